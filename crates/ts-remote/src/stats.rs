// SPDX-License-Identifier: MIT OR Apache-2.0
//! Statistics of connections and streams.

/// Statistics of a connection, counted from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ConnectionStats {
    /// Bytes written to the transport.
    pub sent_bytes: u64,
    /// Bytes read from the transport.
    pub received_bytes: u64,
    /// Frames that were written, or queued for writing.
    pub sent_frames: u64,
    /// Frames whose header was read.
    pub received_frames: u64,
    /// Bytes of received payloads that were copied because they were read together with headers, or
    /// before their memory was provided. Copies for decoding, TLS and shared memory do not count.
    pub copied_bytes: u64,
}

/// Statistics of a stream, counted from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StreamStats {
    /// Tensors that were queued, or have begun to arrive.
    pub tensors: u64,
    /// Messages that were queued or received.
    pub messages: u64,
    /// Bytes of payloads that have been sent or received, counted without compression.
    pub payload_bytes: u64,
    /// The total length of the payloads that were queued or have begun to arrive, in bytes.
    pub expected_bytes: u64,
    /// The number of times that the stream had data to send but no credit.
    pub pauses: u64,
}
