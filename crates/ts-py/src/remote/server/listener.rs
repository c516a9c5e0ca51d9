// SPDX-License-Identifier: MIT OR Apache-2.0
//! The server of operators: accepts connections and serves each on its own thread.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::exec::{EXEC, SessionServer, UploadSink};
use tensorstream::remote::{Acceptor, Error, Listener};

#[cfg(unix)]
use super::dispatcher::owned;
use super::executor::TorchExecutor;
use super::hooks::{Backend, Hooks};
use crate::errors::{configuration_error, wire_error};
use crate::memory::Target;
use crate::wire::{Settings, acceptor};

/// How long a session is kept after its connection was lost.
const SESSION_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the process of one session waits for its serving threads before it exits.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the process of one session waits for its first connection.
const FIRST_CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// The time between two checks of a running server for signals, expired sessions, and `stop`.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A server of operators, for Python.
#[pyclass(frozen, module = "tensorstream", name = "RemoteServer")]
pub(crate) struct RemoteServer {
    /// `None` once the server runs.
    listener: Mutex<Option<(Listener, Acceptor<UploadSink<Target>>)>>,
    backend: Arc<Backend>,
    sessions: Arc<SessionServer<TorchExecutor>>,
    stop: Arc<AtomicBool>,
    /// The number of threads that currently serve a connection.
    serving: Arc<AtomicUsize>,
    address: String,
}

/// Counts a thread as serving, until it ends or panics.
struct ServingGuard(Arc<AtomicUsize>);

impl ServingGuard {
    fn new(count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for ServingGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[pymethods]
impl RemoteServer {
    /// Creates a server that listens at "HOST:PORT" or "unix:PATH".
    #[new]
    #[pyo3(signature = (at, hooks, settings, insecure, cert=None, key=None, ca=None))]
    #[allow(clippy::too_many_arguments)] // called from Python, by name
    fn new(
        py: Python<'_>,
        at: &str,
        hooks: Hooks,
        settings: Settings,
        insecure: bool,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        ca: Option<PathBuf>,
    ) -> PyResult<Self> {
        let backend = Backend::new(py, hooks)?;
        let options = settings.options(py)?.with_service(EXEC);
        let tls = [ca.as_ref(), cert.as_ref(), key.as_ref()];
        let (listener, acceptor, address) = acceptor(py, at, options, tls, insecure)?;
        Ok(Self::with_listener(backend, listener, acceptor, address))
    }

    /// Creates a server for connections that another process passes over the socket `channel`.
    /// Takes ownership of `channel`. A session ends if its client sends no request for `idle`
    /// seconds.
    #[cfg(unix)]
    #[staticmethod]
    #[pyo3(signature = (channel, hooks, settings, idle=None))]
    fn from_handoffs(
        py: Python<'_>,
        channel: std::os::fd::RawFd,
        hooks: Hooks,
        settings: Settings,
        idle: Option<f64>,
    ) -> PyResult<Self> {
        let backend = Backend::new(py, hooks)?;
        let options = settings.options(py)?.with_service(EXEC);
        let listener = Listener::from_handoffs(owned(channel), options.idle_timeout);
        let address = listener.address().to_string();
        let server = Self::with_listener(backend, listener, Acceptor::new(options), address);
        let Some(idle) = idle else { return Ok(server) };
        let idle = Duration::try_from_secs_f64(idle)
            .map_err(|error| configuration_error(py, &format!("invalid idle {idle}: {error}")))?;
        let sessions = SessionServer::new(SESSION_TIMEOUT).with_idle_timeout(idle);
        Ok(Self { sessions: Arc::new(sessions), ..server })
    }

    /// The address to connect to, with the actual port.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// The number of sessions, including those that have lost their connection but not expired yet.
    #[getter]
    fn sessions(&self) -> usize {
        self.sessions.count()
    }

    /// Serves clients, each on its own thread. Blocks until `stop` is called, or until the process
    /// that passes the connections has ended. With `once`, also returns when no session is left, or
    /// if no client connects within 5 seconds.
    ///
    /// When a connection fails, calls `log` with the peer and the reason.
    #[pyo3(signature = (log=None, once=false))]
    fn run(&self, py: Python<'_>, log: Option<&Bound<'_, PyAny>>, once: bool) -> PyResult<()> {
        let taken = self.listener.lock().take();
        let (listener, mut acceptor) = taken.ok_or_else(|| {
            configuration_error(py, "cannot run the server again: `run` can be called only once")
        })?;
        let ended = Arc::new(Mutex::new(Vec::new()));
        let (began, mut served) = (Instant::now(), false);
        while !self.stop.load(Ordering::Relaxed) {
            if once && self.sessions.is_stuck() {
                return Err(configuration_error(
                    py,
                    "cannot end the session: an operator is still running, although its client \
                     disconnected more than a minute ago; end this process to stop it",
                ));
            }
            let idle = self.serving.load(Ordering::Relaxed) == 0 && self.sessions.count() == 0;
            // The first connection may fail before it has a session.
            if once && idle && (served || began.elapsed() > FIRST_CONNECTION_TIMEOUT) {
                break;
            }
            let mut failed = Vec::new();
            let accepted = py.detach(|| {
                let note = |peer: &str, error: &Error| {
                    failed.push((peer.to_string(), error.to_string()));
                };
                acceptor.accept_within(&listener, POLL_INTERVAL, note)
            });
            self.sessions.sweep();
            failed.append(&mut ended.lock());
            if let Some(log) = log {
                for (peer, reason) in failed {
                    log.call1((peer, reason))?;
                }
            }
            py.check_signals()?;
            let link = match accepted {
                Ok(Some(link)) => link,
                Ok(None) => continue,
                // The process that accepts connections has ended.
                Err(Error::Closed { .. }) => {
                    self.stop();
                    continue;
                }
                Err(error) => return Err(wire_error(py, &error)),
            };
            let (backend, sessions, stop) =
                (self.backend.clone(), self.sessions.clone(), self.stop.clone());
            let (serving, ended, peer) =
                (self.serving.clone(), ended.clone(), link.peer().to_string());
            let serving = ServingGuard::new(serving);
            served = true;
            let serve = move || {
                let make = || TorchExecutor::new(backend);
                // The thread attaches once around all batches, so that the interpreter keeps its
                // state for the thread.
                let served = Python::attach(|py| py.detach(|| sessions.serve(link, make, &stop)));
                if let Err(error) = served {
                    ended.lock().push((peer, error.to_string()));
                }
                drop(serving);
            };
            let started = thread::Builder::new().name("tensorstream-serve".into()).spawn(serve);
            started?;
        }
        // The threads use the interpreter until they see `stop`. The process of one session waits
        // for a limited time, because an operator may never end.
        let stopped = Instant::now();
        while self.serving.load(Ordering::Relaxed) > 0
            && !(once && stopped.elapsed() > SHUTDOWN_TIMEOUT)
        {
            py.detach(|| thread::sleep(Duration::from_millis(10)));
        }
        Ok(())
    }

    /// Makes `run` end all sessions and return. Does not block.
    fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl RemoteServer {
    fn with_listener(
        backend: Backend,
        listener: Listener,
        acceptor: Acceptor<UploadSink<Target>>,
        address: String,
    ) -> Self {
        Self {
            listener: Mutex::new(Some((listener, acceptor))),
            backend: Arc::new(backend),
            sessions: Arc::new(SessionServer::new(SESSION_TIMEOUT)),
            stop: Arc::default(),
            serving: Arc::default(),
            address,
        }
    }
}
