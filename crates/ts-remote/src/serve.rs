// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server for many connections on one thread.

use std::time::{Duration, Instant};

#[cfg(feature = "tls")]
use crate::tls::TlsServer;
use crate::{
    Connection, ConnectionOptions, ConnectionStats, Error, Event, Link, Listener, Role, Sink,
    Socket, fd,
};

/// Handles one connection of [`serve`].
pub trait Handler {
    /// The memory that payloads are received into.
    type Sink: Sink;

    /// Handles an event. The server writes the data that the handler queues on `connection`. The
    /// handler must not block, because all connections share one thread.
    ///
    /// # Errors
    /// Returns the reason for closing the connection, which the client receives.
    fn handle(
        &mut self,
        event: Event<Self::Sink>,
        connection: &mut Connection<Self::Sink>,
    ) -> Result<(), String>;

    /// Returns whether the handler takes events now. If not, events wait, and the client gets no
    /// more credit. The default implementation returns whether everything queued has been written.
    fn is_ready(&mut self, connection: &mut Connection<Self::Sink>) -> bool {
        connection.unsent_bytes() == 0
    }
}

/// Options of [`serve`].
///
/// ```
/// use std::time::Duration;
/// use ts_remote::ServerOptions;
///
/// let options = ServerOptions::default()
///     .with_max_connections(64)
///     .with_idle_timeout(Duration::from_secs(60));
/// assert_eq!(options.max_pending, 128);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerOptions {
    /// The options of every connection.
    pub connection: ConnectionOptions,
    /// The maximum number of open connections. Further clients wait to be accepted.
    pub max_connections: usize,
    /// The maximum number of pending handshakes. If another client connects, the oldest is dropped.
    pub max_pending: usize,
    /// The longest time that a handshake may take.
    pub handshake_timeout: Duration,
    /// The longest time without transfers before the server closes a connection.
    pub idle_timeout: Duration,
    /// The longest time that transfers may continue after the server was stopped. A connection
    /// without transfers for half a second is closed earlier.
    pub grace_period: Duration,
    /// The TLS configuration. If it is set, all TCP connections require TLS.
    #[cfg(feature = "tls")]
    pub tls: Option<TlsServer>,
}

impl Default for ServerOptions {
    /// Returns these options:
    ///
    /// - 512 connections, and 128 pending handshakes
    /// - a handshake timeout of 10 seconds, and an idle timeout of 10 minutes
    /// - a grace period of 10 seconds
    /// - no TLS
    /// - windows of 64 KiB, for clients that send little and receive much
    fn default() -> Self {
        Self {
            connection: ConnectionOptions::default().with_window_bytes(64 << 10),
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

impl ServerOptions {
    /// Sets the options of every [`connection`](Self::connection).
    #[must_use]
    pub fn with_connection(mut self, connection: ConnectionOptions) -> Self {
        self.connection = connection;
        self
    }

    /// Sets [`max_connections`](Self::max_connections), the limit of open connections.
    #[must_use]
    pub fn with_max_connections(mut self, max_connections: usize) -> Self {
        self.max_connections = max_connections;
        self
    }

    /// Sets [`max_pending`](Self::max_pending), the limit of pending handshakes.
    #[must_use]
    pub fn with_max_pending(mut self, max_pending: usize) -> Self {
        self.max_pending = max_pending;
        self
    }

    /// Sets [`handshake_timeout`](Self::handshake_timeout), the longest time for a handshake.
    #[must_use]
    pub fn with_handshake_timeout(mut self, handshake_timeout: Duration) -> Self {
        self.handshake_timeout = handshake_timeout;
        self
    }

    /// Sets [`idle_timeout`](Self::idle_timeout), after which idle connections are closed.
    #[must_use]
    pub fn with_idle_timeout(mut self, idle_timeout: Duration) -> Self {
        self.idle_timeout = idle_timeout;
        self
    }

    /// Sets the [`grace_period`](Self::grace_period) for transfers after the server was stopped.
    #[must_use]
    pub fn with_grace_period(mut self, grace_period: Duration) -> Self {
        self.grace_period = grace_period;
        self
    }

    /// Sets the [`tls`](Self::tls) configuration, or removes it if `tls` is `None`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self, tls: impl Into<Option<TlsServer>>) -> Self {
        self.tls = tls.into();
        self
    }
}

/// Statistics of one call of [`serve`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ServerStats {
    /// Accepted connections.
    pub accepted: u64,
    /// Connections that are open, including pending handshakes. 0 when `serve` returns.
    pub open: usize,
    /// Connections dropped because the handshake took too long or too many were pending.
    pub failed_handshakes: u64,
    /// Connections that ended with an error, other than that [the client ended it](Error::is_end).
    pub failed: u64,
    /// Bytes written to clients.
    pub sent_bytes: u64,
    /// Bytes read from clients.
    pub received_bytes: u64,
}

impl ServerStats {
    /// Returns these statistics, which have the bytes of ended connections, with open ones.
    fn with_open<H: Handler>(mut self, clients: &[Client<H>]) -> Self {
        self.open = clients.len();
        clients.iter().for_each(|client| self.count(&client.link.stats()));
        self
    }

