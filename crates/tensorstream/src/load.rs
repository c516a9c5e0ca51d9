// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole checkpoints in memory, as fast as their storage and the cores give them.

use std::ops::Range;
use std::sync::Mutex;

use ts_format::{ByteRange, CHUNK_LEN, Dtype, Tensor, TensorEntry, TensorMeta};
use ts_io::Source;
use ts_orchestrator::{Engine, EngineConfig, Lease, Phase, TensorBytes, Unit, UnitId, UnitTensor, Verify};

use crate::convert::Progress;
use crate::pieces::{over_pieces, threads};
use crate::read::{Damage, Reader};
use crate::{Checkpoint, Error, Watch};

/// Tensors are read together until there are so many bytes of them.
const GROUP_BYTES: u64 = 16 << 20;
/// What is read at a time to be copied: a multiple of the chunks that have checksums.
const PIECE_BYTES: usize = 8 * CHUNK_LEN as usize;
/// Room for pieces, if nobody says how much.
const STAGING_BYTES: usize = 64 << 20;
/// More memory than there can be, and few enough bytes to be added up.
const UNLIMITED: usize = isize::MAX as usize / 16;

/// How [`Checkpoint::load`] reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOptions {
    /// Whether bytes are compared with their checksums, where there are some.
    pub verify: bool,
    /// Threads that compare and decode; 0 for as many as there are cores.
    pub jobs: usize,
    /// How much memory [`Checkpoint::load_each`] may take for tensors that are not dropped yet, in bytes, if so little is
    /// possible at all; `None` for as much as there is. See also [`Checkpoint::load_into`].
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
    /// Its bytes, at the address modulo 64 that a mapping of the file would give them if that suits its elements, else at
    /// a multiple of 64. Their memory is free when the last tensor is dropped of those that were read with them: 16 MiB,
    /// but for larger ones, which are on their own.
    pub bytes: TensorBytes,
}

impl Checkpoint {
    /// Reads all tensors, in the order of their names: by the best backend there is, straight to memory on huge pages, and
    /// what is compressed by way of a few small buffers. Blocks.
    ///
    /// # Errors
    /// [`Error::Io`] when reading fails; [`Error::Corrupt`] when bytes are not those that were written;
    /// [`Error::Interrupted`]; [`Error::Engine`] when there is no memory or thread for it.
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

    /// As [`load`](Self::load), but gives each tensor to `take`, in the order in which they lie in the files, as soon as it
    /// is there, and reads ahead meanwhile. Whatever `take` keeps counts to the budget.
    ///
    /// # Errors
    /// As [`load`](Self::load), and those of `take`, which end it.
    pub fn load_each(
        &self,
        options: LoadOptions,
        take: &mut dyn FnMut(Loaded) -> Result<(), Error>,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        let groups = self.groups();
        let unit =
            |tensors: &Vec<Tensor<'_>>| tensors.iter().map(|tensor| unit_tensor(self, *tensor)).collect();
        let total = self.catalog().tensors().map(|tensor| tensor.range().len).sum();
        self.stream(groups.iter().map(unit).collect(), total, options, watch, &mut |number, lease| {
            for (index, tensor) in groups[number].iter().enumerate() {
                take(Loaded { name: tensor.name().into(), meta: tensor.meta(), bytes: lease.tensor(index) })?;
            }
            Ok(groups[number].iter().map(|tensor| tensor.range().len).sum())
        })
    }

