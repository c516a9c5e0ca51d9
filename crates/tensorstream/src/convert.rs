// SPDX-License-Identifier: MIT OR Apache-2.0
//! Conversion of checkpoints between formats, and between one file and many.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ts_format::{CHUNK_LEN, Metadata, Tensor, shard_index};
use ts_io::Source;

use crate::atomic::{Claim, partial_path};
use crate::metadata::merged_metadata;
use crate::progress::{Progress, Watch};
use crate::read::Reader;
use crate::{Checkpoint, Error, FileWriter, NewTensor, WriteOptions};

/// Number of bytes that are read and written at a time. It is a multiple of [`CHUNK_LEN`], so that
/// checksums can be compared.
const PIECE_BYTES: u64 = 16 * CHUNK_LEN;

/// The result of [`convert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Converted {
    /// Number of tensors.
    pub tensors: usize,
    /// Size of the tensors in bytes, before compression.
    pub bytes: u64,
    /// Length of the new file, or of all new files, in bytes.
    pub file_bytes: u64,
}

/// Suffix of the name of a shard index.
const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// Converts the checkpoint at `from`, which can be anything that [`Checkpoint::open`] accepts.
/// Blocks.
///
/// If `to` ends in `.ts` or `.safetensors`, writes this file. If it ends in
/// `.safetensors.index.json`, writes this index, and shards to the same directory. Tensors are
/// copied bit for bit, and compared with their checksums if they have any. Metadata is kept. If
/// shards disagree on a metadata key, each value is kept as `key@file`. A file that the
/// safetensors library wrote can be converted to `.ts` and back to the same bytes.
///
/// An interrupted conversion to one file can be resumed: call this function again with the same
/// files and options. Until the conversion is finished, `NAME.partial` contains the tensors that
/// are complete so far. The finished file does not depend on interruptions.
///
/// - After an interrupt or a failed read, complete tensors are not written again.
/// - After a crash, the tensors since the last checkpoint are written again (see
///   [`WriteOptions::checkpoint_bytes`]).
/// - A conversion to several shards writes those again that are complete, and resumes in the one
///   that is not.
///
/// # Errors
/// After an error `to` is unchanged, except as described at [`FileWriter::commit`].
///
/// - The errors of [`Checkpoint::open`] and [`FileWriter`].
/// - [`Error::Corrupt`] if a tensor is damaged.
/// - [`Error::Write`] if `to` is an index that exists already. The conversion would overwrite the
///   shards of this index one by one.
/// - [`Error::Write`] if a new file would overwrite the source.
/// - [`Error::Interrupted`] if `watch` returns true.
pub fn convert(
    from: &Path,
    to: &Path,
    options: WriteOptions,
    watch: &mut Watch<'_>,
) -> Result<Converted, Error> {
    let checkpoint = Checkpoint::open(from)?;
    // Sorted by offset, so that files are read sequentially.
    let tensors = checkpoint.catalog().tensors_by_offset();
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

/// The state of a conversion, which copies the tensors of a checkpoint to files.
struct Copier<'a, 'b> {
    checkpoint: &'a Checkpoint,
    buffer: Vec<u8>,
    reader: Reader,
    progress: Progress,
    watch: &'a mut Watch<'b>,
}

impl Copier<'_, '_> {
    /// Writes one file, and returns its length.
    fn write_file(
        &mut self,
        tensors: &[Tensor<'_>],
        to: &Path,
        metadata: Metadata,
        options: WriteOptions,
    ) -> Result<u64, Error> {
        partial_path(to).map_or(Ok(()), |partial| self.check_not_source(&partial))?;
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
        let (complete, rest) = order.split_at(writer.complete());
        self.progress.done += complete.iter().map(|&i| tensors[i].range().len).sum::<u64>();
        // Number of durable tensor bytes, and number of durable tensors.
        let (mut durable_bytes, mut durable) = (self.progress.done, writer.complete());
        for &index in rest {
            if self.progress.done - durable_bytes >= checkpoint_bytes {
                writer.checkpoint(&origin)?;
                (durable_bytes, durable) = (self.progress.done, writer.complete());
            }
            let copied = self.copy(tensors[index], &mut writer);
            if copied.is_err() && writer.complete() > durable {
                // If this fails too, only the first error is reported.
                let _ = writer.checkpoint(&origin);
            }
            copied?;
        }
        writer.commit()?;
        Ok(std::fs::metadata(to).map_or(0, |metadata| metadata.len()))
    }

    /// Writes shards and then their index, and returns their total length.
    fn write_shards(
        &mut self,
        tensors: &[Tensor<'_>],
        index: &Path,
        stem: &str,
        metadata: &Metadata,
        options: &WriteOptions,
    ) -> Result<u64, Error> {
        let claim = Claim::new(index, &options.faults, &mut || (self.watch)(self.progress))?;
        if index.symlink_metadata().is_ok() {
            let reason = "the index exists already, and its shards would be overwritten; remove \
                          it first";
            let source = std::io::Error::new(std::io::ErrorKind::AlreadyExists, reason);
            return Err(Error::write(index, source));
        }
        let shards = into_shards(tensors, options.max_shard_bytes);
        let count = shards.len();
        let name = |number: usize| format!("{stem}-{:05}-of-{count:05}.safetensors", number + 1);
        // A shard must not replace a file that a later shard is copied from.
        (0..count)
            .try_for_each(|number| self.check_not_source(&index.with_file_name(name(number))))?;
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
        let mut file = claim.create(json.len() as u64)?;
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
            writer.write_interruptible(bytes, &mut || (self.watch)(progress))?;
            self.progress.done += bytes.len() as u64;
            if (self.watch)(self.progress) {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// Returns an error if `path` is a file of the source.
    fn check_not_source(&self, path: &Path) -> Result<(), Error> {
        let Ok(real_path) = path.canonicalize() else { return Ok(()) };
        let is_same = |path: &Path| path.canonicalize().is_ok_and(|path| path == real_path);
        if self.checkpoint.sources().iter().any(|source| is_same(source.path())) {
            let reason = "it is also the source of the conversion; choose another name";
            return Err(Error::write(path, std::io::Error::other(reason)));
        }
        Ok(())
    }
}

/// Divides tensors into shards of at most `max_bytes`, in order. A larger tensor gets its own
/// shard.
fn into_shards<'a>(tensors: &[Tensor<'a>], max_bytes: u64) -> Vec<Vec<Tensor<'a>>> {
    let mut shards: Vec<Vec<Tensor<'a>>> = vec![vec![]];
    let mut space = max_bytes;
    for &tensor in tensors {
        let len = tensor.range().len;
        if len > space && shards.last().is_some_and(|shard| !shard.is_empty()) {
            shards.push(vec![]);
            space = max_bytes;
        }
        space = space.saturating_sub(len);
        shards.last_mut().expect("there is at least one shard").push(tensor);
    }
    shards
}

/// Returns a text that identifies the content of a checkpoint and the version of this library. A
/// conversion is resumed only if this text is the same. Reads no data.
fn origin(checkpoint: &Checkpoint) -> String {
    let state = |source: &Arc<Source>| {
        (source.path().to_path_buf(), source.fingerprint().clone(), change_time(source))
    };
    let files: Vec<_> = checkpoint.sources().iter().map(state).collect();
    format!("{} {:?} {files:?}", env!("CARGO_PKG_VERSION"), checkpoint.fingerprint())
}

/// Returns the time at which a file or its attributes last changed. Programs cannot set this time.
#[cfg(unix)]
fn change_time(source: &Source) -> Option<(i64, i64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(source.path()).ok()?;
    Some((metadata.ctime(), metadata.ctime_nsec()))
}

#[cfg(not(unix))]
fn change_time(_: &Source) -> Option<(i64, i64)> {
    None
}
