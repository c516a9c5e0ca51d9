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
    /// Frames written.
    pub sent_frames: u64,
    /// Frames read.
    pub received_frames: u64,
    /// Bytes of payloads that were copied in this process instead of being read straight into their
    /// memory.
    pub copied_bytes: u64,
}

/// Statistics of a stream, counted from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StreamStats {
    /// Tensors that have begun.
    pub tensors: u64,
    /// Messages.
    pub messages: u64,
    /// Bytes of payloads that have been sent or received, as they are when decoded.
    pub payload_bytes: u64,
    /// The total length of the payloads that have begun or are queued, in bytes.
    pub expected_bytes: u64,
    /// How often the stream had something to send but no credit.
    pub pauses: u64,
}
