// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole checkpoints in memory, as fast as their storage and the cores give them.

use parking_lot::Mutex;
use ts_format::{ByteRange, CHUNK_LEN, Tensor, TensorMeta};
use ts_orchestrator::{Engine, EngineConfig, Phase, TensorBytes, Unit, UnitId, UnitTensor, Verify};

use crate::convert::Progress;
use crate::pieces::{over_pieces, threads};
use crate::read::{Damage, Reader, Readers};
use crate::{Checkpoint, Error, Watch};

/// Tensors are read together until there are so many bytes of them.
const GROUP_BYTES: u64 = 16 << 20;
/// What is read at a time into memory that is there: whole chunks, so that their checksums can be
/// compared.
const PIECE_BYTES: u64 = 2 * CHUNK_LEN;
/// More memory than there can be, and few enough bytes to be added up.
const UNLIMITED: usize = isize::MAX as usize / 16;

/// How [`Checkpoint::load`] reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOptions {
    /// Whether bytes are compared with their checksums, where there are some.
    pub verify: bool,
    /// Threads that compare and decode; 0 for as many as there are cores.
    pub jobs: usize,
    /// How much memory [`Checkpoint::load_each`] may take for tensors that are not dropped yet, in
    /// bytes, if so little is possible at all; `None` for as much as there is.
    pub budget: Option<usize>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { verify: true, jobs: 0, budget: None }
    }
}

/// A tensor in memory.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// Its name.
    pub name: String,
    /// Its element type and shape.
    pub meta: TensorMeta,
    /// Its bytes, at the address modulo 64 that a mapping of the file would give them if that suits
    /// its elements, else at a multiple of 64. Their memory is free when the last tensor is dropped
    /// of those that were read with them: 16 MiB, but for larger ones, which are on their own.
    pub bytes: TensorBytes,
}

impl Checkpoint {
    /// Reads all tensors, in the order of their names: by the best backend there is, straight to
    /// memory on huge pages, and what is compressed by way of a few small buffers. Blocks.
    ///
    /// # Errors
    /// [`Error::Io`] when reading fails; [`Error::Corrupt`] when bytes are not those that were
    /// written; [`Error::Interrupted`]; [`Error::Engine`] when there is no memory or thread for it.
    pub fn load(&self, options: LoadOptions, watch: &mut Watch<'_>) -> Result<Vec<Loaded>, Error> {
        let mut loaded = Vec::with_capacity(self.catalog().tensors().len());
        let keep = &mut |tensor| {
            loaded.push(tensor);
            Ok(())
        };
        self.load_each(LoadOptions { budget: None, ..options }, keep, watch)?;
        loaded.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(loaded)
    }

    /// As [`load`](Self::load), but gives each tensor to `take`, in the order in which they lie in
    /// the files, as soon as it is there, and reads ahead meanwhile. Whatever `take` keeps counts
    /// to the budget.
    ///
    /// # Errors
    /// As [`load`](Self::load), and those of `take`, which end it.
    pub fn load_each(
        &self,
        options: LoadOptions,
        take: &mut dyn FnMut(Loaded) -> Result<(), Error>,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        let mut config = EngineConfig::with_budget(options.budget.unwrap_or(UNLIMITED));
        config.verify = if options.verify { Verify::EveryRead } else { Verify::Never };
        config.workers = threads(options.jobs);
        // Two threads are enough: what they do is bound by memory.
        config.populate = if options.budget.is_none() { config.workers.min(2) } else { 0 };
        let groups = self.groups();
        let unit = |(number, tensors): (usize, &Vec<Tensor<'_>>)| Unit {
            name: number.to_string(),
            tensors: tensors.iter().map(|tensor| unit_tensor(self, *tensor)).collect(),
        };
        let units: Vec<_> = groups.iter().enumerate().map(unit).collect();
        if options.budget.is_some()
            && let Err(ts_orchestrator::Error::NeverFits(refusal)) =
                Engine::preview(units.clone(), self.sources(), &config)
        {
            config.budget_bytes = refusal.smallest_budget_bytes;
        }
        let engine = self.engine(units, config)?;
        let mut progress = Progress {
            done: 0,
            total: self.catalog().tensors().map(|tensor| tensor.range().len).sum(),
        };
        let pass = engine.begin_pass(&mut || watch(progress)).map_err(without_unit)?;
        for (number, tensors) in groups.iter().enumerate() {
            let lease = engine.acquire(Some(pass), UnitId(number as u32), &mut || watch(progress));
            let lease = lease.map_err(without_unit)?;
            for (index, tensor) in tensors.iter().enumerate() {
                take(Loaded {
                    name: tensor.name().into(),
                    meta: tensor.meta(),
                    bytes: lease.tensor(index),
                })?;
                progress.done += tensor.range().len;
            }
            // A wait asks, but there may be none.
            if watch(progress) {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// Fills memory that is there with tensors, each given by its name and of just their length:
    /// from the page cache what it holds, the rest past it. Takes some 2 MiB of memory for each of
    /// 16 threads, or as many as there are jobs. Blocks.
    ///
    /// # Errors
    /// As [`load`](Self::load); [`Error::Format`] when there is no such tensor, or it is of another
    /// length. What the memory holds after an error is undefined.
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
                    "{tensor:?} is of {} bytes and goes to {}",
                    tensor.range().len,
                    target.len()
                );
                return Err(ts_format::Error::BadAssembly { tensor: name.into(), reason }.into());
            }
            wanted.push((tensor, target));
        }
        wanted.sort_by_key(|(tensor, _)| (tensor.range().file, tensor.stored_at()));
        let (tensors, targets): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
        let lens: Vec<u64> = targets.iter().map(|target| target.len() as u64).collect();
        // Each piece is taken by one thread.
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
        over_pieces(&lens, PIECE_BYTES, options.jobs, watch, Readers::reader, fill, |_, _, ()| ())
    }

    /// Tensors that lie beside each other.
    fn groups(&self) -> Vec<Vec<Tensor<'_>>> {
        let mut groups: Vec<Vec<Tensor<'_>>> = Vec::new();
        let mut bytes = u64::MAX;
        for tensor in self.catalog().tensors_by_place() {
            let len = tensor.range().len;
            if bytes.saturating_add(len) > GROUP_BYTES {
                groups.push(Vec::new());
                bytes = 0;
            }
            groups.last_mut().expect("the first one opens one").push(tensor);
            bytes += len;
        }
        groups
    }
}

/// What went wrong with a tensor, without the group that it was read in.
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
    let element = u64::from(tensor.dtype().bits().div_ceil(8));
    let phase =
        if tensor.range().offset.is_multiple_of(element) { Phase::Mapped } else { Phase::At(0) };
    UnitTensor::new(checkpoint.catalog(), tensor.name(), tensor.entry(), phase)
}
