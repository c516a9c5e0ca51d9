// SPDX-License-Identifier: MIT OR Apache-2.0
//! Passing accepted connections to other processes.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
#[cfg(feature = "tls")]
use std::sync::Arc;
#[cfg(feature = "tls")]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::RecvFlags;

use crate::acceptor::accept_all;
use crate::frame::{HEADER_LEN, Header, Kind, PREFACE};
use crate::hello::Hello;
use crate::socket::{SLICE, send_with, timespec};
#[cfg(feature = "tls")]
use crate::tls::TlsServer;
use crate::{ConnectionOptions, Error, Link, Listener, Role, Socket};

/// How long to wait before looking at an incomplete HELLO again, whose socket stays readable.
/// Doubles up to [`SLICE`].
const PAUSE: Duration = Duration::from_millis(2);
/// The most bytes of the preface and a HELLO.
const MAX_LEN: usize = 4096;
/// The most TLS connections at a time, each of which takes a thread.
#[cfg(feature = "tls")]
const MAX_RELAYED: usize = 4096;

/// Accepts and authenticates connections for other processes.
///
/// The dispatcher checks the token and the service in each client's HELLO, then yields a
/// [`Handoff`] that passes the socket to the process that serves it. The HELLO stays in the socket,
/// so that process completes the handshake without knowing the token. Clients with a wrong token or
/// service are refused here, with a reason.
///
/// Under TLS a thread of this process decrypts each connection, and relays it for as long as it is
/// open.
#[derive(Debug)]
pub struct Dispatcher {
    options: ConnectionOptions,
    pending: Vec<Pending>,
    scratch: Vec<u8>,
    #[cfg(feature = "tls")]
    tls: Option<TlsServer>,
    /// Decrypted connections that are open.
    #[cfg(feature = "tls")]
    relayed: Arc<AtomicUsize>,
}

/// A connection whose HELLO is incomplete.
#[derive(Debug)]
struct Pending {
    socket: Socket,
    since: Instant,
    /// When to look at an incomplete HELLO again, and for how long to wait after that.
    again: Option<(Instant, Duration)>,
    relayed: bool,
}

impl Pending {
    fn peer(&self) -> &str {
        self.socket.peer()
    }
}

/// An authenticated connection, to be passed to the process that serves it.
#[derive(Debug)]
pub struct Handoff {
    socket: Socket,
    service: String,
    relayed: bool,
}

/// The state of a pending connection.
enum Progress {
    Pending,
    /// It asks for this service, and may.
    Authenticated(String),
    /// The reason to give, unless the HELLO itself is invalid.
    Refused(String),
}

/// The most characters of a peer's address that are passed with a socket.
pub(crate) const MAX_PEER: usize = 100;

impl Handoff {
    /// The service that the client asks for: the dispatcher's, or one that starts with it and a
    /// `/`.
    pub fn service(&self) -> &str {
        &self.service
    }

    /// The client's address.
    pub fn peer(&self) -> &str {
        self.socket.peer()
    }

    /// Passes the socket to the process at the other end of `channel`, a Unix socket of type
    /// `SOCK_SEQPACKET`, which receives it from [`Listener::from_handoffs`]. Does not block.
    ///
    /// # Errors
    /// [`Error::Io`] if that process has ended or its queue is full. The connection is closed.
    pub fn send_to(self, channel: impl AsFd) -> Result<(), Error> {
        let peer: String = self.peer().chars().take(MAX_PEER).collect();
        let relayed = [u8::from(self.relayed)];
        let parts = [IoSlice::new(&relayed), IoSlice::new(peer.as_bytes())];
        let sent = send_with(channel, &parts, self.socket.as_fd());
        sent.map(drop).map_err(|error| Error::io(&peer, "passing the connection on", error))
    }

    /// Closes the connection, and tells the client why.
    pub fn refuse(self, reason: &str) {
        refuse(self.socket, ConnectionOptions::default(), reason);
    }
}

