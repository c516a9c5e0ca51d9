// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream.listen`: accepts connections.

use std::path::PathBuf;
use std::time::Instant;

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::remote::{Acceptor, Error, Listener};

use crate::errors::{misuse, of_wire, timed_out};
use crate::memory::Target;

use super::connection::{PyConnection, connection, deadline, held, slice};
use super::settings::{Settings, acceptor};

/// Where others connect to.
#[pyclass(frozen, module = "tensorstream", name = "Listener")]
pub(crate) struct PyListener {
    listener: Mutex<Option<(Listener, Acceptor<Target>)>>,
    settings: Settings,
    address: String,
}

/// Listens.
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
    Ok(PyListener { listener: Mutex::new(Some((listener, acceptor))), settings, address })
}

#[pymethods]
impl PyListener {
    /// Where it listens: with the port that was free, if 0 was asked for.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Returns the next connection after its handshake. Raises ConnectionTimeout if there is none
    /// within `timeout` seconds. Calls `log` with the peer and the reason of each refusal.
    #[pyo3(signature = (timeout=None, log=None))]
    fn accept(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        log: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyConnection> {
        let end = deadline(timeout);
        let mut listener = held(py, self.listener.try_lock())?;
        let (listener, acceptor) =
            listener.as_mut().ok_or_else(|| misuse(py, "the listener is closed"))?;
        loop {
            let (left, mut sent_away) = (slice(end), Vec::new());
            let known = py.detach(|| {
                let note = |peer: &str, error: &Error| {
                    sent_away.push((peer.to_string(), error.to_string()));
                };
                acceptor.accept_within(listener, left, note)
            });
            if let Some(log) = log {
                for (peer, reason) in sent_away {
                    log.call1((peer, reason))?;
                }
            }
            if let Some(link) = known.map_err(|error| of_wire(py, &error))? {
                return connection(py, link, &self.settings);
            }
            py.check_signals()?;
            if end.is_some_and(|end| Instant::now() >= end) {
                let what = format!("nobody connected to {} within the timeout", self.address);
                return Err(timed_out(py, &what));
            }
        }
    }

    /// Listens no more. Connections go on.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        *held(py, self.listener.try_lock())? = None;
        Ok(())
    }
}
