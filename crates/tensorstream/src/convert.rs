// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoints from one format to another, and from many files to one.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ts_format::{CHUNK_LEN, Tensor, shard_index};
use ts_io::Source;

use crate::atomic::{Claim, partial_of};
use crate::read::Reader;
use crate::{Checkpoint, Error, FileWriter, NewTensor, WriteOptions};

/// What is read and written at a time, in bytes: a multiple of the chunks that have checksums.
const PIECE_BYTES: u64 = 16 * CHUNK_LEN;

/// How far a long job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are done.
    pub done: u64,
    /// Bytes there are.
    pub total: u64,
}

/// What watches a long job: called at least once for 16 MiB, and every 20 ms of a wait. Returning
/// true interrupts.
pub type Watch<'a> = dyn FnMut(Progress) -> bool + 'a;

/// What a conversion did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Converted {
    /// Tensors written.
    pub tensors: usize,
    /// Bytes of their data.
    pub bytes: u64,
    /// Length of the file, or of all files.
    pub file_bytes: u64,
}

/// What an index of shards ends with.
const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// Writes the checkpoint at `from` into one file, `.ts` or `.safetensors` by its suffix, or, where
/// `to` ends in `.safetensors.index.json`, into that index and shards beside it: every tensor bit
/// for bit, and the metadata. `from` is whatever [`Checkpoint::open`] takes. Data with checksums
/// are checked on the way. What was compressed and what will be has nothing to do with each other.
///
/// A safetensors file that its library wrote comes back byte for byte from a `.ts` made of it.
/// Where shards disagree on a key of their metadata, each value is kept as `key@file`.
///
/// A conversion to a `.ts` file can be resumed: the next conversion of the same files with the same
/// options goes on after the last tensor that `NAME.partial` keeps, and the finished file is the
/// same, byte for byte. An interrupt or a failed read keeps every complete tensor. A process that
/// is killed keeps what was made durable last, which happens after every
/// [`WriteOptions::checkpoint_bytes`] of tensors. Conversions to safetensors files begin again.
///
/// # Errors
/// As [`Checkpoint::open`] and [`FileWriter`]; [`Error::Corrupt`]; [`Error::Interrupted`]. `to` is
/// then as it was, but for what [`FileWriter::commit`] says. An index that is there is not written
/// over, since its shards would be before it is: [`Error::Write`].
pub fn convert(
    from: &Path,
    to: &Path,
    options: WriteOptions,
    watch: &mut Watch<'_>,
) -> Result<Converted, Error> {
    let checkpoint = Checkpoint::open(from)?;
    // In the order of the files, so that reading is sequential.
    let tensors = checkpoint.catalog().tensors_by_place();
    let total: u64 = tensors.iter().map(|tensor| tensor.range().len).sum();
    let metadata = merged_metadata(&checkpoint);
    let progress = Progress { done: 0, total };
    let (buffer, reader) = (vec![0; PIECE_BYTES.min(total) as usize], Reader::default());
    let mut copier = Copier { checkpoint: &checkpoint, buffer, reader, progress, watch };
    let name = to.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let file_bytes = match name.strip_suffix(INDEX_SUFFIX) {
        Some(stem) => copier.write_shards(&tensors, to, stem, &metadata, &options)?,
        None => copier.write_file(&tensors, to, metadata, options)?,
    };
    Ok(Converted { tensors: tensors.len(), bytes: total, file_bytes })
}

/// Brings tensors from a checkpoint to files.
struct Copier<'a, 'b> {
    checkpoint: &'a Checkpoint,
    buffer: Vec<u8>,
    reader: Reader,
    progress: Progress,
    watch: &'a mut Watch<'b>,
}

