// SPDX-License-Identifier: MIT OR Apache-2.0
//! The server side of sessions.

mod batch;
mod executor;
mod host;
mod session;
mod upload;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::channel::Hello;
use ts_remote::{Error, ErrorKind, Link};

pub use executor::Executor;
pub use host::HostExecutor;
use session::{SLICE, ServingStatus, Session};
pub use upload::UploadSink;

/// The name of the service, which a client requests in the HELLO of its connection.
pub const EXEC: &str = "exec";

/// The maximum number of sessions that are kept without a link. Beyond that, the session that lost
/// its link first is dropped.
const MAX_DISCONNECTED: usize = 64;

/// Returns the service name that identifies a session in a client's HELLO.
///
/// A [`Dispatcher`](ts_remote::Dispatcher) can use this name to pass the client's connections to
/// the process that has the session.
///
/// # Examples
///
/// ```
/// let service = ts_exec::service_name([0xab; 16]);
/// assert_eq!(service, "exec/abababababababababababababababab");
/// ```
pub fn service_name(session: [u8; 16]) -> String {
    format!("{EXEC}/{:032x}", u128::from_be_bytes(session))
}

/// The sessions of a server, each with its own [`Executor`].
///
/// A session outlives its link: a client that reconnects in time finds its tensors again, and its
/// requests run once.
///
/// # Examples
///
/// ```
/// use std::sync::atomic::AtomicBool;
/// use std::thread;
/// use std::time::Duration;
///
/// use ts_exec::{Client, ClientOptions, HostExecutor, SessionServer};
/// use ts_exec::ts_remote::{ConnectionOptions, Link, Listener, Role};
///
/// let options = ConnectionOptions::default();
/// let listener = Listener::bind(&"127.0.0.1:0".parse()?, options.idle_timeout)?;
/// let address = listener.address().clone();
///
/// let sessions = SessionServer::new(Duration::from_secs(60));
/// let stop = AtomicBool::new(false);
/// thread::scope(|scope| {
///     scope.spawn(|| {
///         let link = Link::new(listener.accept()?, Role::Acceptor, options)?;
///         sessions.serve(link, HostExecutor::new, &stop)
///     });
///     let dial = move || Link::connect(&address, ConnectionOptions::default());
///     let client: Client<Vec<u8>> = Client::connect(ClientOptions::new(dial), [1; 16])?;
///     assert_eq!(sessions.count(), 1);
///     client.close()
/// })?;
/// assert_eq!(sessions.count(), 0);
/// # Ok::<(), ts_exec::ts_remote::Error>(())
/// ```
pub struct SessionServer<E: Executor> {
    reconnect_timeout: Duration,
    idle_timeout: Option<Duration>,
    sessions: Mutex<HashMap<[u8; 16], SessionEntry<E>>>,
    /// Notified when a thread has stopped serving a session.
    changed: Condvar,
}

enum SessionEntry<E: Executor> {
    /// A thread serves the session.
    Serving(Arc<ServingStatus>),
    /// The link was lost at this time.
    Disconnected(Box<Session<E>>, Instant),
}

impl<E: Executor> fmt::Debug for SessionServer<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionServer")
            .field("reconnect_timeout", &self.reconnect_timeout)
            .finish_non_exhaustive()
    }
}

