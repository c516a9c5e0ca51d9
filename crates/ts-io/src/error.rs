// SPDX-License-Identifier: MIT OR Apache-2.0
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Who is to blame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The path names nothing.
    NotFound,
    /// The system does not let this process read it.
    PermissionDenied,
    /// The device or the file system failed.
    Io,
    /// The file is not what it was when it was opened.
    Changed,
    /// The caller asked for what the backend cannot do.
    Misuse,
    /// The read was cancelled.
    Cancelled,
    /// Nobody answered in time. Trying again may help.
    TimedOut,
}

/// Why bytes did not arrive. Cheap to clone: one failed read can end many waits.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The source could not be opened.
    #[error("{}: cannot open: {source}", path.display())]
    Open {
        /** The path. */
        path: PathBuf,
        /** The system's error. */
        source: SharedIoError,
    },
    /// A read failed.
    #[error("{}: reading {len} bytes at byte {offset}: {source}", path.display())]
    Read {
        /** The path. */
        path: PathBuf,
        /** First byte of the request. */
        offset: u64,
        /** Bytes wanted. */
        len: usize,
        /** The system's error. */
        source: SharedIoError,
    },
    /// A write failed.
    #[error("{}: cannot write at byte {offset}: {source}", path.display())]
    Write {
        /** The path. */
        path: PathBuf,
        /** First byte that is not written. */
        offset: u64,
        /** The system's error. */
        source: SharedIoError,
    },
    /// The file ended before the last required byte.
    #[error(
        "{}: truncated: {expected} bytes wanted at byte {offset}, the file ended after {actual}",
        path.display()
    )]
    ShortRead {
        /** The path. */
        path: PathBuf,
        /** First byte of the request. */
        offset: u64,
        /** Bytes wanted. */
        expected: usize,
        /** Bytes there were. */
        actual: usize,
    },
    /// The file is another one, or was written to, since it was opened.
    #[error("{}: changed while it was in use, seen reading byte {offset}: {what}", path.display())]
    Changed {
        /** The path. */
        path: PathBuf,
        /** First byte of the request. */
        offset: u64,
        /** What differs. */
        what: String,
    },
    /// Offset, length or memory do not have the alignment that the backend needs.
    #[error(
        "{}: a direct read of {len} bytes at byte {offset} is not aligned to {alignment}",
        path.display()
    )]
    Misaligned {
        /** The path. */
        path: PathBuf,
        /** First byte of the request. */
        offset: u64,
        /** Bytes wanted. */
        len: usize,
        /** What is needed, in bytes. */
        alignment: usize,
    },
    /// The buffers of a request are too small.
    #[error("{}: {required} bytes are required, and there is room for {room}", path.display())]
    NoRoom {
        /** The path. */
        path: PathBuf,
        /** Bytes that must arrive. */
        required: usize,
        /** Bytes that the buffers hold. */
        room: usize,
    },
    /// The request was taken back before it began.
    #[error("{}: the read at byte {offset} was cancelled", path.display())]
    Cancelled {
        /** The path. */
        path: PathBuf,
        /** First byte of the request. */
        offset: u64,
    },
    /// The system gave no answer in time.
    #[error(
        "{}: reading {len} bytes at byte {offset} has taken more than {timeout:?}: the device or \
         the network does not answer",
        path.display()
    )]
    TimedOut {
        /** The path. */
        path: PathBuf,
        /** First byte of the request. */
        offset: u64,
        /** Bytes wanted. */
        len: usize,
        /** How long it may take. */
        timeout: Duration,
    },
    /// The backend cannot serve these sources here.
    #[error("backend `{backend}` is not available: {reason}")]
    Unavailable {
        /** Its name. */
        backend: String,
        /** Why not. */
        reason: String,
    },
    /// No backend has this name.
    #[error("no backend is called `{name}`; there are {known}")]
    UnknownBackend {
        /** The name asked for. */
        name: String,
        /** The names there are. */
        known: String,
    },
    /// The caller's interrupt ended the work.
    #[error("interrupted")]
    Interrupted,
    /// There is no memory to read into.
    #[error("no memory to read into: {0}")]
    Memory(#[source] Arc<ts_pool::Error>),
    /// The system refused a thread.
    #[error("cannot start an I/O thread: {0}")]
    Thread(SharedIoError),
}

impl Error {
    /// The class of this error.
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
            | Error::NoRoom { .. }
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
