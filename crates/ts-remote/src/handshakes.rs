// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accepts connections while other handshakes are pending.

use std::time::{Duration, Instant};

use rustix::event::PollFd;

use crate::socket::POLL_INTERVAL;
use crate::{ConnectionOptions, Error, Listener, Socket, fd};

/// The maximum number of pending handshakes. If another client connects, the oldest is dropped.
const MAX_PENDING: usize = 128;

/// A connection whose handshake is pending.
pub(crate) trait Handshake: Sized {
    /// The result of a complete handshake.
    type Output;

    /// Returns the address of the peer.
    fn peer(&self) -> &str;

    /// Returns the descriptor and the events after which the handshake can continue. Returns `None`
    /// if the handshake must be [advanced](Self::advance) at a certain time instead.
    fn poll_fd(&mut self) -> Option<PollFd<'_>>;

    /// Returns the longest time to wait before the handshake is advanced, or `None` if only the
    /// events of [`poll_fd`](Self::poll_fd) matter.
    fn time_to_advance(&self) -> Option<Duration>;

    /// Continues the handshake. Does not block.
    fn advance(&mut self, options: &ConnectionOptions) -> Result<Progress<Self::Output>, Error>;

    /// Sends the peer the reason of the refusal, without waiting until the peer reads it, and
    /// closes the connection. Returns the error to log.
    fn refuse(self, options: &ConnectionOptions, reason: &str) -> Error;
}

/// The state of a handshake.
pub(crate) enum Progress<T> {
    Pending,
    Complete(T),
    /// The connection must be refused with this reason.
    #[cfg_attr(windows, expect(dead_code, reason = "only `Dispatcher` refuses"))]
    Refused(String),
}

/// Accepts connections and completes their handshakes. A peer that sends nothing, or no valid
/// handshake, does not delay other peers.
#[derive(Debug)]
pub(crate) struct Handshakes<H> {
    options: ConnectionOptions,
    pending: Vec<H>,
    /// The maximum number of pending handshakes.
    most: usize,
}

impl<H: Handshake> Handshakes<H> {
    pub(crate) fn new(options: ConnectionOptions) -> Self {
        Self { options, pending: Vec::new(), most: fd::most_pending(MAX_PENDING) }
    }

    /// Returns the next connection whose handshake is complete, or `None` after `time`. `start`
    /// begins the handshake on an accepted socket. Calls `log` with the peer and the reason for
    /// each connection that fails. Blocks.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the listener fails, and [`Error::Closed`] if a handoff channel has
    /// closed.
    pub(crate) fn accept_within(
        &mut self,
        listener: &Listener,
        time: Duration,
        start: impl Fn(Socket, &ConnectionOptions) -> Result<H, Error>,
        mut log: impl FnMut(&str, &Error),
    ) -> Result<Option<(H, H::Output)>, Error> {
        listener.set_nonblocking()?;
        let end = Instant::now().checked_add(time);
        loop {
            let left =
                end.map_or(POLL_INTERVAL, |end| end.saturating_duration_since(Instant::now()));
            let next = self.pending.iter().filter_map(Handshake::time_to_advance).min();
            let timeout = next.map_or(left, |next| next.min(left)).min(POLL_INTERVAL);
            let sockets = self.pending.iter_mut().filter_map(Handshake::poll_fd);
            if listener.wait_with(true, sockets, timeout)?[0] {
                self.accept_waiting(listener, &start, &mut log)?;
            }
            let mut at = 0;
            while let Some(handshake) = self.pending.get_mut(at) {
                match handshake.advance(&self.options) {
                    Ok(Progress::Pending) => at += 1,
                    Ok(Progress::Complete(output)) => {
                        return Ok(Some((self.pending.remove(at), output)));
                    }
                    Ok(Progress::Refused(reason)) => {
                        let refused = self.pending.remove(at);
                        let peer = refused.peer().to_string();
                        log(&peer, &refused.refuse(&self.options, &reason));
                    }
                    Err(error) => log(self.pending.remove(at).peer(), &error),
                }
            }
            if left.is_zero() {
                return Ok(None);
            }
        }
    }

    /// Accepts all waiting connections. Drops the oldest pending handshakes if there are too many.
    fn accept_waiting(
        &mut self,
        listener: &Listener,
        start: impl Fn(Socket, &ConnectionOptions) -> Result<H, Error>,
        mut log: impl FnMut(&str, &Error),
    ) -> Result<(), Error> {
        while let Some(socket) = listener.accept_waiting()? {
            match start(socket, &self.options) {
                Ok(handshake) => self.pending.push(handshake),
                Err(error) => log("a new connection", &error),
            }
            if self.pending.len() > self.most {
                let oldest = self.pending.remove(0);
                let reason =
                    format!("handshake dropped: more than {} handshakes are pending", self.most);
                log(oldest.peer(), &Error::Misuse(reason));
            }
        }
        Ok(())
    }
}
