// SPDX-License-Identifier: MIT OR Apache-2.0
//! `.ts` files without what appends left unused.

use std::path::Path;

use ts_format::{ByteRange, ContainerWriter, Digest, Move};
use ts_io::fault::WriteFaults;

use crate::atomic::Claim;
use crate::checkpoint::open_error;
use crate::convert::Progress;
use crate::read::{Readers, WRONG_SUM, damage};
use crate::write::the_one_source;
use crate::{Checkpoint, Error, Watch};

/// What [`compact`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compacted {
    /// Length of the file before,
    pub bytes_before: u64,
    /// and after it.
    pub bytes: u64,
}

/// Writes a `.ts` file anew, without what appends have left unused. Everything is compared with its
/// checksums on the way, and stays compressed as it is. Needs as much room beside it as the new
/// file takes; what is there stays until the new one is.
///
/// # Errors
/// As [`Checkpoint::open`] and [`FileWriter::append`](crate::FileWriter::append);
/// [`Error::Corrupt`]; [`Error::Interrupted`]. The file is then as it was.
pub fn compact(
    path: &Path,
    faults: &WriteFaults,
    watch: &mut Watch<'_>,
) -> Result<Compacted, Error> {
    let path = path.canonicalize().map_err(|e| open_error(path, e))?;
    let mut progress = Progress { done: 0, total: 0 };
    let claim = Claim::new(&path, faults, &mut || watch(progress))?;
    let checkpoint = Checkpoint::open(&path)?;
    let (catalog, source) = (checkpoint.catalog(), the_one_source(&checkpoint, &path)?);
    let mut writer = ContainerWriter::compact(catalog)?;
    progress.total = catalog.tensors().map(|tensor| tensor.stored_bytes()).sum();
    let mut file = claim.begin(progress.total)?;
    let (mut reader, mut buffer) = (Readers::new(1, 1).reader(), Vec::new());
    for tensor in catalog.tensors_by_place() {
        for Move { from, len, to, sum } in writer.copy(tensor)? {
            let place = ByteRange { offset: from, len, ..tensor.range() };
            buffer.resize(len as usize, 0);
            reader.read_exactly(&checkpoint, place, &mut buffer)?;
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
