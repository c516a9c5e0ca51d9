// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes `.ts` and `.safetensors` files.

mod journal;
mod options;
mod sink;
mod tensors;

use std::collections::HashSet;
use std::path::Path;

use ts_format::{ContainerWriter, Error as FormatError, Metadata, SafetensorsLayout};

use self::journal::Record;
#[cfg(feature = "cli")]
pub(crate) use self::journal::unfinished;
pub use self::options::{Format, NewTensor, WriteOptions};
use self::sink::Sink;
use self::tensors::{FileSpec, TensorWriter};
use crate::atomic::{Claim, replaced};
use crate::verify::verify;
use crate::{Checkpoint, Error};

/// Length of a superblock of a `.ts` file in bytes.
const SUPERBLOCK_LEN: usize = 4096;

/// A writer that creates a `.ts` or `.safetensors` file atomically, or appends to a `.ts` file.
///
/// 1. Declare the tensors when you create the writer or, for `.ts` files, later with
///    [`push`](Self::push).
/// 2. Pass their bytes to [`write`](Self::write), in the order that [`order`](Self::order) returns.
/// 3. Call [`commit`](Self::commit), which publishes the file or the appended tensors.
///
/// If the writer is dropped before `commit`, or the process dies, the previous content of the path
/// is unchanged.
///
/// ```
/// use tensorstream::format::{Dtype, TensorMeta};
/// use tensorstream::{Checkpoint, FileWriter, NewTensor, WriteOptions};
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("model.ts");
/// let meta = TensorMeta { dtype: Dtype::U8, shape: vec![3] };
/// let tensors = vec![NewTensor { name: "w".into(), meta, phase: None }];
/// let mut never = || false; // the interrupt
/// let options = WriteOptions::default();
/// let mut writer = FileWriter::create(&path, tensors, Default::default(), options, &mut never)?;
/// writer.write(b"abc")?;
/// assert!(!path.exists());
/// writer.commit()?;
/// assert_eq!(Checkpoint::open(&path)?.catalog().require("w")?.shape(), [3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FileWriter {
    tensors: TensorWriter,
    /// Whether a call failed with another error than [`Error::Interrupted`]. The content of the
    /// unfinished file is then unknown.
    failed: bool,
}

impl FileWriter {
    /// Starts a new file with these tensors and this metadata. The suffix of `path` determines the
    /// format.
    ///
    /// While another process writes the same file, this function waits, and calls `interrupt` every
    /// 20 ms.
    ///
    /// # Errors
    /// - [`Error::UnknownSuffix`] if the suffix is not `.ts` or `.safetensors`.
    /// - [`Error::Format`] if a tensor cannot be written in this format.
    /// - [`Error::Compression`] if the requested compression is not possible.
    /// - [`Error::Write`] or [`Error::Io`] if the file cannot be created.
    /// - [`Error::Interrupted`] if `interrupt` returns true.
    pub fn create(
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: Metadata,
        options: WriteOptions,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
        let spec = FileSpec::new(path, tensors, options)?;
        let claim = Claim::new(path, &spec.options.faults, interrupt)?;
        Self::begin(Some(claim), spec, metadata)
    }

    /// Starts a file in memory, which [`into_bytes`](Self::into_bytes) returns. The suffix of
    /// `name` determines the format. Errors contain `name`.
    ///
    /// # Errors
    /// Returns the errors of [`create`](Self::create) that do not concern the disk or `interrupt`.
    pub fn in_memory(
        name: &str,
        tensors: Vec<NewTensor>,
        metadata: Metadata,
        options: WriteOptions,
    ) -> Result<Self, Error> {
        Self::begin(None, FileSpec::new(name.as_ref(), tensors, options)?, metadata)
    }

    /// Starts a file on disk if there is a `claim` on its path, otherwise in memory.
    fn begin(claim: Option<Claim>, spec: FileSpec, metadata: Metadata) -> Result<Self, Error> {
        let layout = match Format::from_path(&spec.path)? {
            Format::Container => None,
            Format::Safetensors => {
                let named: Vec<_> =
                    spec.tensors.iter().map(|t| (t.name.as_str(), &t.meta)).collect();
                Some(SafetensorsLayout::new(&named, &metadata)?)
            }
        };
        let mut sink = match claim {
            Some(claim) => Sink::File(Box::new(claim.create(spec.expected_bytes(0))?)),
            None => Sink::Memory(Vec::new()),
        };
        let mut tensors = match layout {
            None => TensorWriter::container(spec, sink, ContainerWriter::new(metadata), 0),
            Some(layout) => {
                sink.write(&layout.header)?;
                let header_len = layout.header.len() as u64;
                TensorWriter::safetensors(spec, sink, layout.order, header_len, None)
            }
        };
        tensors.begin_next()?;
        Ok(Self { tensors, failed: false })
    }

