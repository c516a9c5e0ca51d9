// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the bytes of declared tensors, one tensor after the other, and compresses them.

use std::path::{Path, PathBuf};

use ts_format::{CHUNK_LEN, Codec, Compression, ContainerWriter, Error as FormatError};

use super::journal::{self, Record};
use super::options::{Format, NewTensor, WriteOptions};
use super::sink::Sink;
use crate::Error;
use crate::encode::{BATCH, EncodedChunk, Encoders};
use crate::pieces::thread_count;

/// Length of a batch of chunks to compress, in bytes.
const BATCH_LEN: usize = BATCH * CHUNK_LEN as usize;

/// A file to write: its path, its tensors, and the options for writing it.
#[derive(Debug)]
pub(super) struct FileSpec {
    pub(super) path: PathBuf,
    pub(super) tensors: Vec<NewTensor>,
    pub(super) options: WriteOptions,
    encoders: Vec<Encoders>,
}

impl FileSpec {
    /// Creates a specification. Returns an error if the suffix of `path` is unknown, or the
    /// requested compression is not possible.
    pub(super) fn new(
        path: &Path,
        tensors: Vec<NewTensor>,
        options: WriteOptions,
    ) -> Result<Self, Error> {
        let encoders = encoders(path, &tensors, &options)?;
        Ok(Self { path: path.into(), tensors, options, encoders })
    }

    /// Returns the number of bytes to preallocate for the tensors from index `first` on. Compressed
    /// tensors are not counted, because their length is not known in advance.
    pub(super) fn expected_bytes(&self, first: usize) -> u64 {
        let compression = self.options.compression;
        let plain =
            self.tensors[first..].iter().filter(|t| compression.codec(t.meta.dtype).is_none());
        plain.filter_map(|t| t.meta.byte_len()).fold(0, u64::saturating_add)
    }
}

/// How the bytes of the current tensor are stored in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Storage {
    Uncompressed,
    Compressed(Codec),
    /// Compressed with this codec if that saves enough in the first batch, else uncompressed.
    Undecided(Codec),
}

/// A writer of the bytes of tensors, in the order of the file.
#[derive(Debug)]
pub(super) struct TensorWriter {
    spec: FileSpec,
    sink: Sink,
    /// `None` for safetensors.
    container: Option<ContainerWriter>,
    /// Length of the header of a safetensors file.
    header_len: u64,
    /// Number of records in the journal of a safetensors file.
    records: u64,
    /// Indices of the tensors, in the order in which their bytes are written.
    order: Vec<usize>,
    /// Position in `order` of the current tensor, or of the next one if none has begun.
    current: usize,
    /// Bytes that the current tensor still needs. `None` if it has not begun.
    missing: Option<u64>,
    /// Whether the length of the current tensor depends on the bytes that are written.
    growing: bool,
    storage: Storage,
    /// Bytes of the current tensor that are not compressed yet.
    batch: Vec<u8>,
}

impl TensorWriter {
    /// Creates a writer for a `.ts` file whose first `complete` tensors are already written.
    pub(super) fn container(
        spec: FileSpec,
        sink: Sink,
        container: ContainerWriter,
        complete: usize,
    ) -> Self {
        let order = (0..spec.tensors.len()).collect();
        Self { current: complete, ..Self::new(spec, sink, Some(container), order) }
    }

    /// Creates a writer for a safetensors file whose header is already written, as are the tensors
    /// that are complete according to `journal`.
    pub(super) fn safetensors(
        spec: FileSpec,
        sink: Sink,
        order: Vec<usize>,
        header_len: u64,
        journal: Option<Record>,
    ) -> Self {
        let (records, current) =
            journal.map_or((0, 0), |record| (record.number, record.complete as usize));
        Self { header_len, records, current, ..Self::new(spec, sink, None, order) }
    }

    fn new(
        spec: FileSpec,
        sink: Sink,
        container: Option<ContainerWriter>,
        order: Vec<usize>,
    ) -> Self {
        Self {
            spec,
            sink,
            container,
            header_len: 0,
            records: 0,
            order,
            current: 0,
            missing: None,
            growing: false,
            storage: Storage::Uncompressed,
            batch: Vec::new(),
        }
    }

    /// Returns the indices of the tensors, in the order in which their bytes are expected.
    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns the number of complete tensors.
    pub(super) fn complete(&self) -> usize {
        self.current
    }

    /// Declares another tensor of a `.ts` file.
    pub(super) fn push(&mut self, tensor: NewTensor) -> Result<(), Error> {
        self.end_growing()?;
        self.declare(tensor)
    }

    /// Declares a tensor whose first dimension depends on the bytes that are written.
    pub(super) fn push_growing(&mut self, mut tensor: NewTensor) -> Result<(), Error> {
        tensor.meta.shape.first_mut().into_iter().for_each(|first| *first = 1);
        self.end_growing()?;
        self.begin_next()?;
        self.require_complete()?;
        self.growing = true;
        self.declare(tensor)
    }

