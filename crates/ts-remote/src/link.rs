// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection and its socket, for callers that may block.

use std::io::{self, IoSliceMut};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::socket::{Ready, SLICE, Socket};
use crate::{
    Address, Connection, ConnectionOptions, ConnectionStats, Error, Event, Role, SendOptions, Sink,
    TensorInfo,
};

/// One end of a connection, and its socket.
///
/// Nothing happens on it but while one of its methods runs; each that waits reads and writes whatever there is. Two ends that
/// [`send`](Self::send) each other more than their windows at once wait for each other, for neither hears of what it is to give memory to: they
/// send by [`connection`](Self::connection) and go on with [`next_event`](Self::next_event), which does both.
#[derive(Debug)]
pub struct Link<S> {
    connection: Connection<S>,
    socket: Socket,
    timeout: Duration,
    /// When the other end was heard of last.
    heard: Instant,
    asked: bool,
    /// What the socket is ready for, as far as is known.
    ready: Ready,
}

/// The most bytes that are written before something is read, and before others have their turn.
const TURN: usize = 4 << 20;
/// The most pieces that one call to the system gets.
const MAX_SLICES: usize = 16;

impl<S: Sink> Link<S> {
    /// Connects, and waits until both ends know each other.
    ///
    /// # Errors
    /// [`Error::Io`] when nobody is there, [`Error::TimedOut`], [`Error::Closed`] with what the other end has against it. Blocks.
    pub fn connect(address: &Address, options: ConnectionOptions) -> Result<Self, Error> {
        let socket = Socket::connect(address, options.timeout)?;
        Self::new(socket, Role::Connector, options)
    }

    /// Goes on with a socket, and waits until both ends know each other.
    ///
    /// # Errors
    /// As [`connect`](Self::connect). Blocks.
    pub fn new(socket: Socket, role: Role, options: ConnectionOptions) -> Result<Self, Error> {
        let mut this = Self::unmet(socket, role, options);
        // Who accepts has answered then, too.
        while !this.connection.is_connected() || this.connection.has_unsent() || this.socket.wants_write() {
            this.step(true)?;
        }
        Ok(this)
    }

    /// Goes on with a socket, whose other end is still to say who it is. Does not block.
    pub fn unmet(socket: Socket, role: Role, options: ConnectionOptions) -> Self {
        let timeout = options.timeout;
        let connection = Connection::new(role, options);
        let ready = Ready { read: true, write: true };
        Self { connection, socket, timeout, heard: Instant::now(), asked: false, ready }
    }

