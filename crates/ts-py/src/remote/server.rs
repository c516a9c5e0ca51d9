// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server of operators: it listens, and serves each client on a thread of its own.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorstream::remote::exec::{EXEC, Landing, Sessions};
use tensorstream::remote::{ConnectionOptions, Listener, Lobby};

use super::executor::{Server, TorchExecutor};
use crate::errors::{misuse, of_wire};
use crate::memory::Target;
use crate::wire::{Settings, lobby};

/// How long a session outlives its link.
const LINGER: Duration = Duration::from_secs(60);

/// A server of operators, for Python.
#[pyclass(frozen, module = "tensorstream", name = "RemoteServer")]
pub(crate) struct RemoteServer {
    listener: Mutex<Option<(Listener, Lobby<Landing<Target>>)>>,
    server: Arc<Server>,
    sessions: Arc<Sessions<TorchExecutor>>,
    stop: Arc<AtomicBool>,
    serving: Arc<AtomicUsize>,
    address: String,
}

#[pymethods]
impl RemoteServer {
    /// Listens.
    #[new]
    #[pyo3(signature = (at, objects, settings, insecure, cert=None, key=None, ca=None))]
    #[allow(clippy::too_many_arguments)] // a call of Python's, by name
    fn new(
        py: Python<'_>,
        at: &str,
        objects: &Bound<'_, PyDict>,
        settings: Settings,
        insecure: bool,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        ca: Option<PathBuf>,
    ) -> PyResult<Self> {
        let server = Server::new(py, objects)?;
        let options = ConnectionOptions { service: EXEC.into(), ..settings.options(py)? };
        let tls = [ca.as_ref(), cert.as_ref(), key.as_ref()];
        let (listener, lobby, address) = lobby(py, at, options, tls, insecure)?;
        Ok(Self {
            listener: Mutex::new(Some((listener, lobby))),
            server: Arc::new(server),
            sessions: Arc::new(Sessions::new(LINGER)),
            stop: Arc::default(),
            serving: Arc::default(),
            address,
        })
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

    /// Serves until :meth:`stop` is called, each client on a thread of its own. `log` hears of who was sent away or lost, and why. Blocks.
    #[pyo3(signature = (log=None))]
    fn run(&self, py: Python<'_>, log: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let taken = self.listener.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (listener, mut lobby) =
            taken.ok_or_else(|| misuse(py, "the server is running, or was stopped"))?;
        let ended = Arc::new(Mutex::new(Vec::new()));
        while !self.stop.load(Ordering::Relaxed) {
            let mut away = Vec::new();
            let met = py.detach(|| {
                let note = |peer: &str, error: &tensorstream::remote::Error| {
                    away.push((peer.to_string(), error.to_string()));
                };
                lobby.accept_within(&listener, Duration::from_millis(100), note)
            });
            self.sessions.sweep();
            away.append(&mut ended.lock().unwrap_or_else(PoisonError::into_inner));
            if let Some(log) = log {
                for (peer, reason) in away {
                    log.call1((peer, reason))?;
                }
            }
            py.check_signals()?;
            let Some(link) = met.map_err(|error| of_wire(py, &error))? else { continue };
            let (server, sessions, stop) = (self.server.clone(), self.sessions.clone(), self.stop.clone());
            let (serving, ended, peer) = (self.serving.clone(), ended.clone(), link.peer().to_string());
            serving.fetch_add(1, Ordering::Relaxed);
            let serve = move || {
                let make = || TorchExecutor::new(server);
                // What the interpreter has for a thread is kept for the next batch.
                let served = Python::attach(|py| py.detach(|| sessions.serve(link, make, &stop)));
                if let Err(error) = served {
                    ended.lock().unwrap_or_else(PoisonError::into_inner).push((peer, error.to_string()));
                }
                serving.fetch_sub(1, Ordering::Relaxed);
            };
            let started = thread::Builder::new().name("tensorstream-serve".into()).spawn(serve);
            if let Err(error) = started {
                self.serving.fetch_sub(1, Ordering::Relaxed);
                return Err(error.into());
            }
        }
        // They hear of it in a while, and use the interpreter until then.
        while self.serving.load(Ordering::Relaxed) > 0 {
            py.detach(|| thread::sleep(Duration::from_millis(10)));
        }
        Ok(())
    }

    /// Ends all sessions, and :meth:`run`. Does not block.
    fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
