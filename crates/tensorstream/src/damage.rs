// SPDX-License-Identifier: MIT OR Apache-2.0
//! Damaged bytes of a checkpoint.

use std::path::PathBuf;

/// The value of [`Damage::what`] for a checksum mismatch.
pub(crate) const CHECKSUM_MISMATCH: &str = "do not match their checksum";

/// Bytes of a tensor that do not match their checksum, or cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: tensor `{tensor}`: {len} bytes at byte {offset} {what}; the file is damaged, so restore \
     or download it again",
    path.display()
)]
#[non_exhaustive]
pub struct Damage {
    /// Path of the file.
    pub path: PathBuf,
    /// Name of the tensor.
    pub tensor: String,
    /// Offset of the damaged chunk in the file.
    pub offset: u64,
    /// Length of the damaged chunk in the file, in bytes.
    pub len: u64,
    /// The end of a sentence about the bytes, such as `do not match their checksum`.
    pub what: String,
}
