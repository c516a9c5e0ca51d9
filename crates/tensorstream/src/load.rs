// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loading of whole checkpoints.

mod bytes;
mod mapped;

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use ts_format::{ByteRange, CHUNK_LEN, Tensor, TensorMeta};
use ts_io::Source;
use ts_orchestrator::{Engine, EngineConfig, PHASE_ALIGN, Phase, Unit, UnitId, UnitTensor, Verify};
use ts_pool::BLOCK_ALIGN;

use self::bytes::RecycledBuffer;
pub use self::bytes::{LoadedBytes, kept_bytes, trim};
use crate::damage::Damage;
use crate::pieces::{Threads, for_each_piece, thread_count};
use crate::progress::{Progress, Watch};
use crate::read::{Reader, ReaderPool};
use crate::{Checkpoint, Error};

/// Maximum size of a group of tensors that are read together, in bytes.
const GROUP_BYTES: u64 = 16 << 20;
/// Number of bytes that [`Checkpoint::load_into`] reads at a time. It is a multiple of
/// [`CHUNK_LEN`], so that checksums can be compared.
const PIECE_BYTES: u64 = 2 * CHUNK_LEN;
/// Maximum size of tensors that are read without an engine, in bytes. To start an engine takes
/// longer than to read them from the page cache.
const SMALL_BYTES: u64 = 128 << 20;
/// Tensors from this size on have the position in their memory pages that their bytes have in the
/// file, so that direct reads need no copy.
const IN_PLACE_BYTES: u64 = 64 << 10;
/// A budget in bytes that is never exceeded, and does not overflow when sizes are added to it.
const UNLIMITED: usize = isize::MAX as usize / 16;

/// Options for loading tensors.
///
/// ```
/// let options = tensorstream::LoadOptions::default().with_verify(false).with_budget(1 << 30);
/// assert_eq!(options.jobs, 0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Whether to compare bytes with their checksums, if they have any. True by default.
    /// [`Checkpoint::load_into`] always compares compressed bytes.
    pub verify: bool,
    /// Number of threads that decode and compare bytes. The default is 0, which means the number of
    /// cores.
    pub jobs: usize,
    /// Memory in bytes for tensors that [`Checkpoint::load_each`] has read and the caller has not
    /// dropped. If it is too small for the largest group of tensors, the smallest budget that works
    /// is used. Unlimited by default.
    pub budget: Option<usize>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { verify: true, jobs: 0, budget: None }
    }
}

impl LoadOptions {
    /// Sets [`verify`](Self::verify).
    #[must_use]
    pub fn with_verify(self, verify: bool) -> Self {
        Self { verify, ..self }
    }

    /// Sets [`jobs`](Self::jobs).
    #[must_use]
    pub fn with_jobs(self, jobs: usize) -> Self {
        Self { jobs, ..self }
    }

    /// Sets [`budget`](Self::budget).
    #[must_use]
    pub fn with_budget(self, bytes: usize) -> Self {
        Self { budget: Some(bytes), ..self }
    }
}

/// A tensor in memory.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Loaded {
    /// Name of the tensor.
    pub name: String,
    /// Element type and shape.
    pub meta: TensorMeta,
    /// Content of the tensor. Its address modulo 64 equals the offset of the tensor's range modulo
    /// 64 if this offset is aligned for the element type. Otherwise, the address is a multiple of
    /// 64.
    ///
    /// Tensors are read in groups of up to 16 MiB; larger tensors are read alone. The memory of a
    /// group is freed when its last tensor is dropped, or kept for the next tensors until [`trim`]
    /// is called. The mapping of a file is freed when its last view is dropped.
    pub bytes: LoadedBytes,
}

impl Loaded {
    fn new(tensor: Tensor<'_>, bytes: impl Into<LoadedBytes>) -> Self {
        Self { name: tensor.name().into(), meta: tensor.meta(), bytes: bytes.into() }
    }
}