impl Dispatcher {
    /// Accepts clients of `options.service`, and of services that start with it and a `/`. Clients
    /// that send no complete HELLO within `options.idle_timeout` are disconnected.
    pub fn new(options: ConnectionOptions) -> Self {
        Self {
            options,
            pending: Vec::new(),
            scratch: vec![0; MAX_LEN],
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "tls")]
            relayed: Arc::default(),
        }
    }

    /// Requires TLS of connections over TCP.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self, tls: TlsServer) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Returns the next authenticated connection, or `None` after `time`. Calls `log` with the peer
    /// and the reason for each connection that fails. Blocks.
    ///
    /// # Errors
    /// [`Error::Io`] if the listener fails. Errors of single connections only go to `log`.
    pub fn accept_within(
        &mut self,
        listener: &Listener,
        time: Duration,
        mut log: impl FnMut(&str, &Error),
    ) -> Result<Option<Handoff>, Error> {
        listener.set_nonblocking()?;
        let end = Instant::now().checked_add(time);
        loop {
            let left = end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()));
            if self.wait(listener, left.min(SLICE))? {
                let mut pending = std::mem::take(&mut self.pending);
                let accepted = accept_all(
                    listener,
                    &mut pending,
                    |socket| self.receive(socket),
                    Pending::peer,
                    &mut log,
                );
                self.pending = pending;
                accepted?;
            }
            let mut at = 0;
            while at < self.pending.len() {
                match self.progress(at) {
                    Ok(Progress::Pending) => at += 1,
                    Ok(Progress::Authenticated(service)) => {
                        let Pending { socket, relayed, .. } = self.pending.remove(at);
                        return Ok(Some(Handoff { socket, service, relayed }));
                    }
                    Ok(Progress::Refused(reason)) => {
                        let socket = self.pending.remove(at).socket;
                        let peer = socket.peer().to_string();
                        log(&peer, &refuse(socket, self.options.clone(), &reason));
                    }
                    Err(error) => log(self.pending.remove(at).socket.peer(), &error),
                }
            }
            if left.is_zero() {
                return Ok(None);
            }
        }
    }

    fn receive(&self, socket: Socket) -> Result<Pending, Error> {
        let since = Instant::now();
        #[cfg(feature = "tls")]
        if let Some(tls) = self.tls.as_ref().filter(|_| socket.is_tcp()) {
            if self.relayed.load(Ordering::Relaxed) >= MAX_RELAYED {
                return Err(Error::Misuse(format!(
                    "there are {MAX_RELAYED} TLS connections, the maximum"
                )));
            }
            let socket = crate::relay::relayed(socket.into_tls_server(tls)?, &self.relayed)?;
            return Ok(Pending { socket, since, again: None, relayed: true });
        }
        Ok(Pending { socket, since, again: None, relayed: false })
    }

    /// Waits for a new connection, or for the first bytes of a pending one. Returns whether the
    /// listener is ready.
    fn wait(&self, listener: &Listener, longest: Duration) -> Result<bool, Error> {
        let mut polled = vec![PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
        let silent = self.pending.iter().filter(|pending| pending.again.is_none());
        polled
            .extend(silent.map(|one| PollFd::from_borrowed_fd(one.socket.as_fd(), PollFlags::IN)));
        let again =
            self.pending.iter().filter_map(|pending| pending.again).map(|(when, _)| when).min();
        let longest = again
            .map_or(longest, |when| longest.min(when.saturating_duration_since(Instant::now())));
        match poll(&mut polled, Some(&timespec(longest))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(!polled[0].revents().is_empty()),
            Err(error) => Err(Error::io(&listener.address().to_string(), "waiting", error.into())),
        }
    }

    /// Looks at what a client has sent so far, and leaves it in the socket.
    fn progress(&mut self, at: usize) -> Result<Progress, Error> {
        let pending = &mut self.pending[at];
        if pending.again.is_some_and(|(when, _)| when > Instant::now()) {
            return Ok(Progress::Pending);
        }
        let peer = pending.socket.peer();
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let len = match rustix::net::recv(&pending.socket, &mut self.scratch[..], flags) {
            Ok((0, _)) => return Err(Error::Lost { what: format!("to {peer}, before its HELLO") }),
            Ok((len, _)) => len,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(error) => {
                return Err(pending.socket.failed("reading its HELLO", io::Error::from(error)));
            }
        };
        let Some(hello) = hello(&self.scratch[..len]) else {
            let after = self.options.idle_timeout;
            if pending.since.elapsed() > after {
                return Err(Error::TimedOut { peer: peer.into(), after });
            }
            if len > 0 {
                let pause = pending.again.map_or(PAUSE, |(_, pause)| SLICE.min(2 * pause));
                pending.again = Some((Instant::now() + pause, pause));
            }
            return Ok(Progress::Pending);
        };
        let offered = &self.options.service;
        Ok(match hello {
            Ok(hello) if hello.knows(self.options.token.as_deref()) => {
                let rest = hello.service.strip_prefix(offered.as_str());
                if rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
                    Progress::Authenticated(hello.service)
                } else {
                    let wanted = &hello.service;
                    Progress::Refused(format!(
                        "unknown service {wanted:?}: this server offers {offered:?}"
                    ))
                }
            }
            _ => Progress::Refused(format!("invalid HELLO: expected at most {MAX_LEN} bytes")),
        })
    }
}

/// Lets the connection itself answer an invalid HELLO; closes it with `reason` if the HELLO is
/// valid.
fn refuse(socket: Socket, options: ConnectionOptions, reason: &str) -> Error {
    let options = ConnectionOptions { window_bytes: 1, ..options };
    let mut link: Link<Vec<u8>> = Link::unmet(socket, Role::Acceptor, options);
    // The HELLO takes a few rounds. The client may go on to send for ever.
    for _ in 0..8 {
        match link.drive() {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => return error,
        }
    }
    link.connection().close(reason);
    let _ = link.drive();
    Error::Misuse(reason.into())
}

/// Parses the preface and the HELLO; `None` while they are incomplete.
fn hello(bytes: &[u8]) -> Option<Result<Hello, Error>> {
    let bad = |what: &str| Error::Protocol { stream: 0, what: what.into() };
    let known = bytes.len().min(PREFACE.len());
    if bytes[..known] != PREFACE[..known] {
        return Some(Err(bad("no preface")));
    }
    let (head, body) = bytes[known..].split_first_chunk::<HEADER_LEN>()?;
    match Header::decode(head) {
        Ok(Header { len, .. }) if len > (MAX_LEN - known - HEADER_LEN) as u64 => {
            Some(Err(bad("a HELLO that is too long")))
        }
        Ok(Header { kind: Kind::Hello, len, .. }) => body.get(..len as usize).map(Hello::decode),
        Ok(_) => Some(Err(bad("another frame before HELLO"))),
        Err(error) => Some(Err(error)),
    }
}
