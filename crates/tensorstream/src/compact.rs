// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compaction of `.ts` files.

use std::path::Path;

use ts_format::{ByteRange, ContainerWriter, CopyRange, Digest};
use ts_io::fault::WriteFaults;

use crate::atomic::Claim;
use crate::damage::CHECKSUM_MISMATCH;
use crate::progress::{Progress, Watch};
use crate::read::{ReaderPool, damage};
use crate::{Checkpoint, Error};

/// The result of [`compact`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compacted {
    /// Length of the file before compaction, in bytes.
    pub bytes_before: u64,
    /// Length of the file after compaction, in bytes.
    pub bytes: u64,
}

/// Reclaims the space that appends have left unused in a `.ts` file. Blocks.
///
/// Copies the tensors in their stored form to a new file, compares them with their checksums, and
/// replaces the old file atomically. Needs free disk space for the new file. Pass
/// `&WriteFaults::default()`; other `faults` are for tests.
///
/// # Errors
/// After an error the file is unchanged, except as described at
/// [`FileWriter::commit`](crate::FileWriter::commit).
///
/// - The errors of [`Checkpoint::open`] and [`FileWriter::append`](crate::FileWriter::append).
/// - [`Error::Corrupt`] if a tensor is damaged.
/// - [`Error::Interrupted`] if `watch` returns true.
pub fn compact(
    path: &Path,
    faults: &WriteFaults,
    watch: &mut Watch<'_>,
) -> Result<Compacted, Error> {
    let path = path.canonicalize().map_err(|e| Error::open(path, e))?;
    let mut progress = Progress { done: 0, total: 0 };
    let claim = Claim::new(&path, faults, &mut || watch(progress))?;
    let checkpoint = Checkpoint::open(&path)?;
    let (catalog, source) = (checkpoint.catalog(), checkpoint.single_source(&path)?);
    let mut writer = ContainerWriter::compact(catalog)?;
    progress.total = catalog.tensors().map(|tensor| tensor.stored_len()).sum();
    let mut file = claim.create(progress.total)?;
    let (mut reader, mut buffer) = (ReaderPool::new(1, 1).reader(), Vec::new());
    for tensor in catalog.tensors_by_offset() {
        for CopyRange { from, len, to, checksum } in writer.copy(tensor)? {
            let range = ByteRange { offset: from, len, ..tensor.range() };
            buffer.resize(len as usize, 0);
            reader.read_stored(&checkpoint, range, &mut buffer)?;
            if Digest::of(&buffer).chunks() != [checksum] {
                let what = CHECKSUM_MISMATCH.into();
                return Err(damage(&checkpoint, tensor.name(), range, what).into());
            }
            file.seek(to)?;
            file.write(&buffer)?;
            progress.done += len;
            if watch(progress) {
                return Err(Error::Interrupted);
            }
        }
    }
    let tail = writer.finish()?;
    let bytes = tail.index_offset + tail.index.len() as u64;
    file.write_tail(&tail)?;
    file.commit()?;
    Ok(Compacted { bytes_before: source.len(), bytes })
}