impl Checkpoint {
    /// Reads all tensors, and returns them sorted by name. Blocks.
    ///
    /// Reads with the fastest available backend, directly to memory with huge pages. Compressed
    /// tensors are decoded from small buffers. Ignores [`LoadOptions::budget`].
    ///
    /// Tensors that take at most 128 MiB together, in local files, and those of [bytes in
    /// memory](Self::from_bytes) are read as by [`load_into`](Self::load_into). Their memory is
    /// that of [loaded tensors that were dropped](crate::trim), if there is any.
    ///
    /// Forked processes inherit the tensors, copy-on-write.
    ///
    /// # Errors
    /// - [`Error::Io`] if a read fails.
    /// - [`Error::Corrupt`] if a tensor is damaged.
    /// - [`Error::Engine`] if memory or threads cannot be allocated.
    /// - [`Error::Interrupted`] if `watch` returns true.
    pub fn load(&self, options: LoadOptions, watch: &mut Watch<'_>) -> Result<Vec<Loaded>, Error> {
        let mut loaded = self.load_tensors(self.catalog().tensors_by_offset(), options, watch)?;
        loaded.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(loaded)
    }

    /// Reads the tensors with these names like [`load`](Self::load), and returns them sorted by
    /// their offsets in the files. Blocks.
    ///
    /// # Errors
    /// Returns [`Error::Format`] if a tensor does not exist, and the errors of
    /// [`load`](Self::load).
    pub fn load_named(
        &self,
        names: &[impl AsRef<str>],
        options: LoadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Loaded>, Error> {
        let names: BTreeSet<&str> = names.iter().map(AsRef::as_ref).collect();
        for name in &names {
            self.catalog().require(name)?;
        }
        let mut tensors = self.catalog().tensors_by_offset();
        tensors.retain(|tensor| names.contains(tensor.name()));
        self.load_tensors(tensors, options, watch)
    }

    /// Reads these tensors, which are sorted by file and offset.
    fn load_tensors(
        &self,
        tensors: Vec<Tensor<'_>>,
        options: LoadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Loaded>, Error> {
        let bytes: u64 = tensors.iter().map(|tensor| tensor.range().len).sum();
        let groups = groups(tensors);
        let sources = self.sources();
        let is_small = bytes <= SMALL_BYTES && !sources.iter().any(|source| source.is_remote());
        // An engine reads files and remote sources, but not bytes in memory.
        let is_in_memory = |source: &Arc<Source>| !source.is_file() && !source.is_remote();
        if is_small || sources.iter().any(is_in_memory) {
            return self.load_small(&groups, options, watch);
        }
        let mut loaded = Vec::new();
        let keep = &mut |tensor| {
            loaded.push(tensor);
            Ok(())
        };
        self.load_groups(&groups, LoadOptions { budget: None, ..options }, keep, watch)?;
        Ok(loaded)
    }

    /// Reads tensors without an engine.
    fn load_small(
        &self,
        groups: &[Vec<Tensor<'_>>],
        options: LoadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Loaded>, Error> {
        let placed: Vec<(Vec<usize>, usize)> = groups.iter().map(|group| place(group)).collect();
        let memory = placed.iter().map(|(_, len)| RecycledBuffer::allocate(*len));
        let mut memory = memory.collect::<Result<Vec<_>, _>>().map_err(ts_io::Error::from)?;
        let mut wanted = Vec::new();
        for ((group, (begins, _)), memory) in groups.iter().zip(&placed).zip(&mut memory) {
            let (mut rest, mut at) = (memory.bytes_mut(), 0);
            for (&tensor, &begin) in group.iter().zip(begins) {
                let len = tensor.range().len as usize;
                let (target, after) = rest[begin - at..].split_at_mut(len);
                wanted.push((tensor, target));
                (rest, at) = (after, begin + len);
            }
        }
        self.fill(wanted, options, watch)?;
        let mut loaded = Vec::new();
        for ((group, (begins, _)), memory) in groups.iter().zip(&placed).zip(memory) {
            let memory = Arc::new(memory);
            loaded.extend(group.iter().zip(begins).map(|(&tensor, &begin)| {
                let range = begin..begin + tensor.range().len as usize;
                Loaded::new(tensor, LoadedBytes::recycled(Arc::clone(&memory), range))
            }));
        }
        Ok(loaded)
    }

    /// Reads all tensors like [`load`](Self::load), but passes each tensor to `take` as soon as it
    /// is read. The tensors are sorted by their offsets in the files. While `take` runs, the next
    /// tensors are read ahead. Tensors that `take` keeps count towards the budget. Processes that
    /// are forked before this function returns do not inherit the tensors.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load), and the first error of `take`.
    pub fn load_each(
        &self,
        options: LoadOptions,
        take: &mut dyn FnMut(Loaded) -> Result<(), Error>,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        self.load_groups(&groups(self.catalog().tensors_by_offset()), options, take, watch)
    }

    fn load_groups(
        &self,
        groups: &[Vec<Tensor<'_>>],
        options: LoadOptions,
        take: &mut dyn FnMut(Loaded) -> Result<(), Error>,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        let mut config = EngineConfig::with_budget(options.budget.unwrap_or(UNLIMITED));
        config.verify = if options.verify { Verify::EveryRead } else { Verify::Never };
        config.workers = thread_count(options.jobs);
        // Two threads are enough, because memory bandwidth limits their work.
        config.populate = if options.budget.is_none() { config.workers.min(2) } else { 0 };
        // Each unit is used once, so there is no later pass that could take it up.
        config.populate_in_passes = 0;
        let unit = |(number, tensors): (usize, &Vec<Tensor<'_>>)| {
            let tensors = tensors.iter().map(|tensor| unit_tensor(self, *tensor)).collect();
            Unit::new(number.to_string(), tensors)
        };
        let units: Vec<_> = groups.iter().enumerate().map(unit).collect();
        if options.budget.is_some()
            && let Err(ts_orchestrator::Error::NeverFits(refusal)) =
                Engine::preview(units.clone(), self.sources(), &config)
        {
            config.budget_bytes = refusal.smallest_budget_bytes;
        }
        let engine = self.engine(units, config)?;
        let done = take_groups(&engine, groups, take, watch);
        engine.keep_in_forks();
        done
    }

    /// Reads tensors into existing memory. Each target is the name of a tensor and memory of the
    /// tensor's length in bytes. Blocks.
    ///
    /// Copies bytes that the page cache contains, and reads the rest directly from storage. Uses at
    /// most 16 threads, or one for each job if that is more. If the page cache contains everything,
    /// only one thread for each job is used. Each thread uses about 2 MiB of memory, and more to
    /// decode compressed tensors.
    ///
    /// # Errors
    /// The content of the memory is unspecified after an error.
    ///
    /// - The errors of [`load`](Self::load).
    /// - [`Error::Format`] if a tensor does not exist, or its memory has another length.
    pub fn load_into(
        &self,
        targets: Vec<(&str, &mut [u8])>,
        options: LoadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        let mut wanted = Vec::with_capacity(targets.len());
        for (name, target) in targets {
            let tensor = self.catalog().require(name)?;
            if tensor.range().len != target.len() as u64 {
                let reason = format!(
                    "the memory has the wrong length (expected {} bytes, got {})",
                    tensor.range().len,
                    target.len()
                );
                return Err(ts_format::Error::BadAssembly { tensor: name.into(), reason }.into());
            }
            wanted.push((tensor, target));
        }
        self.fill(wanted, options, watch)
    }

    /// Reads tensors into memory of their length.
    fn fill(
        &self,
        mut wanted: Vec<(Tensor<'_>, &mut [u8])>,
        options: LoadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        wanted.sort_by_key(|(tensor, _)| (tensor.range().file, tensor.stored_offset()));
        let (tensors, targets): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
        let lens: Vec<u64> = targets.iter().map(|target| target.len() as u64).collect();
        // Each mutex is locked once, by the thread that reads the piece.
        let pieces = targets
            .into_iter()
            .map(|target| target.chunks_mut(PIECE_BYTES as usize).map(Mutex::new));
        let pieces: Vec<Vec<Mutex<&mut [u8]>>> = pieces.map(Iterator::collect).collect();
        let fill = |reader: &mut Reader, index: usize, begin: u64, _: usize| {
            let piece = &pieces[index][(begin / PIECE_BYTES) as usize];
            let (whole, mut piece) = (tensors[index].range(), piece.lock());
            let len = piece.len() as u64;
            match options.verify {
                true => reader.read_checked(self, tensors[index], begin, &mut piece),
                false => reader.read(
                    self,
                    ByteRange { offset: whole.offset + begin, len, ..whole },
                    &mut piece,
                ),
            }
        };
        let init = ReaderPool::reader;
        let threads = match tensors.iter().all(|tensor| self.is_cached(*tensor)) {
            true => Threads::for_memory(options.jobs),
            false => Threads::for_storage(options.jobs),
        };
        for_each_piece(&lens, PIECE_BYTES, threads, watch, init, fill, |_, _, ()| ())
    }

    /// Returns whether the page cache contains the stored bytes of a tensor.
    fn is_cached(&self, tensor: Tensor<'_>) -> bool {
        let source = &self.sources()[tensor.range().file.0 as usize];
        source.residency(tensor.stored_offset(), tensor.stored_len() as usize) == Some(1.0)
    }
}

/// Passes the tensors of all groups to `take`. The engine has a unit for each group.
fn take_groups(
    engine: &Engine,
    groups: &[Vec<Tensor<'_>>],
    take: &mut dyn FnMut(Loaded) -> Result<(), Error>,
    watch: &mut Watch<'_>,
) -> Result<(), Error> {
    let mut progress =
        Progress { done: 0, total: groups.iter().flatten().map(|tensor| tensor.range().len).sum() };
    let pass = engine.begin_pass_interruptible(&mut || watch(progress)).map_err(without_unit)?;
    for (number, tensors) in groups.iter().enumerate() {
        let lease = engine
            .acquire_interruptible(Some(pass), UnitId(number as u32), &mut || watch(progress));
        let lease = lease.map_err(without_unit)?;
        for (index, tensor) in tensors.iter().enumerate() {
            take(Loaded::new(*tensor, lease.tensor(index)))?;
            progress.done += tensor.range().len;
        }
        // `acquire_interruptible` calls `watch` only if it waits.
        if watch(progress) {
            return Err(Error::Interrupted);
        }
    }
    Ok(())
}

/// Groups neighbouring tensors. A group has at most [`GROUP_BYTES`], or one larger tensor.
fn groups(tensors: Vec<Tensor<'_>>) -> Vec<Vec<Tensor<'_>>> {
    let mut groups: Vec<Vec<Tensor<'_>>> = Vec::new();
    let mut bytes = u64::MAX;
    for tensor in tensors {
        let len = tensor.range().len;
        if bytes.saturating_add(len) > GROUP_BYTES {
            groups.push(Vec::new());
            bytes = 0;
        }
        groups.last_mut().expect("the first tensor starts a group").push(tensor);
        bytes += len;
    }
    groups
}

/// Places tensors one after the other. Returns the offset of each, and the length of the memory.
fn place(tensors: &[Tensor<'_>]) -> (Vec<usize>, usize) {
    let mut end = 0;
    let begins = tensors.iter().map(|tensor| {
        let range = tensor.range();
        let in_place = range.len >= IN_PLACE_BYTES && !range.is_virtual();
        let align = if in_place { BLOCK_ALIGN } else { PHASE_ALIGN };
        let phase = if is_aligned(*tensor) { range.offset as usize % align } else { 0 };
        let begin = end + (phase + align - end % align) % align;
        end = begin + range.len as usize;
        begin
    });
    (begins.collect(), end)
}

/// Returns whether the offset of a tensor in its file suits its element type.
fn is_aligned(tensor: Tensor<'_>) -> bool {
    tensor.range().offset.is_multiple_of(u64::from(tensor.dtype().bits().div_ceil(8)))
}

/// Converts an error of the engine. Omits the name of the unit, because the caller does not know
/// the groups of tensors that are the units.
fn without_unit(error: ts_orchestrator::Error) -> Error {
    use ts_orchestrator::Error as Engine;
    match error {
        Engine::Corrupt { tensor, path, offset, len, what, .. } => {
            Damage { path, tensor, offset, len, what }.into()
        }
        Engine::Load { source, .. } => Error::Io(source),
        Engine::Interrupted { .. } => Error::Interrupted,
        other => other.into(),
    }
}

fn unit_tensor(checkpoint: &Checkpoint, tensor: Tensor<'_>) -> UnitTensor {
    let phase = if is_aligned(tensor) { Phase::Mapped } else { Phase::At(0) };
    UnitTensor::new(checkpoint.catalog(), tensor.name(), tensor.entry(), phase)
}
