// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole checkpoints, read from one end to the other: converted, compacted, verified.

use std::collections::BTreeMap;
use std::path::Path;

use ts_format::{ByteRange, CHUNK_LEN, ContainerWriter, Digest, Move};
use ts_io::fault::WriteFaults;

use crate::atomic::{Claim, partial_of};
use crate::read::{Damage, Reader, WRONG_SUM, damage, read_exactly};
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

/// What [`compact`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compacted {
    /// Length of the file before,
    pub bytes_before: u64,
    /// and after it.
    pub bytes: u64,
}

/// Writes a `.ts` file anew, without what appends have left unused. Everything is compared with its checksums on the
/// way, and stays compressed as it is. Needs as much room beside it as the new file takes; what is there stays until the
/// new one is.
///
/// # Errors
/// As [`Checkpoint::open`] and [`FileWriter::append`]; [`Error::Corrupt`]; [`Error::Interrupted`]. The file is then as it was.
pub fn compact(path: &Path, faults: &WriteFaults, watch: &mut Watch<'_>) -> Result<Compacted, Error> {
    let path = path.canonicalize().map_err(|source| Error::Write { path: path.into(), source })?;
    let mut progress = Progress { done: 0, total: 0 };
    let claim = Claim::new(&path, faults, &mut || watch(progress))?;
    let checkpoint = Checkpoint::open(&path)?;
    let (catalog, source) = (checkpoint.catalog(), &checkpoint.sources()[0]);
    let mut writer = ContainerWriter::compact(catalog)?;
    progress.total = catalog.tensors().map(|tensor| tensor.stored_bytes()).sum();
    let mut file = claim.begin(progress.total)?;
    let mut buffer = Vec::new();
    for tensor in catalog.tensors_by_place() {
        for Move { from, len, to, sum } in writer.copy(tensor)? {
            let place = ByteRange { offset: from, len, ..tensor.range() };
            buffer.resize(len as usize, 0);
            read_exactly(&checkpoint, place, &mut buffer)?;
            if Digest::of(&buffer).chunks() != [sum] {
                return Err(damage(&checkpoint, tensor.name(), place, WRONG_SUM.into()).into());
            }
            file.seek(to)?;
            file.write(&buffer)?;
            progress.done += len;
            if watch(progress) {
                return Err(Error::Interrupted);
            }
        }
    }
    let ends = writer.finish()?;
    let bytes = ends.index_offset + ends.index.len() as u64;
    file.write_ends(&ends)?;
    file.commit()?;
    Ok(Compacted { bytes_before: source.len(), bytes })
}

/// What [`verify`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// Tensors there are.
    pub tensors: usize,
    /// Bytes that were read.
    pub bytes: u64,
    /// Bytes of these that have checksums; safetensors files have none.
    pub checked_bytes: u64,
    /// Runs of bytes that are not what was written.
    pub damaged: Vec<Damage>,
}

/// Reads a whole checkpoint and compares all that has a checksum.
///
/// # Errors
/// As [`Checkpoint::open`]; [`Error::Io`] when a file cannot be read; [`Error::Interrupted`]. Damage is no error
/// but a finding.
pub fn verify(path: &Path, watch: &mut Watch<'_>) -> Result<Verified, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let catalog = checkpoint.catalog();
    let total = catalog.tensors().map(|tensor| tensor.range().len).sum();
    let mut progress = Progress { done: 0, total };
    let mut found =
        Verified { tensors: catalog.tensors().len(), bytes: total, checked_bytes: 0, damaged: vec![] };
    let (mut buffer, mut reader) = (vec![0; CHUNK_LEN as usize], Reader::default());
    for tensor in catalog.tensors() {
        let len = tensor.range().len;
        if tensor.sums().is_some() || tensor.chunks().is_some() {
            found.checked_bytes += len;
        }
        // Chunk by chunk, so that all damage is found and not just the first.
        for begin in (0..len).step_by(CHUNK_LEN as usize) {
            let bytes = &mut buffer[..CHUNK_LEN.min(len - begin) as usize];
            match reader.read_checked(&checkpoint, tensor, begin, bytes) {
                Err(Error::Corrupt(damage)) => found.damaged.push(damage),
                read => read?,
            }
            progress.done += bytes.len() as u64;
            if watch(progress) {
                return Err(Error::Interrupted);
            }
        }
    }
    Ok(found)
}

/// The metadata of all files as one. Keys on which they disagree get the name of their file.
fn merged_metadata(checkpoint: &Checkpoint) -> BTreeMap<String, String> {
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
