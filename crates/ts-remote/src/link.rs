// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection over a socket, for callers that may block.

use std::io::{self, IoSliceMut};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, OwnedFd};
#[cfg(unix)]
use ts_pool::SharedMemory;

use crate::liveness::Liveness;
use crate::socket::{POLL_INTERVAL, Ready, Socket};
use crate::{
    Address, Connection, ConnectionOptions, ConnectionStats, Error, Event, Role, SendOptions, Sink,
    TensorInfo,
};

/// Ends a connection on another thread than the one that uses its [`Link`].
#[derive(Debug)]
pub struct AbortHandle(OwnedFd);

impl AbortHandle {
    /// Ends the connection in both directions. Does not block. Calls of the link that wait return
    /// an error. Data that was not sent yet is lost.
    pub fn abort(&self) {
        // The peer may have closed the connection already.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

/// One end of a connection over a [`Socket`].
///
/// It does I/O only while one of its methods runs. A method that waits both reads and writes
/// meanwhile.
///
/// If two ends [`send`](Self::send) more than a window to each other at the same time, both calls
/// fail, at least one of them with [`Error::Stalled`]. The reason is that neither end takes the
/// [`Event::Metadata`] that requests memory. Queue such tensors with
/// [`connection`](Self::connection) instead, and call [`next_event`](Self::next_event), which sends
/// and receives.
///
/// The [crate documentation](crate) has an example.
#[derive(Debug)]
pub struct Link<S> {
    connection: Connection<S>,
    socket: Socket,
    liveness: Liveness,
    /// The length of the shared memory to offer, in bytes. 0 if shared memory is disabled, or after
    /// the first attempt to offer it.
    #[cfg(unix)]
    shared_bytes: usize,
    /// The readiness of the socket at the last check.
    ready: Ready,
    /// The error that ended the connection. Methods return it after all earlier events.
    end_error: Option<Error>,
    /// The error that ended writing. The peer's last frames are still read.
    write_error: Option<Error>,
}

/// Once this many bytes have been written, writing stops, so that this end reads and other
/// connections are served.
const MAX_WRITE: usize = 4 << 20;
/// The length of the buffer for bytes that are read and dropped.
const DISCARD_LEN: usize = 64 << 10;
/// The maximum number of slices per system call.
const MAX_SLICES: usize = 16;

impl<S: Sink> Link<S> {
    /// Connects to an address and completes the handshake. Blocks.
    ///
    /// # Errors
    /// Returns:
    /// - [`Error::Io`] if the connection cannot be established.
    /// - [`Error::TimedOut`] if the handshake takes longer than the idle timeout.
    /// - [`Error::Closed`] with the reason if the peer refuses the connection.
    /// - [`Error::Protocol`] if the peer uses another protocol.
    /// - [`Error::Lost`] if the peer disconnects before the handshake is complete.
    pub fn connect(address: &Address, options: ConnectionOptions) -> Result<Self, Error> {
        let socket = Socket::connect(address, options.idle_timeout)?;
        Self::new(socket, Role::Connector, options)
    }

    /// Completes the handshake on a socket. Blocks.
    ///
    /// # Errors
    /// Returns the same errors as [`connect`](Self::connect), except for errors of connecting.
    /// Returns [`Error::Tls`] if TLS fails. An acceptor returns [`Error::Protocol`] if the peer
    /// sends no token or a wrong one.
    pub fn new(socket: Socket, role: Role, options: ConnectionOptions) -> Result<Self, Error> {
        let mut this = Self::start(socket, role, options);
        while !this.handshake_within(POLL_INTERVAL)? {}
        Ok(this)
    }

    /// Continues the handshake for about `time`. Returns whether the handshake is complete. Blocks.
    ///
    /// # Errors
    /// Returns the same errors as [`new`](Self::new).
    pub fn handshake_within(&mut self, time: Duration) -> Result<bool, Error> {
        let end = Instant::now() + time;
        self.liveness.begin_wait(&self.connection);
        self.liveness.check_handshake(&self.connection, self.socket.peer())?;
        // An acceptor must also have sent its own HELLO.
        while !self.connection.is_connected()
            || self.connection.has_unsent()
            || self.socket.wants_write()
        {
            if Instant::now() >= end {
                return Ok(false);
            }
            self.step(POLL_INTERVAL)?;
        }
        // The peer may have closed the connection after it read this end's HELLO.
        self.end_error.clone().map_or(Ok(true), Err)
    }

    /// Starts the handshake on a socket, which [`handshake_within`](Self::handshake_within) then
    /// completes. Does not block.
    pub fn start(mut socket: Socket, role: Role, mut options: ConnectionOptions) -> Self {
        if !socket.takes_descriptors() {
            options.shared_bytes = 0;
        }
        if options.shared_bytes == 0 {
            socket.disable_descriptors();
        }
        let liveness = Liveness::new(&options);
        #[cfg(unix)]
        let shared_bytes = options.shared_bytes;
        let connection = Connection::new(role, options);
        let ready = Ready { read: true, write: true };
        Self {
            connection,
            socket,
            liveness,
            #[cfg(unix)]
            shared_bytes,
            ready,
            end_error: None,
            write_error: None,
        }
    }

    /// Returns the connection, to open streams, queue tensors and provide memory.
    pub fn connection(&mut self) -> &mut Connection<S> {
        &mut self.connection
    }

    pub(crate) fn stall_timeout(&self) -> Duration {
        self.liveness.stall_timeout()
    }

    /// Returns the address of the peer, as text.
    pub fn peer(&self) -> &str {
        self.socket.peer()
    }

    /// Returns a handle with which another thread can end the connection.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the process has too many open files.
    pub fn abort_handle(&self) -> Result<AbortHandle, Error> {
        let socket = self.socket.as_fd().try_clone_to_owned();
        socket.map(AbortHandle).map_err(|error| self.socket.failed("duplicating", error))
    }

    /// Returns counters of the bytes and frames since the connection began.
    pub fn stats(&self) -> ConnectionStats {
        self.connection.stats()
    }

    /// Returns the next event. Blocks until there is one.
    ///
    /// # Errors
    /// Returns the error that ended the connection. Returns [`Error::TimedOut`] if the peer does
    /// not answer PINGs, and [`Error::Stalled`] if the peer answers but a transfer makes no
    /// progress.
    pub fn next_event(&mut self) -> Result<Event<S>, Error> {
        self.liveness.begin_wait(&self.connection);
        loop {
            if let Some(event) = self.connection.poll() {
                return Ok(event);
            }
            self.step(POLL_INTERVAL)?;
        }
    }

    /// Returns the next event, or `None` if there is none within `time`. Blocks.
    ///
    /// # Errors
    /// Returns the same errors as [`next_event`](Self::next_event).
    pub fn next_event_within(&mut self, time: Duration) -> Result<Option<Event<S>>, Error> {
        let end = Instant::now() + time;
        self.liveness.begin_wait(&self.connection);
        loop {
            let event = self.connection.poll();
            let left = end.saturating_duration_since(Instant::now());
            if event.is_some() || left.is_zero() {
                return Ok(event);
            }
            self.step(left)?;
        }
    }

    /// Returns the next event, if one is available. Does not block.
    ///
    /// # Errors
    /// Returns the error that ended the connection. Does not check the timeouts.
    pub fn poll_event(&mut self) -> Result<Option<Event<S>>, Error> {
        let event = self.connection.poll();
        if event.is_none() {
            self.step(Duration::ZERO)?;
        }
        Ok(event.or_else(|| self.connection.poll()))
    }

    /// Sends a tensor on a stream and waits until the socket has taken all of it. Events that
    /// arrive meanwhile are queued. Blocks while the peer grants no credit.
    ///
    /// # Errors
    /// Returns the same errors as [`Connection::send`] and [`next_event`](Self::next_event).
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

    /// Sends a message on a stream and waits until the socket has taken it. Blocks while the peer
    /// grants no credit.
    ///
    /// # Errors
    /// Returns the same errors as [`Connection::send_message`] and
    /// [`next_event`](Self::next_event).
    pub fn send_message(&mut self, stream: u32, message: Bytes) -> Result<(), Error> {
        self.connection.send_message(stream, message)?;
        self.flush(stream)
    }

    /// Waits until the socket has taken everything that is queued on a stream. Blocks while the
    /// peer grants no credit.
    ///
    /// # Errors
    /// Returns the same errors as [`next_event`](Self::next_event).
    pub fn flush(&mut self, stream: u32) -> Result<(), Error> {
        self.liveness.begin_wait(&self.connection);
        while !self.connection.is_sent(stream) || self.socket.wants_write() {
            self.step(POLL_INTERVAL)?;
        }
        Ok(())
    }

    /// Waits like [`flush`](Self::flush), but only for about `time`. Returns whether the socket has
    /// taken everything.
    ///
    /// # Errors
    /// Returns the same errors as [`next_event`](Self::next_event).
    pub fn flush_within(&mut self, stream: u32, time: Duration) -> Result<bool, Error> {
        let end = Instant::now() + time;
        self.liveness.begin_wait(&self.connection);
        while !self.connection.is_sent(stream) || self.socket.wants_write() {
            if Instant::now() >= end {
                return Ok(false);
            }
            self.step(POLL_INTERVAL)?;
        }
        Ok(true)
    }

    /// Waits until the socket has taken all control frames, and everything that is queued on all
    /// streams. Blocks while the peer grants no credit.
    ///
    /// # Errors
    /// Returns the same errors as [`next_event`](Self::next_event). Succeeds if the peer closes the
    /// connection after the socket has taken all data of the user.
    pub fn flush_all(&mut self) -> Result<(), Error> {
        self.liveness.begin_wait(&self.connection);
        while self.connection.has_unsent() || self.socket.wants_write() {
            match self.step(POLL_INTERVAL) {
                // The socket has taken all user data, and the peer needs no more control frames.
                Err(end) if end.is_end() && !self.connection.has_unsent_user_data() => break,
                done => done?,
            }
        }
        Ok(())
    }

    /// Reads and writes without blocking. Writes at most a few MiB, so that other connections can
    /// be served. Returns whether anything was read or written.
    ///
    /// # Errors
    /// Returns the error that ended the connection. Does not check the timeouts.
    pub fn drive(&mut self) -> Result<bool, Error> {
        self.ready = Ready { read: true, write: true };
        self.liveness.update();
        self.write_and_read()
    }

    /// Returns whether data waits to be written. If so, call [`drive`](Self::drive) once the socket
    /// is writable.
    pub fn wants_write(&mut self) -> bool {
        self.connection.plan_writes() || self.socket.wants_write()
    }

    /// Returns whether there may be more to read even if the socket does not become readable.
    pub(crate) fn may_read(&self) -> bool {
        self.ready.read
    }

    pub(crate) fn peek(&self) -> &Connection<S> {
        &self.connection
    }

    /// Returns the socket's descriptor and the events to wait for.
    pub(crate) fn poll_fd(&mut self) -> PollFd<'_> {
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, self.wants_write());
        PollFd::from_borrowed_fd(self.socket.as_fd(), flags)
    }

