// SPDX-License-Identifier: MIT OR Apache-2.0
use std::io;
use std::time::Duration;

/// Who is to blame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The other end did what the protocol forbids.
    Peer,
    /// The other end refused, cancelled or went.
    Refused,
    /// The network, or the system, failed.
    Network,
    /// Nothing came in time.
    TimedOut,
    /// There is no memory for what was to come.
    Memory,
    /// The caller asked for what makes no sense.
    Misuse,
}

/// What went wrong on a connection, and where.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The other end broke the protocol; the connection is of no more use.
    #[error("the other end broke the protocol{}: {what}", of_stream(*stream))]
    Protocol {
        /** On which stream; 0 for the connection itself. */
        stream: u32,
        /** What it did. */
        what: String,
    },
    /// Bytes of a payload are not those that were sent.
    #[error("tensor `{tensor}`: bytes {offset}..{end} of its payload are damaged: {what}")]
    Damaged {
        /** The tensor's name. */
        tensor: String,
        /** First byte, in the payload. */
        offset: u64,
        /** One past the last. */
        end: u64,
        /** How that is known. */
        what: String,
    },
    /// The other end cancelled a stream.
    #[error("the other end cancelled stream {stream}: {reason}")]
    Cancelled {
        /** Which. */
        stream: u32,
        /** Why, in its words. */
        reason: String,
    },
    /// The other end ended the connection.
    #[error("the other end closed the connection: {reason}")]
    Closed {
        /** Why, in its words. */
        reason: String,
    },
    /// The connection broke off in the middle of something.
    #[error("the connection was lost{}", while_doing(what))]
    Lost {
        /** In the middle of what. */
        what: String,
    },
    /// The other end did not answer.
    #[error(
        "nothing came from {peer} for {after:?}: it is gone, or takes longer than `idle_timeout` allows"
    )]
    TimedOut {
        /** Who. */
        peer: String,
        /** How long it was waited for. */
        after: Duration,
    },
    /// The other end is there, and does not do what is waited for.
    #[error("{peer} answers, but has neither given nor taken anything for {after:?}")]
    Stalled {
        /** Whom this was about. */
        peer: String,
        /** How long it was waited for. */
        after: Duration,
    },
    /// The network, or the system, refused.
    #[error("{peer}: {what}: {source}")]
    Io {
        /** Whom this was about. */
        peer: String,
        /** What was tried. */
        what: &'static str,
        /** What the system says. */
        source: std::sync::Arc<io::Error>,
    },
    /// The two ends found no way to trust each other, or somebody changed what was under way.
    #[error("{peer}: TLS: {source}")]
    Tls {
        /** Whom this was about. */
        peer: String,
        /** What is wrong. */
        source: std::sync::Arc<io::Error>,
    },
    /// There is no memory for a tensor.
    #[error("no memory for tensor `{tensor}` of {bytes} bytes: {source}")]
    Memory {
        /** The tensor's name. */
        tensor: String,
        /** Of its payload. */
        bytes: u64,
        /** Why. */
        source: std::sync::Arc<ts_pool::Error>,
    },
    /// What was to be sent makes no sense.
    #[error("tensor `{tensor}` cannot be sent: {reason}")]
    Unsendable {
        /** The tensor's name. */
        tensor: String,
        /** Why not. */
        reason: String,
    },
    /// A call that this end may not make now.
    #[error("{0}")]
    Misuse(String),
}

impl Error {
    /// Who is to blame.
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
}

fn of_stream(stream: u32) -> String {
    if stream == 0 { String::new() } else { format!(" on stream {stream}") }
}

fn while_doing(what: &str) -> String {
    if what.is_empty() { String::new() } else { format!(" {what}") }
}
