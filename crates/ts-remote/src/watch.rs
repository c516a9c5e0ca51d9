// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long an end waits for the other.

use std::time::{Duration, Instant};

use crate::{Connection, ConnectionOptions, Error, Sink};

/// Who has not called for so long, or for half of the timeout, was busy with other things.
const AWAY: Duration = Duration::from_secs(1);

/// Two clocks: one of the other end's silence, one of what is under way and does not go on. They
/// are looked at once for each thing that
/// may take time: for a small message that is what takes most, beside the system's calls.
#[derive(Debug)]
pub(crate) struct Watch {
    timeout: Duration,
    stall_timeout: Duration,
    since: Instant,
    /// When they were looked at last, and whether nothing that may take time was done since.
    now: Instant,
    fresh: bool,
    /// When the other end was heard of last, and whether it was asked for a sign of life since.
    heard: Instant,
    asked: bool,
    /// When something went on last, and how often it had.
    moved: (Instant, u64),
}

impl Watch {
    pub(crate) fn new(options: &ConnectionOptions) -> Self {
        let (timeout, stall_timeout, now) =
            (options.idle_timeout, options.stall_timeout, Instant::now());
        Self {
            timeout,
            stall_timeout,
            since: now,
            now,
            fresh: true,
            heard: now,
            asked: false,
            moved: (now, 0),
        }
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    /// A wait begins. Silence counts from now on, if nobody has listened before.
    pub(crate) fn begin<S: Sink>(&mut self, connection: &Connection<S>) {
        let before = self.now;
        self.look();
        if self.now - before > AWAY.min(self.timeout / 2) {
            (self.heard, self.asked) = (self.now, false);
            self.moved = (self.now, connection.moves());
        }
    }

    /// Something is tried that may take time.
    pub(crate) fn step(&mut self) {
        if !self.fresh {
            self.look();
        }
        self.fresh = false;
    }

    /// Something was waited for.
    pub(crate) fn look(&mut self) {
        (self.now, self.fresh) = (Instant::now(), true);
    }

    /// The other end has done something.
    pub(crate) fn hear(&mut self) {
        (self.heard, self.asked) = (self.now, false);
    }

    /// How long nothing has gone on.
    pub(crate) fn at_rest<S: Sink>(&mut self, connection: &Connection<S>) -> Duration {
        let moves = connection.moves();
        if moves != self.moved.1 {
            self.moved = (self.now, moves);
        }
        self.now.saturating_duration_since(self.moved.0)
    }

    /// # Errors
    /// [`Error::TimedOut`] of an end that does not say who it is, however much else it says.
    pub(crate) fn check_introduction<S: Sink>(
        &self,
        connection: &Connection<S>,
        peer: &str,
    ) -> Result<(), Error> {
        if connection.is_connected() || self.since.elapsed() <= self.timeout {
            return Ok(());
        }
        Err(Error::TimedOut { peer: peer.into(), after: self.timeout })
    }

    /// # Errors
    /// [`Error::Stalled`] when something is under way and the other end has not done its part for
    /// longer than is waited for.
    pub(crate) fn check_progress<S: Sink>(
        &mut self,
        connection: &Connection<S>,
        peer: &str,
    ) -> Result<(), Error> {
        if self.at_rest(connection) < self.stall_timeout || !connection.is_under_way() {
            return Ok(());
        }
        Err(Error::Stalled { peer: peer.into(), after: self.stall_timeout })
    }

    /// How much longer the other end may be silent. Asks it for a sign of life when half of its
    /// time is over.
    ///
    /// # Errors
    /// [`Error::TimedOut`] when it is over.
    pub(crate) fn check_life<S: Sink>(
        &mut self,
        connection: &mut Connection<S>,
        peer: &str,
    ) -> Result<Duration, Error> {
        let left = self.timeout.saturating_sub(self.now.saturating_duration_since(self.heard));
        if left.is_zero() {
            return Err(Error::TimedOut { peer: peer.into(), after: self.timeout });
        }
        if !self.asked && connection.is_connected() && left <= self.timeout / 2 {
            self.asked = true;
            connection.ping();
        }
        Ok(left)
    }
}
