// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events of a connection.

use bytes::Bytes;

use crate::TensorInfo;

/// An event of a connection. `S` is the type of the memory that payloads are received into.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<S> {
    /// The handshake is complete. Streams can be opened.
    Connected {
        /// The name and version of the peer's software.
        software: String,
        /// The service in the peer's HELLO. A connector's HELLO requests this service.
        service: String,
    },
    /// A tensor begins. Its payload needs [memory](crate::Connection::accept), unless its storage
    /// is empty or known.
    Metadata {
        /// The number of the stream.
        stream: u32,
        /// The tensor without its elements.
        info: TensorInfo,
        /// Whether an earlier tensor of this stream had the same storage, so that no payload
        /// follows.
        known: bool,
        /// Whether later tensors of this stream may use the same storage.
        kept: bool,
    },
    /// Bytes of a payload have been written to its memory.
    Data {
        /// The number of the stream.
        stream: u32,
        /// The offset of these bytes in the payload.
        offset: u64,
        /// The number of bytes.
        size: u64,
    },
    /// A tensor is complete.
    End {
        /// The number of the stream.
        stream: u32,
        /// The tensor without its elements.
        info: Box<TensorInfo>,
        /// The memory of the payload. `None` if the storage is empty or known, and the user
        /// provided no memory.
        sink: Option<S>,
    },
    /// A message has arrived.
    Message {
        /// The number of the stream.
        stream: u32,
        /// The whole message.
        bytes: Bytes,
    },
    /// The peer cancelled a stream, of either direction.
    Cancelled {
        /// The number of the stream.
        stream: u32,
        /// The peer's reason.
        reason: String,
        /// The memory of the incomplete tensor, if the user provided any.
        sink: Option<S>,
    },
    /// The peer finished a stream, and everything on it has been received.
    Finished {
        /// The number of the stream.
        stream: u32,
    },
}
