// SPDX-License-Identifier: MIT OR Apache-2.0
//! Passes accepted connections to other processes.

use std::io::{self, IoSlice};
#[cfg(feature = "tls")]
use std::sync::Arc;
#[cfg(feature = "tls")]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fd::AsFd;

use crate::fd;
use crate::frame::{HEADER_LEN, Header, Kind, PREFACE};
use crate::handshakes::{Handshake, Handshakes, Progress};
use crate::hello::Hello;
use crate::listener::MAX_PEER_CHARS;
use crate::socket::POLL_INTERVAL;
#[cfg(feature = "tls")]
use crate::tls::TlsServer;
use crate::{Backoff, ConnectionOptions, Error, Link, Listener, Role, Socket};

/// The first delay before an incomplete HELLO is checked again. The socket stays readable, so poll
/// would not wait.
const FIRST_RETRY: Duration = Duration::from_millis(2);
/// The maximum length of the preface and HELLO together, in bytes.
const MAX_LEN: usize = 4096;
/// The maximum number of open TLS connections. Each of them takes a thread.
#[cfg(feature = "tls")]
const MAX_RELAYED: usize = 4096;

/// Accepts and authenticates connections for other processes.
///
/// The dispatcher checks the token and the service in each client's HELLO. It then returns a
/// [`Handoff`], which passes the socket to the process that serves the client. The HELLO stays in
/// the socket, and the other process completes the handshake. That process does not need the token.
/// If the token or the service is wrong, the dispatcher refuses the client and sends the reason.
///
/// Under TLS, a thread of this process decrypts each connection and relays its bytes until the
/// connection ends.
///
/// ```no_run
/// use std::os::unix::net::UnixStream;
/// use std::time::Duration;
/// use ts_remote::{ConnectionOptions, Dispatcher, Listener};
///
/// /// Returns a `SOCK_SEQPACKET` socket to the process of a service.
/// fn channel_to(service: &str) -> Option<UnixStream> {
///     # let _ = service;
///     None
/// }
///
/// let options =
///     ConnectionOptions::default().with_service("exec").with_token("secret".to_string());
/// let listener = Listener::bind(&"0.0.0.0:5000".parse()?, options.idle_timeout)?;
/// let mut dispatcher = Dispatcher::new(options);
/// let mut log = |peer: &str, error: &ts_remote::Error| eprintln!("{peer}: {error}");
/// loop {
///     let next = dispatcher.accept_within(&listener, Duration::from_secs(1), &mut log)?;
///     let Some(handoff) = next else { continue };
///     match channel_to(handoff.service()) {
///         Some(channel) => handoff.send_to(channel)?,
///         None => handoff.refuse("no such session"),
///     }
/// }
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug)]
pub struct Dispatcher {
    handshakes: Handshakes<PendingHello>,
    #[cfg(feature = "tls")]
    tls: Option<TlsServer>,
    /// The number of open connections that are relayed.
    #[cfg(feature = "tls")]
    relayed: Arc<AtomicUsize>,
}

/// A connection whose HELLO is incomplete.
#[derive(Debug)]
struct PendingHello {
    socket: Socket,
    since: Instant,
    /// The time of the next check of an incomplete HELLO, and the delays after it. `None` until a
    /// byte has arrived.
    retry: Option<(Instant, Backoff)>,
    relayed: bool,
}

/// An authenticated connection, to be passed to the process that serves it.
#[derive(Debug)]
pub struct Handoff {
    socket: Socket,
    service: String,
    relayed: bool,
}

impl Handoff {
    /// Returns the service that the client requests. It is the dispatcher's service, optionally
    /// followed by `/` and more text.
    pub fn service(&self) -> &str {
        &self.service
    }

    /// Returns the client's address.
    pub fn peer(&self) -> &str {
        self.socket.peer()
    }

    /// Passes the socket to the process at the other end of `channel`, a Unix socket of type
    /// `SOCK_SEQPACKET`. That process receives it with [`Listener::from_handoffs`]. Does not block.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if that process has ended or its queue is full. The connection is then
    /// closed.
    pub fn send_to(self, channel: impl AsFd) -> Result<(), Error> {
        let peer: String = self.peer().chars().take(MAX_PEER_CHARS).collect();
        let relayed = [u8::from(self.relayed)];
        let parts = [IoSlice::new(&relayed), IoSlice::new(peer.as_bytes())];
        let sent = fd::send_with_descriptor(channel, &parts, self.socket.as_fd());
        sent.map(drop)
            .map_err(|error| Error::io(&peer, "passing the connection to another process", error))
    }

    /// Closes the connection, and sends the client the reason. Does not block.
    pub fn refuse(self, reason: &str) {
        refuse(self.socket, ConnectionOptions::default(), reason);
    }
}