    /// Counts a connection that is dropped during its handshake.
    fn drop_pending<H: Handler>(&mut self, client: &Client<H>) {
        self.failed_handshakes += 1;
        self.count(&client.link.stats());
    }

    fn count(&mut self, connection: &ConnectionStats) {
        self.sent_bytes += connection.sent_bytes;
        self.received_bytes += connection.received_bytes;
    }
}

/// An accepted connection and its handler.
struct Client<H: Handler> {
    link: Link<H::Sink>,
    handler: H,
    accepted_at: Instant,
    is_connected: bool,
}

/// The longest wait between calls of `stop`, and between checks of conditions that no socket
/// reports.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The idle time after which a stopped server closes a connection. Most clients request the next
/// part of a file within this time.
const IDLE_BEFORE_CLOSE: Duration = Duration::from_millis(500);
/// The reason with which a stopped server closes connections.
const STOPPED: &str = "the server was stopped";

/// Serves connections until `stop` returns true. Blocks. For each connection, calls `new_handler`
/// with the client's address. Calls `log` with the client's address and the error for each
/// connection that fails, is idle for too long, or is closed by the client. Handshakes that are
/// dropped are only counted in [`ServerStats::failed_handshakes`].
///
/// Calls `stop` with the statistics so far, and waits for at most 50 ms between two calls. Once it
/// has returned true, no more connections are accepted. Open connections are closed when they are
/// idle, or after [`ServerOptions::grace_period`].
///
/// # Errors
/// Returns [`Error::Io`] if the listener fails, and [`Error::Closed`] if a
/// [handoff channel](Listener::from_handoffs) has closed. Errors of single connections are only
/// passed to `log`.
///
/// # Examples
/// ```
/// use std::thread;
/// use std::time::Duration;
/// use ts_remote::{
///     Connection, ConnectionOptions, Event, Handler, Link, Listener, ServerOptions, serve,
/// };
///
/// /// Sends each message back.
/// struct Echo(Option<u32>);
///
/// impl Handler for Echo {
///     type Sink = Vec<u8>;
///
///     fn handle(
///         &mut self,
///         event: Event<Vec<u8>>,
///         connection: &mut Connection<Vec<u8>>,
///     ) -> Result<(), String> {
///         let Event::Message { bytes, .. } = event else { return Ok(()) };
///         let stream = match self.0 {
///             Some(stream) => Ok(stream),
///             None => connection.open_stream(),
///         };
///         let sent = stream.and_then(|stream| {
///             self.0 = Some(stream);
///             connection.send_message(stream, bytes)
///         });
///         sent.map_err(|error| error.to_string())
///     }
/// }
///
/// let listener = Listener::bind(&"127.0.0.1:0".parse()?, Duration::from_secs(30))?;
/// let address = listener.address().clone();
/// let (stop, stopped) = std::sync::mpsc::channel();
/// let server = thread::spawn(move || {
///     let mut should_stop = |_: &_| stopped.try_recv().is_ok();
///     serve(&listener, &ServerOptions::default(), &mut should_stop, |_| Echo(None), |_, _| {})
/// });
///
/// let mut link = Link::<Vec<u8>>::connect(&address, ConnectionOptions::default())?;
/// let stream = link.connection().open_stream()?;
/// link.send_message(stream, "hello".into())?;
/// loop {
///     if let Event::Message { bytes, .. } = link.next_event()? {
///         assert_eq!(bytes, "hello");
///         break;
///     }
/// }
/// drop(link);
/// stop.send(()).expect("the server runs");
/// assert_eq!(server.join().expect("the server does not panic")?.accepted, 1);
/// # Ok::<(), ts_remote::Error>(())
/// ```
pub fn serve<H: Handler>(
    listener: &Listener,
    options: &ServerOptions,
    stop: &mut dyn FnMut(&ServerStats) -> bool,
    mut new_handler: impl FnMut(&str) -> H,
    mut log: impl FnMut(&str, &Error),
) -> Result<ServerStats, Error> {
    listener.set_nonblocking()?;
    let most_pending = fd::most_pending(options.max_pending);
    let mut stats = ServerStats::default();
    let mut clients: Vec<Client<H>> = Vec::new();
    let mut busy = false;
    let mut end: Option<Instant> = None;
    loop {
        // `stop` is called even after `end` is set, because the callback may end the process at
        // once.
        if stop(&stats.with_open(&clients)) && end.is_none() {
            end = Some(Instant::now() + options.grace_period);
        }
        if let Some(end) = end {
            let late = Instant::now() >= end;
            clients.retain_mut(|client| {
                let closes = late || client.is_idle();
                if closes {
                    client.close_stopped();
                    stats.count(&client.link.stats());
                }
                !closes
            });
            if clients.is_empty() {
                return Ok(stats);
            }
        }
        let accepting = end.is_none() && clients.len() < options.max_connections;
        let sockets = clients.iter_mut().map(|client| client.link.poll_fd());
        let timeout = if busy { Duration::ZERO } else { POLL_INTERVAL };
        let ready = listener.wait_with(accepting, sockets, timeout)?;
        if ready[0] && accepting {
            while let Some(socket) = listener.accept_waiting()? {
                stats.accepted += 1;
                match Client::new(socket, options, &mut new_handler) {
                    Ok(client) => clients.push(client),
                    Err(error) => log("a new connection", &error),
                }
                // While many clients wait, those that were accepted first must not keep the
                // descriptors for the others.
                drop_excess_pending(&mut clients, most_pending, &mut stats);
                if clients.len() >= options.max_connections {
                    break;
                }
            }
        }
        busy = false;
        let mut number = 0;
        clients.retain_mut(|client| {
            number += 1;
            let polled = ready.get(number).copied().unwrap_or(true);
            let drives = polled || client.has_work();
            let result = if drives { client.drive() } else { Ok(false) };
            let result =
                result.and_then(|moved| client.check(options.idle_timeout).map(|()| moved));
            match result {
                Ok(moved) => {
                    busy |= moved;
                    let late = !client.is_connected
                        && client.accepted_at.elapsed() > options.handshake_timeout;
                    if late {
                        stats.drop_pending(client);
                    }
                    !late
                }
                Err(error) => {
                    stats.count(&client.link.stats());
                    stats.failed += u64::from(!error.is_end());
                    log(client.link.peer(), &error);
                    false
                }
            }
        });
    }
}

/// Drops the oldest pending handshakes if there are too many.
fn drop_excess_pending<H: Handler>(
    clients: &mut Vec<Client<H>>,
    most: usize,
    stats: &mut ServerStats,
) {
    let pending = clients.iter().filter(|client| !client.is_connected).count();
    let mut excess = pending.saturating_sub(most);
    clients.retain(|client| {
        let drops = excess > 0 && !client.is_connected;
        if drops {
            excess -= 1;
            stats.drop_pending(client);
        }
        !drops
    });
}

impl<H: Handler> Client<H> {
    fn new(
        socket: Socket,
        options: &ServerOptions,
        new_handler: &mut impl FnMut(&str) -> H,
    ) -> Result<Self, Error> {
        #[cfg(feature = "tls")]
        let socket = socket.into_tls_if_tcp(options.tls.as_ref())?;
        let handler = new_handler(socket.peer());
        let link = Link::start(socket, Role::Acceptor, options.connection.clone());
        Ok(Self { link, handler, accepted_at: Instant::now(), is_connected: false })
    }