    /// Starts a new file like [`create`](Self::create), but returns `None` if the file already has
    /// these tensors and this metadata.
    ///
    /// With a `fingerprint`, the existing content must also have this
    /// [fingerprint](Checkpoint::fingerprint) and must not be damaged.
    ///
    /// If several processes write the same file, one of them gets a writer, and the others wait.
    /// If that process commits the file, the others get `None`. If it fails, one of the others
    /// gets a writer.
    ///
    /// # Errors
    /// Returns the errors of [`create`](Self::create).
    pub fn unless_written(
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: &Metadata,
        options: WriteOptions,
        fingerprint: Option<u128>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Self>, Error> {
        // A file that is damaged or cannot be read is written again.
        let is_written = |tensors: &[NewTensor], interrupt: &mut dyn FnMut() -> bool| {
            let existing = Checkpoint::open(path);
            if !existing.is_ok_and(|file| has_content(&file, tensors, metadata, fingerprint)) {
                return Ok(false);
            }
            // A caller with a fingerprint may discard its own copy, so the file is verified first.
            let verified = fingerprint.map(|_| verify(path, 0, &mut |_| interrupt())).transpose();
            match verified {
                Ok(found) => Ok(found.is_none_or(|found| found.damaged.is_empty())),
                Err(Error::Interrupted) => Err(Error::Interrupted),
                Err(_) => Ok(false),
            }
        };
        if is_written(&tensors, interrupt)? {
            return Ok(None);
        }
        let spec = FileSpec::new(path, tensors, options)?;
        let claim = Claim::new(path, &spec.options.faults, interrupt)?;
        // Another process may have written the file while this one waited for the claim.
        if is_written(&spec.tensors, interrupt)? {
            return Ok(None);
        }
        Self::begin(Some(claim), spec, metadata.clone()).map(Some)
    }

    /// Appends to an existing `.ts` file. Adds `tensors`, which replace those of the same name,
    /// removes the tensors named in `remove`, and sets the keys of `metadata`.
    ///
    /// The change is atomic: [`commit`](Self::commit) makes it visible. Readers that have the file
    /// open get an error at their next read, because the file has changed. The space of replaced
    /// and removed tensors stays in use until [`compact`](crate::compact()) reclaims it. Waits for
    /// other writers like [`create`](Self::create).
    ///
    /// # Errors
    /// - The errors of [`create`](Self::create) and [`Checkpoint::open`].
    /// - [`Error::Format`] if a tensor to remove does not exist, or the path is not a single `.ts`
    ///   file of a version that this library can write.
    pub fn append(
        path: &Path,
        tensors: Vec<NewTensor>,
        remove: &[String],
        metadata: Metadata,
        options: WriteOptions,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
        let spec = FileSpec::new(path, tensors, options)?;
        // All processes must claim the same path.
        let real_path = path.canonicalize().map_err(|e| Error::open(path, e))?;
        let claim = Claim::new(&real_path, &spec.options.faults, interrupt)?;
        let target = claim.open_target(interrupt)?;
        let existing = Checkpoint::open(&real_path)?;
        let (catalog, source) = (existing.catalog(), existing.single_source(&real_path)?);
        remove.iter().try_for_each(|name| catalog.require(name).map(|_| ()))?;
        let mut removed: HashSet<&str> = remove.iter().map(String::as_str).collect();
        removed.extend(spec.tensors.iter().map(|tensor| tensor.name.as_str()));
        let mut container = ContainerWriter::append(catalog, |name| !removed.contains(name))?;
        container.metadata_mut().extend(metadata);
        let used_len = catalog.files()[0].used_len();
        let mut superblock = [0; SUPERBLOCK_LEN];
        let superblock_offset = catalog.files()[0].superblock_offset().unwrap_or(0);
        source.read_at(superblock_offset, &mut superblock)?;
        source.verify(0)?;
        if !source.is_at_path() {
            return Err(Error::open(path, replaced()));
        }
        let file = claim.append(
            target,
            used_len,
            (superblock_offset, &superblock),
            container.end(),
            spec.expected_bytes(0),
        )?;
        let mut tensors = TensorWriter::container(spec, Sink::File(Box::new(file)), container, 0);
        tensors.begin_next()?;
        Ok(Self { tensors, failed: false })
    }

    /// Starts a file like [`create`](Self::create), or continues an unfinished file from its last
    /// [`checkpoint`](Self::checkpoint). The unfinished file must have been started with the same
    /// tensors, compression and `origin`. `origin` identifies the source of the bytes.
    ///
    /// # Errors
    /// Returns the errors of [`create`](Self::create).
    pub fn resume(
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: Metadata,
        origin: &str,
        options: WriteOptions,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
        let spec = FileSpec::new(path, tensors, options)?;
        let claim = Claim::new(path, &spec.options.faults, interrupt)?;
        match Format::from_path(path)? {
            Format::Container => Self::resume_container(claim, spec, metadata, origin),
            Format::Safetensors => Self::resume_safetensors(claim, spec, metadata, origin),
        }
    }

    fn resume_container(
        mut claim: Claim,
        spec: FileSpec,
        metadata: Metadata,
        origin: &str,
    ) -> Result<Self, Error> {
        let unfinished = Checkpoint::open(claim.partial()).ok();
        let complete = unfinished.as_ref().and_then(|unfinished| {
            journal::complete_tensors(unfinished, &spec.tensors, origin, &spec.options)
        });
        let (Some(unfinished), Some(complete)) = (unfinished, complete) else {
            return Self::begin(Some(claim), spec, metadata);
        };
        claim.keep();
        let order: Vec<&str> =
            spec.tensors[..complete].iter().map(|tensor| tensor.name.as_str()).collect();
        let container = ContainerWriter::resume(unfinished.catalog(), &order, metadata)?;
        let file = claim.resume(container.end(), spec.expected_bytes(complete))?;
        let sink = Sink::File(Box::new(file));
        let tensors = TensorWriter::container(spec, sink, container, complete);
        Ok(Self { tensors, failed: false })
    }

    fn resume_safetensors(
        mut claim: Claim,
        spec: FileSpec,
        metadata: Metadata,
        origin: &str,
    ) -> Result<Self, Error> {
        let named: Vec<_> = spec.tensors.iter().map(|t| (t.name.as_str(), &t.meta)).collect();
        let layout = SafetensorsLayout::new(&named, &metadata)?;
        let job = Record::new(&spec.tensors, origin, &spec.options, 0, 0);
        let found = Record::of(claim.partial(), &layout.header, job);
        let Some(found) = found.filter(|found| found.complete <= spec.tensors.len() as u64) else {
            return Self::begin(Some(claim), spec, metadata);
        };
        claim.keep();
        let (complete, header_len) = (found.complete as usize, layout.header.len() as u64);
        let lens = |order: &[usize]| {
            let lens = order.iter().filter_map(|&i| spec.tensors[i].meta.byte_len());
            lens.fold(0, u64::saturating_add)
        };
        let (done, rest) = layout.order.split_at(complete);
        let file = claim.resume(header_len + lens(done), lens(rest))?;
        let sink = Sink::File(Box::new(file));
        let mut tensors =
            TensorWriter::safetensors(spec, sink, layout.order, header_len, Some(found));
        tensors.begin_next()?;
        Ok(Self { tensors, failed: false })
    }

    /// Makes the complete tensors durable, so that [`resume`](Self::resume) continues after them,
    /// and keeps the unfinished file if the writer is dropped. Bytes of a tensor that is not
    /// complete are discarded: write it again from its begin, or drop the writer. Does nothing
    /// after a failed call. Blocks.
    ///
    /// # Errors
    /// Returns [`Error::Write`] or [`Error::Io`] if a system call fails.
    pub fn checkpoint(&mut self, origin: &str) -> Result<(), Error> {
        if self.failed { Ok(()) } else { self.tensors.checkpoint(origin) }
    }

    /// Returns the number of complete tensors, in the order of [`order`](Self::order). A resumed
    /// file can have some.
    pub fn complete(&self) -> usize {
        self.tensors.complete()
    }

    /// Declares another tensor of a `.ts` file. Its bytes follow those of all other tensors.
    ///
    /// # Errors
    /// - [`Error::Format`] if the file is not a `.ts` file, or the tensor cannot be written.
    /// - [`Error::Compression`] if the requested compression is not possible.
    /// - [`Error::Write`] or [`Error::Io`] if a write fails.
    pub fn push(&mut self, tensor: NewTensor) -> Result<(), Error> {
        self.unless_failed(|tensors| tensors.push(tensor))
    }

    /// Declares a growing tensor of a `.ts` file: the length of the tensor depends on the bytes
    /// that are written. The tensor ends when the next tensor is pushed or the file is committed.
    /// The writer ignores the declared first dimension, and computes it when the tensor ends.
    ///
    /// # Errors
    /// Returns the errors of [`push`](Self::push), and [`Error::Format`] if bytes of an earlier
    /// tensor are missing. The call that ends the tensor returns [`Error::Format`] if the bytes do
    /// not form whole rows. A row is one index of the first dimension.
    pub fn push_growing(&mut self, tensor: NewTensor) -> Result<(), Error> {
        self.unless_failed(|tensors| tensors.push_growing(tensor))
    }

    /// Returns the indices of the declared tensors, in the order in which their bytes are expected.
    pub fn order(&self) -> &[usize] {
        self.tensors.order()
    }

    /// Writes the next bytes of the tensors, in pieces of any size. A piece can contain bytes of
    /// several tensors. Blocks.
    ///
    /// # Errors
    /// Returns [`Error::Write`] or [`Error::Io`] if a write fails, and [`Error::Format`] if there
    /// are more bytes than the tensors have. After an error, all further calls fail.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.write_interruptible(bytes, &mut || false)
    }

