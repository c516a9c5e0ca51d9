// SPDX-License-Identifier: MIT OR Apache-2.0
//! A session with another server that only claims and offers tensors. It needs no PyTorch.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use tensorstream::exec::{
    Answer, Call, Client, OpFailureKind, Output, Request, ScalarType, StorageView, TensorRef,
    Value, WaitError,
};
use tensorstream::remote::{Bytes, Error};

use super::connector::Connector;
use super::session::SIGNAL_INTERVAL;
use crate::errors::{configuration_error, operator_error, wire_error_at};
use crate::wire::Settings;

/// The operator that moves an offered tensor to its argument.
const CLAIM: &str = "tensorstream::claim";
/// The operators that offer a tensor, and end an offer.
const DEPOSIT: &str = "tensorstream::deposit";
const WITHDRAW: &str = "tensorstream::withdraw";
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

    /// Sends a tensor, which the server then offers under a ticket. Blocks.
    ///
    /// Args:
    ///     ticket: The ticket.
    ///     dtype: PyTorch's number of the dtype.
    ///     sizes: The sizes of the tensor.
    ///     elements: Its elements, in row-major order.
    ///
    /// Returns:
    ///     An empty string, or the reason why the server does not offer it.
    ///
    /// Raises:
    ///     RemoteTensorError: The server has too little memory.
    ///     ConnectionLost: The server cannot be reached.
    fn deposit(
        &self,
        py: Python<'_>,
        ticket: &str,
        dtype: u8,
        sizes: Vec<u64>,
        elements: PyBackedBytes,
    ) -> PyResult<String> {
        let storage = self.storages.fetch_add(1, Ordering::Relaxed) + 1;
        let tensor = TensorRef { storage, view: StorageView::contiguous(ScalarType(dtype), sizes) };
        let reply = self.client.new_reply();
        let (bytes, ticket) = (elements.len() as u64, Value::Text(ticket.into()));
        let sent = py.detach(|| {
            self.client.send(&Request::Create { storage, bytes, device: 0 })?;
            self.client.write(storage, 0, Bytes::from_owner(elements))?;
            self.call(DEPOSIT, vec![Value::Tensor(tensor), ticket], Some(reply))
        });
        let answer = match sent {
            Ok(()) => self.wait(py, reply),
            Err(error) => Err(self.lost(py, &error)),
        };
        self.client.free(storage);
        match answer? {
            Answer::Values(mut values) => match values.pop() {
                Some(Value::Text(refusal)) => Ok(refusal),
                _ => Err(self.unexpected(py)),
            },
            _ => Err(self.unexpected(py)),
        }
    }

    /// Ends the offer of a tensor that was sent, if it was not claimed. Does not wait for that.
    ///
    /// Raises:
    ///     ConnectionLost: The server cannot be reached.
    fn withdraw(&self, py: Python<'_>, ticket: &str) -> PyResult<()> {
        let storage = self.storages.fetch_add(1, Ordering::Relaxed) + 1;
        let view = StorageView::contiguous(ScalarType(0), vec![0]);
        let anchor = Value::Tensor(TensorRef { storage, view });
        let sent = py.detach(|| {
            self.client.send(&Request::Create { storage, bytes: 0, device: 0 })?;
            self.call(WITHDRAW, vec![anchor, Value::Text(ticket.into())], None)?;
            self.client.free(storage);
            self.client.flush()
        });
        sent.map_err(|error| self.lost(py, &error))
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
        self.client.send(&Request::Create { storage, bytes, device: 0 }).map_err(lost)?;
        let args = vec![Value::Tensor(tensor.clone()), Value::Text(ticket.into())];
        self.call(CLAIM, args, None).map_err(lost)?;
        // Without a wait in between, the elements come with the answer to the claim. The size is
        // what a session says, so a large one is allocated only if there is such a tensor.
        if nbytes > MAX_EARLY {
            let reply = self.client.new_reply();
            self.client.send(&Request::Sync { reply }).map_err(lost)?;
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
            _ => Err(self.unexpected(py)),
        }
    }

    /// Submits a call of an operator. If `reply` is given, the server answers with the result,
    /// which must not be a tensor.
    fn call(&self, name: &str, args: Vec<Value>, reply: Option<u64>) -> Result<(), Error> {
        let op = self.client.operator_id(name)?;
        let outputs = reply.iter().map(|_| Output::Known).collect();
        self.client.send(&Request::Call(Call { op, args, kwargs: Vec::new(), outputs, reply }))?;
        Ok(())
    }

    fn unexpected(&self, py: Python<'_>) -> PyErr {
        let what = format!("machine {}: unexpected reply", self.address);
        operator_error(py, OpFailureKind::Operator, &what)
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

    fn lost(&self, py: Python<'_>, error: &Error) -> PyErr {
        wire_error_at(py, error, &format!("machine {}: ", self.address))
    }
}
