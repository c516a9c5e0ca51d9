// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether checkpoints are what was written.

use std::path::Path;

use ts_format::CHUNK_LEN;

use crate::pieces::over_pieces;
use crate::read::{Damage, Reader, Readers};
use crate::{Checkpoint, Error, Watch};

/// What [`verify`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// Tensors there are.
    pub tensors: usize,
    /// Bytes that were read.
    pub bytes: u64,
    /// Bytes of these that have checksums; safetensors files have none.
    pub checked_bytes: u64,
    /// Runs of bytes that are not what was written, in the order in which they lie in the files.
    pub damaged: Vec<Damage>,
}

/// Reads a whole checkpoint on `jobs` threads, 0 for as many as there are cores, and compares all
/// that has a checksum.
///
/// # Errors
/// As [`Checkpoint::open`]; [`Error::Io`] when a file cannot be read; [`Error::Interrupted`].
/// Damage is no error but a finding.
pub fn verify(path: &Path, jobs: usize, watch: &mut Watch<'_>) -> Result<Verified, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let tensors = checkpoint.catalog().tensors_by_place();
    let lens: Vec<u64> = tensors.iter().map(|tensor| tensor.range().len).collect();
    let checked =
        tensors.iter().filter(|tensor| tensor.sums().is_some() || tensor.chunks().is_some());
    let checked_bytes = checked.map(|tensor| tensor.range().len).sum();
    // Chunk by chunk, so that all damage is found and not just the first.
    let look = |(reader, buffer): &mut (Reader, Vec<u8>), index: usize, begin: u64, len: usize| {
        buffer.resize(len, 0);
        match reader.read_checked(&checkpoint, tensors[index], begin, buffer) {
            Err(Error::Corrupt(damage)) => Ok(Some(damage)),
            read => read.map(|()| None),
        }
    };
    let mut damaged = Vec::new();
    let begin = |readers: &Readers| (readers.reader(), Vec::new());
    over_pieces(
        &lens,
        CHUNK_LEN,
        jobs,
        watch,
        begin,
        look,
        |index, begin, found: Option<Damage>| {
            damaged.extend(found.map(|damage| (index, begin, damage)));
        },
    )?;
    damaged.sort_by_key(|&(index, begin, _)| (index, begin));
    let damaged = damaged.into_iter().map(|(.., damage)| damage).collect();
    Ok(Verified { tensors: tensors.len(), bytes: lens.iter().sum(), checked_bytes, damaged })
}