    /// Writes bytes like [`write`](Self::write), and calls `interrupt` before each chunk (1 MiB)
    /// that the calling thread compresses.
    ///
    /// # Errors
    /// Returns the errors of [`write`](Self::write), and [`Error::Interrupted`] if `interrupt`
    /// returns true. After an interrupt, only [`checkpoint`](Self::checkpoint) may be called.
    pub(crate) fn write_interruptible(
        &mut self,
        bytes: &[u8],
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), Error> {
        self.unless_failed(|tensors| tensors.write(bytes, interrupt))
    }

    /// Makes the file durable and renames it to its path, where it replaces an existing file. After
    /// [`append`](Self::append), makes the appended tensors durable and visible. Blocks.
    ///
    /// # Errors
    /// Returns [`Error::Format`] if bytes are missing, and [`Error::Write`] or [`Error::Io`] if a
    /// system call fails.
    ///
    /// After an error the previous content is unchanged, with one exception: the last flush, of the
    /// directory or of the superblock of an append. If only this flush fails, the new content is
    /// visible, but may be lost in a power failure.
    pub fn commit(self) -> Result<(), Error> {
        match self.finish()? {
            Sink::File(file) => file.commit(),
            Sink::Memory(_) => Ok(()),
        }
    }

    /// Completes a file in memory and returns its bytes. Commits a file on disk and returns an
    /// empty vector.
    ///
    /// # Errors
    /// Returns the errors of [`commit`](Self::commit).
    pub fn into_bytes(self) -> Result<Vec<u8>, Error> {
        match self.finish()? {
            Sink::File(file) => file.commit().map(|()| Vec::new()),
            Sink::Memory(bytes) => Ok(bytes),
        }
    }

