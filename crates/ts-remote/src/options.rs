// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options of connections and of single tensors.

use std::fmt;
use std::time::Duration;

use ts_format::Compression;

/// Options of one end of a connection.
///
/// ```
/// use std::time::Duration;
/// use ts_remote::ConnectionOptions;
///
/// let options = ConnectionOptions::default()
///     .with_token("secret".to_string())
///     .with_window_bytes(1 << 20)
///     .with_idle_timeout(Duration::from_secs(5));
/// assert_eq!(options.max_streams, 16);
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionOptions {
    /// The initial credit of each incoming stream: how many bytes the peer may send before this end
    /// grants more. 0 counts as 1.
    pub window_bytes: u64,
    /// The maximum number of streams that the peer may have open at a time.
    pub max_streams: u32,
    /// The secret that an acceptor requires, and that a connector sends to any acceptor. Without
    /// TLS, anyone on the network path can read it. An acceptor without a token accepts every
    /// connector.
    pub token: Option<String>,
    /// The service that a connector requests, or that a [`Dispatcher`](crate::Dispatcher) offers.
    /// A [`Link`](crate::Link) does not check the service that its peer requests.
    /// [`Event::Connected`](crate::Event::Connected) contains the requested service.
    pub service: String,
    /// The maximum number of bytes of a payload per frame, from 1 to 2^24 (16 MiB). Smaller frames
    /// delay other streams less. Frames of more than 2^20 bytes need a peer that announces that it
    /// reads them, as this version does, and a window and credit of that length. Encoded payloads,
    /// and those in shared memory, always have shorter ones.
    pub frame_bytes: usize,
    /// The length of the shared memory for large payloads to a peer on the same host, in bytes. The
    /// maximum is 64 MiB. 0 disables shared memory in both directions.
    ///
    /// Each connection over a Unix socket allocates this memory when it first sends such a payload.
    pub shared_bytes: usize,
    /// The longest silence of the peer while this end waits for it. After half of this time, this
    /// end sends a PING. After all of it, waiting fails with
    /// [`Error::TimedOut`](crate::Error::TimedOut).
    pub idle_timeout: Duration,
    /// The longest time that a transfer may make no progress, even if the peer answers PINGs. A
    /// transfer makes no progress if the peer grants no credit, or sends no more of a tensor. After
    /// this time, waiting fails with [`Error::Stalled`](crate::Error::Stalled).
    pub stall_timeout: Duration,
}

impl fmt::Debug for ConnectionOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            window_bytes,
            max_streams,
            token,
            service,
            frame_bytes,
            shared_bytes,
            idle_timeout,
            stall_timeout,
        } = self;
        f.debug_struct("ConnectionOptions")
            .field("window_bytes", window_bytes)
            .field("max_streams", max_streams)
            .field("token", &token.as_ref().map(|_| "secret"))
            .field("service", service)
            .field("frame_bytes", frame_bytes)
            .field("shared_bytes", shared_bytes)
            .field("idle_timeout", idle_timeout)
            .field("stall_timeout", stall_timeout)
            .finish()
    }
}

impl Default for ConnectionOptions {
    /// Returns these options:
    ///
    /// - 16 streams with windows of 16 MiB, and frames of 1 MiB
    /// - 4 MiB of shared memory
    /// - an idle timeout of 30 seconds, and a stall timeout of 5 minutes
    /// - no token, and an empty service
    fn default() -> Self {
        Self {
            window_bytes: 16 << 20,
            max_streams: 16,
            token: None,
            service: String::new(),
            frame_bytes: 1 << 20,
            shared_bytes: 4 << 20,
            idle_timeout: Duration::from_secs(30),
            stall_timeout: Duration::from_secs(300),
        }
    }
}

impl ConnectionOptions {
    /// Sets [`window_bytes`](Self::window_bytes), the initial credit of each incoming stream.
    #[must_use]
    pub fn with_window_bytes(mut self, window_bytes: u64) -> Self {
        self.window_bytes = window_bytes;
        self
    }

    /// Sets [`max_streams`](Self::max_streams), the limit of the peer's open streams.
    #[must_use]
    pub fn with_max_streams(mut self, max_streams: u32) -> Self {
        self.max_streams = max_streams;
        self
    }

    /// Sets the [`token`](Self::token), or removes it if `token` is `None`.
    #[must_use]
    pub fn with_token(mut self, token: impl Into<Option<String>>) -> Self {
        self.token = token.into();
        self
    }

    /// Sets the [`service`](Self::service) to request or to offer.
    #[must_use]
    pub fn with_service(mut self, service: impl Into<String>) -> Self {
        self.service = service.into();
        self
    }

    /// Sets [`frame_bytes`](Self::frame_bytes), the longest part of a payload in one frame.
    #[must_use]
    pub fn with_frame_bytes(mut self, frame_bytes: usize) -> Self {
        self.frame_bytes = frame_bytes;
        self
    }

    /// Sets [`shared_bytes`](Self::shared_bytes), the length of the shared memory. 0 disables it.
    #[must_use]
    pub fn with_shared_bytes(mut self, shared_bytes: usize) -> Self {
        self.shared_bytes = shared_bytes;
        self
    }

    /// Sets [`idle_timeout`](Self::idle_timeout), the longest silence of the peer.
    #[must_use]
    pub fn with_idle_timeout(mut self, idle_timeout: Duration) -> Self {
        self.idle_timeout = idle_timeout;
        self
    }

    /// Sets [`stall_timeout`](Self::stall_timeout), the longest time without progress.
    #[must_use]
    pub fn with_stall_timeout(mut self, stall_timeout: Duration) -> Self {
        self.stall_timeout = stall_timeout;
        self
    }
}

/// Options for sending one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SendOptions {
    /// The compression of the payload. Each frame is compressed separately.
    pub compression: Compression,
    /// Whether each frame of the payload contains a 64-bit checksum (XXH3), which the receiver
    /// verifies. The checksums of TCP have only 16 bits.
    pub checksums: bool,
    /// Whether later tensors of the same stream may use this tensor's storage, with
    /// [`Connection::send_view`](crate::Connection::send_view).
    pub keep: bool,
}

impl SendOptions {
    /// Sets the [`compression`](Self::compression) of the payload.
    #[must_use]
    pub fn with_compression(mut self, compression: Compression) -> Self {
        self.compression = compression;
        self
    }

    /// Sets whether frames of the payload contain [`checksums`](Self::checksums).
    #[must_use]
    pub fn with_checksums(mut self, checksums: bool) -> Self {
        self.checksums = checksums;
        self
    }

    /// Sets [`keep`](Self::keep), which lets later tensors use the storage.
    #[must_use]
    pub fn with_keep(mut self, keep: bool) -> Self {
        self.keep = keep;
        self
    }
}
