// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accepts clients, and passes their connections to the processes of sessions.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::exec::EXEC;
use tensorstream::remote::{self, Listener};

use crate::errors::{configuration_error, wire_error};
use crate::wire::{Settings, bind};

/// Accepts and authenticates clients, for Python.
#[pyclass(frozen, module = "tensorstream", name = "Dispatcher")]
pub(crate) struct Dispatcher {
    inner: Mutex<(Listener, remote::Dispatcher)>,
    address: String,
}

/// An authenticated connection, for Python.
#[pyclass(frozen, module = "tensorstream", name = "Handoff")]
pub(crate) struct Handoff {
    inner: Mutex<Option<remote::Handoff>>,
    /// The service that the client requests.
    #[pyo3(get)]
    service: String,
    /// The client's address.
    #[pyo3(get)]
    peer: String,
}

#[pymethods]
impl Dispatcher {
    /// Creates a dispatcher that listens at "HOST:PORT" or "unix:PATH".
    #[new]
    #[pyo3(signature = (at, settings, insecure, cert=None, key=None, ca=None))]
    fn new(
        py: Python<'_>,
        at: &str,
        settings: Settings,
        insecure: bool,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        ca: Option<PathBuf>,
    ) -> PyResult<Self> {
        let options = settings.options(py)?.with_service(EXEC);
        let files = [ca.as_ref(), cert.as_ref(), key.as_ref()];
        let (listener, tls) = bind(py, at, &options, files, insecure)?;
        let address = listener.address().to_string();
        let dispatcher = remote::Dispatcher::new(options);
        let dispatcher = if let Some(tls) = tls { dispatcher.with_tls(tls) } else { dispatcher };
        Ok(Self { inner: Mutex::new((listener, dispatcher)), address })
    }

    /// The address to connect to, with the actual port.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Returns the next authenticated connection, or None after `seconds`. For each connection
    /// whose handshake fails, calls `log` with the peer and the reason. Blocks.
    fn next(
        &self,
        py: Python<'_>,
        seconds: f64,
        log: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Handoff>> {
        let mut failed = Vec::new();
        let within = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
        let handoff = py.detach(|| {
            let mut inner = self.inner.lock();
            let (listener, dispatcher) = &mut *inner;
            let note = |peer: &str, error: &remote::Error| {
                failed.push((peer.to_string(), error.to_string()));
            };
            dispatcher.accept_within(listener, within, note)
        });
        for (peer, reason) in failed {
            log.call1((peer, reason))?;
        }
        let handoff = handoff.map_err(|error| wire_error(py, &error))?;
        Ok(handoff.map(|handoff| {
            let (service, peer) = (handoff.service().to_string(), handoff.peer().to_string());
            Handoff { inner: Mutex::new(Some(handoff)), service, peer }
        }))
    }
}

#[pymethods]
impl Handoff {
    /// Passes the connection to the process at the other end of the socket `channel`. Takes
    /// ownership of `channel`, and closes it.
    fn send_to(&self, py: Python<'_>, channel: RawFd) -> PyResult<()> {
        let channel = owned(channel);
        let inner = self.take(py)?;
        inner.send_to(&channel).map_err(|error| wire_error(py, &error))
    }

    /// Closes the connection, and sends the reason to the client.
    fn refuse(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let inner = self.take(py)?;
        py.detach(|| inner.refuse(reason));
        Ok(())
    }
}

impl Handoff {
    fn take(&self, py: Python<'_>) -> PyResult<remote::Handoff> {
        let taken = self.inner.lock().take();
        taken.ok_or_else(|| {
            configuration_error(py, "the connection was already passed on or refused")
        })
    }
}

/// Takes ownership of a file descriptor that the Python caller has given up.
pub(super) fn owned(descriptor: RawFd) -> OwnedFd {
    // SAFETY: the descriptor is open and has no other owner, because only this package's Python
    // code passes it, and detaches or duplicates it for the call.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}