    fn finish(mut self) -> Result<Sink, Error> {
        self.unless_failed(TensorWriter::end)?;
        self.tensors.finish()
    }

    /// Runs `action`, unless an earlier call failed.
    fn unless_failed(
        &mut self,
        action: impl FnOnce(&mut TensorWriter) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.failed {
            let (tensor, reason) = (
                String::new(),
                "an earlier call to this writer failed; create a new writer".into(),
            );
            return Err(FormatError::Unwritable { tensor, reason }.into());
        }
        // Complete tensors are intact after an interrupt, so a checkpoint is still possible.
        action(&mut self.tensors)
            .inspect_err(|error| self.failed = !matches!(error, Error::Interrupted))
    }
}

/// Returns whether a file has exactly these tensors, this metadata and this fingerprint.
fn has_content(
    file: &Checkpoint,
    tensors: &[NewTensor],
    metadata: &Metadata,
    fingerprint: Option<u128>,
) -> bool {
    let catalog = file.catalog();
    let same = |t: &NewTensor| catalog.tensor(&t.name).is_some_and(|found| found.meta() == t.meta);
    catalog.tensors().len() == tensors.len()
        && tensors.iter().all(same)
        && catalog.files().iter().all(|file| file.metadata == *metadata)
        && fingerprint.is_none_or(|expected| file.fingerprint() == Some(expected))
}