impl Dispatcher {
    /// Creates a dispatcher for clients that request `options.service`, optionally followed by `/`
    /// and more text. It disconnects clients that do not send a complete HELLO within
    /// `options.idle_timeout`.
    pub fn new(options: ConnectionOptions) -> Self {
        Self {
            handshakes: Handshakes::new(options),
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "tls")]
            relayed: Arc::default(),
        }
    }

    /// Requires TLS on all TCP connections.
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
    /// Returns [`Error::Io`] if the listener fails, and [`Error::Closed`] if a
    /// [handoff channel](Listener::from_handoffs) has closed. Errors of single connections are only
    /// passed to `log`.
    pub fn accept_within(
        &mut self,
        listener: &Listener,
        time: Duration,
        log: impl FnMut(&str, &Error),
    ) -> Result<Option<Handoff>, Error> {
        #[cfg(feature = "tls")]
        let (tls, relayed) = (self.tls.as_ref(), &self.relayed);
        let start = |socket: Socket, _: &ConnectionOptions| {
            #[cfg(feature = "tls")]
            if let Some(tls) = tls.filter(|_| socket.is_plain_tcp()) {
                if relayed.load(Ordering::Relaxed) >= MAX_RELAYED {
                    return Err(Error::Misuse(format!(
                        "cannot accept a TLS connection: the maximum of {MAX_RELAYED} connections \
                         is already open"
                    )));
                }
                let socket = crate::relay::relayed(socket.into_tls_server(tls)?, relayed)?;
                return Ok(PendingHello::new(socket, true));
            }
            Ok(PendingHello::new(socket, false))
        };
        let accepted = self.handshakes.accept_within(listener, time, start, log)?;
        Ok(accepted.map(|(PendingHello { socket, relayed, .. }, service)| Handoff {
            socket,
            service,
            relayed,
        }))
    }
}

impl PendingHello {
    fn new(socket: Socket, relayed: bool) -> Self {
        Self { socket, since: Instant::now(), retry: None, relayed }
    }
}

impl Handshake for PendingHello {
    /// The service that the client requests.
    type Output = String;

    fn peer(&self) -> &str {
        self.socket.peer()
    }

    fn poll_fd(&mut self) -> Option<PollFd<'_>> {
        let silent = self.retry.is_none();
        silent.then(|| PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN))
    }

    fn time_to_advance(&self) -> Option<Duration> {
        self.retry.as_ref().map(|(when, _)| when.saturating_duration_since(Instant::now()))
    }

    /// Parses the bytes that the client has sent so far, and leaves them in the socket.
    fn advance(&mut self, options: &ConnectionOptions) -> Result<Progress<String>, Error> {
        if self.retry.as_ref().is_some_and(|(when, _)| *when > Instant::now()) {
            return Ok(Progress::Pending);
        }
        let mut bytes = [0; MAX_LEN];
        let len = match fd::peek(&self.socket, &mut bytes) {
            Ok(0) => {
                let what =
                    format!("{} disconnected before its HELLO was complete", self.socket.peer());
                return Err(Error::Lost { what });
            }
            Ok(len) => len,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => 0,
                _ => return Err(self.socket.failed("reading its HELLO", error)),
            },
        };
        let Some(hello) = parse_hello(&bytes[..len]) else {
            let after = options.idle_timeout;
            if self.since.elapsed() > after {
                return Err(Error::TimedOut { peer: self.socket.peer().into(), after });
            }
            if len > 0 {
                let mut backoff = match self.retry.take() {
                    Some((_, backoff)) => backoff,
                    None => Backoff::new(FIRST_RETRY, POLL_INTERVAL),
                };
                self.retry = Some((Instant::now() + backoff.next_delay(), backoff));
            }
            return Ok(Progress::Pending);
        };
        let offered = &options.service;
        Ok(match hello {
            Ok(hello) if hello.has_token(options.token.as_deref()) => {
                let rest = hello.service.strip_prefix(offered.as_str());
                if rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
                    Progress::Complete(hello.service)
                } else {
                    let requested = &hello.service;
                    Progress::Refused(format!(
                        "unknown service {requested:?}: this server offers {offered:?}"
                    ))
                }
            }
            // If HELLO is invalid or has a wrong token, `refuse` sends that error instead.
            _ => Progress::Refused(format!(
                "HELLO is too long: expected at most {MAX_LEN} bytes, including the preface"
            )),
        })
    }

    fn refuse(self, options: &ConnectionOptions, reason: &str) -> Error {
        refuse(self.socket, options.clone(), reason)
    }
}

/// Closes a connection with `reason`. If the peer's HELLO is invalid or has a wrong token, sends
/// the peer that error instead. Returns the error to log.
fn refuse(socket: Socket, options: ConnectionOptions, reason: &str) -> Error {
    let options = ConnectionOptions { window_bytes: 1, ..options };
    let mut link: Link<Vec<u8>> = Link::start(socket, Role::Acceptor, options.clone());
    // Processing the HELLO takes a few rounds. They are limited, because the client may send for
    // ever.
    for _ in 0..8 {
        match link.drive() {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => return error,
        }
    }
    link.refuse(&options, reason)
}

/// Parses the preface and the HELLO. Returns `None` while they are incomplete.
fn parse_hello(bytes: &[u8]) -> Option<Result<Hello, Error>> {
    let bad = |what: &str| Error::Protocol { stream: 0, what: what.into() };
    let known = bytes.len().min(PREFACE.len());
    if bytes[..known] != PREFACE[..known] {
        return Some(Err(bad("received an invalid preface")));
    }
    let (head, body) = bytes[known..].split_first_chunk::<HEADER_LEN>()?;
    match Header::decode(head) {
        Ok(Header { len, .. }) if len > (MAX_LEN - known - HEADER_LEN) as u64 => {
            Some(Err(bad("received HELLO that is too long")))
        }
        Ok(Header { kind: Kind::Hello, len, .. }) => body.get(..len as usize).map(Hello::decode),
        Ok(_) => Some(Err(bad("received a frame before HELLO"))),
        Err(error) => Some(Err(error)),
    }
}