impl<E: Executor + Send> SessionServer<E> {
    /// Creates a server without sessions. `reconnect_timeout` is how long a session is kept after
    /// its link was lost.
    pub fn new(reconnect_timeout: Duration) -> Self {
        Self {
            reconnect_timeout,
            idle_timeout: None,
            sessions: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Ends sessions whose connected clients send no request for this long. By default they go on.
    #[must_use]
    pub fn with_idle_timeout(self, timeout: Duration) -> Self {
        Self { idle_timeout: Some(timeout), ..self }
    }

    /// Returns the number of sessions, with and without a link.
    pub fn count(&self) -> usize {
        self.sessions.lock().len()
    }

    /// Returns whether an operator is still running although its client has been disconnected for
    /// the reconnect timeout or longer. An operator cannot be interrupted; only ending the process
    /// stops it.
    pub fn is_stuck(&self) -> bool {
        self.sessions.lock().values().any(|entry| match entry {
            SessionEntry::Serving(status) => {
                let lost_since = *status.lost_since.lock();
                lost_since.is_some_and(|since| since.elapsed() >= self.reconnect_timeout)
            }
            SessionEntry::Disconnected(..) => false,
        })
    }

    /// Drops the sessions whose clients have not reconnected in time.
    pub fn sweep(&self) {
        let is_expired = |entry: &SessionEntry<E>| match entry {
            SessionEntry::Serving(_) => false,
            SessionEntry::Disconnected(_, since) => since.elapsed() >= self.reconnect_timeout,
        };
        let mut sessions = self.sessions.lock();
        let removed: Vec<_> = sessions.extract_if(|_, entry| is_expired(entry)).collect();
        // Dropping an executor may take long, so the sessions are unlocked first.
        drop(sessions);
        drop(removed);
    }

    /// Serves a connected client. Blocks until the client ends its session, loses its link or
    /// connects again, or until `stop` is set. Setting `stop` ends the session, and frees its
    /// tensors. So does the idle timeout.
    ///
    /// `make` creates the executor, if the session is new. A second thread answers pings and sends
    /// replies while operators run. [`is_stuck`](Self::is_stuck) reports an operator that still
    /// runs after its client has gone.
    ///
    /// # Errors
    /// - The error that ended the link. The session is kept, and its client may reconnect, unless
    ///   the client broke the protocol.
    /// - [`Error::Closed`] if the client wants to continue a session that does not exist.
    /// - [`Error::Misuse`] if the previous connection of the session is still busy after the
    ///   reconnect timeout, or if the second thread cannot be started.
    pub fn serve(
        &self,
        mut link: Link<UploadSink<E::Sink>>,
        make: impl FnOnce() -> E,
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let peer = Hello::receive(&mut link)?;
        self.sweep();
        let status = Arc::new(ServingStatus::default());
        let mut session = match self.take(peer.session, &status)? {
            Some(session) => session,
            None if peer.received > 0 => {
                self.sessions.lock().remove(&peer.session);
                let reason = "the session has ended, and its tensors are gone: the server dropped \
                              it after a disconnect, or was restarted; begin a new session";
                link.connection().close(reason);
                let _ = link.flush_all();
                return Err(Error::Closed { reason: reason.into() });
            }
            None => Box::new(Session::new(make())),
        };
        let result = session.serve(link, peer, &status, stop, self.idle_timeout);
        let link = session.detach();
        if let (Err(error @ Error::Protocol { .. }), Some(mut link)) = (&result, link) {
            // If the connection itself detected the error, it has already sent CLOSE.
            link.connection().close(&error.to_string());
            let _ = link.drive();
        }
        let mut sessions = self.sessions.lock();
        match &result {
            Err(error) if error.kind() != ErrorKind::Peer => {
                let entry = SessionEntry::Disconnected(session, Instant::now());
                sessions.insert(peer.session, entry);
            }
            _ => drop(sessions.remove(&peer.session)),
        }
        let surplus = take_surplus(&mut sessions);
        drop(sessions);
        drop(surplus);
        self.changed.notify_all();
        result
    }

    /// Takes a session, or returns `None` if it does not exist. Marks its id as served in both
    /// cases. If another thread serves the session, makes that thread drop its link, and waits
    /// until it has stopped serving.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if that thread still serves the session after the reconnect
    /// timeout.
    fn take(
        &self,
        session: [u8; 16],
        status: &Arc<ServingStatus>,
    ) -> Result<Option<Box<Session<E>>>, Error> {
        let end = Instant::now() + self.reconnect_timeout;
        let mut sessions = self.sessions.lock();
        while let Some(SessionEntry::Serving(other)) = sessions.get(&session) {
            other.superseded.store(true, Ordering::Relaxed);
            if Instant::now() >= end {
                return Err(Error::Misuse(format!(
                    "cannot continue the session: its previous connection is still busy after the \
                     reconnect timeout of {:?}",
                    self.reconnect_timeout
                )));
            }
            self.changed.wait_for(&mut sessions, SLICE);
        }
        match sessions.insert(session, SessionEntry::Serving(status.clone())) {
            Some(SessionEntry::Disconnected(session, _)) => Ok(Some(session)),
            _ => Ok(None),
        }
    }
}

/// If there are too many sessions without a link, removes the one that lost its link first.
fn take_surplus<E: Executor>(
    sessions: &mut HashMap<[u8; 16], SessionEntry<E>>,
) -> Option<SessionEntry<E>> {
    let disconnected = sessions.iter().filter_map(|(session, entry)| match entry {
        SessionEntry::Disconnected(_, since) => Some((*since, *session)),
        SessionEntry::Serving(_) => None,
    });
    let disconnected: Vec<_> = disconnected.collect();
    let (_, oldest) =
        disconnected.iter().filter(|_| disconnected.len() > MAX_DISCONNECTED).min()?;
    sessions.remove(oldest)
}
