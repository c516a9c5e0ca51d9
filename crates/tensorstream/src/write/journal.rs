// SPDX-License-Identifier: MIT OR Apache-2.0
//! Journals of unfinished files. An unfinished file serves as its own journal.
//!
//! - An unfinished `.ts` file contains the complete tensors, and its metadata identifies the job.
//! - An unfinished safetensors file has the header of the finished one. Two slots after its data
//!   hold [`Record`]s of how many tensors are complete. They are written in turn, so that a torn
//!   write leaves the other one.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use ts_format::{Digest, Metadata};

use super::options::{NewTensor, WriteOptions};
use crate::Checkpoint;

/// The metadata key that marks an unfinished file.
const KEY: &str = "tensorstream.unfinished";

/// Returns the metadata of an unfinished file: a digest of the tensors, the compression and
/// `origin`, which identifies the source of the bytes.
pub(super) fn metadata(tensors: &[NewTensor], origin: &str, options: &WriteOptions) -> Metadata {
    let described = format!("{:?} {origin} {tensors:?}", options.compression);
    let digest = Digest::of(described.as_bytes());
    let hex = digest.chunks().iter().map(|checksum| format!("{checksum:016x}")).collect();
    Metadata::from([(KEY.into(), hex)])
}

/// Returns how many of `tensors` an unfinished file contains, or `None` if it is not an unfinished
/// conversion with the same tensors, origin and compression.
pub(super) fn complete_tensors(
    unfinished: &Checkpoint,
    tensors: &[NewTensor],
    origin: &str,
    options: &WriteOptions,
) -> Option<usize> {
    let (catalog, expected) = (unfinished.catalog(), metadata(tensors, origin, options));
    let count = catalog.tensors().len();
    let contains =
        |tensor: &NewTensor| catalog.tensor(&tensor.name).is_some_and(|t| t.meta() == tensor.meta);
    let same =
        catalog.files()[0].metadata == expected && tensors.get(..count)?.iter().all(contains);
    same.then_some(count)
}

/// Distance of the slots of a safetensors journal, which a torn write does not span.
const SLOT_LEN: u64 = 4096;
const MAGIC: [u8; 8] = *b"TSUNDONE";
const RECORD_LEN: usize = 40;

/// An entry of the journal of an unfinished safetensors file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    /// Checksum of what identifies the job. See [`metadata`].
    job: u64,
    /// Position of the record in the order of all records: 1 for the first one.
    pub(super) number: u64,
    /// Number of complete tensors, in the order of the file.
    pub(super) complete: u64,
}

impl Record {
    pub(super) fn new(
        tensors: &[NewTensor],
        origin: &str,
        options: &WriteOptions,
        number: u64,
        complete: usize,
    ) -> Self {
        let job: String = metadata(tensors, origin, options).values().map(String::as_str).collect();
        Self { job: checksum(job.as_bytes()), number, complete: complete as u64 }
    }

    /// Returns the offset at which the record is written, in a file whose data ends at `data_end`.
    /// The first record goes to the last slot, so that the length of the file tells where the slots
    /// are.
    pub(super) fn offset(&self, data_end: u64) -> u64 {
        data_end.next_multiple_of(SLOT_LEN) + self.number % 2 * SLOT_LEN
    }

    pub(super) fn to_bytes(self) -> [u8; RECORD_LEN] {
        let mut bytes = [0; RECORD_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.job.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.complete.to_le_bytes());
        let sum = checksum(&bytes[..32]);
        bytes[32..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; RECORD_LEN]) -> Option<Self> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let valid = bytes[..8] == MAGIC && word(32) == checksum(&bytes[..32]);
        valid.then(|| Self { job: word(8), number: word(16), complete: word(24) })
    }

    /// Returns the last record of an unfinished safetensors file.
    fn last(mut file: &File) -> Option<Self> {
        let last_slot = file.metadata().ok()?.len().checked_sub(RECORD_LEN as u64)?;
        let mut read = |offset: u64| {
            let mut bytes = [0; RECORD_LEN];
            file.seek(SeekFrom::Start(offset)).ok()?;
            file.read_exact(&mut bytes).ok()?;
            Self::from_bytes(&bytes)
        };
        let first = last_slot.checked_sub(SLOT_LEN).and_then(&mut read);
        first.into_iter().chain(read(last_slot)).max_by_key(|record| record.number)
    }

    /// Returns the last record of the unfinished safetensors file at `path`, or `None` if the file
    /// does not begin with `header`, or belongs to another job than `expected`.
    pub(super) fn of(path: &Path, header: &[u8], expected: Self) -> Option<Self> {
        let mut file = File::open(path).ok()?;
        let mut begin = vec![0; header.len()];
        file.read_exact(&mut begin).ok()?;
        Self::last(&file).filter(|found| begin == header && found.job == expected.job)
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    Digest::of(bytes).chunks()[0]
}

/// Returns the path of the unfinished file of a conversion to `target`, if there is one to resume.
#[cfg(feature = "cli")]
pub(crate) fn unfinished(target: &Path) -> Option<std::path::PathBuf> {
    let partial = crate::atomic::partial_path(target)?;
    let has_journal = Checkpoint::open(&partial)
        .is_ok_and(|file| file.catalog().files()[0].metadata.contains_key(KEY))
        || File::open(&partial).is_ok_and(|file| Record::last(&file).is_some());
    has_journal.then_some(partial)
}
