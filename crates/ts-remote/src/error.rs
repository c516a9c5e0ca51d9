// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of connections.

use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The kind of an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The peer violated the protocol, sent damaged bytes, or could not be authenticated.
    Peer,
    /// The peer refused or cancelled something, or closed the connection.
    Refused,
    /// The network or the operating system failed.
    Network,
    /// The peer did not answer or made no progress in time.
    TimedOut,
    /// There is no memory for a tensor.
    Memory,
    /// The caller used the API wrongly.
    Misuse,
}

/// An error of a connection.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The peer violated the protocol. The connection is unusable.
    #[error("protocol error{}: {what}", on_stream(*stream))]
    Protocol {
        /// The number of the stream; 0 for the connection itself.
        stream: u32,
        /// What the peer sent.
        what: String,
    },
    /// Bytes of a payload differ from those that were sent.
    #[error("payload of tensor {tensor:?} is damaged at bytes {offset}..{end}: {what}")]
    Damaged {
        /// The name of the tensor.
        tensor: String,
        /// The offset of the first byte in the payload.
        offset: u64,
        /// The offset after the last byte.
        end: u64,
        /// How the damage was detected.
        what: String,
    },
    /// The peer cancelled a stream.
    #[error("the peer cancelled stream {stream}: {reason}")]
    Cancelled {
        /// The number of the stream.
        stream: u32,
        /// The peer's reason.
        reason: String,
    },
    /// The peer closed the connection.
    #[error("the peer closed the connection: {reason}")]
    Closed {
        /// The peer's reason.
        reason: String,
    },
    /// The connection broke while it was in use.
    #[error("connection lost{}", after_colon(what))]
    Lost {
        /// What was being done.
        what: String,
    },
    /// The peer did not answer.
    #[error("{peer} did not answer for {after:?}: it is unreachable or slower than `idle_timeout`")]
    TimedOut {
        /// The address of the peer.
        peer: String,
        /// The timeout.
        after: Duration,
    },
    /// The peer answers, but does not do its part of a transfer.
    #[error("{peer} answers, but has made no progress for {after:?}")]
    Stalled {
        /// The address of the peer.
        peer: String,
        /// The timeout.
        after: Duration,
    },
    /// The network or the operating system failed.
    #[error("{peer}: {what} failed: {source}")]
    Io {
        /// The address of the peer or of the listener.
        peer: String,
        /// The operation, such as `connecting`.
        what: &'static str,
        /// The error of the system.
        source: Arc<io::Error>,
    },
    /// TLS failed: a certificate is not trusted, or bytes were changed in transit.
    #[error("{peer}: TLS failed: {source}")]
    Tls {
        /// The address of the peer.
        peer: String,
        /// The error of the TLS library.
        source: Arc<io::Error>,
    },
    /// There is no memory for a tensor.
    #[error("no memory for tensor {tensor:?} of {bytes} bytes: {source}")]
    Memory {
        /// The name of the tensor.
        tensor: String,
        /// The length of its payload.
        bytes: u64,
        /// The error of the allocator.
        source: Arc<ts_pool::Error>,
    },
    /// A tensor is invalid, so it cannot be sent.
    #[error("cannot send tensor {tensor:?}: {reason}")]
    Unsendable {
        /// The name of the tensor.
        tensor: String,
        /// What is invalid.
        reason: String,
    },
    /// A call is not allowed in the current state, or has an invalid argument.
    #[error("{0}")]
    Misuse(String),
}

impl Error {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Protocol { .. } | Self::Damaged { .. } | Self::Tls { .. } => ErrorKind::Peer,
            Self::Cancelled { .. } | Self::Closed { .. } => ErrorKind::Refused,
            Self::Lost { .. } | Self::Io { .. } => ErrorKind::Network,
            Self::TimedOut { .. } | Self::Stalled { .. } => ErrorKind::TimedOut,
            Self::Memory { .. } => ErrorKind::Memory,
            Self::Unsendable { .. } | Self::Misuse(_) => ErrorKind::Misuse,
        }
    }

    pub(crate) fn io(peer: &str, what: &'static str, source: io::Error) -> Self {
        Self::Io { peer: peer.into(), what, source: source.into() }
    }

    /// Returns the error for a failed call on a connected transport.
    pub(crate) fn transport(peer: &str, what: &'static str, error: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match error.kind() {
            ConnectionReset | BrokenPipe | UnexpectedEof => {
                Self::Lost { what: format!("{peer}: {what} failed") }
            }
            _ => Self::io(peer, what, error),
        }
    }

    /// Returns the error for a byte stream that ended between frames, without CLOSE.
    pub(crate) fn closed_without_reason() -> Self {
        Self::Closed { reason: "no reason given".into() }
    }
}

fn on_stream(stream: u32) -> String {
    if stream == 0 { String::new() } else { format!(" on stream {stream}") }
}

fn after_colon(what: &str) -> String {
    if what.is_empty() { String::new() } else { format!(": {what}") }
}
