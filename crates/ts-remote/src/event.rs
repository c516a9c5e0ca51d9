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
        /// The service that the peer requests.
        service: String,
    },
    /// A tensor begins. Its payload needs [memory](crate::Connection::accept), unless its storage
    /// is empty or known.
    Metadata {
        /// The number of the stream.
        stream: u32,
        /// The tensor without its elements.
        info: TensorInfo,
        /// The storage came with an earlier tensor, and is not sent again.
        known: bool,
        /// Later tensors of this stream may use the same storage.
        kept: bool,
    },
    /// Bytes of a payload have been written to its memory.
    Data {
        /// The number of the stream.
        stream: u32,
        /// The offset of the first byte in the payload.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
    },
    /// A tensor is complete.
    End {
        /// The number of the stream.
        stream: u32,
        /// The tensor without its elements.
        info: Box<TensorInfo>,
        /// The memory of the payload. `None` if the tensor needed none and got none.
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
        /// The memory of the incomplete tensor, if it had got any.
        sink: Option<S>,
    },
    /// The peer finished a stream. All of it has been received.
    Finished {
        /// The number of the stream.
        stream: u32,
    },
}
