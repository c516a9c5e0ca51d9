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
    /// How many bytes of each stream the peer may send before this end grants more: at least 1.
    pub window_bytes: u64,
    /// How many streams the peer may have open at a time.
    pub max_streams: u32,
    /// The secret that connectors must know. A connector sends it to whatever accepts the
    /// connection, and without TLS anyone on the path can read it.
    pub token: Option<String>,
    /// The service that a connector requests. A [`Dispatcher`](crate::Dispatcher) compares it with
    /// the service that it offers.
    pub service: String,
    /// The most bytes of a payload per frame, from 1 byte to 1 MiB. Smaller frames delay other
    /// streams less.
    pub frame_bytes: usize,
    /// The length of the shared memory through which large payloads are sent to a peer on the same
    /// host, in bytes. 0 disables it in both directions. Used only over Unix sockets; each
    /// connection that sends such payloads allocates this much.
    pub shared_bytes: usize,
    /// How long the peer may be silent while this end waits for it. It is pinged before.
    pub idle_timeout: Duration,
    /// How long a responsive peer may make no progress: grant no credit, or send no more of a
    /// tensor.
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
    /// 16 streams with windows of 16 MiB, frames of 1 MiB, 4 MiB of shared memory, an idle timeout
    /// of 30 seconds, a stall timeout of 5 minutes, and no token.
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
    /// Sets [`window_bytes`](Self::window_bytes).
    #[must_use]
    pub fn with_window_bytes(mut self, window_bytes: u64) -> Self {
        self.window_bytes = window_bytes;
        self
    }

    /// Sets [`max_streams`](Self::max_streams).
    #[must_use]
    pub fn with_max_streams(mut self, max_streams: u32) -> Self {
        self.max_streams = max_streams;
        self
    }

    /// Sets or removes the [`token`](Self::token).
    #[must_use]
    pub fn with_token(mut self, token: impl Into<Option<String>>) -> Self {
        self.token = token.into();
        self
    }

    /// Sets the [`service`](Self::service).
    #[must_use]
    pub fn with_service(mut self, service: impl Into<String>) -> Self {
        self.service = service.into();
        self
    }

    /// Sets [`frame_bytes`](Self::frame_bytes).
    #[must_use]
    pub fn with_frame_bytes(mut self, frame_bytes: usize) -> Self {
        self.frame_bytes = frame_bytes;
        self
    }

    /// Sets [`shared_bytes`](Self::shared_bytes).
    #[must_use]
    pub fn with_shared_bytes(mut self, shared_bytes: usize) -> Self {
        self.shared_bytes = shared_bytes;
        self
    }

    /// Sets [`idle_timeout`](Self::idle_timeout).
    #[must_use]
    pub fn with_idle_timeout(mut self, idle_timeout: Duration) -> Self {
        self.idle_timeout = idle_timeout;
        self
    }

    /// Sets [`stall_timeout`](Self::stall_timeout).
    #[must_use]
    pub fn with_stall_timeout(mut self, stall_timeout: Duration) -> Self {
        self.stall_timeout = stall_timeout;
        self
    }
}

/// How a tensor is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SendOptions {
    /// How the payload is compressed, piece by piece.
    pub compression: Compression,
    /// Adds a 64-bit checksum (XXH3) to each frame of the payload, which the receiver verifies. The
    /// checksums of TCP have 16 bits.
    pub checksums: bool,
    /// Lets later tensors of the same stream use this tensor's storage: see
    /// [`Connection::send_view`](crate::Connection::send_view).
    pub keep: bool,
}

impl SendOptions {
    /// Sets the [`compression`](Self::compression).
    #[must_use]
    pub fn with_compression(mut self, compression: Compression) -> Self {
        self.compression = compression;
        self
    }

    /// Sets [`checksums`](Self::checksums).
    #[must_use]
    pub fn with_checksums(mut self, checksums: bool) -> Self {
        self.checksums = checksums;
        self
    }

    /// Sets [`keep`](Self::keep).
    #[must_use]
    pub fn with_keep(mut self, keep: bool) -> Self {
        self.keep = keep;
        self
    }
}