    fn declare(&mut self, tensor: NewTensor) -> Result<(), Error> {
        if self.container.is_none() {
            let reason = "the header of the safetensors file is already written; use a .ts file \
                          to add tensors later"
                .into();
            return Err(FormatError::Unwritable { tensor: tensor.name, reason }.into());
        }
        let added = encoders(&self.spec.path, std::slice::from_ref(&tensor), &self.spec.options)?;
        for encoders in added {
            if self.spec.encoders.iter().all(|known| known.codec() != encoders.codec()) {
                self.spec.encoders.push(encoders);
            }
        }
        self.order.push(self.spec.tensors.len());
        self.spec.tensors.push(tensor);
        self.begin_next()
    }

    /// Writes the next bytes. Calls `interrupt` before each chunk that the calling thread
    /// compresses.
    pub(super) fn write(
        &mut self,
        mut bytes: &[u8],
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), Error> {
        while !bytes.is_empty() {
            self.begin_next()?;
            let Some(missing) = self.missing else {
                let (tensor, reason) =
                    (String::new(), "received more bytes than the declared tensors have".into());
                return Err(FormatError::Unwritable { tensor, reason }.into());
            };
            let space = match self.storage {
                Storage::Uncompressed => usize::MAX,
                Storage::Compressed(_) | Storage::Undecided(_) => BATCH_LEN - self.batch.len(),
            };
            let len = usize::try_from(missing).unwrap_or(usize::MAX).min(bytes.len()).min(space);
            let (piece, rest) = bytes.split_at(len);
            match self.storage {
                Storage::Uncompressed => self.write_uncompressed(piece)?,
                Storage::Compressed(_) | Storage::Undecided(_) => {
                    self.batch.extend_from_slice(piece);
                }
            }
            let missing = if self.growing { missing } else { missing - len as u64 };
            self.missing = Some(missing);
            bytes = rest;
            if self.storage != Storage::Uncompressed && (missing == 0 || len == space) {
                self.write_batch(interrupt)?;
            }
            if missing == 0 {
                self.end_tensor();
            }
        }
        Ok(())
    }

    /// Makes the complete tensors durable, so that the job can resume after them. Does nothing for
    /// files in memory.
    pub(super) fn checkpoint(&mut self, origin: &str) -> Result<(), Error> {
        let (end, data_end) = (self.safetensors_end(self.current), self.data_end());
        let Sink::File(file) = &mut self.sink else { return Ok(()) };
        let Some(container) = &mut self.container else {
            let FileSpec { tensors, options, .. } = &self.spec;
            let record = Record::new(tensors, origin, options, self.records + 1, self.current);
            file.flush()?;
            file.seek(record.offset(data_end))?;
            file.write(&record.to_bytes())?;
            file.flush()?;
            file.keep();
            self.records = record.number;
            self.missing = None;
            file.seek(end)?;
            return self.begin_next();
        };
        container.discard_incomplete();
        let FileSpec { tensors, options, .. } = &self.spec;
        let metadata = journal::metadata(tensors, origin, options);
        let named = tensors.iter().map(|tensor| (tensor.name.as_str(), &tensor.meta));
        let space = container.checkpoint_space(named);
        let tail = container.checkpoint(space, &metadata)?;
        file.write_tail(&tail)?;
        file.flush()?;
        file.keep();
        file.seek(container.end())
    }

    /// Returns the offset after the first `count` tensors of a safetensors file.
    pub(super) fn safetensors_end(&self, count: usize) -> u64 {
        let lens = self.order[..count].iter().map(|&i| self.spec.tensors[i].meta.byte_len());
        lens.flatten().fold(self.header_len, u64::saturating_add)
    }

    fn data_end(&self) -> u64 {
        self.safetensors_end(self.order.len())
    }

    /// Ends the last tensor. Returns an error if bytes of a tensor are missing.
    pub(super) fn end(&mut self) -> Result<(), Error> {
        self.end_growing()?;
        self.begin_next()?;
        self.require_complete()
    }

    /// Writes the index and superblocks of a `.ts` file, or removes the journal of a safetensors
    /// file. Returns the sink.
    pub(super) fn finish(mut self) -> Result<Sink, Error> {
        let data_end = self.data_end();
        if let Some(container) = self.container {
            self.sink.write_tail(&container.finish()?)?;
        } else if let (Sink::File(file), true) = (&mut self.sink, self.records > 0) {
            // The data must be durable before the journal, which says what is missing, is removed.
            file.flush()?;
            file.truncate(data_end)?;
        }
        Ok(self.sink)
    }

    fn require_complete(&self) -> Result<(), Error> {
        let Some(&index) = self.order.get(self.current) else { return Ok(()) };
        let (tensor, missing) = (self.spec.tensors[index].name.clone(), self.missing.unwrap_or(0));
        let reason = format!("{missing} of its bytes are missing");
        Err(FormatError::Unwritable { tensor, reason }.into())
    }

