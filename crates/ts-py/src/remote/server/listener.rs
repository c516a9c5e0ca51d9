// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server of operators: it listens, and serves each client on a thread of its own.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::exec::{EXEC, SessionServer, UploadSink};
use tensorstream::remote::{Acceptor, Error, Listener};

use super::dispatcher::owned;
use super::executor::{Backend, Hooks, TorchExecutor};
use crate::errors::{configuration_error, wire_error};
use crate::memory::Target;
use crate::wire::{Settings, acceptor};

/// How long a session outlives its link.
const LINGER: Duration = Duration::from_secs(60);

/// How long a server of one session waits for its client to hear of the end.
const FAREWELL: Duration = Duration::from_secs(3);
/// How long a server of one session waits for its first connection.
const ALONE: Duration = Duration::from_secs(5);

/// A server of operators, for Python.
#[pyclass(frozen, module = "tensorstream", name = "RemoteServer")]
pub(crate) struct RemoteServer {
    listener: Mutex<Option<(Listener, Acceptor<UploadSink<Target>>)>>,
    backend: Arc<Backend>,
    sessions: Arc<SessionServer<TorchExecutor>>,
    stop: Arc<AtomicBool>,
    serving: Arc<AtomicUsize>,
    address: String,
}

/// Counts a thread while it serves, also if it panics.
struct Serving(Arc<AtomicUsize>);

impl Serving {
    fn new(count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[pymethods]
impl RemoteServer {
    /// Listens.
    #[new]
    #[pyo3(signature = (at, hooks, settings, insecure, cert=None, key=None, ca=None))]
    #[allow(clippy::too_many_arguments)] // a call of Python's, by name
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
        Ok(Self::of(backend, listener, acceptor, address))
    }

    /// Serves connections that another process passes over this socket, and takes ownership of the
    /// socket.
    #[staticmethod]
    fn from_handoffs(
        py: Python<'_>,
        channel: RawFd,
        hooks: Hooks,
        settings: Settings,
    ) -> PyResult<Self> {
        let backend = Backend::new(py, hooks)?;
        let options = settings.options(py)?.with_service(EXEC);
        let listener = Listener::from_handoffs(owned(channel), options.idle_timeout);
        let address = listener.address().to_string();
        Ok(Self::of(backend, listener, Acceptor::new(options), address))
    }

    /// Where it listens: with the port that was free, if 0 was asked for.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// How many sessions it has.
    #[getter]
    fn sessions(&self) -> usize {
        self.sessions.count()
    }

    /// Serves until `stop` is called, or with `once` until the last session has ended. Each
    /// client has its own thread. Calls `log` with the peer and the reason when a connection fails
    /// or ends. Blocks.
    #[pyo3(signature = (log=None, once=false))]
    fn run(&self, py: Python<'_>, log: Option<&Bound<'_, PyAny>>, once: bool) -> PyResult<()> {
        let taken = self.listener.lock().take();
        let (listener, mut acceptor) = taken
            .ok_or_else(|| configuration_error(py, "the server is running, or was stopped"))?;
        let ended = Arc::new(Mutex::new(Vec::new()));
        let (began, mut served) = (Instant::now(), false);
        while !self.stop.load(Ordering::Relaxed) {
            if once && self.sessions.is_stuck() {
                return Err(configuration_error(
                    py,
                    "an operator is still running after its client disconnected",
                ));
            }
            // The first connection may have failed.
            let alone = self.serving.load(Ordering::Relaxed) == 0 && self.sessions.count() == 0;
            if once && alone && (served || began.elapsed() > ALONE) {
                break;
            }
            let mut away = Vec::new();
            let met = py.detach(|| {
                let note = |peer: &str, error: &Error| {
                    away.push((peer.to_string(), error.to_string()));
                };
                acceptor.accept_within(&listener, Duration::from_millis(100), note)
            });
            self.sessions.sweep();
            away.append(&mut ended.lock());
            if let Some(log) = log {
                for (peer, reason) in away {
                    log.call1((peer, reason))?;
                }
            }
            py.check_signals()?;
            let link = match met {
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
            let serving = Serving::new(serving);
            served = true;
            let serve = move || {
                let make = || TorchExecutor::new(backend);
                // What the interpreter has for a thread is kept for the next batch.
                let served = Python::attach(|py| py.detach(|| sessions.serve(link, make, &stop)));
                if let Err(error) = served {
                    ended.lock().push((peer, error.to_string()));
                }
                drop(serving);
            };
            let started = thread::Builder::new().name("tensorstream-serve".into()).spawn(serve);
            started?;
        }
        // The threads notice within a while, and use the interpreter until then. The process of a
        // session does not wait for a stuck operator.
        let stopped = Instant::now();
        while self.serving.load(Ordering::Relaxed) > 0 && !(once && stopped.elapsed() > FAREWELL) {
            py.detach(|| thread::sleep(Duration::from_millis(10)));
        }
        Ok(())
    }

    /// Ends all sessions, and `run`. Does not block.
    fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl RemoteServer {
    fn of(
        backend: Backend,
        listener: Listener,
        acceptor: Acceptor<UploadSink<Target>>,
        address: String,
    ) -> Self {
        Self {
            listener: Mutex::new(Some((listener, acceptor))),
            backend: Arc::new(backend),
            sessions: Arc::new(SessionServer::new(LINGER)),
            stop: Arc::default(),
            serving: Arc::default(),
            address,
        }
    }
}