    /// Sends everything that is queued on all streams, then closes the connection with a reason.
    /// Drops everything that arrives meanwhile.
    ///
    /// Blocks while the peer grants no credit, and then until the peer's system has acknowledged
    /// everything. The peer may read it later. On systems other than Linux, a TCP connection blocks
    /// until the peer has closed its end.
    ///
    /// # Errors
    /// Returns the same errors as [`next_event`](Self::next_event). Sent data may then be lost.
    /// Succeeds if the peer closes the connection after the socket has taken all data of the user.
    pub fn close(mut self, reason: &str) -> Result<(), Error> {
        self.flush_all()?;
        if matches!(self.connection.end_of_input(), Err(Error::Closed { .. })) {
            return Ok(());
        }
        match self.send_close(reason) {
            // The peer ended it first, so only this end's CLOSE is missing.
            Err(end) if end.is_end() => Ok(()),
            done => done,
        }
    }

    /// Sends CLOSE, and waits until the peer's system has acknowledged everything.
    fn send_close(&mut self, reason: &str) -> Result<(), Error> {
        self.connection.close(reason);
        while self.connection.plan_writes() || self.socket.wants_write() {
            self.step(POLL_INTERVAL)?;
        }
        self.socket.shutdown().map_err(|error| self.socket.failed("closing", error))?;
        self.drain()
    }