    /// Begins the next tensor unless one has begun. Empty tensors are complete at once.
    pub(super) fn begin_next(&mut self) -> Result<(), Error> {
        while self.missing.is_none() {
            let Some(&index) = self.order.get(self.current) else { return Ok(()) };
            let meta = &self.spec.tensors[index].meta;
            let len = if self.growing { u64::MAX } else { meta.byte_len().unwrap_or(0) };
            self.storage = match self.spec.options.compression.codec(meta.dtype) {
                Some(codec) if self.container.is_some() && len > 0 => Storage::Undecided(codec),
                _ => Storage::Uncompressed,
            };
            if self.storage == Storage::Uncompressed {
                self.begin_uncompressed()?;
            }
            match len {
                0 => self.end_tensor(),
                _ => self.missing = Some(len),
            }
        }
        Ok(())
    }

    fn end_tensor(&mut self) {
        self.current += 1;
        self.missing = None;
    }

    /// Ends the current tensor if it is growing.
    fn end_growing(&mut self) -> Result<(), Error> {
        if self.growing {
            self.write_batch(&mut || false)?;
            self.growing = false;
            self.end_tensor();
        }
        Ok(())
    }

    fn begin_uncompressed(&mut self) -> Result<(), Error> {
        if let Some(container) = &mut self.container {
            let NewTensor { name, meta, phase } = &self.spec.tensors[self.order[self.current]];
            let offset = container.begin(name, meta.clone(), *phase)?;
            if self.growing {
                container.grow()?;
            }
            self.sink.seek(offset)?;
        }
        Ok(())
    }

    fn write_uncompressed(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if let Some(container) = &mut self.container {
            container.feed(bytes)?;
        }
        self.sink.write(bytes)
    }

    /// Compresses and writes the batch. The first batch decides whether the tensor is compressed.
    fn write_batch(&mut self, interrupt: &mut dyn FnMut() -> bool) -> Result<(), Error> {
        let batch = std::mem::take(&mut self.batch);
        let (Storage::Compressed(codec) | Storage::Undecided(codec)) = self.storage else {
            return Ok(());
        };
        let dtype = self.spec.tensors[self.order[self.current]].meta.dtype;
        let encoders = self.spec.encoders.iter_mut().find(|encoders| encoders.codec() == codec);
        let encoders = encoders.expect("every codec in use has encoders");
        let chunks = encoders.encode(dtype, &batch, interrupt).ok_or(Error::Interrupted)?;
        if matches!(self.storage, Storage::Undecided(_)) {
            let stored = chunks.iter().map(|(encoded, _)| encoded.len as u64).sum();
            if self.spec.options.compression.is_worthwhile(batch.len() as u64, stored) {
                self.storage = Storage::Compressed(codec);
                self.begin_compressed()?;
            } else {
                self.storage = Storage::Uncompressed;
                self.begin_uncompressed()?;
                self.write_uncompressed(&batch)?;
            }
        }
        if self.storage != Storage::Uncompressed {
            self.write_chunks(&chunks)?;
        }
        self.batch = batch;
        self.batch.clear();
        Ok(())
    }

    fn begin_compressed(&mut self) -> Result<(), Error> {
        let NewTensor { name, meta, phase } = &self.spec.tensors[self.order[self.current]];
        let container = self
            .container
            .as_mut()
            .expect("only .ts files, which have a container, are compressed");
        container.begin_chunked(name, meta.clone(), *phase)?;
        if self.growing {
            container.grow()?;
        }
        Ok(())
    }

    fn write_chunks(&mut self, chunks: &[EncodedChunk]) -> Result<(), Error> {
        let container = self
            .container
            .as_mut()
            .expect("only .ts files, which have a container, are compressed");
        for (encoded, bytes) in chunks {
            let offset = container.push_chunk(encoded)?;
            self.sink.seek(offset)?;
            self.sink.write(bytes)?;
        }
        Ok(())
    }
}

/// Creates encoders for each codec that these tensors use.
fn encoders(
    path: &Path,
    tensors: &[NewTensor],
    options: &WriteOptions,
) -> Result<Vec<Encoders>, Error> {
    let WriteOptions { compression, jobs, .. } = *options;
    let invalid = |reason: String| Error::Compression { path: path.into(), reason };
    if Format::from_path(path)? == Format::Safetensors && compression != Compression::None {
        return Err(invalid("safetensors files cannot be compressed; use a .ts file".into()));
    }
    let jobs = thread_count(jobs);
    // An invalid level is an error even if no tensor uses the codec.
    let requested = match compression {
        Compression::Codec(codec, _) => Some(codec),
        _ => None,
    };
    let mut codecs: Vec<Codec> =
        tensors.iter().filter_map(|t| compression.codec(t.meta.dtype)).chain(requested).collect();
    codecs.sort_unstable();
    codecs.dedup();
    let create = |codec| Encoders::new(codec, compression.level(codec), jobs).map_err(invalid);
    codecs.into_iter().map(create).collect()
}
