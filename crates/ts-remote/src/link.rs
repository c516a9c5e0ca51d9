// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection and its socket, for callers that may block.

use std::io::{self, IoSliceMut};
use std::time::{Duration, Instant};

use bytes::Bytes;
use ts_pool::SharedMemory;

use crate::socket::{Ready, SLICE, Socket};
use crate::watch::Watch;
use crate::{
    Address, Connection, ConnectionOptions, ConnectionStats, Error, Event, Role, SendOptions, Sink,
    TensorInfo,
};

/// One end of a connection, and its socket.
///
/// Nothing happens on it but while one of its methods runs; each that waits reads and writes
/// whatever there is. Two ends that [`send`](Self::send) each other more than their windows at once
/// wait for each other, for neither hears of what it is to give memory to, and fail when their
/// stall_timeout ends: they send by [`connection`](Self::connection) and go on with
/// [`next_event`](Self::next_event), which does both.
#[derive(Debug)]
pub struct Link<S> {
    connection: Connection<S>,
    socket: Socket,
    watch: Watch,
    /// Bytes of shared memory that are to be offered.
    to_share: usize,
    /// What the socket is ready for, as far as is known.
    ready: Ready,
    /// What ended the connection, while events that came before wait to be polled.
    ended: Option<Error>,
    /// Why nothing more can be written, while what the other end said before is read.
    mute: Option<Error>,
}

/// The most bytes that are written before something is read, and before others have their turn.
const TURN: usize = 4 << 20;
/// What is read at a time of what nobody wants, in bytes.
const DROPPED: usize = 64 << 10;
/// The most pieces that one call to the system gets.
const MAX_SLICES: usize = 16;

impl<S: Sink> Link<S> {
    /// Connects, and waits until both ends know each other.
    ///
    /// # Errors
    /// [`Error::Io`] when nobody is there, [`Error::TimedOut`], [`Error::Closed`] with what the
    /// other end has against it. Blocks.
    pub fn connect(address: &Address, options: ConnectionOptions) -> Result<Self, Error> {
        let socket = Socket::connect(address, options.idle_timeout)?;
        Self::new(socket, Role::Connector, options)
    }

    /// Goes on with a socket, and waits until both ends know each other.
    ///
    /// # Errors
    /// As [`connect`](Self::connect). Blocks.
    pub fn new(socket: Socket, role: Role, options: ConnectionOptions) -> Result<Self, Error> {
        let mut this = Self::unmet(socket, role, options);
        while !this.meet_within(SLICE)? {}
        Ok(this)
    }

