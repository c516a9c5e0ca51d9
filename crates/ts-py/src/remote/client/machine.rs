// SPDX-License-Identifier: MIT OR Apache-2.0
//! The Python class of a session with a machine.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorstream::exec::{Request, ScalarType, StorageView, TensorRef};

use super::connector::Connector;
use super::devices::{MAX_DEVICES, add_devices, remove_devices};
use super::session::Session;
use super::transfer::{download, upload};
use crate::errors::configuration_error;
use crate::memory::Memory;
use crate::wire::Settings;

/// PyTorch's number for uint8.
const UINT8: ScalarType = ScalarType(0);

/// A session with a machine, and the indices of the machine's devices, for Python.
#[pyclass(frozen, weakref, module = "tensorstream", name = "RemoteSession")]
pub(crate) struct PySession {
    session: Arc<Session>,
    first: u32,
    count: u32,
    connector: Connector,
}

#[pymethods]
impl PySession {
    /// Connects to a machine, and adds `count` of its devices. Blocks.
    ///
    /// Args:
    ///     address: "HOST:PORT" or "unix:PATH".
    ///     name: The name of the machine, for error messages.
    ///     count: The number of devices to add.
    ///     settings: The settings of the connection.
    ///     first: The index for the machine's first device, if enough indices are free there.
    ///     retry: How many seconds the session tries to reconnect after its connection is lost.
    ///     returns: Whether the session keeps trying when the address refuses connections.
    ///     ca: A file of certificates (PEM) to trust. The connection then uses TLS.
    ///     cert: A certificate (PEM) of this side, if the machine requires one.
    ///     key: The private key of ``cert`` (PEM).
    #[new]
    #[pyo3(signature = (address, name, count, settings, retry, *, first=None, returns=true, ca=None,
        cert=None, key=None))]
    #[allow(clippy::too_many_arguments)] // called from Python, by name
    fn new(
        py: Python<'_>,
        address: &str,
        name: String,
        count: u32,
        settings: Settings,
        retry: f64,
        first: Option<u32>,
        returns: bool,
        ca: Option<PathBuf>,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
    ) -> PyResult<Self> {
        let reconnect_timeout = Duration::try_from_secs_f64(retry).map_err(|_| {
            configuration_error(
                py,
                &format!("retry must be 0 or more, and below 2^64 seconds, got {retry}"),
            )
        })?;
        let connector =
            Connector { settings, reconnect_timeout, retry_refused: returns, tls: [ca, cert, key] };
        let session = Arc::new(Session::new(name, connector.connect(py, address)?));
        let Some(first) = add_devices(&session, count, first) else {
            let what = format!(
                "cannot add {count} devices of machine {}: PyTorch supports up to {MAX_DEVICES} \
                 indices, and fewer than {count} consecutive ones are free; stop other machines \
                 with stop()",
                session.name
            );
            return Err(configuration_error(py, &what));
        };
        Ok(Self { session, first, count, connector })
    }

    /// Returns whether the session has ended, for example because the connection was lost. Returns
    /// False for a paused session.
    fn is_over(&self) -> bool {
        self.session.is_over()
    }

    /// Returns whether the connection was lost, and is being replaced.
    fn is_reconnecting(&self) -> bool {
        self.session.is_reconnecting()
    }

    /// Ends the session because the server has ended. Blocks while an attempt to connect again
    /// lasts.
    ///
    /// Later calls, and those that wait, raise ``ConnectionLost`` with this reason. Does nothing if
    /// the session is paused or has ended.
    fn abandon(&self, py: Python<'_>, reason: &str) {
        self.session.abandon(py, reason);
    }

    /// The index of the machine's first device in this process.
    #[getter]
    fn first(&self) -> u32 {
        self.first
    }

    /// Returns the counters of the session.
    fn stats(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let stats = self.session.stats(py);
        let dict = PyDict::new(py);
        dict.set_item("operators", self.session.operators.load(Ordering::Relaxed))?;
        dict.set_item("requests", stats.requests)?;
        dict.set_item("batches", stats.batches)?;
        dict.set_item("waits", stats.waits)?;
        dict.set_item("reconnects", stats.reconnects)?;
        dict.set_item("uploaded_bytes", stats.uploaded_bytes)?;
        dict.set_item("downloaded_bytes", stats.downloaded_bytes)?;
        let scalars = self.session.scalars.lock();
        dict.set_item("cached_scalars", scalars.cached)?;
        dict.set_item("early_scalars", scalars.prefetched)?;
        Ok(dict.unbind())
    }

    /// Returns the lines of the program that have waited, how often, and for how many seconds in
    /// all. The longest time is first.
    fn waits(&self, py: Python<'_>) -> Vec<(String, u64, f64)> {
        self.session.waits(py)
    }

    /// Blocks until the machine has run all requests.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        self.session.synchronize(py)
    }

    /// Sends the requests of an incomplete batch.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.session.flush(py)
    }

    /// Begins or ends a pause or a resumption on this thread. In between, calls of other threads
    /// fail.
    ///
    /// The beginning blocks until the uploads in progress are done. From then on, storages are not
    /// freed but recorded.
    ///
    /// Args:
    ///     begins: Whether to begin, or else to end.
    ///     end_freed: Whether to free the recorded storages, and record no more.
    #[pyo3(signature = (begins, end_freed=false))]
    fn pausing(&self, py: Python<'_>, begins: bool, end_freed: bool) {
        self.session.set_pausing(py, begins, end_freed);
    }

    /// Returns the number, the size in bytes, the device and the state of each storage on the
    /// machine.
    ///
    /// The state is 0 if the storage was never written to, 1 if it was, and 2 if a request that
    /// should have written to it failed.
    fn storages(&self, py: Python<'_>) -> PyResult<Vec<(u64, u64, u32, u8)>> {
        self.session.storages(py)
    }

    /// Ends the session on the machine, which drops its tensors. ``resume`` can connect the session
    /// to a machine again. Blocks.
    ///
    /// Returns:
    ///     The exception of a request whose failure was not raised yet, or None.
    fn close(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        self.session.close(py)
    }

    /// Connects the session to a machine, on which the session has no tensors yet. Blocks.
    fn resume(&self, py: Python<'_>, address: &str) -> PyResult<()> {
        self.session.resume(self.connector.connect(py, address)?);
        Ok(())
    }

    /// Returns whether a storage was freed since the pause began.
    fn was_freed(&self, storage: u64) -> bool {
        self.session.was_freed(storage)
    }

    /// Creates a storage on a device of the machine, with a given number and size.
    fn create(&self, py: Python<'_>, storage: u64, bytes: u64, ordinal: u32) -> PyResult<()> {
        self.session.submit(py, &Request::Create { storage, bytes, device: ordinal }).map(drop)
    }

    /// Fills the memory of a capsule with bytes of a storage, from `offset` on. Blocks.
    fn read(
        &self,
        py: Python<'_>,
        storage: u64,
        offset: u64,
        capsule: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let memory = Memory::from_capsule(capsule)?;
        let mut view = StorageView::contiguous(UINT8, vec![memory.len() as u64]);
        view.offset = offset;
        download(py, &self.session, TensorRef { storage, view }, memory)
    }

    /// Writes the bytes of a capsule to a storage, from `offset` on. Blocks until the caller
    /// may reuse the memory of the capsule.
    fn write(
        &self,
        py: Python<'_>,
        storage: u64,
        offset: u64,
        capsule: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        upload(py, &self.session, storage, offset, Memory::from_capsule(capsule)?)
    }

    /// Removes the devices of the machine, and frees their indices for other machines.
    fn forget(&self) {
        remove_devices(self.first, self.count);
    }
}
