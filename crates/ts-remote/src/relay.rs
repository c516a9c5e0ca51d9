// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decrypts TLS connections for other processes.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fd::AsFd;

use crate::fd;
use crate::{Error, Socket};

/// The length of the buffer of each direction, in bytes.
const BUFFER_LEN: usize = 256 << 10;
/// The maximum duration of one `poll`, so that the relay checks `CLOSE_TIMEOUT` regularly.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The longest time for the remote end to receive the rest after the local end has closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns a Unix socket that carries the decrypted bytes of `socket`. Starts a thread that relays
/// the bytes until both directions have ended. The thread ends at most about [`CLOSE_TIMEOUT`]
/// after the local end has closed.
///
/// `relayed` counts the running threads.
pub(crate) fn relayed(socket: Socket, relayed: &Arc<AtomicUsize>) -> Result<Socket, Error> {
    let peer = socket.peer().to_string();
    let failed = |error| Error::io(&peer, "starting a TLS relay", error);
    let (near, far) = UnixStream::pair().map_err(failed)?;
    let mut far = Socket::from_unix(far, peer.clone()).map_err(failed)?;
    far.disable_descriptors();
    let near = Socket::from_unix(near, peer.clone()).map_err(failed)?;
    relayed.fetch_add(1, Ordering::Relaxed);
    let guard = CountGuard(Arc::clone(relayed));
    let run = move || {
        let _guard = guard;
        relay(socket, far);
    };
    thread::Builder::new().name("tensorstream-relay".into()).spawn(run).map_err(failed)?;
    Ok(near)
}

/// Decrements the number of relay threads when it is dropped.
struct CountGuard(Arc<AtomicUsize>);

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn relay(mut remote: Socket, mut local: Socket) {
    let (mut inbound, mut outbound) = (Direction::new(), Direction::new());
    let mut closed: Option<Instant> = None;
    while !(inbound.done && outbound.done) {
        let moved = [inbound.copy(&mut remote, &mut local), outbound.copy(&mut local, &mut remote)];
        if moved != [false, false] {
            continue;
        }
        let watch = outbound.source_closed && closed.is_none();
        match wait(&remote, &local, &inbound, &outbound, watch) {
            Ok(false) => {}
            // The local end has closed, so bytes from the remote end are dropped. Bytes that the
            // local end sent before may still arrive.
            Ok(true) => {
                inbound.done = true;
                closed = Some(Instant::now());
            }
            Err(_) => return,
        }
        if closed.is_some_and(|since| since.elapsed() > CLOSE_TIMEOUT) {
            return;
        }
    }
}

/// One direction. `bytes[at..end]` were read from one socket and not yet written to the other.
struct Direction {
    bytes: Box<[u8]>,
    at: usize,
    end: usize,
    source_closed: bool,
    /// Whether the destination has been shut down or has failed.
    done: bool,
}

impl Direction {
    fn new() -> Self {
        Self { bytes: vec![0; BUFFER_LEN].into(), at: 0, end: 0, source_closed: false, done: false }
    }

    fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// Reads if the buffer is empty, then writes the buffer. Returns whether anything was read or
    /// written, or the direction has just ended.
    fn copy(&mut self, from: &mut Socket, to: &mut Socket) -> bool {
        if self.done {
            return false;
        }
        let mut moved = false;
        if self.is_empty() && !self.source_closed {
            let mut into = [IoSliceMut::new(&mut self.bytes), IoSliceMut::new(&mut [])];
            if let Some(read) = unless_blocked(from.read(&mut into, false)) {
                let len = read.unwrap_or(0);
                (self.at, self.end, self.source_closed) = (0, len, len == 0);
                moved = true;
            }
        }
        if !self.is_empty()
            && let Some(written) =
                unless_blocked(to.write(&[IoSlice::new(&self.bytes[self.at..self.end])], None))
        {
            self.at += written.as_ref().copied().unwrap_or(0);
            self.done = written.is_err();
            moved = true;
        }
        self.done |= unless_blocked(to.flush()).is_some_and(|flushed| flushed.is_err());
        if self.source_closed && self.is_empty() && !self.done && !to.wants_write() {
            self.done = true;
            let _ = to.shutdown();
        }
        moved || self.done
    }
}

/// Returns `None` if the call would have blocked.
fn unless_blocked<T>(done: io::Result<T>) -> Option<io::Result<T>> {
    match done {
        Err(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
        {
            None
        }
        done => Some(done),
    }
}

/// Waits until a socket is ready for the reads and writes that the two directions need. If `watch`
/// is set, returns whether the local end has closed. Otherwise, returns false.
fn wait(
    remote: &Socket,
    local: &Socket,
    inbound: &Direction,
    outbound: &Direction,
    watch: bool,
) -> io::Result<bool> {
    let mut polled = Vec::with_capacity(2);
    for (socket, from, to, watched) in
        [(local, outbound, inbound, watch), (remote, inbound, outbound, false)]
    {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, from.is_empty() && !from.source_closed && !from.done);
        flags.set(PollFlags::OUT, !to.done && (!to.is_empty() || socket.wants_write()));
        // `poll` returns at once for a closed socket, so sockets that need no event are left out.
        if watched || !flags.is_empty() {
            polled.push(PollFd::from_borrowed_fd(socket.as_fd(), flags));
        }
    }
    fd::poll(&mut polled, POLL_INTERVAL)?;
    let ended = |fd: &PollFd<'_>| fd.revents().intersects(PollFlags::HUP | PollFlags::ERR);
    Ok(watch && polled.first().is_some_and(ended))
}
