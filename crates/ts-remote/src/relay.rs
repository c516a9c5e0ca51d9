// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decrypts TLS connections for other processes.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::socket::timespec;
use crate::{Error, Socket};

/// The buffer of each direction, in bytes.
const BUFFER: usize = 256 << 10;
/// The longest wait for a socket.
const SLICE: Duration = Duration::from_secs(1);
/// How long the remote end may take to receive the rest after the local end has closed.
const FAREWELL: Duration = Duration::from_secs(10);

/// Returns a Unix socket that carries the decrypted bytes of `socket`. A thread relays them both
/// ways until both ends have closed.
///
/// Counts the thread in `relayed` while it runs.
pub(crate) fn relayed(socket: Socket, relayed: &Arc<AtomicUsize>) -> Result<Socket, Error> {
    let peer = socket.peer().to_string();
    let failed = |error| Error::io(&peer, "relaying", error);
    let (near, far) = UnixStream::pair().map_err(failed)?;
    let mut far = Socket::of_unix(far, peer.clone()).map_err(failed)?;
    far.refuse_descriptors();
    let near = Socket::of_unix(near, peer.clone()).map_err(failed)?;
    relayed.fetch_add(1, Ordering::Relaxed);
    let counted = Counted(Arc::clone(relayed));
    let run = move || {
        let _counted = counted;
        relay(socket, far);
    };
    thread::Builder::new().name("tensorstream-relay".into()).spawn(run).map_err(failed)?;
    Ok(near)
}

/// Counts a thread until it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn relay(mut remote: Socket, mut local: Socket) {
    let (mut inbound, mut outbound) = (Way::new(), Way::new());
    let mut closed: Option<Instant> = None;
    while !(inbound.done && outbound.done) {
        let went = [inbound.go(&mut remote, &mut local), outbound.go(&mut local, &mut remote)];
        if went != [false, false] {
            continue;
        }
        match wait(&remote, &local, &inbound, &outbound, outbound.over && closed.is_none()) {
            Ok(false) => {}
            // Nobody reads what the remote end sends. What was sent to it before may still arrive.
            Ok(true) => {
                inbound.done = true;
                closed = Some(Instant::now());
            }
            Err(_) => return,
        }
        if closed.is_some_and(|since| since.elapsed() > FAREWELL) {
            return;
        }
    }
}

/// One direction: bytes read from one socket and not yet written to the other.
struct Way {
    bytes: Box<[u8]>,
    at: usize,
    end: usize,
    /// The source has closed.
    over: bool,
    /// The destination has been shut down, or has failed.
    done: bool,
}

impl Way {
    fn new() -> Self {
        Self { bytes: vec![0; BUFFER].into(), at: 0, end: 0, over: false, done: false }
    }

    fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// Reads if the buffer is empty, and writes. Returns whether anything moved.
    fn go(&mut self, from: &mut Socket, to: &mut Socket) -> bool {
        if self.done {
            return false;
        }
        let mut went = false;
        if self.is_empty() && !self.over {
            let mut into = [IoSliceMut::new(&mut self.bytes), IoSliceMut::new(&mut [])];
            if let Some(read) = at_once(from.read(&mut into, false)) {
                let len = read.unwrap_or(0);
                (self.at, self.end, self.over) = (0, len, len == 0);
                went = true;
            }
        }
        if !self.is_empty()
            && let Some(written) =
                at_once(to.write(&[IoSlice::new(&self.bytes[self.at..self.end])], None))
        {
            self.at += written.as_ref().copied().unwrap_or(0);
            self.done = written.is_err();
            went = true;
        }
        self.done |= at_once(to.flush()).is_some_and(|flushed| flushed.is_err());
        if self.over && self.is_empty() && !self.done && !to.wants_write() {
            self.done = true;
            let _ = to.shutdown();
        }
        went || self.done
    }
}

/// Returns `None` if the call would have blocked.
fn at_once<T>(done: io::Result<T>) -> Option<io::Result<T>> {
    match done {
        Err(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
        {
            None
        }
        done => Some(done),
    }
}

/// Waits until a socket can be read or written, as the two directions need. Returns whether the
/// local end has closed, if `watch` asks for it.
fn wait(
    remote: &Socket,
    local: &Socket,
    inbound: &Way,
    outbound: &Way,
    watch: bool,
) -> io::Result<bool> {
    let mut polled = Vec::with_capacity(2);
    for (socket, from, to, watched) in
        [(local, outbound, inbound, watch), (remote, inbound, outbound, false)]
    {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, from.is_empty() && !from.over && !from.done);
        flags.set(PollFlags::OUT, !to.done && (!to.is_empty() || socket.wants_write()));
        // poll reports the end of any socket that it is given, again and again.
        if watched || !flags.is_empty() {
            polled.push(PollFd::from_borrowed_fd(socket.as_fd(), flags));
        }
    }
    match poll(&mut polled, Some(&timespec(SLICE))) {
        Ok(_) => {
            let ended = |fd: &PollFd<'_>| fd.revents().intersects(PollFlags::HUP | PollFlags::ERR);
            Ok(watch && polled.first().is_some_and(ended))
        }
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
