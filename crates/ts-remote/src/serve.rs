// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many connections on one thread.

use std::time::{Duration, Instant};

use crate::acceptor::{accept, wait};
#[cfg(feature = "tls")]
use crate::tls::TlsServer;
use crate::{
    Connection, ConnectionOptions, ConnectionStats, Error, Event, Link, Listener, Role, Sink,
    Socket,
};

/// What a server does for one that has connected.
pub trait Handler {
    /// What payloads are received to.
    type Sink: Sink;

    /// Something came. What is sent on `connection` goes out when the socket takes it.
    ///
    /// # Errors
    /// Why the connection is to end: the other end is told.
    fn handle(
        &mut self,
        event: Event<Self::Sink>,
        connection: &mut Connection<Self::Sink>,
    ) -> Result<(), String>;

    /// Whether it takes more now. What comes meanwhile waits, and credit with it.
    fn is_ready(&mut self, connection: &mut Connection<Self::Sink>) -> bool {
        connection.unsent_bytes() == 0
    }
}

/// How a server is set up.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Of each connection.
    pub connection: ConnectionOptions,
    /// The most connections at a time. Of more those wait that come last.
    pub max_connections: usize,
    /// The most that have not said who they are; for another the oldest of them goes.
    pub max_pending: usize,
    /// How long who connects may take to say who it is.
    pub handshake_timeout: Duration,
    /// How long a connection may be open and nothing be wanted of it. Who wants something later
    /// connects again.
    pub idle_timeout: Duration,
    /// How long transfers that are under way may take to end after the server was stopped. A
    /// connection counts as idle when nothing has been sent or requested for half a second.
    pub grace_period: Duration,
    /// Certificates, for connections by TCP.
    #[cfg(feature = "tls")]
    pub tls: Option<TlsServer>,
}

impl Default for ServerOptions {
    /// 512 connections, 128 of them without an introduction, for which there are 10 s; 10 minutes
    /// for idle ones; a grace period of 10 s; windows of 64 KiB, for clients that send little and
    /// receive much.
    fn default() -> Self {
        Self {
            connection: ConnectionOptions {
                window_bytes: 64 << 10,
                max_streams: 16,
                ..ConnectionOptions::default()
            },
            max_connections: 512,
            max_pending: 128,
            handshake_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(600),
            grace_period: Duration::from_secs(10),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }
}

/// What a server has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ServerStats {
    /// Connections that were accepted.
    pub accepted: u64,
    /// Of these, those that never said who they were.
    pub failed_handshakes: u64,
    /// Connections that ended with an error.
    pub failed: u64,
    /// Bytes written.
    pub sent_bytes: u64,
    /// Bytes read.
    pub received_bytes: u64,
}

impl ServerStats {
    fn count(&mut self, connection: &ConnectionStats) {
        self.sent_bytes += connection.sent_bytes;
        self.received_bytes += connection.received_bytes;
    }
}

struct Guest<S: Handler> {
    link: Link<S::Sink>,
    session: S,
    since: Instant,
    met: bool,
}

/// How often the server looks whether it is to stop, and at what waits for other things than its
/// socket.
const SLICE: Duration = Duration::from_millis(50);

/// How long a connection must be idle before a server that was stopped closes it: longer than most
/// round trips, after which a client requests the next part of what it reads.
const QUIET: Duration = Duration::from_millis(500);
/// What clients are told then.
const STOPPED: &str = "the server was stopped";

