// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole checkpoints, read from one end to the other: converted, verified.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ts_format::{ByteRange, CHUNK_LEN, Digest};

use crate::atomic::partial_of;
use crate::{Checkpoint, Error, FileWriter, NewTensor};

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
}

/// Writes the checkpoint at `from` into one file, `.ts` or `.safetensors` by its suffix: every tensor bit for bit,
/// and the metadata. `from` is whatever [`Checkpoint::open`] takes. Data with checksums are checked on the way.
///
/// A safetensors file that its library wrote comes back byte for byte from a `.ts` made of it. Where shards
/// disagree on a key of their metadata, each value is kept as `key@file`.
///
/// # Errors
/// As [`Checkpoint::open`] and [`FileWriter`]; [`Error::Corrupt`]; [`Error::Interrupted`]. `to` is then as it was,
/// but for what [`FileWriter::commit`] says.
pub fn convert(from: &Path, to: &Path, watch: &mut Watch<'_>) -> Result<Converted, Error> {
    let checkpoint = Checkpoint::open(from)?;
    // The unfinished file would be made in place of what is read.
    let partial = partial_of(to).and_then(|path| path.canonicalize().ok());
    let read = |path: &Path| partial.is_some() && path.canonicalize().ok() == partial;
    if checkpoint.sources().iter().any(|source| read(source.path())) {
        let source = std::io::Error::other("it would be written by way of the very file that is read");
        return Err(Error::Write { path: to.into(), source });
    }
    let mut tensors: Vec<_> = checkpoint.catalog().tensors().collect();
    // In the order of the files, so that reading is sequential.
    tensors.sort_by_key(|(_, entry)| entry.parts.first().map(|p| (p.file, p.offset)));
    let new = tensors.iter().map(|(name, entry)| NewTensor {
        name: (*name).into(),
        meta: entry.meta.clone(),
        phase: None,
    });
    let total: u64 = tensors.iter().flat_map(|(_, e)| &e.parts).map(|p| p.len).sum();
    let metadata = merged_metadata(&checkpoint);
    let mut progress = Progress { done: 0, total };
    let mut writer = FileWriter::create(to, new.collect(), metadata, &mut || watch(progress))?;
    let mut buffer = vec![0; PIECE_BYTES.min(total) as usize];
    for index in writer.order().to_vec() {
        let (name, entry) = tensors[index];
        for piece in entry.parts.iter().flat_map(|&part| pieces(&checkpoint, name, part, PIECE_BYTES)) {
            let bytes = piece.read_checked(&checkpoint, &mut buffer)?;
            writer.write(bytes)?;
            progress.done += bytes.len() as u64;
            if watch(progress) {
                return Err(Error::Interrupted);
            }
        }
    }
    writer.commit()?;
    Ok(Converted { tensors: tensors.len(), bytes: total })
}

impl Checkpoint {
    /// Reads a tensor into `buffer`, and compares it with its checksums if it has some. Blocks.
    ///
    /// # Errors
    /// [`Error::Format`] when there is no such tensor, [`Error::Io`], [`Error::Corrupt`], [`Error::Interrupted`].
    ///
    /// # Panics
    /// If `buffer` is not as long as the tensor.
    pub fn read_tensor(&self, name: &str, buffer: &mut [u8], watch: &mut Watch<'_>) -> Result<(), Error> {
        let entry = self.catalog().require(name)?;
        let (total, mut rest) = (buffer.len() as u64, buffer);
        for piece in entry.parts.iter().flat_map(|&part| pieces(self, name, part, PIECE_BYTES)) {
            let (bytes, after) = rest.split_at_mut(piece.range.len as usize);
            piece.read_checked(self, bytes)?;
            rest = after;
            if watch(Progress { done: total - rest.len() as u64, total }) {
                return Err(Error::Interrupted);
            }
        }
        assert!(rest.is_empty(), "the buffer is longer than the tensor");
        Ok(())
    }
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

/// Bytes that are not what was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: tensor `{tensor}`: {len} bytes at byte {offset} do not have their checksum: the file is damaged", path.display())]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// The tensor.
    pub tensor: String,
    /// First byte of the chunk, from the start of the file.
    pub offset: u64,
    /// Length of the chunk in bytes.
    pub len: u64,
}

/// Reads a whole checkpoint and compares all that has a checksum.
///
/// # Errors
/// As [`Checkpoint::open`]; [`Error::Io`] when a file cannot be read; [`Error::Interrupted`]. Damage is no error
/// but a finding.
pub fn verify(path: &Path, watch: &mut Watch<'_>) -> Result<Verified, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let catalog = checkpoint.catalog();
    let parts: Vec<_> = catalog.tensors().flat_map(|(n, e)| e.parts.iter().map(move |&p| (n, p))).collect();
    let total = parts.iter().map(|(_, p)| p.len).sum();
    let mut progress = Progress { done: 0, total };
    let mut found =
        Verified { tensors: catalog.tensors().len(), bytes: total, checked_bytes: 0, damaged: vec![] };
    let mut buffer = vec![0; PIECE_BYTES.min(total) as usize];
    for (name, part) in parts {
        if catalog.digest(part).is_some() {
            found.checked_bytes += part.len;
        }
        // Chunk by chunk, so that all damage is found and not just the first.
        for piece in pieces(&checkpoint, name, part, CHUNK_LEN) {
            let bytes = piece.read(&checkpoint, &mut buffer)?;
            found.damaged.extend(piece.damage(&checkpoint, bytes));
            progress.done += bytes.len() as u64;
            if watch(progress) {
                return Err(Error::Interrupted);
            }
        }
    }
    Ok(found)
}

/// Part of a tensor's data, small enough to be held at once.
struct Piece<'a> {
    tensor: &'a str,
    range: ByteRange,
    digest: Option<&'a Digest>,
    /// Which chunk of the digest the piece begins with.
    chunk: usize,
}

/// Cuts a tensor's data at multiples of `len`, itself a multiple of a chunk.
fn pieces<'a>(
    checkpoint: &'a Checkpoint,
    tensor: &'a str,
    part: ByteRange,
    len: u64,
) -> impl Iterator<Item = Piece<'a>> {
    let digest = checkpoint.catalog().digest(part).map(|digest| &**digest);
    (0..part.len.div_ceil(len)).map(move |i| {
        let begin = i * len;
        let range = ByteRange { offset: part.offset + begin, len: len.min(part.len - begin), ..part };
        Piece { tensor, range, digest, chunk: (begin / CHUNK_LEN) as usize }
    })
}

impl Piece<'_> {
    fn read<'b>(&self, checkpoint: &Checkpoint, buffer: &'b mut [u8]) -> Result<&'b [u8], Error> {
        let bytes = &mut buffer[..self.range.len as usize];
        checkpoint.read(&[self.range], bytes)?;
        Ok(bytes)
    }

    fn read_checked<'b>(&self, checkpoint: &Checkpoint, buffer: &'b mut [u8]) -> Result<&'b [u8], Error> {
        let bytes = self.read(checkpoint, buffer)?;
        self.damage(checkpoint, bytes).map_or(Ok(bytes), |damage| Err(Error::Corrupt(damage)))
    }

    /// The first chunk of `bytes` that is not what was written.
    fn damage(&self, checkpoint: &Checkpoint, bytes: &[u8]) -> Option<Damage> {
        let at = self.digest?.mismatch(self.chunk, bytes)?;
        Some(Damage {
            path: checkpoint.sources()[self.range.file.0 as usize].path().to_path_buf(),
            tensor: self.tensor.into(),
            offset: self.range.offset + at.start as u64,
            len: at.len() as u64,
        })
    }
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
