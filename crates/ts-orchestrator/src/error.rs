// SPDX-License-Identifier: MIT OR Apache-2.0
use std::path::PathBuf;
use std::sync::Arc;

use crate::plan::NeverFits;

/// Who is to blame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The budget can never work.
    NeverFits,
    /// Memory is held by the caller that a unit needs now.
    Full,
    /// The bytes of a file are not those that were written.
    Corrupt,
    /// Storage failed or changed; the source error says how.
    Storage,
    /// The device that units are for failed; the source error says how.
    Device,
    /// The caller asked for what there is not.
    Misuse,
    /// The caller wrote to a unit's bytes.
    Written,
    /// The caller interrupted a wait.
    Interrupted,
}

/// Why a unit is not there.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The units can never run under the budget.
    #[error(transparent)]
    NeverFits(#[from] NeverFits),
    /// Reading a unit failed.
    #[error("unit `{unit}`, tensor `{tensor}`: {source}")]
    Load {
        /** The unit. */
        unit: String,
        /** The tensor whose bytes were being read. */
        tensor: String,
        /** What happened. */
        source: ts_io::Error,
    },
    /// A unit's bytes are not those that were written.
    #[error(
        "unit `{unit}`, tensor `{tensor}`: {}: {len} bytes at byte {offset} {what}: the file is \
         damaged",
        path.display()
    )]
    Corrupt {
        /** The unit. */
        unit: String,
        /** The tensor. */
        tensor: String,
        /** The file. */
        path: PathBuf,
        /** First byte of the chunk, from the start of the file. */
        offset: u64,
        /** Length of the chunk in bytes. */
        len: u64,
        /** What is wrong with them. */
        what: String,
    },
    /// A unit was read, and did not come to its device; or the device could not be asked for memory
    /// for it.
    #[error("unit `{unit}`: {source}")]
    Device {
        /** The unit. */
        unit: String,
        /** What happened. */
        source: Arc<ts_pool::Error>,
    },
    /// Storage failed before a unit was read.
    #[error(transparent)]
    Storage(#[from] ts_io::Error),
    /// A unit needs memory that tensors of other units still occupy after their use.
    #[error(
        "unit `{unit}` needs {needed_bytes} bytes, and {held_bytes} are still referenced: \
         {holders}. Something keeps tensors of a streamed unit alive (a view, an autograd graph); \
         drop it or raise the budget"
    )]
    StillReferenced {
        /** The unit that is wanted. */
        unit: String,
        /** Its slot. */
        needed_bytes: usize,
        /** Bytes held beyond their use. */
        held_bytes: usize,
        /** The units whose tensors are held, with their number. */
        holders: String,
    },
    /// Somebody wrote to a unit's bytes through a tensor that outlived its lease.
    #[error(
        "unit `{unit}` was written to through a tensor that outlived its use; the next use reads \
         it again"
    )]
    Written {
        /** The unit. */
        unit: String,
    },
    /// Passes wait for each other's memory, and no one can go on.
    #[error(
        "unit `{unit}` needs {needed_bytes} bytes while {holders} are in use by passes that wait \
         as well; raise the budget, or `max_passes` so that it is planned for"
    )]
    Stuck {
        /** The unit that is wanted. */
        unit: String,
        /** Its slot. */
        needed_bytes: usize,
        /** The units in use. */
        holders: String,
    },
    /// No unit has this id.
    #[error("there is no unit {unit}; the engine has {count}")]
    NoSuchUnit {
        /** The id. */
        unit: u32,
        /** How many there are. */
        count: usize,
    },
    /// The chunks of a tensor are not those of its compressed parts.
    #[error("tensor `{tensor}`: its chunks do not make up the parts of it that are compressed")]
    WrongChunks {
        /** The tensor. */
        tensor: String,
    },
    /// A tensor refers to a file that the engine was not given.
    #[error("tensor `{tensor}` lies in file {file}; the engine was given {count}")]
    NoSuchFile {
        /** The tensor. */
        tensor: String,
        /** The file. */
        file: u32,
        /** How many there are. */
        count: usize,
    },
    /// The system refused memory or a thread.
    #[error("{0}")]
    System(String),
    /// The caller's [`Interrupt`](crate::Interrupt) ended the wait.
    #[error("interrupted while waiting for {what}")]
    Interrupted {
        /** What was waited for. */
        what: String,
    },
}

impl Error {
    /// The class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::NeverFits(_) => ErrorKind::NeverFits,
            Error::StillReferenced { .. } | Error::Stuck { .. } => ErrorKind::Full,
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

    /// The storage error behind this one, if there is one.
    pub fn storage(&self) -> Option<&ts_io::Error> {
        match self {
            Error::Load { source, .. } | Error::Storage(source) => Some(source),
            _ => None,
        }
    }
}