    /// Waits until both ends know each other, at most so long; whether they do.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn meet_within(&mut self, time: Duration) -> Result<bool, Error> {
        let end = Instant::now() + time;
        self.watch.begin(&self.connection);
        self.watch.check_introduction(&self.connection, self.socket.peer())?;
        // Who accepts has answered then, too.
        while !self.connection.is_connected()
            || self.connection.has_unsent()
            || self.socket.wants_write()
        {
            if Instant::now() >= end {
                return Ok(false);
            }
            self.step(SLICE)?;
        }
        // Who was told who this is may want no more of it.
        self.ended.clone().map_or(Ok(true), Err)
    }

    /// Goes on with a socket, whose other end is still to say who it is. Does not block.
    pub fn unmet(mut socket: Socket, role: Role, mut options: ConnectionOptions) -> Self {
        if !socket.takes_descriptors() {
            options.shared_bytes = 0;
        }
        if options.shared_bytes == 0 {
            socket.refuse_descriptors();
        }
        let (watch, to_share) = (Watch::new(&options), options.shared_bytes);
        let connection = Connection::new(role, options);
        let ready = Ready { read: true, write: true };
        Self { connection, socket, watch, to_share, ready, ended: None, mute: None }
    }

    /// The connection.
    pub fn connection(&mut self) -> &mut Connection<S> {
        &mut self.connection
    }

    pub(crate) fn stall_timeout(&self) -> Duration {
        self.watch.stall_timeout()
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
    /// What ended the connection; [`Error::TimedOut`] when the other end is silent, also to a ping;
    /// [`Error::Stalled`] when it is there, but something is under way and does not go on.
    pub fn next_event(&mut self) -> Result<Event<S>, Error> {
        self.watch.begin(&self.connection);
        loop {
            if let Some(event) = self.connection.poll() {
                return Ok(event);
            }
            self.step(SLICE)?;
        }
    }

    /// As [`next_event`](Self::next_event), at most so long; `None` when nothing happened.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event).
    pub fn next_event_within(&mut self, time: Duration) -> Result<Option<Event<S>>, Error> {
        let end = Instant::now() + time;
        self.watch.begin(&self.connection);
        loop {
            let event = self.connection.poll();
            let left = end.saturating_duration_since(Instant::now());
            if event.is_some() || left.is_zero() {
                return Ok(event);
            }
            self.step(left)?;
        }
    }

    /// What has happened, if anything has. Does not block.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event).
    pub fn poll_event(&mut self) -> Result<Option<Event<S>>, Error> {
        let event = self.connection.poll();
        if event.is_none() {
            self.step(Duration::ZERO)?;
        }
        Ok(event.or_else(|| self.connection.poll()))
    }

    /// Sends a tensor on a stream, and waits until the socket has it. Events that come meanwhile
    /// wait.
    ///
    /// # Errors
    /// As [`Connection::send`] and [`next_event`](Self::next_event). Blocks as long as the other
    /// end gives no credit.
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
        self.watch.begin(&self.connection);
        while !self.connection.is_sent(stream) || self.socket.wants_write() {
            self.step(SLICE)?;
        }
        Ok(())
    }

    /// As [`flush`](Self::flush), at most so long; whether the socket has it all.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event).
    pub fn flush_within(&mut self, stream: u32, time: Duration) -> Result<bool, Error> {
        let end = Instant::now() + time;
        self.watch.begin(&self.connection);
        while !self.connection.is_sent(stream) || self.socket.wants_write() {
            if Instant::now() >= end {
                return Ok(false);
            }
            self.step(SLICE)?;
        }
        Ok(true)
    }

    /// Waits until the socket has all that was sent on all streams, and what this end has to say of
    /// the other's.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event). Blocks as long as the other end gives no credit.
    pub fn flush_all(&mut self) -> Result<(), Error> {
        self.watch.begin(&self.connection);
        while self.connection.has_unsent() || self.socket.wants_write() {
            match self.step(SLICE) {
                // It has all that was sent to it, and no use for what else there was to say.
                Err(Error::Closed { .. }) if !self.connection.owes() => break,
                done => done?,
            }
        }
        Ok(())
    }

    /// Reads and writes what goes without waiting; writes no more than some MiB, so that others
    /// have their turn. Whether something went or came.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event). Does not block.
    pub fn drive(&mut self) -> Result<bool, Error> {
        self.ready = Ready { read: true, write: true };
        self.watch.look();
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

    /// Says that this is the end and why, behind what was sent on all streams, and waits until the
    /// other end's system has that, which may be before it is read; where the system (others than
    /// Linux) does not tell, until the other end has read it. What comes meanwhile is dropped.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event): what was sent may not have come then. It is no error
    /// that the other end closes first, once the socket has all that was sent. Blocks as long as
    /// there is no credit.
    pub fn close(mut self, reason: &str) -> Result<(), Error> {
        self.flush_all()?;
        if matches!(self.connection.end_of_input(), Err(Error::Closed { .. })) {
            return Ok(());
        }
        match self.say_last(reason) {
            // Only this end's own farewell has not arrived.
            Err(Error::Closed { .. }) => Ok(()),
            done => done,
        }
    }

    /// Says why it ends, and waits until the other end's system has all.
    fn say_last(&mut self, reason: &str) -> Result<(), Error> {
        self.connection.close(reason);
        while self.connection.plan_writes() || self.socket.wants_write() {
            self.step(SLICE)?;
        }
        self.socket.shutdown().map_err(|error| self.socket.failed("closing", error))?;
        self.drain()
    }

    /// Reads on until the other end's system has all that was written: a socket that is closed
    /// before, and is sent something then, takes back what is still on its way.
    fn drain(&mut self) -> Result<(), Error> {
        let (mut dropped, mut nothing) = (vec![0; DROPPED], []);
        let (mut left, mut since) = (u64::MAX, Instant::now());
        while since.elapsed() < self.watch.timeout() {
            match self.socket.undelivered() {
                Some(0) => return Ok(()),
                Some(now) if now < left => (left, since) = (now, Instant::now()),
                _ => {}
            }
            self.socket.wait(Ready { read: true, write: false }, SLICE / 10)?;
            match self
                .socket
                .read(&mut [IoSliceMut::new(&mut dropped), IoSliceMut::new(&mut nothing)], false)
            {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                    // It is gone, and was the last to speak.
                    io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => return Ok(()),
                    _ => return Err(self.socket.failed("closing", error)),
                },
            }
        }
        Err(Error::Stalled { peer: self.socket.peer().into(), after: self.watch.timeout() })
    }

    /// How long nothing has gone on.
    pub(crate) fn at_rest(&mut self) -> Duration {
        self.watch.look();
        self.watch.at_rest(&self.connection)
    }

    /// # Errors
    /// [`Error::Stalled`] when something is under way and the other end has not done its part for
    /// longer than is waited for.
    pub(crate) fn check_progress(&mut self) -> Result<(), Error> {
        self.watch.check_progress(&self.connection, self.socket.peer())
    }

    /// Writes or reads something; when there is nothing to, waits until there is, at most about so
    /// long, or [`SLICE`].
    fn step(&mut self, longest: Duration) -> Result<(), Error> {
        let wait = !longest.is_zero();
        self.watch.step();
        // Before what there is to send is put into frames for the socket.
        self.share()?;
        if longest > SLICE / 2 && self.ended.is_none() && self.mute.is_none() && !self.wants_write()
        {
            self.check_progress()?;
            self.watch.check_life(&mut self.connection, self.socket.peer())?;
            // Whoever only waits for bytes does so where they come.
            return self.read(true).map(drop);
        }
        if self.write_and_read()? {
            return Ok(());
        }
        if let Some(error) = &self.mute {
            // What was there is read, and there are no events that wait: those are polled before.
            return Err(error.clone());
        }
        let left = if wait {
            self.check_progress()?;
            self.watch.check_life(&mut self.connection, self.socket.peer())?
        } else {
            Duration::ZERO
        };
        let pending = self.wants_write();
        let ready =
            self.socket.wait(Ready { read: true, write: pending }, left.min(longest).min(SLICE))?;
        self.watch.look();
        // What was not waited for is as it was.
        self.ready = Ready { read: ready.read, write: ready.write || !pending };
        if !wait {
            self.write_and_read()?;
        }
        Ok(())
    }

    /// Writes and reads as far as the socket is known to be ready for it. Whether something went or
    /// came.
    fn write_and_read(&mut self) -> Result<bool, Error> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        if self.connection.is_short_of_credit() {
            // What has come is worth a look before a payload is cut where its credit ends.
            self.read(false)?;
        }
        let wrote = self.mute.is_none() && self.ready.write && self.write()?;
        // Who cannot write looks for the last time for what the other end has said.
        let reads = self.ready.read || self.mute.is_some();
        Ok(reads && self.read(false)? || wrote)
    }

    /// Offers the other end shared memory, once there is something that it would speed up. Without
    /// it payloads go by the socket.
    fn share(&mut self) -> Result<(), Error> {
        if self.to_share > 0
            && self.connection.could_share()
            && let Ok(memory) = SharedMemory::create(std::mem::take(&mut self.to_share))
        {
            self.connection.share(memory)?;
        }
        Ok(())
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
        self.share()?;
        while self.ready.write && left > 0 && self.connection.plan_writes() {
            let slices = self.connection.write_slices(MAX_SLICES);
            let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
            match self.socket.write(&slices, self.connection.descriptor_to_send()) {
                Ok(len) => {
                    self.ready.write = self.socket.may_take_more(len, wanted);
                    let before = self.connection.moves();
                    self.connection.written(len);
                    // A full socket takes more when the other end's has taken some; a ping is no
                    // sign of the other's life.
                    if self.connection.moves() != before {
                        self.watch.hear();
                    }
                    wrote = true;
                    left = left.saturating_sub(len);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.ready.write = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // What the other end has said last is of more use than that it is gone.
                Err(error) => {
                    self.mute = Some(self.socket.failed("writing", error));
                    self.ready = Ready { read: true, write: false };
                }
            }
        }
        Ok(wrote)
    }

    /// Reads what is there, once, or waits for something for a while. Whether there was something.
    fn read(&mut self, wait: bool) -> Result<bool, Error> {
        if let Err(error) = self.connection.settle() {
            return self.end(error).map(|()| true);
        }
        let [first, second] = self.connection.read_targets()?;
        let wanted = first.len() + second.len();
        let read = self.socket.read(&mut [IoSliceMut::new(first), IoSliceMut::new(second)], wait);
        if wait {
            self.watch.look();
        }
        match read {
            Ok(0) => {
                let done = Error::Closed { reason: "it has no more to say".into() };
                Err(self.connection.end_of_input().err().unwrap_or(done))
            }
            Ok(len) => {
                self.ready.read = self.socket.may_have_more(len, wanted);
                self.watch.hear();
                if let Some(descriptor) = self.socket.take_descriptor() {
                    self.connection.descriptor_received(descriptor);
                    // One is all that a connection has use for.
                    self.socket.refuse_descriptors();
                }
                self.connection.filled(len).or_else(|error| self.end(error))?;
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

    /// What came has ended the connection. An error, unless there are events that came before.
    fn end(&mut self, error: Error) -> Result<(), Error> {
        if matches!(error, Error::Closed { .. }) {
            // It waits for that.
            let _ = self.socket.shutdown();
        }
        // The other end is told why, if it takes that.
        while self.connection.plan_writes()
            && let Ok(len) = self.socket.write(&self.connection.write_slices(MAX_SLICES), None)
        {
            self.connection.written(len);
        }
        // That is what ended it, also for who asks again and cannot write any more.
        self.ended = Some(error.clone());
        if self.connection.may_have_events() { Ok(()) } else { Err(error) }
    }
}