/// Serves until `stop` returns true, which is asked at least every 50 ms. Then no connection is
/// accepted, and those that are open go on until they are idle, at most [`ServerOptions::grace_period`].
/// `session` makes what serves one that has connected; `log` hears why connections end. Blocks.
///
/// # Errors
/// [`Error::Io`] when the listener fails for good. No connection's error ends it.
pub fn serve<S: Handler>(
    listener: &Listener,
    options: &ServerOptions,
    stop: &mut dyn FnMut() -> bool,
    mut session: impl FnMut(&str) -> S,
    mut log: impl FnMut(&str, &Error),
) -> Result<ServerStats, Error> {
    listener.set_nonblocking()?;
    let mut stats = ServerStats::default();
    let mut guests: Vec<Guest<S>> = Vec::new();
    let mut busy = false;
    let mut end: Option<Instant> = None;
    loop {
        // Also afterwards: who is asked may see that the process is to end at once.
        if stop() && end.is_none() {
            end = Some(Instant::now() + options.grace_period);
        }
        if let Some(end) = end {
            let late = Instant::now() >= end;
            guests.retain_mut(|guest| {
                let goes = late || guest.is_quiet();
                if goes {
                    guest.dismiss();
                    stats.count(&guest.link.stats());
                }
                !goes
            });
            if guests.is_empty() {
                return Ok(stats);
            }
        }
        let accepting = end.is_none() && guests.len() < options.max_connections;
        let links = guests.iter_mut().map(|guest| &mut guest.link).collect();
        let ready = wait(listener, accepting, links, if busy { Duration::ZERO } else { SLICE })?;
        if ready[0] && accepting {
            while let Some(socket) = accept(listener)? {
                stats.accepted += 1;
                match guest(socket, options, &mut session) {
                    Ok(guest) => guests.push(guest),
                    Err(error) => log("a socket", &error),
                }
                if guests.len() >= options.max_connections {
                    break;
                }
            }
            stats.failed_handshakes += turn_away(&mut guests, options);
        }
        busy = false;
        let mut number = 0;
        guests.retain_mut(|guest| {
            number += 1;
            let polled = ready.get(number).copied().unwrap_or(true);
            let kept = polled || guest.waits();
            let result = if kept { guest.turn() } else { Ok(false) };
            let result = result.and_then(|went| guest.check(options.idle_timeout).map(|()| went));
            match result {
                Ok(went) => {
                    busy |= went;
                    let late = !guest.met && guest.since.elapsed() > options.handshake_timeout;
                    stats.failed_handshakes += u64::from(late);
                    !late
                }
                Err(error) => {
                    stats.count(&guest.link.stats());
                    stats.failed += u64::from(!matches!(error, Error::Closed { .. }));
                    log(guest.link.peer(), &error);
                    false
                }
            }
        });
    }
}

fn guest<S: Handler>(
    socket: Socket,
    options: &ServerOptions,
    session: &mut impl FnMut(&str) -> S,
) -> Result<Guest<S>, Error> {
    #[cfg(feature = "tls")]
    let socket = socket.into_tls_if_asked(options.tls.as_ref())?;
    let session = session(socket.peer());
    let link = Link::unmet(socket, Role::Acceptor, options.connection.clone());
    Ok(Guest { link, session, since: Instant::now(), met: false })
}

/// Ends the oldest of those who have not said who they are, if there are too many; how many.
fn turn_away<S: Handler>(guests: &mut Vec<Guest<S>>, options: &ServerOptions) -> u64 {
    let strangers = guests.iter().filter(|guest| !guest.met).count();
    let mut surplus = strangers.saturating_sub(options.max_pending);
    let gone = surplus as u64;
    guests.retain(|guest| {
        let goes = surplus > 0 && !guest.met;
        surplus -= usize::from(goes);
        !goes
    });
    gone
}

impl<S: Handler> Guest<S> {
    /// Whether there may be something to do for it that its socket does not tell of: bytes that TLS
    /// has taken off it, events that waited, or what it was to be sent and there was no memory for.
    fn waits(&mut self) -> bool {
        let before = self.link.peek().unsent_bytes();
        let ready = self.session.is_ready(self.link.connection());
        let after = self.link.peek().unsent_bytes();
        self.link.may_read() || after > before || (ready && self.link.peek().may_have_events())
    }

    /// # Errors
    /// [`Error::Stalled`] when it does not take what it is sent; [`Error::Closed`] when nothing has
    /// been wanted for long.
    fn check(&mut self, idle_timeout: Duration) -> Result<(), Error> {
        self.link.check_progress()?;
        if self.link.at_rest() < idle_timeout {
            return Ok(());
        }
        let reason = format!("nothing was wanted for {idle_timeout:?}");
        self.link.connection().close(&reason);
        self.link.drive()?;
        Err(Error::Closed { reason })
    }

    /// Whether it can be closed without cutting a transfer.
    fn is_quiet(&mut self) -> bool {
        !self.met || (!self.link.wants_write() && self.link.at_rest() >= QUIET)
    }

    /// Tells the other end that the server was stopped, if it takes that.
    fn dismiss(&mut self) {
        self.link.connection().close(STOPPED);
        let _ = self.link.drive();
    }

    /// Reads, serves and writes, as much as goes; whether something did.
    fn turn(&mut self) -> Result<bool, Error> {
        let mut went = self.link.drive()?;
        self.met |= self.link.peek().is_connected();
        while self.session.is_ready(self.link.connection())
            && let Some(event) = self.link.connection().poll()
        {
            went = true;
            if let Err(reason) = self.session.handle(event, self.link.connection()) {
                self.link.connection().close(&reason);
                self.link.drive()?;
                return Err(Error::Misuse(reason));
            }
        }
        Ok(self.link.drive()? || went)
    }
}
