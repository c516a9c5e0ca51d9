// SPDX-License-Identifier: MIT OR Apache-2.0
//! Verification of checksums.

use std::path::Path;

use ts_format::CHUNK_LEN;

use crate::damage::Damage;
use crate::pieces::{Threads, for_each_piece};
use crate::progress::Watch;
use crate::read::{Reader, ReaderPool};
use crate::{Checkpoint, Error};

/// The result of [`verify`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verified {
    /// Number of tensors.
    pub tensors: usize,
    /// Size of all tensors in bytes, before compression.
    pub bytes: u64,
    /// Size in bytes of the tensors that have checksums. Safetensors files have none.
    pub checked_bytes: u64,
    /// The damaged chunks, sorted by file and offset.
    pub damaged: Vec<Damage>,
}

/// Reads all tensors of a checkpoint and compares them with their checksums. At most `jobs` threads
/// decode or compute checksums at a time; 0 means the number of cores. Blocks.
///
/// Damage is not an error; it is reported in [`Verified::damaged`].
///
/// # Errors
/// - The errors of [`Checkpoint::open`].
/// - [`Error::Io`] if a read fails.
/// - [`Error::Interrupted`] if `watch` returns true.
pub fn verify(path: &Path, jobs: usize, watch: &mut Watch<'_>) -> Result<Verified, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let tensors = checkpoint.catalog().tensors_by_offset();
    let lens: Vec<u64> = tensors.iter().map(|tensor| tensor.range().len).collect();
    let checked =
        tensors.iter().filter(|tensor| tensor.checksums().is_some() || tensor.chunks().is_some());
    let checked_bytes = checked.map(|tensor| tensor.range().len).sum();
    // Pieces are single chunks, so that every damaged chunk is found, not only the first of a
    // tensor.
    let check = |(reader, buffer): &mut (Reader, Vec<u8>), index: usize, begin: u64, len: usize| {
        buffer.resize(len, 0);
        match reader.read_checked(&checkpoint, tensors[index], begin, buffer) {
            Err(Error::Corrupt(damage)) => Ok(Some(damage)),
            read => read.map(|()| None),
        }
    };
    let mut damaged = Vec::new();
    let init = |readers: &ReaderPool| (readers.reader(), Vec::new());
    let take = |index, begin, found: Option<Damage>| {
        damaged.extend(found.map(|damage| (index, begin, damage)));
    };
    for_each_piece(&lens, CHUNK_LEN, Threads::for_storage(jobs), watch, init, check, take)?;
    damaged.sort_by_key(|&(index, begin, _)| (index, begin));
    let damaged = damaged.into_iter().map(|(.., damage)| damage).collect();
    Ok(Verified { tensors: tensors.len(), bytes: lens.iter().sum(), checked_bytes, damaged })
}
