// SPDX-License-Identifier: MIT OR Apache-2.0
//! The errors of this crate.

use std::path::PathBuf;
use std::sync::Arc;

use crate::not_a_checkpoint::NotACheckpoint;
use crate::plan::NeverFits;

/// The class of an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The budget is too small for any plan.
    NeverFits,
    /// Leases or tensors of the caller occupy the memory that a unit needs.
    Full,
    /// The bytes of a file are damaged.
    Corrupt,
    /// A path leads to no checkpoint, or a checkpoint is malformed.
    NotACheckpoint,
    /// A read failed, a file has changed, the I/O backend is not available, the system refused
    /// memory or a thread, or a thread of the engine failed.
    Storage,
    /// The device that stores the units reported an error.
    Device,
    /// The arguments of the call are invalid.
    Misuse,
    /// Other code wrote to the bytes of a unit.
    Written,
    /// The caller interrupted the call.
    Interrupted,
}

/// An error that an [`Engine`](crate::Engine) returns.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The budget is too small for any plan.
    #[error(transparent)]
    NeverFits(#[from] NeverFits),
    /// A unit could not be read.
    #[error("cannot read unit `{unit}`, tensor `{tensor}`: {source}")]
    Load {
        /// The name of the unit.
        unit: String,
        /// The name of the tensor at the position where the read failed.
        tensor: String,
        /// The error of the read.
        source: ts_io::Error,
    },
    /// Bytes of a unit do not match their checksum or cannot be decoded.
    #[error(
        "unit `{unit}`, tensor `{tensor}`: {}: {len} bytes at byte {offset} {what}; the file is \
         damaged, so restore or download it again",
        path.display()
    )]
    Corrupt {
        /// The name of the unit.
        unit: String,
        /// The name of the tensor.
        tensor: String,
        /// The path of the file.
        path: PathBuf,
        /// The offset in the file at which the damaged range begins, in bytes.
        offset: u64,
        /// The length of the damaged range, in bytes.
        len: u64,
        /// The end of a sentence about the bytes, such as `do not match their checksum`.
        what: String,
    },
    /// A unit could not be copied to its device, or the device could not provide memory for it, or
    /// a stream that uses the unit could not be recorded.
    #[error("device error for unit `{unit}`: {source}")]
    Device {
        /// The name of the unit.
        unit: String,
        /// The error of the device or of its memory pool.
        source: Arc<ts_pool::Error>,
    },
    /// A table does not exist.
    #[error("unknown table id {table}: expected an id below {count}, the number of tables")]
    NoSuchTable {
        /// The id of the table.
        table: u32,
        /// The number of tables.
        count: usize,
    },
    /// A row of a table does not exist.
    #[error("no row {row} in table `{table}`: it has {count} rows, numbered from 0")]
    NoSuchRow {
        /// The name of the table.
        table: String,
        /// The number of the row.
        row: u64,
        /// The number of rows.
        count: u64,
    },
    /// The I/O backend does not exist, is not available, or cannot be started.
    #[error(transparent)]
    Storage(#[from] ts_io::Error),
    /// Tensors that outlived their lease occupy the memory that a unit needs.
    #[error(
        "no memory for unit `{unit}`: it needs {needed_bytes} bytes, but tensors of evicted units \
         are still referenced and occupy {held_bytes} bytes (copies of units: {holders}); delete \
         the views, autograd graphs or exceptions that reference these tensors, or raise the budget"
    )]
    StillReferenced {
        /// The name of the unit. Several names are joined by `` ` + ` ``.
        unit: String,
        /// The memory that the unit needs, in bytes.
        needed_bytes: usize,
        /// The memory that the referenced tensors occupy, in bytes.
        held_bytes: usize,
        /// The units of the referenced tensors, each with the number of its copies in memory.
        holders: String,
    },
    /// Other code wrote to a unit through a tensor that outlived its lease.
    #[error(
        "unit `{unit}` was written to through a tensor kept from an earlier use; the next use \
         reads the unit again"
    )]
    Written {
        /// The name of the unit.
        unit: String,
    },
    /// All threads that could free memory are themselves waiting for memory or for a pass.
    #[error(
        "no memory for unit `{unit}`: it needs {needed_bytes} bytes, but no running thread can \
         free memory{}; drop leases before acquiring other units, raise the budget, or raise \
         `max_passes` to reserve memory for more units in use",
        in_use_by(holders)
    )]
    Deadlock {
        /// The name of the unit. Several names are joined by `` ` + ` ``.
        unit: String,
        /// The memory that the unit needs, in bytes.
        needed_bytes: usize,
        /// The names of the streamed units in use. Empty if there are none.
        holders: String,
    },
    /// The staging memory is too small for the request, or is full and cannot become free.
    #[error(
        "no staging memory for `{unit}`: it is too large, or the memory is full of other units of \
         this call, gathered rows, or reads that timed out; acquire or gather less at once, drop \
         gathered rows, or raise `staging_units`"
    )]
    StagingFull {
        /// The name of the unit. Several names are joined by `` ` + ` ``.
        unit: String,
    },
    /// A checkpoint is malformed or truncated.
    #[error(transparent)]
    Format(#[from] ts_format::Error),
    /// A path leads to no checkpoint, or to one in a format that is not supported.
    #[error(transparent)]
    NotACheckpoint(#[from] NotACheckpoint),
    /// A model has no unit or tensor with this name.
    #[error("{}: no {kind} `{name}`: {hint}", path.display())]
    NoSuchName {
        /// `unit` or `tensor`.
        kind: &'static str,
        /// The name that was passed.
        name: String,
        /// The path of the model, or the name of the unit that was searched.
        path: PathBuf,
        /// The most similar name if there is one, and the first names that exist.
        hint: String,
    },
    /// A tensor has no rows that can be read alone.
    #[error(
        "cannot read rows of tensor `{tensor}`: it is {dtype} {shape:?} (expected a tensor with a \
         dimension, whose rows are whole bytes)"
    )]
    NoRows {
        /// The name of the tensor.
        tensor: String,
        /// The element type.
        dtype: ts_format::Dtype,
        /// The shape.
        shape: Vec<u64>,
    },
    /// The engine has no unit with this id.
    #[error("unknown unit id {unit}: expected an id below {count}, the number of units")]
    NoSuchUnit {
        /// The id that was passed.
        unit: u32,
        /// The number of units.
        count: usize,
    },
    /// The chunks of a tensor do not match its compressed parts: the total lengths differ, or the
    /// tensor needs bytes beyond the end of a decoded chunk.
    #[error(
        "invalid tensor `{tensor}`: its chunks do not match its compressed parts (expected equal \
         total lengths, and ranges inside the decoded chunks)"
    )]
    WrongChunks {
        /// The name of the tensor.
        tensor: String,
    },
    /// A tensor refers to a file that the engine does not have.
    #[error(
        "invalid tensor `{tensor}`: unknown file index {file}: expected an index below {count}, \
         the number of files"
    )]
    NoSuchFile {
        /// The name of the tensor.
        tensor: String,
        /// The index of the file, counted from 0.
        file: u32,
        /// The number of files.
        count: usize,
    },
    /// The system refused memory or a thread, the device refused memory when the engine was
    /// created, or a thread of the engine failed.
    #[error("{0}")]
    System(String),
    /// The caller's [`Interrupt`](crate::Interrupt) ended the call.
    #[error("interrupted while waiting for {what}")]
    Interrupted {
        /// The end of a sentence: the event that the call waited for.
        what: String,
    },
}

/// Formats the users of memory for an error message. Returns an empty string if there are none.
fn in_use_by(holders: &str) -> String {
    if holders.is_empty() { String::new() } else { format!(" (memory in use by: {holders})") }
}

impl Error {
    /// Returns the class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::NeverFits(_) => ErrorKind::NeverFits,
            Error::StillReferenced { .. } | Error::Deadlock { .. } | Error::StagingFull { .. } => {
                ErrorKind::Full
            }
            Error::Corrupt { .. } => ErrorKind::Corrupt,
            Error::Device { .. } => ErrorKind::Device,
            Error::Load { .. } | Error::Storage(_) | Error::System(_) => ErrorKind::Storage,
            Error::NoSuchUnit { .. }
            | Error::NoSuchTable { .. }
            | Error::NoSuchRow { .. }
            | Error::NoSuchFile { .. }
            | Error::NoSuchName { .. }
            | Error::NoRows { .. }
            | Error::WrongChunks { .. } => ErrorKind::Misuse,
            Error::Format(_) | Error::NotACheckpoint(_) => ErrorKind::NotACheckpoint,
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
