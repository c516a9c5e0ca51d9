// SPDX-License-Identifier: MIT OR Apache-2.0
//! The native halves of `tensorstream.listen` and of the class `Listener`.

use std::path::PathBuf;

use pyo3::prelude::*;
use tensorstream::remote::{Acceptor, Error, Listener};

use super::connection::PyConnection;
use super::incoming::ConnectionState;
use super::place::Place;
use super::settings::{Settings, acceptor};
use super::wait::{Closable, deadline, is_over, poll_time};
use crate::errors::{timeout_error, wire_error};

/// A listening socket that accepts connections.
#[pyclass(frozen, module = "tensorstream", name = "Listener")]
pub(crate) struct PyListener {
    listener: Closable<(Listener, Acceptor<Place>)>,
    settings: Settings,
    address: String,
}

/// Starts to listen for connections. Does not wait for one.
#[pyfunction]
pub(crate) fn listen(
    py: Python<'_>,
    at: &str,
    settings: Settings,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    insecure: bool,
) -> PyResult<PyListener> {
    let options = settings.options(py)?;
    let tls = [ca.as_ref(), cert.as_ref(), key.as_ref()];
    let (listener, acceptor, address) = acceptor(py, at, options, tls, insecure)?;
    let listener = Closable::new("listener", (listener, acceptor));
    Ok(PyListener { listener, settings, address })
}

#[pymethods]
impl PyListener {
    /// The address to connect to, with the actual port.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Returns the next connection, after its handshake. Blocks.
    ///
    /// Args:
    ///     timeout: Seconds to wait; None to wait without a limit.
    ///     log: Called for each connection whose handshake fails, with the peer and the reason.
    ///
    /// Raises:
    ///     ConnectionTimeout: No client completed a handshake within ``timeout``.
    ///     ConfigurationError: The listener is in use, or is closed, also by another thread during
    ///         the call.
    #[pyo3(signature = (timeout=None, log=None))]
    fn accept(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        log: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyConnection> {
        let deadline = deadline(timeout);
        let mut call = self.listener.begin(py)?;
        let (listener, acceptor) = &mut *call;
        loop {
            let (time, mut refused) = (poll_time(deadline), Vec::new());
            let accepted = py.detach(|| {
                let note = |peer: &str, error: &Error| {
                    refused.push((peer.to_string(), error.to_string()));
                };
                acceptor.accept_within(listener, time, note)
            });
            if let Some(log) = log {
                for (peer, reason) in refused {
                    log.call1((peer, reason))?;
                }
            }
            if let Some(link) = accepted.map_err(|error| wire_error(py, &error))? {
                let state = ConnectionState::new(py, link, &self.settings)?;
                return Ok(PyConnection::new(state));
            }
            py.check_signals()?;
            self.listener.check(py)?;
            if is_over(deadline) {
                let message = format!(
                    "no client completed a handshake with {} within {} s",
                    self.address,
                    timeout.unwrap_or_default()
                );
                return Err(timeout_error(py, &message));
            }
        }
    }

    /// Stops listening. Connections stay open. Ends an ``accept`` that waits on another thread.
    ///
    /// Raises:
    ///     ConfigurationError: It is called by the ``log`` of ``accept``.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.listener.close(py).map(drop)
    }
}