    /// Fills memory that is there with tensors, each given by its name and of just their length. Nothing is set aside for
    /// them but `options.budget`, or 64 MiB, to read into what the page cache does not hold; fresh pages, which are slower
    /// than many a disk, are not needed. Blocks.
    ///
    /// # Errors
    /// As [`load`](Self::load); [`Error::Format`] when there is no such tensor, or it is of another length. What the memory
    /// holds after an error is undefined.
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
                let reason =
                    format!("{tensor:?} is of {} bytes and goes to {}", tensor.range().len, target.len());
                return Err(ts_format::Error::BadAssembly { tensor: name.into(), reason }.into());
            }
            wanted.push((tensor, target));
        }
        wanted.sort_by_key(|(tensor, _)| (tensor.range().file, tensor.stored_at()));
        match self.is_warm() {
            true => self.copy_into(wanted, options, watch),
            false => self.stream_into(wanted, options, watch),
        }
    }

    /// Straight from the page cache, on all cores.
    fn copy_into(
        &self,
        wanted: Vec<(Tensor<'_>, &mut [u8])>,
        options: LoadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        let (tensors, targets): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
        let lens: Vec<u64> = targets.iter().map(|target| target.len() as u64).collect();
        // Each chunk is taken by one thread.
        let chunked = targets.into_iter().map(|target| target.chunks_mut(CHUNK_LEN as usize).map(Mutex::new));
        let targets: Vec<Vec<Mutex<&mut [u8]>>> = chunked.map(Iterator::collect).collect();
        let fill = |reader: &mut Reader, index: usize, begin: u64, _: usize| {
            let mut target =
                targets[index][(begin / CHUNK_LEN) as usize].lock().expect("nobody panics with it");
            let (whole, len) = (tensors[index].range(), target.len() as u64);
            match options.verify {
                true => reader.read_checked(self, tensors[index], begin, &mut target),
                false => {
                    reader.read(self, ByteRange { offset: whole.offset + begin, len, ..whole }, &mut target)
                }
            }
        };
        over_pieces(&lens, options.jobs, watch, fill, |_, _, ()| ())
    }

    /// By way of a few buffers that are used again and again.
    fn stream_into(
        &self,
        mut wanted: Vec<(Tensor<'_>, &mut [u8])>,
        options: LoadOptions,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        let options = LoadOptions { budget: Some(options.budget.unwrap_or(STAGING_BYTES)), ..options };
        let mut places = Vec::new();
        for (index, (_, target)) in wanted.iter().enumerate() {
            places.extend((0..target.len()).step_by(PIECE_BYTES).map(|begin| {
                let end = target.len().min(begin + PIECE_BYTES);
                (index, begin..end)
            }));
        }
        let unit = |(index, place): &(usize, Range<usize>)| {
            let (tensor, len) = (wanted[*index].0, place.len() as u64);
            let part =
                ByteRange { offset: tensor.range().offset + place.start as u64, len, ..tensor.range() };
            let meta = TensorMeta { dtype: Dtype::U8, shape: vec![len] };
            let entry = TensorEntry { meta, parts: vec![part] };
            vec![UnitTensor::new(self.catalog(), tensor.name(), entry, Phase::Mapped)]
        };
        let units = places.iter().map(unit).collect();
        let total = wanted.iter().map(|(_, target)| target.len() as u64).sum();
        self.stream(units, total, options, watch, &mut |number, lease| {
            let (index, place) = places[number].clone();
            let len = place.len() as u64;
            wanted[index].1[place].copy_from_slice(&lease.tensor(0));
            Ok(len)
        })
    }

    /// Brings units into memory one after the other, and has `take` do something with each, which says how many bytes it was.
    fn stream(
        &self,
        units: Vec<Vec<UnitTensor>>,
        total: u64,
        options: LoadOptions,
        watch: &mut Watch<'_>,
        take: &mut dyn FnMut(usize, &Lease) -> Result<u64, Error>,
    ) -> Result<(), Error> {
        let mut config = EngineConfig::with_budget(options.budget.unwrap_or(UNLIMITED));
        config.verify = if options.verify { Verify::EveryRead } else { Verify::Never };
        config.workers = threads(options.jobs);
        // Two threads are enough: what they do is bound by memory.
        config.populate = if options.budget.is_none() { config.workers.min(2) } else { 0 };
        let named = units.into_iter().enumerate();
        let units: Vec<_> =
            named.map(|(number, tensors)| Unit { name: number.to_string(), tensors }).collect();
        let preview = Engine::preview(units.clone(), self.sources(), &config);
        if let Err(ts_orchestrator::Error::NeverFits(refusal)) = preview {
            config.budget_bytes = refusal.smallest_budget_bytes;
        }
        let engine = self.engine(units, config)?;
        let mut progress = Progress { done: 0, total };
        let pass = engine.begin_pass(&mut || watch(progress)).map_err(without_unit)?;
        for number in 0..engine.unit_count() {
            let lease = engine.acquire(Some(pass), UnitId(number as u32), &mut || watch(progress));
            progress.done += take(number, &lease.map_err(without_unit)?)?;
            // A wait asks, but there may be none.
            if watch(progress) {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// Whether the page cache holds nearly all of it, as far as can be told by looking here and there.
    fn is_warm(&self) -> bool {
        const SAMPLES: u64 = 64;
        let places = |source: &Source| (0..SAMPLES).map(|i| source.len() / SAMPLES * i).collect::<Vec<_>>();
        let looked = self
            .sources()
            .iter()
            .flat_map(|source| places(source).into_iter().map(|at| source.residency(at, 1) == Some(1.0)));
        let (warm, cold): (Vec<bool>, Vec<bool>) = looked.partition(|warm| *warm);
        cold.len() * 16 <= warm.len()
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
    let phase = if tensor.range().offset.is_multiple_of(element) { Phase::Mapped } else { Phase::At(0) };
    UnitTensor::new(checkpoint.catalog(), tensor.name(), tensor.entry(), phase)
}
