// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use ts_format::{
    CHUNK_LEN, Codec, Compression, ContainerWriter, Digest, Error as FormatError,
    SafetensorsLayout, TensorMeta,
};
use ts_io::Source;
use ts_io::fault::WriteFaults;

use crate::atomic::{AtomicFile, Claim};
use crate::checkpoint::open_error;
use crate::encode::{BATCH, Encoders, Ready};
use crate::pieces::threads;
use crate::{Checkpoint, Error};

/// What a file shall hold: a tensor's name, type, and address modulo 64 if it must have one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewTensor {
    /// Its name.
    pub name: String,
    /// Its element type and shape.
    pub meta: TensorMeta,
    /// Where its data shall begin, modulo 64. `.ts` files keep this, 0 if `None`; safetensors files
    /// cannot.
    pub phase: Option<u8>,
}

/// How tensors are written to a file.
#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// What is done with their bytes; only `.ts` files can be compressed.
    pub compression: Compression,
    /// Threads that compress; 0 for as many as there are cores.
    pub jobs: usize,
    /// After so many bytes of tensors [`convert`](crate::convert()) makes sure that it can go on
    /// behind them; 1 GiB by default. See there.
    pub checkpoint_bytes: u64,
    /// The most bytes of tensors that [`convert`](crate::convert()) puts into one shard, where it
    /// writes such; 5 GB by default. A larger tensor has a shard of its own.
    pub max_shard_bytes: u64,
    /// What goes wrong on purpose, in tests.
    pub faults: WriteFaults,
}

impl Default for WriteOptions {
    fn default() -> Self {
        let (compression, faults) = (Compression::None, WriteFaults::default());
        Self {
            compression,
            jobs: 0,
            checkpoint_bytes: 1 << 30,
            max_shard_bytes: 5_000_000_000,
            faults,
        }
    }
}

/// A container format, as a file's suffix names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `.ts`
    Container,
    /// `.safetensors`
    Safetensors,
}

impl Format {
    /// The format that a path's suffix names.
    ///
    /// # Errors
    /// [`Error::UnknownSuffix`].
    pub fn of(path: &Path) -> Result<Self, Error> {
        match path.extension().and_then(|suffix| suffix.to_str()) {
            Some("ts") => Ok(Self::Container),
            Some("safetensors") => Ok(Self::Safetensors),
            _ => Err(Error::UnknownSuffix { path: path.into() }),
        }
    }
}

/// Whether a file's index lists just these tensors, with this metadata and fingerprint.
fn holds(
    there: &Checkpoint,
    tensors: &[NewTensor],
    metadata: &BTreeMap<String, String>,
    fingerprint: Option<u128>,
) -> bool {
    let catalog = there.catalog();
    let same = |t: &NewTensor| catalog.tensor(&t.name).is_some_and(|there| there.meta() == t.meta);
    catalog.tensors().len() == tensors.len()
        && tensors.iter().all(same)
        && catalog.files().iter().all(|file| file.metadata == *metadata)
        && fingerprint.is_none_or(|wanted| there.fingerprint() == Some(wanted))
}

/// The key under which an unfinished file says what it is being made of.
const JOURNAL: &str = "tensorstream.unfinished";

/// Writes a `.ts` or `.safetensors` file that appears whole or not at all, or appends to a `.ts`
/// file.
///
/// All tensors are declared first, or, of a `.ts` file, also later by [`push`](Self::push);
/// [`write`](Self::write) takes their bytes in the order that [`order`](Self::order) says, and
/// [`commit`](Self::commit) gives the file its name, or what was appended its validity. If it is
/// dropped before that, or the process dies, what was there before still is.
#[derive(Debug)]
pub struct FileWriter {
    path: PathBuf,
    file: Target,
    options: WriteOptions,
    tensors: Vec<NewTensor>,
    order: Vec<usize>,
    container: Option<ContainerWriter>,
    encoders: Vec<Encoders>,
    /// The place in `order` of the tensor that is being written, or would be next.
    at: usize,
    /// How many of its bytes are missing, if it was begun.
    missing: Option<u64>,
    /// It has as many bytes as come.
    growing: bool,
    /// What becomes of it.
    way: Way,
    /// Bytes of it that wait to be compressed.
    batch: Vec<u8>,
    /// A call failed: nobody knows what the file has after that.
    failed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// It is written as it comes.
    AsItIs,
    /// It is compressed,
    Compressed(Codec),
    /// or will be, if its first batch shows that it is worth it.
    Undecided(Codec),
}