    /// Reads and drops bytes until the peer's system has acknowledged everything. If the socket
    /// were closed earlier and then received something, the system would reset the connection and
    /// drop bytes in transit.
    fn drain(&mut self) -> Result<(), Error> {
        let (mut discarded, mut empty) = (vec![0; DISCARD_LEN], []);
        let (mut left, mut since) = (u64::MAX, Instant::now());
        while since.elapsed() < self.liveness.idle_timeout() {
            match self.socket.undelivered() {
                Some(0) => return Ok(()),
                Some(now) if now < left => (left, since) = (now, Instant::now()),
                _ => {}
            }
            self.socket.wait(Ready { read: true, write: false }, POLL_INTERVAL / 10)?;
            let mut into = [IoSliceMut::new(&mut discarded), IoSliceMut::new(&mut empty)];
            match self.socket.read(&mut into, false) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                    // The peer has closed the connection, usually because of this end's CLOSE.
                    io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::UnexpectedEof => return Ok(()),
                    _ => return Err(self.socket.failed("closing", error)),
                },
            }
        }
        let after = self.liveness.idle_timeout();
        Err(Error::Stalled { peer: self.socket.peer().into(), after })
    }

    /// Returns for how long the connection has made no progress.
    pub(crate) fn idle_time(&mut self) -> Duration {
        self.liveness.update();
        self.liveness.idle_time(&self.connection)
    }

    /// Checks that transfers make progress.
    ///
    /// # Errors
    /// Returns [`Error::Stalled`] if a transfer is in progress but has made no progress for the
    /// stall timeout.
    pub(crate) fn check_progress(&mut self) -> Result<(), Error> {
        self.liveness.check_progress(&self.connection, self.socket.peer())
    }

    /// Writes or reads something. If neither is possible, waits for about `timeout`, but not longer
    /// than [`POLL_INTERVAL`].
    fn step(&mut self, timeout: Duration) -> Result<(), Error> {
        let wait = !timeout.is_zero();
        self.liveness.begin_step();
        // Shared memory must be offered before payloads are put into frames for the socket.
        #[cfg(unix)]
        self.share()?;
        if timeout > POLL_INTERVAL / 2
            && self.end_error.is_none()
            && self.write_error.is_none()
            && !self.wants_write()
        {
            self.check_progress()?;
            self.liveness.check_peer(&mut self.connection, self.socket.peer())?;
            // A read that blocks saves a call of poll.
            return self.read(true).map(drop);
        }
        if self.write_and_read()? {
            return Ok(());
        }
        if let Some(error) = &self.write_error {
            // Everything available has been read, and `next_event` polls before it calls this.
            return Err(error.clone());
        }
        let left = if wait {
            self.check_progress()?;
            self.liveness.check_peer(&mut self.connection, self.socket.peer())?
        } else {
            Duration::ZERO
        };
        let writing = self.wants_write();
        let wanted = Ready { read: true, write: writing };
        let ready = self.socket.wait(wanted, left.min(timeout).min(POLL_INTERVAL))?;
        self.liveness.update();
        // If nothing waits to be written, the socket was not checked and counts as writable.
        self.ready = Ready { read: ready.read, write: ready.write || !writing };
        if !wait {
            self.write_and_read()?;
        }
        Ok(())
    }

    /// Writes and reads if the socket is known to be ready. Returns whether anything was written or
    /// read.
    fn write_and_read(&mut self) -> Result<bool, Error> {
        if let Some(error) = &self.end_error {
            return Err(error.clone());
        }
        if self.connection.is_short_of_credit() {
            // More credit may have arrived. The payload is then not split where the old credit
            // ends.
            self.read(false)?;
        }
        let wrote = self.write_error.is_none() && self.ready.write && self.write()?;
        // If writing fails, the peer's last frames are still read.
        let reads = self.ready.read || self.write_error.is_some();
        Ok(reads && self.read(false)? || wrote)
    }

    /// Offers the peer shared memory once there is a payload for it. If that fails, payloads go
    /// through the socket.
    #[cfg(unix)]
    fn share(&mut self) -> Result<(), Error> {
        if self.shared_bytes > 0
            && self.connection.could_share()
            && let Ok(memory) = SharedMemory::create(std::mem::take(&mut self.shared_bytes))
        {
            self.connection.share(memory)?;
        }
        Ok(())
    }

    /// Writes what the socket takes. Returns whether it took anything.
    fn write(&mut self) -> Result<bool, Error> {
        let (mut wrote, mut left) = (false, MAX_WRITE);
        if self.socket.wants_write() {
            match self.socket.flush() {
                Ok(()) => wrote = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.ready.write = false,
                Err(error) => return Err(self.socket.failed("writing", error)),
            }
        }
        #[cfg(unix)]
        self.share()?;
        while self.ready.write && left > 0 && self.connection.plan_writes() {
            let slices = self.connection.write_slices(MAX_SLICES);
            let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
            #[cfg(unix)]
            let descriptor = self.connection.descriptor_to_send();
            #[cfg(windows)]
            let descriptor = None;
            match self.socket.write(&slices, descriptor) {
                Ok(len) => {
                    self.ready.write = self.socket.may_take_more(len, wanted);
                    let before = self.connection.progress();
                    self.connection.written(len);
                    // A full socket takes more only after the peer's system has received some
                    // bytes, so a write is a sign of activity. A written PING is not.
                    if self.connection.progress() != before {
                        self.liveness.note_activity();
                    }
                    wrote = true;
                    left = left.saturating_sub(len);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.ready.write = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // If the peer's CLOSE can still be read, its reason explains more than this error.
                Err(error) => {
                    self.write_error = Some(self.socket.failed("writing", error));
                    self.ready = Ready { read: true, write: false };
                }
            }
        }
        Ok(wrote)
    }

    /// Reads once. If `wait` is set, waits at most the socket's read timeout for bytes. Returns
    /// whether any bytes were read. Also returns true if postponed bytes were invalid, but earlier
    /// events can still be polled.
    fn read(&mut self, wait: bool) -> Result<bool, Error> {
        if let Err(error) = self.connection.settle() {
            return self.end(error).map(|()| true);
        }
        let [first, second] = self.connection.read_targets()?;
        let wanted = first.len() + second.len();
        let read = self.socket.read(&mut [IoSliceMut::new(first), IoSliceMut::new(second)], wait);
        if wait {
            self.liveness.update();
        }
        match read {
            Ok(0) => {
                let end = self.connection.end_of_input().err();
                Err(end.unwrap_or(Error::Abandoned))
            }
            Ok(len) => {
                self.ready.read = self.socket.may_have_more(len, wanted);
                self.liveness.note_activity();
                #[cfg(unix)]
                if let Some(descriptor) = self.socket.take_descriptor() {
                    self.connection.descriptor_received(descriptor);
                    // A connection uses at most one descriptor.
                    self.socket.disable_descriptors();
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

    /// Ends the connection after an error in received bytes. Returns the error, unless earlier
    /// events can still be polled.
    fn end(&mut self, error: Error) -> Result<(), Error> {
        if matches!(error, Error::Closed { .. }) {
            // The peer waits for the end of the byte stream.
            let _ = self.socket.shutdown();
        }
        // Sends the peer the reason, as far as the socket takes it without blocking.
        while self.connection.plan_writes()
            && let Ok(len) = self.socket.write(&self.connection.write_slices(MAX_SLICES), None)
        {
            self.connection.written(len);
        }
        // Later calls return this error too.
        self.end_error = Some(error.clone());
        if self.connection.may_have_events() { Ok(()) } else { Err(error) }
    }
}