impl Copier<'_, '_> {
    /// Writes one file; its length.
    fn write_file(
        &mut self,
        tensors: &[Tensor<'_>],
        to: &Path,
        metadata: BTreeMap<String, String>,
        options: WriteOptions,
    ) -> Result<u64, Error> {
        self.refuse_source(to)?;
        let new = tensors.iter().map(|t| NewTensor {
            name: t.name().into(),
            meta: t.meta(),
            phase: None,
        });
        let (origin, checkpoint_bytes) = (origin(self.checkpoint), options.checkpoint_bytes.max(1));
        let interrupt = &mut || (self.watch)(self.progress);
        let mut writer =
            FileWriter::resume(to, new.collect(), metadata, &origin, options, interrupt)?;
        let order = writer.order().to_vec();
        let (done, left) = order.split_at(writer.complete());
        self.progress.done += done.iter().map(|&index| tensors[index].range().len).sum::<u64>();
        let (mut safe, mut kept) = (self.progress.done, writer.complete());
        for &index in left {
            if self.progress.done - safe >= checkpoint_bytes {
                writer.checkpoint(&origin)?;
                (safe, kept) = (self.progress.done, writer.complete());
            }
            let copied = self.copy(tensors[index], &mut writer);
            if copied.is_err() && writer.complete() > kept {
                // The error that ended the conversion says more than one of keeping what is done.
                let _ = writer.checkpoint(&origin);
            }
            copied?;
        }
        writer.commit()?;
        Ok(std::fs::metadata(to).map_or(0, |metadata| metadata.len()))
    }

    /// Writes shards and, when all are there, their index; the bytes of all.
    fn write_shards(
        &mut self,
        tensors: &[Tensor<'_>],
        index: &Path,
        stem: &str,
        metadata: &BTreeMap<String, String>,
        options: &WriteOptions,
    ) -> Result<u64, Error> {
        let claim = Claim::new(index, &options.faults, &mut || (self.watch)(self.progress))?;
        if index.symlink_metadata().is_ok() {
            let reason =
                "an index is there, whose shards would be written over before it: remove it first";
            let source = std::io::Error::new(std::io::ErrorKind::AlreadyExists, reason);
            return Err(Error::Write { path: index.into(), source });
        }
        let mut shards: Vec<Vec<Tensor<'_>>> = vec![vec![]];
        let mut room = options.max_shard_bytes;
        for &tensor in tensors {
            let len = tensor.range().len;
            if len > room && shards.last().is_some_and(|shard| !shard.is_empty()) {
                shards.push(vec![]);
                room = options.max_shard_bytes;
            }
            room = room.saturating_sub(len);
            shards.last_mut().expect("there is one at first").push(tensor);
        }
        let count = shards.len();
        let name = |number: usize| format!("{stem}-{:05}-of-{count:05}.safetensors", number + 1);
        // Another shard may still be made of what the first one would be put in the place of.
        (0..count)
            .try_for_each(|number| self.refuse_source_at(&index.with_file_name(name(number))))?;
        let mut names = BTreeMap::new();
        let mut bytes = 0;
        for (number, shard) in shards.iter().enumerate() {
            let name = name(number);
            bytes += self.write_file(
                shard,
                &index.with_file_name(&name),
                metadata.clone(),
                options.clone(),
            )?;
            names.extend(shard.iter().map(|tensor| (tensor.name().to_string(), name.clone())));
        }
        let json = shard_index(self.progress.total, &names)?;
        let mut file = claim.begin(json.len() as u64)?;
        file.write(&json)?;
        file.commit()?;
        Ok(bytes + json.len() as u64)
    }

    fn copy(&mut self, tensor: Tensor<'_>, writer: &mut FileWriter) -> Result<(), Error> {
        let len = tensor.range().len;
        for begin in (0..len).step_by(PIECE_BYTES as usize) {
            let bytes = &mut self.buffer[..PIECE_BYTES.min(len - begin) as usize];
            self.reader.read_checked(self.checkpoint, tensor, begin, bytes)?;
            let progress = self.progress;
            writer.write_watched(bytes, &mut || (self.watch)(progress))?;
            self.progress.done += bytes.len() as u64;
            if (self.watch)(self.progress) {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// The unfinished file must not be made in place of what is read.
    fn refuse_source(&self, to: &Path) -> Result<(), Error> {
        partial_of(to).map_or(Ok(()), |partial| self.refuse_source_at(&partial))
    }

    /// An error where what is read lies at `path`.
    fn refuse_source_at(&self, path: &Path) -> Result<(), Error> {
        let Ok(place) = path.canonicalize() else { return Ok(()) };
        let read = |path: &Path| path.canonicalize().is_ok_and(|path| path == place);
        if self.checkpoint.sources().iter().any(|source| read(source.path())) {
            let source = std::io::Error::other("the very file that is read would be written over");
            return Err(Error::Write { path: path.into(), source });
        }
        Ok(())
    }
}

/// What the bytes of a checkpoint are, as far as can be told without reading them, and what they
/// become here.
fn origin(checkpoint: &Checkpoint) -> String {
    let state = |source: &Arc<Source>| {
        (source.path().to_path_buf(), source.fingerprint().clone(), changed(source))
    };
    let files: Vec<_> = checkpoint.sources().iter().map(state).collect();
    format!("{} {:?} {files:?}", env!("CARGO_PKG_VERSION"), checkpoint.fingerprint())
}

/// When the system last noted a change of a file, in whatever: a time that cannot be set.
#[cfg(unix)]
fn changed(source: &Source) -> Option<(i64, i64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(source.path()).ok()?;
    Some((metadata.ctime(), metadata.ctime_nsec()))
}

#[cfg(not(unix))]
fn changed(_: &Source) -> Option<(i64, i64)> {
    None
}

/// The metadata of all files as one. Keys on which they disagree get the name of their file.
pub(crate) fn merged_metadata(checkpoint: &Checkpoint) -> BTreeMap<String, String> {
    let files = checkpoint.catalog().files();
    let mut merged = BTreeMap::new();
    for file in files {
        for (key, value) in &file.metadata {
            let agreed = files.iter().all(|f| f.metadata.get(key).is_none_or(|v| v == value));
            let name = Path::new(&file.name).file_name().unwrap_or_default().to_string_lossy();
            let key = if agreed { key.clone() } else { format!("{key}@{name}") };
            merged.insert(key, value.clone());
        }
    }
    merged
}
