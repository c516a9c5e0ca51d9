// SPDX-License-Identifier: MIT OR Apache-2.0
//! The timeouts of a connection.

use std::time::{Duration, Instant};

use crate::{Connection, ConnectionOptions, Error, Sink};

/// The longest pause between waits that counts as silence of the peer. If half of the idle timeout
/// is shorter, that is the limit instead.
const MAX_GAP: Duration = Duration::from_secs(1);

/// Tracks whether a peer is alive and makes progress.
///
/// Reads the clock once when a wait begins, and then about once per operation that may block. For
/// small messages, reading the clock is the largest cost after the system calls.
#[derive(Debug)]
pub(crate) struct Liveness {
    idle_timeout: Duration,
    stall_timeout: Duration,
    connected_at: Instant,
    /// The time when the clock was last read.
    now: Instant,
    /// Whether `now` is current. An operation that may block makes it outdated.
    is_current: bool,
    /// The time when the peer was last active.
    active_at: Instant,
    /// Whether the peer was pinged since it was last active.
    pinged: bool,
    /// The time when the connection last made progress, and the value of its progress counter then.
    progress: (Instant, u64),
}

impl Liveness {
    pub(crate) fn new(options: &ConnectionOptions) -> Self {
        let now = Instant::now();
        Self {
            idle_timeout: options.idle_timeout,
            stall_timeout: options.stall_timeout,
            connected_at: now,
            now,
            is_current: true,
            active_at: now,
            pinged: false,
            progress: (now, 0),
        }
    }

    pub(crate) fn idle_timeout(&self) -> Duration {
        self.idle_timeout
    }

    pub(crate) fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    /// Begins a wait. If the pause since the last wait was longer than [`MAX_GAP`] allows, the
    /// timeouts start now.
    pub(crate) fn begin_wait<S: Sink>(&mut self, connection: &Connection<S>) {
        let before = self.now;
        self.update();
        if self.now - before > MAX_GAP.min(self.idle_timeout / 2) {
            self.note_activity();
            self.progress = (self.now, connection.progress());
        }
    }

    /// Prepares for an operation that may block: reads the clock, unless it was read after the
    /// previous such operation.
    pub(crate) fn begin_step(&mut self) {
        if !self.is_current {
            self.update();
        }
        self.is_current = false;
    }

    /// Reads the clock, after an operation that may have blocked.
    pub(crate) fn update(&mut self) {
        (self.now, self.is_current) = (Instant::now(), true);
    }

    /// Records that the peer is active now.
    pub(crate) fn note_activity(&mut self) {
        (self.active_at, self.pinged) = (self.now, false);
    }

    /// Returns for how long the connection has made no progress.
    pub(crate) fn idle_time<S: Sink>(&mut self, connection: &Connection<S>) -> Duration {
        let progress = connection.progress();
        if progress != self.progress.1 {
            self.progress = (self.now, progress);
        }
        self.now.saturating_duration_since(self.progress.0)
    }

    /// Checks that the handshake does not take too long, even if the peer sends other bytes.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if the handshake takes longer than the idle timeout.
    pub(crate) fn check_handshake<S: Sink>(
        &self,
        connection: &Connection<S>,
        peer: &str,
    ) -> Result<(), Error> {
        if connection.is_connected() || self.connected_at.elapsed() <= self.idle_timeout {
            return Ok(());
        }
        Err(Error::TimedOut { peer: peer.into(), after: self.idle_timeout })
    }

    /// Checks that transfers make progress.
    ///
    /// # Errors
    /// Returns [`Error::Stalled`] if a transfer is in progress but has made no progress for the
    /// stall timeout.
    pub(crate) fn check_progress<S: Sink>(
        &mut self,
        connection: &Connection<S>,
        peer: &str,
    ) -> Result<(), Error> {
        if self.idle_time(connection) < self.stall_timeout || !connection.awaits_peer() {
            return Ok(());
        }
        Err(Error::Stalled { peer: peer.into(), after: self.stall_timeout })
    }

    /// Returns how much longer the peer may be silent. Queues a PING once half of the idle timeout
    /// is over.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if the peer has been silent for the idle timeout.
    pub(crate) fn check_peer<S: Sink>(
        &mut self,
        connection: &mut Connection<S>,
        peer: &str,
    ) -> Result<Duration, Error> {
        let silence = self.now.saturating_duration_since(self.active_at);
        let left = self.idle_timeout.saturating_sub(silence);
        if left.is_zero() {
            return Err(Error::TimedOut { peer: peer.into(), after: self.idle_timeout });
        }
        if !self.pinged && connection.is_connected() && left <= self.idle_timeout / 2 {
            self.pinged = true;
            connection.ping();
        }
        Ok(left)
    }
}
