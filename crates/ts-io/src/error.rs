// SPDX-License-Identifier: MIT OR Apache-2.0
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The class of an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The path does not exist.
    NotFound,
    /// The system denies access.
    PermissionDenied,
    /// The device, the file system or the network failed.
    Io,
    /// The source changed since it was opened.
    Changed,
    /// The request or the configuration is invalid for the backend.
    Misuse,
    /// The read was cancelled.
    Cancelled,
    /// There was no response within the timeout. A retry may succeed.
    TimedOut,
}

/// Why a read or write failed. Cheap to clone, because one failed read can end many waits.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The source could not be opened.
    #[error("{}: cannot open: {source}", path.display())]
    Open {
        /** The path or URL. */
        path: PathBuf,
        /** The system's error. */
        source: SharedIoError,
    },
    /// A read failed.
    #[error("{}: cannot read {len} bytes at byte {offset}: {source}", path.display())]
    Read {
        /** The path or URL. */
        path: PathBuf,
        /** The offset at which it failed. */
        offset: u64,
        /** The number of bytes requested. */
        len: usize,
        /** The system's error. */
        source: SharedIoError,
    },
    /// A write failed.
    #[error("{}: cannot write at byte {offset}: {source}", path.display())]
    Write {
        /** The path. */
        path: PathBuf,
        /** The offset of the first byte that was not written. */
        offset: u64,
        /** The system's error. */
        source: SharedIoError,
    },
    /// The file ended before the last required byte.
    #[error(
        "{}: truncated: expected {expected} bytes at byte {offset}, got {actual}",
        path.display()
    )]
    ShortRead {
        /** The path or URL. */
        path: PathBuf,
        /** The offset of the request. */
        offset: u64,
        /** The number of bytes required. */
        expected: usize,
        /** The number of bytes before the end of the file. */
        actual: usize,
    },
    /// The file was replaced or written to since it was opened.
    #[error(
        "{}: changed since it was opened: {what} (detected when reading at byte {offset})",
        path.display()
    )]
    Changed {
        /** The path or URL. */
        path: PathBuf,
        /** The offset of the request. */
        offset: u64,
        /** What differs. */
        what: String,
    },
    /// Offset, length or memory do not have the alignment that the backend needs.
    #[error(
        "{}: direct read of {len} bytes at byte {offset} is not aligned (expected offset, length \
         and memory to be multiples of {alignment})",
        path.display()
    )]
    Misaligned {
        /** The path. */
        path: PathBuf,
        /** The offset of the request. */
        offset: u64,
        /** The number of bytes requested. */
        len: usize,
        /** The required alignment in bytes. */
        alignment: usize,
    },
    /// The buffers of a request are smaller than the required bytes.
    #[error(
        "{}: buffers too small: expected at least {required} bytes, got {capacity}",
        path.display()
    )]
    BufferTooSmall {
        /** The path or URL. */
        path: PathBuf,
        /** The number of bytes required. */
        required: usize,
        /** The total length of the buffers. */
        capacity: usize,
    },
    /// The read was cancelled before it finished.
    #[error("{}: read at byte {offset} was cancelled", path.display())]
    Cancelled {
        /** The path or URL. */
        path: PathBuf,
        /** The offset of the request. */
        offset: u64,
    },
    /// The system did not respond within the timeout.
    #[error(
        "{}: reading {len} bytes at byte {offset} timed out after {timeout:?}: the device or the \
         network does not respond",
        path.display()
    )]
    TimedOut {
        /** The path or URL. */
        path: PathBuf,
        /** The offset of the request. */
        offset: u64,
        /** The number of bytes requested. */
        len: usize,
        /** The timeout. */
        timeout: Duration,
    },
    /// The backend cannot read these sources on this system.
    #[error("backend \"{backend}\" is not available: {reason}")]
    Unavailable {
        /** The name of the backend. */
        backend: String,
        /** Why it is not available. */
        reason: String,
    },
    /// There is no backend with this name.
    #[error("unknown backend \"{name}\" (expected one of {known})")]
    UnknownBackend {
        /** The name that was requested. */
        name: String,
        /** The names of all backends. */
        known: String,
    },
    /// The caller's interrupt function ended the operation.
    #[error("interrupted")]
    Interrupted,
    /// The memory pool could not provide a buffer.
    #[error("cannot allocate I/O buffers: {0}")]
    Memory(#[source] Arc<ts_pool::Error>),
    /// The system refused a thread.
    #[error("cannot start an I/O thread: {0}")]
    Thread(SharedIoError),
}

impl Error {
    pub(crate) fn read(path: &Path, offset: u64, len: usize, error: io::Error) -> Self {
        Error::Read { path: path.into(), offset, len, source: error.into() }
    }

    /// Returns the class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Open { source, .. }
            | Error::Read { source, .. }
            | Error::Write { source, .. } => match source.0.kind() {
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
                _ => ErrorKind::Io,
            },
            Error::ShortRead { .. } | Error::Changed { .. } => ErrorKind::Changed,
            Error::Misaligned { .. }
            | Error::BufferTooSmall { .. }
            | Error::UnknownBackend { .. }
            | Error::Unavailable { .. } => ErrorKind::Misuse,
            Error::Cancelled { .. } | Error::Interrupted => ErrorKind::Cancelled,
            Error::TimedOut { .. } => ErrorKind::TimedOut,
            Error::Thread(_) => ErrorKind::Io,
            Error::Memory(_) => ErrorKind::Misuse,
        }
    }
}

/// An [`io::Error`] that can be cloned.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct SharedIoError(pub Arc<io::Error>);

impl From<io::Error> for SharedIoError {
    fn from(error: io::Error) -> Self {
        Self(Arc::new(error))
    }
}

impl From<ts_pool::Error> for Error {
    fn from(error: ts_pool::Error) -> Self {
        Error::Memory(Arc::new(error))
    }
}
