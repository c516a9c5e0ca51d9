// SPDX-License-Identifier: MIT OR Apache-2.0
//! Damaged bytes of a checkpoint.

use std::path::PathBuf;

/// Why bytes are damaged, for [`Damage::what`].
pub(crate) const CHECKSUM_MISMATCH: &str = "do not match their checksum";

/// Bytes of a tensor that do not match their checksum, or cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: tensor `{tensor}`: {len} bytes at byte {offset} {what}: the file is damaged",
    path.display()
)]
#[non_exhaustive]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// Name of the tensor.
    pub tensor: String,
    /// Offset of the damaged chunk in the file.
    pub offset: u64,
    /// Length of the damaged chunk in the file, in bytes.
    pub len: u64,
    /// What is wrong, as the end of a sentence about the bytes.
    pub what: String,
}
