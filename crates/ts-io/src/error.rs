// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The error number of a device that reports an I/O error.
const EIO: i32 = 5;

/// The class of an [`Error`], for callers that handle errors by their cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The file or object does not exist.
    NotFound,
    /// The system or the server denies access.
    PermissionDenied,
    /// Opening, reading or writing failed for another reason, or the system refused to start a
    /// thread.
    Io,
    /// The source has changed since it was opened, or it ends before the last required byte.
    Changed,
    /// The backend does not exist or is not available, the request is invalid for the backend, or
    /// the buffers cannot be allocated.
    Misuse,
    /// The read was cancelled, or the operation was interrupted.
    Cancelled,
    /// The read did not finish within the timeout. A retry may succeed.
    TimedOut,
}

/// The error of a read or write that failed, or of a backend that cannot be used.
///
/// Clones are cheap, so that one failed read can be reported to many waiting callers.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The source could not be opened.
    #[error("{}: cannot open: {source}", path.display())]
    Open {
        /** The path or URL. */
        path: PathBuf,
        /** The error of the system or the network library. */
        source: SharedIoError,
    },
    /// A read failed, the backend cannot read this kind of source, or
    /// [`Source::evict`](crate::Source::evict) failed. If two backends tried the read, the source
    /// names the error of each.
    #[error("{}: {}{source}", path.display(), attempted(*offset, *len))]
    Read {
        /** The path or URL. */
        path: PathBuf,
        /** The offset in bytes at which the read failed. */
        offset: u64,
        /** The number of bytes requested. 0 if the error does not concern a range. */
        len: usize,
        /** The error of the system or the network library. */
        source: SharedIoError,
    },
    /// A write, or another operation of a [`Writer`](crate::Writer), failed.
    #[error("{}: cannot write at byte {offset}: {source}", path.display())]
    Write {
        /** The path. */
        path: PathBuf,
        /** The offset in bytes at which the operation failed. */
        offset: u64,
        /** The error of the system or the network library. */
        source: SharedIoError,
    },
    /// The file ended before the last required byte.
    #[error(
        "{}: too short: expected {expected} bytes at byte {offset}, got {actual}",
        path.display()
    )]
    ShortRead {
        /** The path or URL. */
        path: PathBuf,
        /** The offset of the request. */
        offset: u64,
        /** The number of bytes required. */
        expected: usize,
        /** The number of bytes from the offset to the end of the file. */
        actual: usize,
    },
    /// The file has been written to since it was opened, or the object has been written to,
    /// replaced or removed, or this cannot be ruled out.
    #[error(
        "{}: changed since it was opened: {what} (detected when reading at byte {offset})",
        path.display()
    )]
    Changed {
        /** The path or URL. */
        path: PathBuf,
        /** The offset of the request. */
        offset: u64,
        /** A description of the difference. */
        what: String,
    },
    /// The buffers do not have the alignment that [`ReadRequest`](crate::ReadRequest) describes.
    #[error(
        "{}: direct read of {len} bytes at byte {offset} is not aligned (expected the address and \
         the file offset of each buffer to be equal modulo {alignment}, and each buffer after the \
         first to begin at a file offset that is a multiple of {alignment})",
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
    /// The buffers of a request are too small for the required bytes.
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
    /// The read did not finish within the timeout.
    #[error(
        "{}: reading {len} bytes at byte {offset} timed out after {timeout:?}: the device or the \
         network is too slow or does not respond",
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
        /** The reason why the backend is not available. */
        reason: String,
    },
    /// The registry has no backend with this name.
    #[error("unknown backend \"{name}\" (expected one of {known})")]
    UnknownBackend {
        /** The name that was requested. */
        name: String,
        /** The names of all backends. */
        known: String,
    },
    /// The caller's `interrupt` function returned `true`.
    #[error("the measurement was interrupted")]
    Interrupted,
    /// A memory pool could not be created, or could not provide a buffer.
    #[error("cannot allocate I/O buffers: {0}")]
    Memory(#[source] Arc<ts_pool::Error>),
    /// The system refused to start a thread, or refused a resource that the thread needs.
    #[error("cannot start an I/O thread: {0}")]
    Thread(SharedIoError),
}

/// Returns the part of the message of [`Error::Read`] that names the range. Empty if `len` is 0.
fn attempted(offset: u64, len: usize) -> String {
    match len {
        0 => String::new(),
        _ => format!("cannot read {len} bytes at byte {offset}: "),
    }
}

impl Error {
    pub(crate) fn read(path: &Path, offset: u64, len: usize, error: io::Error) -> Self {
        Error::Read { path: path.into(), offset, len, source: error.into() }
    }

    /// Returns whether another backend may succeed where one failed with this error. A device that
    /// reports an I/O error (EIO) would report it again, perhaps after a long time.
    pub(crate) fn is_of_backend(&self) -> bool {
        match self {
            Error::Read { source, .. } => source.0.raw_os_error() != Some(EIO),
            Error::Unavailable { .. } | Error::Thread(_) => true,
            _ => false,
        }
    }

    /// Returns the error of a read of `len` bytes at `offset` by `backend`, after the backend
    /// `before.0` had failed to read them with the error `before.1`.
    pub(crate) fn after(
        self,
        before: &(&str, Error),
        backend: &str,
        (path, offset, len): (&Path, u64, usize),
    ) -> Self {
        let (offset, len, kind) = match &self {
            Error::Read { offset, len, source, .. } => (*offset, *len, source.0.kind()),
            Error::Unavailable { .. } | Error::Thread(_) => (offset, len, io::ErrorKind::Other),
            _ => return self,
        };
        let (first, error) = before;
        let message = format!(
            "{} (backend \"{backend}\"; before that, the backend \"{first}\" failed: {})",
            self.cause(),
            error.cause()
        );
        Error::read(path, offset, len, io::Error::new(kind, message))
    }

    /// Returns what went wrong, without the path and the range of a read.
    fn cause(&self) -> &dyn fmt::Display {
        match self {
            Error::Read { source, .. } => source,
            error => error,
        }
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
