// SPDX-License-Identifier: MIT OR Apache-2.0
//! The errors of this crate.

use std::path::PathBuf;
use std::sync::Arc;

use crate::plan::NeverFits;

/// The class of an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The budget is too small for any plan.
    NeverFits,
    /// The caller holds the memory that a unit needs.
    Full,
    /// The bytes of a file are damaged.
    Corrupt,
    /// Storage failed or the file has changed, or the system refused memory or a thread.
    Storage,
    /// The device that units live on failed.
    Device,
    /// The arguments of the call are invalid.
    Misuse,
    /// Other code wrote to the bytes of a unit.
    Written,
    /// The caller interrupted the call.
    Interrupted,
}

/// An error of an [`Engine`](crate::Engine).
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The budget is too small for any plan.
    #[error(transparent)]
    NeverFits(#[from] NeverFits),
    /// A unit could not be read.
    #[error("unit `{unit}`, tensor `{tensor}`: {source}")]
    Load {
        /// The unit.
        unit: String,
        /// The tensor whose bytes were being read.
        tensor: String,
        /// The cause.
        source: ts_io::Error,
    },
    /// Bytes of a unit do not match their checksum or cannot be decoded.
    #[error(
        "unit `{unit}`, tensor `{tensor}`: {}: {len} bytes at byte {offset} {what}: the file is \
         damaged",
        path.display()
    )]
    Corrupt {
        /// The unit.
        unit: String,
        /// The tensor.
        tensor: String,
        /// The file.
        path: PathBuf,
        /// The offset of the damaged chunk in the file.
        offset: u64,
        /// The length of the chunk, in bytes.
        len: u64,
        /// What is wrong, as the end of a sentence about the bytes.
        what: String,
    },
    /// A unit could not be copied to its device, or the device failed to provide memory for it.
    #[error("unit `{unit}`: {source}")]
    Device {
        /// The unit.
        unit: String,
        /// The cause.
        source: Arc<ts_pool::Error>,
    },
    /// Storage failed before a unit was read.
    #[error(transparent)]
    Storage(#[from] ts_io::Error),
    /// A unit needs memory that tensors of other units still occupy after their use.
    #[error(
        "no memory for unit `{unit}`: it needs {needed_bytes} bytes, but tensors that are still \
         referenced occupy {held_bytes} bytes: {holders}; drop what keeps them alive (a view, an \
         autograd graph) or raise the budget"
    )]
    StillReferenced {
        /// The unit, or several names joined by `` ` + ` ``.
        unit: String,
        /// The memory that it needs, in bytes.
        needed_bytes: usize,
        /// The memory of units whose tensors outlived their use, in bytes.
        held_bytes: usize,
        /// These units, each with the number of its slots that are still referenced.
        holders: String,
    },
    /// Other code wrote to a unit through a tensor that outlived its lease.
    #[error(
        "unit `{unit}` was written to through a tensor that outlived its use; the next use reads \
         it again"
    )]
    Written {
        /// The unit.
        unit: String,
    },
    /// All threads that hold memory are themselves waiting for memory.
    #[error(
        "no memory for unit `{unit}`: it needs {needed_bytes} bytes, but {holders} use the memory, \
         and all threads that could free it wait for memory too; raise the budget, or `max_passes` \
         to plan for more concurrent passes"
    )]
    Deadlock {
        /// The unit, or several names joined by `` ` + ` ``.
        unit: String,
        /// The memory that it needs, in bytes.
        needed_bytes: usize,
        /// What uses the memory: the names of units, or reads that timed out.
        holders: String,
    },
    /// The engine has no unit with this id.
    #[error("unknown unit {unit}: the engine has {count} units")]
    NoSuchUnit {
        /// The id.
        unit: u32,
        /// The number of units.
        count: usize,
    },
    /// The chunks of a tensor do not decode to its compressed parts.
    #[error(
        "invalid tensor `{tensor}`: its chunks do not match the lengths of its compressed parts"
    )]
    WrongChunks {
        /// The tensor.
        tensor: String,
    },
    /// A tensor refers to a file that the engine does not have.
    #[error("invalid tensor `{tensor}`: it is in file {file}, but the engine has {count} files")]
    NoSuchFile {
        /// The tensor.
        tensor: String,
        /// The index of the file.
        file: u32,
        /// The number of files.
        count: usize,
    },
    /// The system refused memory or a thread, or a thread of the engine failed.
    #[error("{0}")]
    System(String),
    /// The caller's [`Interrupt`](crate::Interrupt) ended the call.
    #[error("interrupted while waiting for {what}")]
    Interrupted {
        /// What the call waited for.
        what: String,
    },
}

impl Error {
    /// Returns the class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::NeverFits(_) => ErrorKind::NeverFits,
            Error::StillReferenced { .. } | Error::Deadlock { .. } => ErrorKind::Full,
            Error::Corrupt { .. } => ErrorKind::Corrupt,
            Error::Device { .. } => ErrorKind::Device,
            Error::Load { .. } | Error::Storage(_) | Error::System(_) => ErrorKind::Storage,
            Error::NoSuchUnit { .. } | Error::NoSuchFile { .. } | Error::WrongChunks { .. } => {
                ErrorKind::Misuse
            }
            Error::Written { .. } => ErrorKind::Written,
            Error::Interrupted { .. } => ErrorKind::Interrupted,
        }
    }

    /// Returns the storage error that caused this error, if there is one.
    pub fn storage(&self) -> Option<&ts_io::Error> {
        match self {
            Error::Load { source, .. } | Error::Storage(source) => Some(source),
            _ => None,
        }
    }

    pub(crate) fn device(unit: &str, source: ts_pool::Error) -> Self {
        Error::Device { unit: unit.into(), source: Arc::new(source) }
    }
}
