// SPDX-License-Identifier: MIT OR Apache-2.0
use crate::Dtype;

/// The class of an [`Error`], for callers that do not distinguish every variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file is malformed or truncated, or exceeds the limits of a catalog.
    BadFile,
    /// The requested tensor does not exist.
    NotFound,
    /// The caller passed invalid arguments, or called methods in the wrong order.
    Misuse,
}

/// An error in a checkpoint or in a request, with its location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is shorter than its header requires.
    #[error(
        "{file}: truncated: {what} needs bytes {offset}..{end}, but the file has {file_len} bytes"
    )]
    Truncated {
        /** Name of the file, as given to the reader. */
        file: String,
        /** The part of the file that is cut off. */
        what: String,
        /** First byte needed. */
        offset: u64,
        /** One past the last byte needed. */
        end: u64,
        /** Length of the file in bytes. */
        file_len: u64,
    },
    /// The header or the index violates the format.
    #[error("{file}: byte {offset}: {reason}")]
    BadHeader {
        /** Name of the file, as given to the reader. */
        file: String,
        /** Position of the error, in bytes from the start of the file. */
        offset: u64,
        /** Description of the violation. */
        reason: String,
    },
    /// The header entry of a tensor violates the format.
    #[error("{file}: tensor `{tensor}` (data at byte {offset}): {reason}")]
    BadTensor {
        /** Name of the file, as given to the reader. */
        file: String,
        /** Tensor name. */
        tensor: String,
        /** Start of its data, in bytes from the start of the file. */
        offset: u64,
        /** Description of the violation. */
        reason: String,
    },
    /// The shard index assigns a tensor to a shard that does not contain it.
    #[error("{file}: tensor `{tensor}` is listed in {index} but missing from this shard")]
    MissingFromShard {
        /** Name of the shard. */
        file: String,
        /** Tensor name. */
        tensor: String,
        /** Name of the shard index. */
        index: String,
    },
    /// The requested byte ranges do not match the tensor.
    #[error("{}{reason}", tensor_prefix(tensor))]
    BadAssembly {
        /** Tensor name, or empty if the error concerns no single tensor. */
        tensor: String,
        /** Description of the mismatch. */
        reason: String,
    },
    /// A tensor, or the file as a whole, cannot be written.
    #[error("cannot write {}: {reason}", tensor_or_file(tensor))]
    Unwritable {
        /** Tensor name, or empty if the error concerns no single tensor. */
        tensor: String,
        /** Reason for the failure. */
        reason: String,
    },
    /// The file cannot be appended to or compacted.
    #[error("{file}: cannot append to or compact the checkpoint: {reason}")]
    NotAppendable {
        /** Name of the file, as given to the reader. */
        file: String,
        /** Reason for the failure. */
        reason: String,
    },
    /// No tensor has this name.
    #[error("no tensor `{tensor}` in {files}")]
    NoSuchTensor {
        /** Tensor name. */
        tensor: String,
        /** Names of the files that were searched. */
        files: String,
    },
    /// The catalog would reach a limit: 2^32 tensors, dimensions, checksums, chunks, or bytes of
    /// names.
    #[error(
        "{file}: the catalog would have 2^32 or more tensors, dimensions, checksums, chunks or \
         bytes of names"
    )]
    TooLarge {
        /** Name of the file, as given to the reader. After a merge, names of the added files. */
        file: String,
    },
    /// [`CatalogReader::finish`](crate::CatalogReader::finish) was called too early, or after an
    /// error.
    #[error(
        "{file}: the catalog is incomplete: feed the reader until `need` returns None, and stop \
         at the first error"
    )]
    Incomplete {
        /** Name of the file, as given to the reader. */
        file: String,
    },
}

impl Error {
    /// Returns the class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Truncated { .. }
            | Error::BadHeader { .. }
            | Error::BadTensor { .. }
            | Error::MissingFromShard { .. }
            | Error::TooLarge { .. } => ErrorKind::BadFile,
            Error::NoSuchTensor { .. } => ErrorKind::NotFound,
            Error::BadAssembly { .. }
            | Error::Unwritable { .. }
            | Error::NotAppendable { .. }
            | Error::Incomplete { .. } => ErrorKind::Misuse,
        }
    }

    pub(crate) fn header(file: &str, offset: u64, reason: impl Into<String>) -> Self {
        Error::BadHeader { file: file.into(), offset, reason: reason.into() }
    }
}

fn tensor_prefix(tensor: &str) -> String {
    if tensor.is_empty() { String::new() } else { format!("tensor `{tensor}`: ") }
}

fn tensor_or_file(tensor: &str) -> String {
    if tensor.is_empty() { "the file".into() } else { format!("tensor `{tensor}`") }
}

/// Formats a dtype and shape for error messages, such as `F32 [2, 3]`.
pub(crate) fn describe(dtype: Dtype, shape: &[u64]) -> String {
    format!("{dtype} {shape:?}")
}

/// Returns an error message if the name is empty or contains NUL. Writers and strict readers refuse
/// such names.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.contains('\0') {
        Err(format!("invalid tensor name {name:?} (must not be empty or contain NUL)"))
    } else {
        Ok(())
    }
}
