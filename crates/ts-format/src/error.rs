// SPDX-License-Identifier: MIT OR Apache-2.0
use crate::Dtype;

/// Who is to blame, for callers that react to the class and not to the case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The file does not say what its format requires.
    BadFile,
    /// Something that was asked for is not in the file.
    NotFound,
    /// The caller asked for what this crate cannot do.
    Misuse,
}

/// What is wrong with a checkpoint, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is shorter than its own header says.
    #[error("{file}: truncated: {what} needs bytes {offset}..{end}, the file has {file_len}")]
    Truncated {
        /** Path as given. */
        file: String,
        /** What was being read. */
        what: String,
        /** First byte needed. */
        offset: u64,
        /** One past the last byte needed. */
        end: u64,
        /** Length of the file in bytes. */
        file_len: u64,
    },
    /// The header, or the index, breaks the format.
    #[error("{file}: byte {offset}: {reason}")]
    BadHeader {
        /** Path as given. */
        file: String,
        /** Where in the file. */
        offset: u64,
        /** What is wrong. */
        reason: String,
    },
    /// The entry of one tensor breaks the format.
    #[error("{file}: tensor `{tensor}` (data at byte {offset}): {reason}")]
    BadTensor {
        /** Path as given. */
        file: String,
        /** Tensor name. */
        tensor: String,
        /** Where its data begins, in bytes from the start of the file. */
        offset: u64,
        /** What is wrong. */
        reason: String,
    },
    /// A tensor is listed by the index, but not in the shard that should have it.
    #[error("{file}: tensor `{tensor}` is listed in {index} and missing from this shard")]
    MissingFromShard {
        /** The shard. */
        file: String,
        /** Tensor name. */
        tensor: String,
        /** The index. */
        index: String,
    },
    /// Parts that are put together do not make the tensor.
    #[error("tensor `{tensor}`: {reason}")]
    BadAssembly {
        /** Tensor name. */
        tensor: String,
        /** What does not fit. */
        reason: String,
    },
    /// A tensor cannot be written.
    #[error("tensor `{tensor}` cannot be written: {reason}")]
    Unwritable {
        /** Tensor name. */
        tensor: String,
        /** Why not. */
        reason: String,
    },
    /// A file is not one that can be appended to, or compacted.
    #[error("{file}: not a file to append to or compact: {reason}")]
    NotAppendable {
        /** Path as given. */
        file: String,
        /** Why not. */
        reason: String,
    },
    /// No tensor has this name.
    #[error("no tensor `{tensor}` in {files}")]
    NoSuchTensor {
        /** Tensor name. */
        tensor: String,
        /** The files looked at. */
        files: String,
    },
    /// More tensors, or longer names, than one catalog holds: 2^32 of each.
    #[error("{file}: more tensors, chunks or names than one catalog holds")]
    TooLarge {
        /** Path as given. */
        file: String,
    },
    /// A reader was finished before it had all it asked for.
    #[error("the catalog of {file} is not complete: more bytes were asked for than fed")]
    Incomplete {
        /** Path as given. */
        file: String,
    },
}

impl Error {
    /// The class of this error.
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

/// "F32 [2, 3]", as error messages name a tensor's type.
pub(crate) fn describe(dtype: Dtype, shape: &[u64]) -> String {
    format!("{dtype} {shape:?}")
}

/// What no container may call a tensor, and why.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.contains('\0') {
        Err(format!("{name:?} is no tensor name"))
    } else {
        Ok(())
    }
}