    /// Returns whether there may be work that the socket does not report: bytes that TLS has
    /// buffered, events that waited for the handler, or an answer that waited for memory.
    fn has_work(&mut self) -> bool {
        let before = self.link.peek().unsent_bytes();
        let ready = self.handler.is_ready(self.link.connection());
        let after = self.link.peek().unsent_bytes();
        self.link.may_read() || after > before || (ready && self.link.peek().may_have_events())
    }

    /// Checks that transfers make progress, and that the connection is not idle for too long.
    ///
    /// # Errors
    /// Returns [`Error::Stalled`] if a transfer makes no progress. After the idle timeout, closes
    /// the connection and returns [`Error::Closed`].
    fn check(&mut self, idle_timeout: Duration) -> Result<(), Error> {
        self.link.check_progress()?;
        if self.link.idle_time() < idle_timeout {
            return Ok(());
        }
        let reason = format!("no data was transferred for {idle_timeout:?}");
        self.link.connection().close(&reason);
        self.link.drive()?;
        Err(Error::Closed { reason })
    }

    /// Returns whether the connection is in its handshake, or probably has no transfer in progress:
    /// nothing is left to write, and there was no progress for [`IDLE_BEFORE_CLOSE`].
    fn is_idle(&mut self) -> bool {
        !self.is_connected
            || (!self.link.wants_write() && self.link.idle_time() >= IDLE_BEFORE_CLOSE)
    }

    /// Closes the connection because the server was stopped.
    fn close_stopped(&mut self) {
        self.link.connection().close(STOPPED);
        let _ = self.link.drive();
    }

    /// Reads, handles events and writes, without blocking. Returns whether anything was done.
    fn drive(&mut self) -> Result<bool, Error> {
        let mut moved = self.link.drive()?;
        self.is_connected |= self.link.peek().is_connected();
        while self.handler.is_ready(self.link.connection())
            && let Some(event) = self.link.connection().poll()
        {
            moved = true;
            if let Err(reason) = self.handler.handle(event, self.link.connection()) {
                self.link.connection().close(&reason);
                self.link.drive()?;
                return Err(Error::Misuse(reason));
            }
        }
        Ok(self.link.drive()? || moved)
    }
}