impl FileWriter {
    /// Begins a file, in the format of its suffix. Waits for another process that writes the same
    /// one; `interrupt` is asked every 20 ms and ends the wait by returning true.
    ///
    /// # Errors
    /// [`Error::UnknownSuffix`], [`Error::Format`] when a tensor cannot be written,
    /// [`Error::Write`] when the system refuses, [`Error::Compression`], [`Error::Interrupted`].
    pub fn create(
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: BTreeMap<String, String>,
        options: WriteOptions,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
        // A name that cannot be written has nothing made for it.
        let encoders = encoders(path, &tensors, &options)?;
        let claim = Claim::new(path, &options.faults, interrupt)?;
        Self::begin_file(Some(claim), path, tensors, metadata, options, encoders)
    }

    fn begin_file(
        claim: Option<Claim>,
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: BTreeMap<String, String>,
        options: WriteOptions,
        encoders: Vec<Encoders>,
    ) -> Result<Self, Error> {
        let (order, header, container) = match Format::of(path)? {
            Format::Container => {
                ((0..tensors.len()).collect(), None, Some(ContainerWriter::new(metadata)))
            }
            Format::Safetensors => {
                let named: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), &t.meta)).collect();
                let layout = SafetensorsLayout::new(&named, &metadata)?;
                (layout.order, Some(layout.header), None)
            }
        };
        let file = match claim {
            Some(claim) => Target::File(Box::new(claim.begin(expected(&tensors, &options))?)),
            None => Target::Memory(Vec::new()),
        };
        let mut this = Self::over(path, file, options, tensors, container, encoders);
        this.order = order;
        if let Some(header) = header {
            this.file.write(&header)?;
        }
        this.advance()?;
        Ok(this)
    }

    /// A file in memory, which [`into_bytes`](Self::into_bytes) gives in the end. Errors call it
    /// `name`, whose suffix says the format.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn in_memory(
        name: &str,
        tensors: Vec<NewTensor>,
        metadata: BTreeMap<String, String>,
        options: WriteOptions,
    ) -> Result<Self, Error> {
        let encoders = encoders(name.as_ref(), &tensors, &options)?;
        Self::begin_file(None, name.as_ref(), tensors, metadata, options, encoders)
    }

    fn over(
        path: &Path,
        file: Target,
        options: WriteOptions,
        tensors: Vec<NewTensor>,
        container: Option<ContainerWriter>,
        encoders: Vec<Encoders>,
    ) -> Self {
        let (path, order) = (path.to_path_buf(), (0..tensors.len()).collect());
        let (at, missing, growing, way, batch, failed) =
            (0, None, false, Way::AsItIs, Vec::new(), false);
        Self {
            path,
            file,
            options,
            tensors,
            order,
            container,
            encoders,
            at,
            missing,
            growing,
            way,
            batch,
            failed,
        }
    }

    /// As [`create`](Self::create), but `None` when `path` is there and holds just these tensors
    /// and this metadata: then there is nothing to write. With a `fingerprint` it must be that of
    /// the content too. Of several processes that write the same file, one does and the others wait
    /// and get `None`.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn unless_written(
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: &BTreeMap<String, String>,
        options: WriteOptions,
        fingerprint: Option<u128>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Self>, Error> {
        // Whatever is wrong with a file that is there, it is written again.
        let written = |tensors: &[NewTensor], interrupt: &mut dyn FnMut() -> bool| {
            let there = Checkpoint::open(path);
            if !there.is_ok_and(|there| holds(&there, tensors, metadata, fingerprint)) {
                return Ok(false);
            }
            // Who has the content, and so its fingerprint, may give it up once it is in the file.
            let found =
                fingerprint.map(|_| crate::verify(path, 0, &mut |_| interrupt())).transpose();
            match found {
                Ok(found) => Ok(found.is_none_or(|found| found.damaged.is_empty())),
                Err(Error::Interrupted) => Err(Error::Interrupted),
                Err(_) => Ok(false),
            }
        };
        if written(&tensors, interrupt)? {
            return Ok(None);
        }
        let encoders = encoders(path, &tensors, &options)?;
        let claim = Claim::new(path, &options.faults, interrupt)?;
        // It may have been written while this waited for its turn.
        if written(&tensors, interrupt)? {
            return Ok(None);
        }
        Self::begin_file(Some(claim), path, tensors, metadata.clone(), options, encoders).map(Some)
    }

    /// Goes on with a `.ts` file that is there: adds tensors, which take the place of those of the
    /// same name, takes away those in `remove`, and sets `metadata`, key by key. All of it counts
    /// from [`commit`](Self::commit) on, and none of it before. What is not used any more takes
    /// room until [`compact`](crate::compact()). Waits as [`create`](Self::create) does. Who has
    /// the file open sees in its next read that it has changed.
    ///
    /// # Errors
    /// As [`create`](Self::create) and [`Checkpoint::open`]; [`Error::Format`] when a tensor to be
    /// taken away is not there, or the file is no `.ts` file or one of a later minor version.
    pub fn append(
        path: &Path,
        tensors: Vec<NewTensor>,
        remove: &[String],
        metadata: BTreeMap<String, String>,
        options: WriteOptions,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
        let encoders = encoders(path, &tensors, &options)?;
        // By its own name, as everybody's claim must be the same.
        let real = path.canonicalize().map_err(|e| open_error(path, e))?;
        let claim = Claim::new(&real, &options.faults, interrupt)?;
        let target = claim.open_target(interrupt)?;
        let there = Checkpoint::open(&real)?;
        let (catalog, source) = (there.catalog(), the_one_source(&there, &real)?);
        remove.iter().try_for_each(|name| catalog.require(name).map(|_| ()))?;
        let mut gone: HashSet<&str> = remove.iter().map(String::as_str).collect();
        gone.extend(tensors.iter().map(|tensor| tensor.name.as_str()));
        let mut container = ContainerWriter::append(catalog, |name| !gone.contains(name))?;
        container.metadata_mut().extend(metadata);
        let used = catalog.files()[0].used_len();
        let mut active = [0; 4096];
        let active_at = catalog.files()[0].superblock_offset().unwrap_or(0);
        source.read_at(active_at, &mut active)?;
        // What was read is what has the name, and so what is written to.
        source.verify(0)?;
        let file = claim.append(
            target,
            used,
            (active_at, &active),
            container.end(),
            expected(&tensors, &options),
        )?;
        let mut this = Self::over(
            path,
            Target::File(Box::new(file)),
            options,
            tensors,
            Some(container),
            encoders,
        );
        this.advance()?;
        Ok(this)
    }

    /// As [`create`](Self::create), but goes on with what a writer before it left at its last
    /// [`checkpoint`](Self::checkpoint), if that was for the same tensors, metadata, options and
    /// `origin`, which says where the bytes come from.
    pub(crate) fn resume(
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: BTreeMap<String, String>,
        origin: &str,
        options: WriteOptions,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
        let encoders = encoders(path, &tensors, &options)?;
        let mut claim = Claim::new(path, &options.faults, interrupt)?;
        if Format::of(path)? == Format::Container {
            let there = Checkpoint::open(claim.partial());
            let left = there
                .ok()
                .and_then(|there| left(&there, &tensors, origin, &options).map(|n| (there, n)));
            if let Some((there, done)) = left {
                claim.keep();
                let order: Vec<&str> =
                    tensors[..done].iter().map(|tensor| tensor.name.as_str()).collect();
                let container = ContainerWriter::resume(there.catalog(), &order, metadata)?;
                let file = claim.resume(container.end(), expected(&tensors[done..], &options))?;
                let mut this = Self::over(
                    path,
                    Target::File(Box::new(file)),
                    options,
                    tensors,
                    Some(container),
                    encoders,
                );
                this.at = done;
                return Ok(this);
            }
        }
        Self::begin_file(Some(claim), path, tensors, metadata, options, encoders)
    }

    /// Makes the complete tensors durable, so that [`resume`](Self::resume) goes on after them.
    /// Does nothing for safetensors files, and after a failed write.
    pub(crate) fn checkpoint(&mut self, origin: &str) -> Result<(), Error> {
        let (Some(container), Target::File(file), false) =
            (&mut self.container, &mut self.file, self.failed)
        else {
            return Ok(());
        };
        container.drop_incomplete();
        let journal = journal(&self.tensors, origin, &self.options);
        let named = self.tensors.iter().map(|tensor| (tensor.name.as_str(), &tensor.meta));
        let room = container.room(named);
        let ends = container.checkpoint(room, &journal)?;
        file.write_ends(&ends)?;
        file.flush()?;
        file.keep();
        file.seek(container.end())
    }

    /// How many tensors are complete.
    pub(crate) fn complete(&self) -> usize {
        self.at
    }

    /// Declares one more tensor of a `.ts` file, whose bytes come behind those of all others.
    ///
    /// # Errors
    /// [`Error::Format`] when the format is another or the tensor cannot be written,
    /// [`Error::Compression`].
    pub fn push(&mut self, tensor: NewTensor) -> Result<(), Error> {
        self.unless_failed(|this| {
            this.end_growing()?;
            this.declare(tensor)
        })
    }

    fn unless_failed(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.failed {
            let (tensor, reason) = (String::new(), "an earlier call failed".into());
            return Err(FormatError::Unwritable { tensor, reason }.into());
        }
        // An interrupt comes before anything is written: what is complete can still be kept.
        act(self).inspect_err(|error| self.failed = !matches!(error, Error::Interrupted))
    }

    fn declare(&mut self, tensor: NewTensor) -> Result<(), Error> {
        if self.container.is_none() {
            let reason =
                "the header of a safetensors file, which lists it, is written already: name it .ts"
                    .into();
            return Err(FormatError::Unwritable { tensor: tensor.name, reason }.into());
        }
        for more in encoders(&self.path, std::slice::from_ref(&tensor), &self.options)? {
            if self.encoders.iter().all(|encoders| encoders.codec() != more.codec()) {
                self.encoders.push(more);
            }
        }
        self.order.push(self.tensors.len());
        self.tensors.push(tensor);
        self.advance()
    }

    /// As [`push`](Self::push), for a tensor that has as many bytes as are written until the next
    /// one is pushed or the file is committed: its first dimension, whatever it says, becomes what
    /// they are enough for.
    ///
    /// # Errors
    /// As [`push`](Self::push); [`Error::Format`] also when bytes of a tensor before this one are
    /// missing. When it ends, its bytes must be a whole number of steps along the first dimension.
    pub fn push_growing(&mut self, mut tensor: NewTensor) -> Result<(), Error> {
        tensor.meta.shape.first_mut().into_iter().for_each(|first| *first = 1);
        self.unless_failed(|this| {
            this.end_growing()?;
            this.advance()?;
            this.require_complete()?;
            this.growing = true;
            this.declare(tensor)
        })
    }

    /// Indices of the declared tensors, in the order in which their bytes are expected.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Takes the next bytes: of one tensor or of several, in pieces of any size. Blocks.
    ///
    /// # Errors
    /// [`Error::Write`], and [`Error::Format`] when the tensors have no more bytes. After an error,
    /// of this or another call, the file is given up: every call is an error.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.write_watched(bytes, &mut || false)
    }

    /// As [`write`](Self::write), but `interrupt` is asked before each mebibyte that is compressed.
    ///
    /// # Errors
    /// [`Error::Interrupted`] when it returned true. Then only [`checkpoint`](Self::checkpoint) may
    /// follow.
    pub(crate) fn write_watched(
        &mut self,
        bytes: &[u8],
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), Error> {
        self.unless_failed(|this| this.take(bytes, interrupt))
    }

    fn take(&mut self, mut bytes: &[u8], interrupt: &mut dyn FnMut() -> bool) -> Result<(), Error> {
        while !bytes.is_empty() {
            self.advance()?;
            let Some(missing) = self.missing else {
                let (tensor, reason) = (String::new(), "all tensors are complete".into());
                return Err(FormatError::Unwritable { tensor, reason }.into());
            };
            let room = match self.way {
                Way::AsItIs => usize::MAX,
                Way::Compressed(_) | Way::Undecided(_) => {
                    BATCH * CHUNK_LEN as usize - self.batch.len()
                }
            };
            let now = usize::try_from(missing).unwrap_or(usize::MAX).min(bytes.len()).min(room);
            let (piece, later) = bytes.split_at(now);
            match self.way {
                Way::AsItIs => self.write_as_it_is(piece)?,
                Way::Compressed(_) | Way::Undecided(_) => self.batch.extend_from_slice(piece),
            }
            let missing = if self.growing { missing } else { missing - now as u64 };
            self.missing = Some(missing);
            bytes = later;
            if self.way != Way::AsItIs && (missing == 0 || now == room) {
                self.write_batch(interrupt)?;
            }
            if missing == 0 {
                self.end_tensor();
            }
        }
        Ok(())
    }

    /// Makes the file durable and gives it its name, replacing what had it; or makes durable what
    /// was appended.
    ///
    /// # Errors
    /// [`Error::Format`] when bytes are missing, [`Error::Write`]. What was there before still is
    /// then, with two exceptions: when it is only the directory, or the superblock of an append,
    /// that cannot be brought to the disk, what is new is there, and may be gone after a loss of
    /// power.
    pub fn commit(self) -> Result<(), Error> {
        match self.finish()? {
            Target::File(file) => file.commit(),
            Target::Memory(_) => Ok(()),
        }
    }

    /// The file that was made in memory; of any other, which is committed, nothing.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn into_bytes(self) -> Result<Vec<u8>, Error> {
        match self.finish()? {
            Target::File(file) => file.commit().map(|()| Vec::new()),
            Target::Memory(bytes) => Ok(bytes),
        }
    }

    fn finish(mut self) -> Result<Target, Error> {
        self.unless_failed(|this| {
            this.end_growing()?;
            this.advance()?;
            this.require_complete()
        })?;
        if let Some(container) = self.container {
            let ends = container.finish()?;
            match &mut self.file {
                // What a checkpoint has left behind the index goes when that is not needed any
                // more.
                Target::File(file) if file.is_kept() => {
                    file.write_ends(&ends)?;
                    file.flush()?;
                    file.truncate(ends.index_offset + ends.index.len() as u64)?;
                }
                Target::File(file) => {
                    file.truncate(ends.index_offset)?;
                    file.write_ends(&ends)?;
                }
                Target::Memory(bytes) => {
                    bytes.resize(ends.index_offset as usize, 0);
                    bytes.extend(&ends.index);
                    bytes[..ends.superblocks.len()].copy_from_slice(&ends.superblocks);
                }
            }
        }
        Ok(self.file)
    }

    fn require_complete(&self) -> Result<(), Error> {
        let Some(&index) = self.order.get(self.at) else { return Ok(()) };
        let (tensor, missing) = (self.tensors[index].name.clone(), self.missing.unwrap_or(0));
        let reason = format!("{missing} of its bytes are missing");
        Err(FormatError::Unwritable { tensor, reason }.into())
    }

    /// Begins the next tensor, unless one is begun; those that are empty are complete with that.
    fn advance(&mut self) -> Result<(), Error> {
        while self.missing.is_none() {
            let Some(&index) = self.order.get(self.at) else { return Ok(()) };
            let meta = &self.tensors[index].meta;
            let len = if self.growing { u64::MAX } else { meta.byte_len().unwrap_or(0) };
            self.way = match self.options.compression.codec(meta.dtype) {
                Some(codec) if self.container.is_some() && len > 0 => Way::Undecided(codec),
                _ => Way::AsItIs,
            };
            if self.way == Way::AsItIs {
                self.begin_as_it_is()?;
            }
            match len {
                0 => self.end_tensor(),
                _ => self.missing = Some(len),
            }
        }
        Ok(())
    }

    fn end_tensor(&mut self) {
        self.at += 1;
        self.missing = None;
    }

    /// Ends the tensor that grows, if there is one.
    fn end_growing(&mut self) -> Result<(), Error> {
        if self.growing {
            self.write_batch(&mut || false)?;
            self.growing = false;
            self.end_tensor();
        }
        Ok(())
    }

    fn begin_as_it_is(&mut self) -> Result<(), Error> {
        if let Some(container) = &mut self.container {
            let NewTensor { name, meta, phase } = &self.tensors[self.order[self.at]];
            let offset = container.begin(name, meta.clone(), *phase)?;
            if self.growing {
                container.grow()?;
            }
            self.file.seek(offset)?;
        }
        Ok(())
    }

    fn write_as_it_is(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if let Some(container) = &mut self.container {
            container.feed(bytes)?;
        }
        self.file.write(bytes)
    }

    /// Compresses what has gathered and writes it; or decides by it that the tensor stays as it is.
    fn write_batch(&mut self, interrupt: &mut dyn FnMut() -> bool) -> Result<(), Error> {
        let batch = std::mem::take(&mut self.batch);
        let (Way::Compressed(codec) | Way::Undecided(codec)) = self.way else { return Ok(()) };
        let dtype = self.tensors[self.order[self.at]].meta.dtype;
        let encoders = self.encoders.iter_mut().find(|encoders| encoders.codec() == codec);
        let encoders = encoders.expect("there are those of every codec in use");
        let ready = encoders.encode(dtype, &batch, interrupt).ok_or(Error::Interrupted)?;
        if matches!(self.way, Way::Undecided(_)) {
            let stored = ready.iter().map(|(encoded, _)| encoded.len as u64).sum();
            if self.options.compression.is_worth(batch.len() as u64, stored) {
                self.way = Way::Compressed(codec);
                self.begin_chunked()?;
            } else {
                self.way = Way::AsItIs;
                self.begin_as_it_is()?;
                self.write_as_it_is(&batch)?;
            }
        }
        if self.way != Way::AsItIs {
            self.write_chunks(&ready)?;
        }
        self.batch = batch;
        self.batch.clear();
        Ok(())
    }

    fn begin_chunked(&mut self) -> Result<(), Error> {
        let NewTensor { name, meta, phase } = &self.tensors[self.order[self.at]];
        let container = self.container.as_mut().expect("only .ts files are compressed");
        container.begin_chunked(name, meta.clone(), *phase)?;
        if self.growing {
            container.grow()?;
        }
        Ok(())
    }

    fn write_chunks(&mut self, ready: &[Ready]) -> Result<(), Error> {
        let container = self.container.as_mut().expect("only .ts files are compressed");
        for (encoded, bytes) in ready {
            let offset = container.push_chunk(encoded)?;
            self.file.seek(offset)?;
            self.file.write(bytes)?;
        }
        Ok(())
    }
}

