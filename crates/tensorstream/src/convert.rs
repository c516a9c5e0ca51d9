// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoints from one format to another, and from many files to one.

use std::collections::BTreeMap;
use std::path::Path;

use ts_format::CHUNK_LEN;

use crate::atomic::partial_of;
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

/// What watches a long job: called at least once for 16 MiB, and every 20 ms of a wait. Returning true interrupts.
pub type Watch<'a> = dyn FnMut(Progress) -> bool + 'a;

/// What a conversion did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Converted {
    /// Tensors written.
    pub tensors: usize,
    /// Bytes of their data.
    pub bytes: u64,
    /// Length of the file.
    pub file_bytes: u64,
}

/// Writes the checkpoint at `from` into one file, `.ts` or `.safetensors` by its suffix: every tensor bit for bit,
/// and the metadata. `from` is whatever [`Checkpoint::open`] takes. Data with checksums are checked on the way. What was
/// compressed and what will be has nothing to do with each other.
///
/// A safetensors file that its library wrote comes back byte for byte from a `.ts` made of it. Where shards
/// disagree on a key of their metadata, each value is kept as `key@file`.
///
/// After every [`WriteOptions::checkpoint_bytes`] of tensors, what has been written to a `.ts` file is made durable. If the
/// conversion ends before its time, however it does, `NAME.partial` keeps that, and the next conversion of the same files in
/// the same way goes on behind it. The file is in the end the same, byte for byte.
///
/// # Errors
/// As [`Checkpoint::open`] and [`FileWriter`]; [`Error::Corrupt`]; [`Error::Interrupted`]. `to` is then as it was,
/// but for what [`FileWriter::commit`] says.
pub fn convert(
    from: &Path,
    to: &Path,
    options: WriteOptions,
    watch: &mut Watch<'_>,
) -> Result<Converted, Error> {
    let checkpoint = Checkpoint::open(from)?;
    // The unfinished file would be made in place of what is read.
    let partial = partial_of(to).and_then(|path| path.canonicalize().ok());
    let read = |path: &Path| partial.is_some() && path.canonicalize().ok() == partial;
    if checkpoint.sources().iter().any(|source| read(source.path())) {
        let source = std::io::Error::other("it would be written by way of the very file that is read");
        return Err(Error::Write { path: to.into(), source });
    }
    // In the order of the files, so that reading is sequential.
    let tensors = checkpoint.catalog().tensors_by_place();
    let new = tensors.iter().map(|t| NewTensor { name: t.name().into(), meta: t.meta(), phase: None });
    let total: u64 = tensors.iter().map(|tensor| tensor.range().len).sum();
    let metadata = merged_metadata(&checkpoint);
    let mut progress = Progress { done: 0, total };
    let (origin, checkpoint_bytes) = (origin(&checkpoint), options.checkpoint_bytes);
    let interrupt = &mut || watch(progress);
    let mut writer = FileWriter::resume(to, new.collect(), metadata, &origin, options, interrupt)?;
    let (mut buffer, mut reader) = (vec![0; PIECE_BYTES.min(total) as usize], Reader::default());
    let order = writer.order().to_vec();
    let (done, left) = order.split_at(writer.complete());
    progress.done = done.iter().map(|&index| tensors[index].range().len).sum();
    let mut safe = progress.done;
    for &index in left {
        let (tensor, len) = (tensors[index], tensors[index].range().len);
        if progress.done - safe >= checkpoint_bytes {
            writer.checkpoint(&origin)?;
            safe = progress.done;
        }
        for begin in (0..len).step_by(PIECE_BYTES as usize) {
            let bytes = &mut buffer[..PIECE_BYTES.min(len - begin) as usize];
            reader.read_checked(&checkpoint, tensor, begin, bytes)?;
            writer.write(bytes)?;
            progress.done += bytes.len() as u64;
            if watch(progress) {
                return Err(Error::Interrupted);
            }
        }
    }
    writer.commit()?;
    let file_bytes = std::fs::metadata(to).map_or(0, |metadata| metadata.len());
    Ok(Converted { tensors: tensors.len(), bytes: total, file_bytes })
}

/// What the bytes of a checkpoint are, as far as can be told without reading them.
fn origin(checkpoint: &Checkpoint) -> String {
    let files: Vec<_> = checkpoint.sources().iter().map(|s| (s.path(), s.fingerprint())).collect();
    format!("{files:?}")
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
