// SPDX-License-Identifier: MIT OR Apache-2.0
//! Journals of unfinished conversions. The unfinished file serves as the journal: it is a `.ts`
//! file that contains the complete tensors, and its metadata identifies the conversion.

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

/// Returns the path of the unfinished file of a conversion to `target`, if there is one to resume.
#[cfg(feature = "cli")]
pub(crate) fn unfinished(target: &std::path::Path) -> Option<std::path::PathBuf> {
    let partial = crate::atomic::partial_path(target)?;
    let checkpoint = Checkpoint::open(&partial).ok()?;
    checkpoint.catalog().files()[0].metadata.contains_key(KEY).then_some(partial)
}