/// The source of the one file that a checkpoint is, which was opened as `path`: neither a shard of
/// an index that has this name, nor what lies in a directory of it.
pub(crate) fn the_one_source<'a>(there: &'a Checkpoint, path: &Path) -> Result<&'a Source, Error> {
    match there.sources() {
        [source] if source.path() == path => Ok(source),
        _ => {
            let (file, reason) = (path.display().to_string(), "it is not one .ts file".into());
            Err(FormatError::NotAppendable { file, reason }.into())
        }
    }
}

/// The unfinished file beside this place, if a conversion to it could go on with that.
#[cfg(feature = "cli")]
pub(crate) fn unfinished(target: &Path) -> Option<PathBuf> {
    let partial = crate::atomic::partial_of(target)?;
    let there = Checkpoint::open(&partial).ok()?;
    there.catalog().files()[0].metadata.contains_key(JOURNAL).then_some(partial)
}

/// Where a file is made.
#[derive(Debug)]
enum Target {
    File(Box<AtomicFile>),
    Memory(Vec<u8>),
}

impl Target {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match self {
            Self::File(file) => file.write(bytes),
            Self::Memory(held) => {
                held.extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Goes forward to `offset`.
    fn seek(&mut self, offset: u64) -> Result<(), Error> {
        match self {
            Self::File(file) => file.seek(offset),
            Self::Memory(held) => {
                held.resize(offset as usize, 0);
                Ok(())
            }
        }
    }
}

/// Bytes to set aside: what will be compressed takes nobody knows how much.
fn expected(tensors: &[NewTensor], options: &WriteOptions) -> u64 {
    let as_it_is = tensors.iter().filter(|t| options.compression.codec(t.meta.dtype).is_none());
    as_it_is.filter_map(|t| t.meta.byte_len()).fold(0, u64::saturating_add)
}

/// What an unfinished file says of itself.
fn journal(
    tensors: &[NewTensor],
    origin: &str,
    options: &WriteOptions,
) -> BTreeMap<String, String> {
    let made_of = format!("{:?} {origin} {tensors:?}", options.compression);
    let made_of = Digest::of(made_of.as_bytes());
    let hex = made_of.chunks().iter().map(|sum| format!("{sum:016x}")).collect();
    BTreeMap::from([(JOURNAL.into(), hex)])
}

/// How many of the tensors an unfinished file has that is of just these.
fn left(
    there: &Checkpoint,
    tensors: &[NewTensor],
    origin: &str,
    options: &WriteOptions,
) -> Option<usize> {
    let (catalog, wanted) = (there.catalog(), journal(tensors, origin, options));
    let count = catalog.tensors().len();
    let holds =
        |tensor: &NewTensor| catalog.tensor(&tensor.name).is_some_and(|t| t.meta() == tensor.meta);
    let same = catalog.files()[0].metadata == wanted && tensors.get(..count)?.iter().all(holds);
    same.then_some(count)
}

/// What compresses these tensors, if the file that `path` names can be compressed.
fn encoders(
    path: &Path,
    tensors: &[NewTensor],
    options: &WriteOptions,
) -> Result<Vec<Encoders>, Error> {
    let WriteOptions { compression, jobs, .. } = *options;
    let refuse = |reason: String| Error::Compression { path: path.into(), reason };
    if Format::of(path)? == Format::Safetensors && compression != Compression::None {
        return Err(refuse("safetensors files are not compressed: name it .ts".into()));
    }
    let jobs = threads(jobs);
    // Also a level that no tensor will need is looked at.
    let asked = if let Compression::By(codec, _) = compression { Some(codec) } else { None };
    let mut codecs: Vec<Codec> =
        tensors.iter().filter_map(|t| compression.codec(t.meta.dtype)).chain(asked).collect();
    codecs.sort_unstable();
    codecs.dedup();
    let make = |codec| Encoders::new(codec, compression.level(), jobs).map_err(refuse);
    codecs.into_iter().map(make).collect()
}
