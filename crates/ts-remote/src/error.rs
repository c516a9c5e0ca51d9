// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of connections.

use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The kind of an [`Error`], which tells what caused it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The peer violated the protocol, sent damaged bytes, or could not be authenticated.
    Peer,
    /// The peer cancelled a stream, or the connection was closed, for example because the peer
    /// refused it.
    Refused,
    /// The network or the operating system failed.
    Network,
    /// The peer did not answer or made no progress in time.
    TimedOut,
    /// Memory for a tensor could not be allocated or filled.
    Memory,
    /// The caller made an invalid call, or passed an invalid argument.
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
        /// A description of the violation.
        what: String,
    },
    /// Bytes of a payload differ from those that were sent.
    #[error("payload of tensor {tensor:?} is damaged at bytes {offset}..{end}: {what}")]
    Damaged {
        /// The name of the tensor.
        tensor: String,
        /// The offset in the payload at which the damaged piece begins, in bytes.
        offset: u64,
        /// The offset in the payload at which the damaged piece ends, in bytes.
        end: u64,
        /// A description of the damage, such as a wrong checksum.
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
    /// The connection is closed: the peer closed it, or this end closed it because it was idle.
    /// Also returned if the process that passes connections to a [`Listener`](crate::Listener) has
    /// ended.
    #[error("the connection was closed: {reason}")]
    Closed {
        /// The reason of the end that closed the connection.
        reason: String,
    },
    /// The peer ended the connection between two frames, but did not close it: it may have died
    /// before it sent everything.
    #[error(
        "connection lost: the peer ended it without closing it, so it may not have sent everything"
    )]
    Abandoned,
    /// The connection broke, or ended while data was incomplete.
    #[error("connection lost{}", after_colon(what))]
    Lost {
        /// The operation that failed, or the place where the byte stream ended.
        what: String,
    },
    /// The peer did not answer in time, or did not complete the handshake in time.
    #[error(
        "{peer} did not answer for {after:?}: check that it is running and reachable, or raise \
         `idle_timeout`"
    )]
    TimedOut {
        /// The address of the peer.
        peer: String,
        /// The timeout that expired.
        after: Duration,
    },
    /// The peer makes no progress in a transfer: it neither takes data nor sends the rest of a
    /// tensor. It may still answer PINGs.
    #[error(
        "{peer} has made no progress in a transfer for {after:?}: check that it still sends and \
         receives"
    )]
    Stalled {
        /// The address of the peer.
        peer: String,
        /// The timeout that expired.
        after: Duration,
    },
    /// The network or the operating system failed.
    #[error("{peer}: {what} failed: {source}")]
    Io {
        /// The address of the peer or of the listener.
        peer: String,
        /// The operation, such as `connecting`.
        what: &'static str,
        /// The error of the operating system.
        source: Arc<io::Error>,
    },
    /// TLS failed, for example because a certificate is not trusted.
    #[error("{peer}: TLS failed: {source}")]
    Tls {
        /// The address of the peer.
        peer: String,
        /// The error of the TLS library.
        source: Arc<io::Error>,
    },
    /// Memory for a tensor could not be allocated or filled.
    #[error("cannot allocate or fill memory for tensor {tensor:?} of {bytes} bytes: {source}")]
    Memory {
        /// The name of the tensor.
        tensor: String,
        /// The length of the tensor's storage, in bytes.
        bytes: u64,
        /// The error of the allocation or of the copy.
        source: Arc<ts_pool::Error>,
    },
    /// A tensor cannot be sent, for example because it is invalid or its payload has the wrong
    /// length.
    #[error("cannot send tensor {tensor:?}: {reason}")]
    Unsendable {
        /// The name of the tensor.
        tensor: String,
        /// The reason why the tensor cannot be sent.
        reason: String,
    },
    /// A call is not allowed in the current state, or has an invalid argument.
    #[error("{0}")]
    Misuse(String),
}

impl Error {
    /// Returns the kind of the error, for callers that do not need to match each variant.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Protocol { .. } | Self::Damaged { .. } | Self::Tls { .. } => ErrorKind::Peer,
            Self::Cancelled { .. } | Self::Closed { .. } => ErrorKind::Refused,
            Self::Abandoned | Self::Lost { .. } | Self::Io { .. } => ErrorKind::Network,
            Self::TimedOut { .. } | Self::Stalled { .. } => ErrorKind::TimedOut,
            Self::Memory { .. } => ErrorKind::Memory,
            Self::Unsendable { .. } | Self::Misuse(_) => ErrorKind::Misuse,
        }
    }

    pub(crate) fn io(peer: &str, what: &'static str, source: io::Error) -> Self {
        Self::Io { peer: peer.into(), what, source: source.into() }
    }

    /// Returns the error for a failed call on a connected transport: [`Error::Lost`] if the
    /// connection is broken, otherwise [`Error::Io`].
    pub(crate) fn transport(peer: &str, what: &'static str, error: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        match error.kind() {
            // Windows reports some resets as aborts.
            ConnectionReset | ConnectionAborted | BrokenPipe | UnexpectedEof => {
                Self::Lost { what: format!("{peer}: {what} failed: {error}") }
            }
            _ => Self::io(peer, what, error),
        }
    }

    /// Returns whether the peer has ended the connection between two frames, with CLOSE or without.
    pub fn is_end(&self) -> bool {
        matches!(self, Self::Closed { .. } | Self::Abandoned)
    }
}

fn on_stream(stream: u32) -> String {
    if stream == 0 { String::new() } else { format!(" on stream {stream}") }
}

fn after_colon(what: &str) -> String {
    if what.is_empty() { String::new() } else { format!(": {what}") }
}