    /// The connection.
    pub fn connection(&mut self) -> &mut Connection<S> {
        &mut self.connection
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &str {
        self.socket.peer()
    }

    /// What it has done.
    pub fn stats(&self) -> ConnectionStats {
        self.connection.stats()
    }

    /// What happens next. Blocks until something does.
    ///
    /// # Errors
    /// What ended the connection; [`Error::TimedOut`] when the other end is silent, also to a ping.
    pub fn next_event(&mut self) -> Result<Event<S>, Error> {
        self.begin_wait();
        loop {
            if let Some(event) = self.connection.poll() {
                return Ok(event);
            }
            self.step(true)?;
        }
    }

    /// What has happened, if anything has. Does not block.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event).
    pub fn poll_event(&mut self) -> Result<Option<Event<S>>, Error> {
        let event = self.connection.poll();
        if event.is_none() {
            self.step(false)?;
        }
        Ok(event.or_else(|| self.connection.poll()))
    }

    /// Sends a tensor on a stream, and waits until the socket has it. Events that come meanwhile wait.
    ///
    /// # Errors
    /// As [`Connection::send`] and [`next_event`](Self::next_event). Blocks as long as the other end gives no credit.
    pub fn send(
        &mut self,
        stream: u32,
        info: TensorInfo,
        payload: Bytes,
        options: SendOptions,
    ) -> Result<(), Error> {
        self.connection.send(stream, info, payload, options)?;
        self.flush(stream)
    }

    /// Sends a message, and waits until the socket has it.
    ///
    /// # Errors
    /// As [`Connection::send_message`] and [`next_event`](Self::next_event).
    pub fn send_message(&mut self, stream: u32, message: Bytes) -> Result<(), Error> {
        self.connection.send_message(stream, message)?;
        self.flush(stream)
    }

    /// Waits until the socket has all that was sent on a stream.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event). Blocks as long as the other end gives no credit.
    pub fn flush(&mut self, stream: u32) -> Result<(), Error> {
        self.begin_wait();
        while !self.connection.is_sent(stream) || self.socket.wants_write() {
            self.step(true)?;
        }
        Ok(())
    }

    /// Reads and writes what goes without waiting; writes no more than some MiB, so that others have their turn. Whether something went or came.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event). Does not block.
    pub fn drive(&mut self) -> Result<bool, Error> {
        self.ready = Ready { read: true, write: true };
        self.write_and_read()
    }

    /// Whether it has something to write, and waits for its socket to take it.
    pub fn wants_write(&mut self) -> bool {
        self.connection.plan_writes() || self.socket.wants_write()
    }

    /// Whether there may be more to read than its socket tells of.
    pub(crate) fn may_read(&self) -> bool {
        self.ready.read
    }

    pub(crate) fn peek(&self) -> &Connection<S> {
        &self.connection
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Says that this is the end and why, behind what was sent on all streams. Does not wait for the other end to read it.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event): what was sent may not have come then. Blocks as long as there is no credit.
    pub fn close(mut self, reason: &str) -> Result<(), Error> {
        self.begin_wait();
        while self.connection.has_unsent() || self.socket.wants_write() {
            self.step(true)?;
        }
        self.connection.close(reason);
        while self.connection.plan_writes() || self.socket.wants_write() {
            self.step(true)?;
        }
        self.socket.shutdown().map_err(|error| self.socket.failed("closing", error))
    }

    /// The other end's silence counts from now on: before, nobody has listened.
    fn begin_wait(&mut self) {
        (self.heard, self.asked) = (Instant::now(), false);
    }

    /// Writes or reads something; when there is nothing to, waits until there is, or for a while, if `wait` says so.
    fn step(&mut self, wait: bool) -> Result<(), Error> {
        if self.write_and_read()? {
            return Ok(());
        }
        let mut left = self.timeout.saturating_sub(self.heard.elapsed());
        if !wait {
            left = Duration::ZERO;
        } else if left.is_zero() {
            return Err(Error::TimedOut { peer: self.socket.peer().into(), after: self.timeout });
        } else if !self.asked && self.connection.is_connected() && left < self.timeout / 2 {
            self.asked = true;
            self.connection.ping();
        }
        let pending = self.connection.plan_writes() || self.socket.wants_write();
        if wait && !pending {
            // Whoever only waits for bytes does so where they come.
            return self.read(true).map(drop);
        }
        let ready = self.socket.wait(Ready { read: true, write: pending }, left.min(SLICE))?;
        // What was not waited for is as it was.
        self.ready = Ready { read: ready.read, write: ready.write || !pending };
        if !wait {
            self.write_and_read()?;
        }
        Ok(())
    }

    /// Writes and reads as far as the socket is known to be ready for it. Whether something went or came.
    fn write_and_read(&mut self) -> Result<bool, Error> {
        let wrote = self.ready.write && self.write()?;
        Ok(self.ready.read && self.read(false)? || wrote)
    }

    /// Writes what the socket takes. Whether it took something.
    fn write(&mut self) -> Result<bool, Error> {
        let (mut wrote, mut left) = (false, TURN);
        if self.socket.wants_write() {
            match self.socket.flush() {
                Ok(()) => wrote = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.ready.write = false,
                Err(error) => return Err(self.socket.failed("writing", error)),
            }
        }
        while self.ready.write && left > 0 && self.connection.plan_writes() {
            let slices = self.connection.write_slices(MAX_SLICES);
            let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
            match self.socket.write(&slices) {
                Ok(len) => {
                    self.ready.write = self.socket.may_take_more(len, wanted);
                    self.connection.written(len);
                    wrote = true;
                    left = left.saturating_sub(len);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.ready.write = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // What the other end has said last is of more use than that it is gone.
                Err(error) => {
                    while self.read(false)? {}
                    return Err(self.socket.failed("writing", error));
                }
            }
        }
        Ok(wrote)
    }

    /// Reads what is there, once, or waits for something for a while. Whether there was something.
    fn read(&mut self, wait: bool) -> Result<bool, Error> {
        let [first, second] = self.connection.read_targets()?;
        let wanted = first.len() + second.len();
        match self.socket.read(&mut [IoSliceMut::new(first), IoSliceMut::new(second)], wait) {
            Ok(0) => {
                let done = Error::Closed { reason: "it has no more to say".into() };
                Err(self.connection.end_of_input().err().unwrap_or(done))
            }
            Ok(len) => {
                self.ready.read = self.socket.may_have_more(len, wanted);
                (self.heard, self.asked) = (Instant::now(), false);
                if let Err(error) = self.connection.filled(len) {
                    // The other end is told why, if it takes that.
                    while self.connection.plan_writes()
                        && let Ok(len) = self.socket.write(&self.connection.write_slices(MAX_SLICES))
                    {
                        self.connection.written(len);
                    }
                    return Err(error);
                }
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.ready.read = false;
                Ok(false)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(self.socket.failed("reading", error)),
        }
    }
}
