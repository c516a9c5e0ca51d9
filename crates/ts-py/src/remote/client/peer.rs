// SPDX-License-Identifier: MIT OR Apache-2.0
//! A session with another server that only claims tensors. It needs no PyTorch.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorstream::exec::{
    Answer, Call, Client, OpFailureKind, Request, ScalarType, StorageView, TensorRef, Value,
    WaitError,
};
use tensorstream::remote::Error;

use super::connector::Connector;
use super::session::SIGNAL_INTERVAL;
use crate::errors::{configuration_error, operator_error, wire_error_at};
use crate::wire::Settings;

/// The operator that moves an offered tensor to its argument.
const CLAIM: &str = "tensorstream::claim";
/// The most bytes that are allocated before the server has confirmed a claim.
const MAX_EARLY: usize = 16 << 20;

/// A session with another server, for Python. One thread uses it at a time.
#[pyclass(frozen, module = "tensorstream", name = "PeerSession")]
pub(crate) struct PeerSession {
    client: Client<Vec<u8>>,
    address: String,
    storages: AtomicU64,
}

#[pymethods]
impl PeerSession {
    /// Connects to a server. Blocks.
    ///
    /// Args:
    ///     address: "HOST:PORT" or "unix:PATH".
    ///     settings: The settings of the connection.
    ///     retry: How many seconds the session tries to reconnect after its connection is lost.
    ///     ca: A file of certificates (PEM) to trust. The connection then uses TLS.
    ///     cert: A certificate (PEM) of this side, if the server requires one.
    ///     key: The private key of ``cert`` (PEM).
    #[new]
    #[pyo3(signature = (address, settings, retry, *, ca=None, cert=None, key=None))]
    fn new(
        py: Python<'_>,
        address: String,
        settings: Settings,
        retry: f64,
        ca: Option<PathBuf>,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
    ) -> PyResult<Self> {
        let reconnect_timeout = Duration::try_from_secs_f64(retry)
            .map_err(|error| configuration_error(py, &format!("invalid retry {retry}: {error}")))?;
        let tls = [ca, cert, key];
        let connector = Connector { settings, reconnect_timeout, retry_refused: true, tls };
        let client = connector.connect(py, &address)?;
        Ok(Self { client, address, storages: AtomicU64::new(0) })
    }

    /// Claims the tensor that the server offers under a ticket, and returns its elements. Blocks.
    ///
    /// Args:
    ///     ticket: The ticket.
    ///     dtype: PyTorch's number of the dtype.
    ///     sizes: The sizes of the tensor.
    ///     nbytes: Its size in bytes.
    ///
    /// Raises:
    ///     RemoteTensorError: The server does not offer such a tensor.
    ///     ConnectionLost: The server cannot be reached.
    fn claim<'py>(
        &self,
        py: Python<'py>,
        ticket: &str,
        dtype: u8,
        sizes: Vec<u64>,
        nbytes: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let storage = self.storages.fetch_add(1, Ordering::Relaxed) + 1;
        let view = StorageView::contiguous(ScalarType(dtype), sizes);
        let elements = self.elements(py, ticket, TensorRef { storage, view }, nbytes);
        self.client.free(storage);
        elements.map(|elements| PyBytes::new(py, &elements))
    }

    /// Ends the session. Blocks.
    fn close(&self, py: Python<'_>) {
        // The server notices a connection that is lost by itself.
        let _ = py.detach(|| self.client.close());
    }
}

impl PeerSession {
    fn elements(
        &self,
        py: Python<'_>,
        ticket: &str,
        tensor: TensorRef,
        nbytes: usize,
    ) -> PyResult<Vec<u8>> {
        let lost = |error: Error| self.lost(py, &error);
        let (storage, bytes) = (tensor.storage, nbytes as u64);
        self.submit(&Request::Create { storage, bytes, device: 0 }).map_err(lost)?;
        let op = self.client.operator_id(CLAIM).map_err(lost)?;
        let args = vec![Value::Tensor(tensor.clone()), Value::Text(ticket.into())];
        let call = Call { op, args, kwargs: Vec::new(), outputs: Vec::new(), reply: None };
        self.submit(&Request::Call(call)).map_err(lost)?;
        // Without a wait in between, the elements come with the answer to the claim. The size is
        // what a session says, so a large one is allocated only if there is such a tensor.
        if nbytes > MAX_EARLY {
            let reply = self.client.new_reply();
            self.submit(&Request::Sync { reply }).map_err(lost)?;
            self.wait(py, reply)?;
        }
        let mut memory = Vec::new();
        if memory.try_reserve_exact(nbytes).is_err() {
            let what = format!("cannot allocate {nbytes} bytes for a tensor of {}", self.address);
            return Err(operator_error(py, OpFailureKind::OutOfMemory, &what));
        }
        memory.resize(nbytes, 0);
        let reply = self.client.read(tensor, memory).map_err(lost)?;
        match self.wait(py, reply)? {
            Answer::Memory(elements) | Answer::Bytes(elements) => Ok(elements),
            _ => {
                let what = format!("machine {}: unexpected reply", self.address);
                Err(operator_error(py, OpFailureKind::Operator, &what))
            }
        }
    }

    /// Blocks until a reply arrives, and returns the answer.
    fn wait(&self, py: Python<'_>, reply: u64) -> PyResult<Answer<Vec<u8>>> {
        loop {
            match py.detach(|| self.client.wait(reply, SIGNAL_INTERVAL)) {
                Ok(None) => py.check_signals()?,
                Ok(Some(answer)) => return Ok(answer),
                Err(WaitError::Ended(error)) => return Err(self.lost(py, &error)),
                Err(WaitError::Failed { failure, .. }) => {
                    let what = format!("machine {}: {}", self.address, failure.message);
                    return Err(operator_error(py, failure.kind, &what));
                }
            }
        }
    }

    fn submit(&self, request: &Request) -> Result<(), Error> {
        let submitted = self.client.submit(request)?;
        if submitted.batch_full { self.client.send_batches() } else { Ok(()) }
    }

    fn lost(&self, py: Python<'_>, error: &Error) -> PyErr {
        wire_error_at(py, error, &format!("machine {}: ", self.address))
    }
}
