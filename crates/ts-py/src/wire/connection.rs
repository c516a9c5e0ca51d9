// SPDX-License-Identifier: MIT OR Apache-2.0
//! The native halves of `tensorstream.connect` and of the class `Connection`.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tensorstream::format::Compression;
use tensorstream::remote::{AbortHandle, Bytes, Error, Link, Role, SendOptions, Socket};

use super::incoming::{ConnectionState, Incoming};
use super::place::moved;
use super::settings::{Settings, address, tls_client};
use super::wait::{Closable, POLL_INTERVAL, deadline, is_over, poll_time};
use crate::accelerator::Accelerator;
use crate::errors::{configuration_error, pool_error, timeout_error, wire_error};
use crate::memory::Payload;
use crate::tensors::PyTensor;

/// The number of tensors that are queued before the connection is flushed.
const TENSORS_PER_FLUSH: usize = 64;

/// One side of a connection. One thread can use it at a time.
#[pyclass(frozen, weakref, module = "tensorstream", name = "Connection")]
pub(crate) struct PyConnection {
    state: Closable<ConnectionState>,
    peer: String,
    /// Set by `_allow_abort`.
    abort: OnceLock<AbortHandle>,
}

/// Connects to a listener. Blocks until the handshake is done.
#[pyfunction]
pub(crate) fn connect(
    py: Python<'_>,
    to: &str,
    settings: Settings,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
) -> PyResult<PyConnection> {
    let (to, options) = (address(py, to)?, settings.options(py)?);
    let tls = tls_client(py, ca.as_ref(), cert.as_ref(), key.as_ref())?;
    let link = py.detach(|| {
        let mut socket = Socket::connect(&to, options.idle_timeout)?;
        if let Some(tls) = &tls {
            socket = socket.into_tls_client(tls)?;
        }
        Ok(Link::start(socket, Role::Connector, options))
    });
    let to_python = |error: Error| wire_error(py, &error);
    let mut state = ConnectionState::new(py, link.map_err(to_python)?, &settings)?;
    while !py.detach(|| state.link.handshake_within(POLL_INTERVAL)).map_err(to_python)? {
        py.check_signals()?;
    }
    Ok(PyConnection::new(state))
}

/// The parameters of a call that receives.
struct Request<'a> {
    /// The memory for the next tensor; None to allocate it.
    into: Option<&'a PyTensor>,
    /// The device to allocate it on; None for the host.
    device: Option<&'a Py<Accelerator>>,
    /// The stream to receive from; None for any.
    stream: Option<u32>,
    deadline: Option<Instant>,
}

impl PyConnection {
    /// Creates a connection whose handshake is done.
    pub(super) fn new(state: ConnectionState) -> Self {
        let peer = state.link.peer().to_string();
        Self { state: Closable::new("connection", state), peer, abort: OnceLock::new() }
    }

    /// Returns the next received item and the number of its stream, or None at the end of the
    /// connection. Blocks.
    ///
    /// # Errors
    /// ConnectionTimeout after the deadline, and the connection stays usable. Also the errors of
    /// the connection, of [`ConnectionState::provide_memory`], of signal handlers and of
    /// `progress`.
    fn next(
        &self,
        py: Python<'_>,
        request: &Request<'_>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<(u32, Incoming)>> {
        let state = &mut *self.state.begin(py)?;
        let mut last_check = Instant::now();
        loop {
            let is_requested = |(stream, _): &(u32, Incoming)| {
                request.stream.is_none_or(|requested| requested == *stream)
            };
            if let Some(index) = state.ready.iter().position(is_requested) {
                return Ok(state.ready.remove(index));
            }
            state.provide_memory(py, request.into, request.device)?;
            let time = poll_time(request.deadline);
            let event = match py.detach(|| state.link.next_event_within(time)) {
                Ok(event) => event,
                Err(Error::Closed { .. }) => return Ok(None),
                Err(error) => return Err(wire_error(py, &error)),
            };
            let nothing = event.is_none();
            if let Some(event) = event {
                py.detach(|| state.handle(event, request.device))
                    .map_err(|error| wire_error(py, &error))?;
            }
            if last_check.elapsed() >= POLL_INTERVAL {
                last_check = Instant::now();
                py.check_signals()?;
                self.state.check(py)?;
                if let Some(progress) = progress {
                    let stats = state.link.connection().stats();
                    progress.call1((stats.received_bytes,))?;
                }
            }
            if nothing && is_over(request.deadline) {
                let what = match request.stream {
                    Some(_) => "the end of the stream did not arrive",
                    None => "no complete tensor or message arrived",
                };
                let message = format!("{what} from {} within the timeout", self.peer);
                return Err(timeout_error(py, &message));
            }
        }
    }

    /// Blocks until the operating system has accepted everything that was sent on a stream.
    fn flush(
        &self,
        py: Python<'_>,
        state: &mut ConnectionState,
        stream: u32,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        loop {
            let done = py.detach(|| state.link.flush_within(stream, POLL_INTERVAL));
            if done.map_err(|error| wire_error(py, &error))? {
                return Ok(());
            }
            py.check_signals()?;
            self.state.check(py)?;
            if let (Some(progress), Some(stats)) =
                (progress, state.link.connection().stream_stats(stream))
            {
                progress.call1((stats.payload_bytes, stats.expected_bytes))?;
            }
        }
    }
}

#[pymethods]
impl PyConnection {
    /// The address of the other side.
    #[getter]
    fn peer(&self) -> &str {
        &self.peer
    }

    /// Sends tensors in order. Blocks until the operating system has accepted all of them.
    ///
    /// Args:
    ///     tensors: Each tensor, the number of its storage, and whether later tensors share this
    ///         storage. The number is 0 for a storage that is not shared. Tensors that share a
    ///         storage must be consecutive. The bytes of the storage are sent once.
    ///     compression: The name of a codec, or None.
    ///     checksums: Whether to send checksums of the payloads.
    ///     apart: Whether to send on a new stream, which ends after the last tensor.
    ///     progress: Called about ten times a second with two numbers: the bytes that were sent on
    ///         the stream, and the bytes that were queued on it so far.
    #[pyo3(signature = (tensors, *, compression=None, checksums=false, apart=false, progress=None))]
    fn _send(
        &self,
        py: Python<'_>,
        tensors: Vec<(Py<PyTensor>, u64, bool)>,
        compression: Option<&str>,
        checksums: bool,
        apart: bool,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let compression = parse_compression(py, compression)?;
        let to_python = |error| wire_error(py, &error);
        let state = &mut *self.state.begin(py)?;
        let stream =
            if apart { state.link.connection().open_stream() } else { state.default_stream() }
                .map_err(to_python)?;
        let mut last_storage = 0;
        for (index, (tensor, storage, keep)) in tensors.iter().enumerate() {
            let tensor = tensor.get();
            let mut info = tensor.info.clone();
            info.storage_id = *storage;
            let connection = state.link.connection();
            if *storage != 0 && *storage == last_storage {
                connection.send_view(stream, info, *keep).map_err(to_python)?;
            } else {
                let options = SendOptions::default()
                    .with_compression(compression)
                    .with_checksums(checksums)
                    .with_keep(*keep);
                let payload = payload(py, tensor)?;
                connection.send(stream, info, payload, options).map_err(to_python)?;
            }
            last_storage = *storage;
            if (index + 1) % TENSORS_PER_FLUSH == 0 {
                self.flush(py, state, stream, progress)?;
            }
        }
        if apart {
            state.link.connection().finish(stream).map_err(to_python)?;
        }
        self.flush(py, state, stream, progress)
    }

    /// Sends a message of at most 64 KiB. Blocks until the operating system has accepted it.
    fn send_message(&self, py: Python<'_>, message: &[u8]) -> PyResult<()> {
        let to_python = |error| wire_error(py, &error);
        let state = &mut *self.state.begin(py)?;
        let stream = state.default_stream().map_err(to_python)?;
        let message = Bytes::copy_from_slice(message);
        state.link.connection().send_message(stream, message).map_err(to_python)?;
        self.flush(py, state, stream, None)
    }

    /// Returns the next tensor or message, or None at the end. Blocks.
    ///
    /// Args:
    ///     into: The memory for the tensor; None to allocate it.
    ///     device: The device to allocate it on; None for the host.
    ///     timeout: Seconds to wait; None to wait without a limit.
    ///     progress: Called about ten times a second with the bytes received so far.
    ///
    /// Raises:
    ///     ConnectionTimeout: No complete tensor or message arrived within ``timeout``, or the peer
    ///         is silent or makes no progress.
    ///     ConnectionLost: The connection was lost, or the peer cancelled the stream.
    ///     ConfigurationError: ``into`` cannot receive the tensor, or the connection is closed or
    ///         in use.
    ///     OutOfMemoryError: There is too little memory for the tensor, or its storage exceeds
    ///         ``limit_bytes``.
    #[pyo3(signature = (*, into=None, device=None, timeout=None, progress=None))]
    fn _recv<'py>(
        &self,
        py: Python<'py>,
        into: Option<&Bound<'py, PyTensor>>,
        device: Option<Py<Accelerator>>,
        timeout: Option<f64>,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let into = into.map(|tensor| tensor.get().clone());
        let request = Request {
            into: into.as_ref(),
            device: device.as_ref(),
            stream: None,
            deadline: deadline(timeout),
        };
        loop {
            match self.next(py, &request, progress)? {
                None => return Ok(None),
                Some((_, Incoming::Tensor(mut tensor))) => {
                    if into.is_none() {
                        move_all(py, std::slice::from_mut(&mut tensor), device.as_ref())?;
                    }
                    return Ok(Some(Bound::new(py, tensor)?.into_any()));
                }
                Some((_, Incoming::Message(bytes))) => {
                    return Ok(Some(PyBytes::new(py, &bytes).into_any()));
                }
                Some((_, Incoming::Finished)) => {}
                Some((stream, Incoming::Cancelled(reason))) => {
                    return Err(wire_error(py, &Error::Cancelled { stream, reason }));
                }
            }
        }
    }

    /// Returns all tensors of the stream whose tensor arrives next, or None at the end of the
    /// connection. Blocks until the stream ends.
    ///
    /// Args:
    ///     device: The device to allocate the tensors on; None for the host.
    ///     timeout: Seconds to wait for the end of the stream; None to wait without a limit.
    ///     progress: Called about ten times a second with the bytes received so far.
    ///
    /// Raises:
    ///     ConnectionTimeout: The stream did not end within ``timeout``; call again to continue. Or
    ///         the peer is silent or makes no progress.
    ///     ConnectionLost: The connection was lost, or the peer cancelled the stream.
    ///     ConfigurationError: A message arrived instead of a tensor, or the connection is closed
    ///         or in use.
    ///     OutOfMemoryError: There is too little memory for a tensor, or its storage exceeds
    ///         ``limit_bytes``.
    #[pyo3(signature = (*, device=None, timeout=None, progress=None))]
    fn _recv_all<'py>(
        &self,
        py: Python<'py>,
        device: Option<Py<Accelerator>>,
        timeout: Option<f64>,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Vec<Bound<'py, PyTensor>>>> {
        let mut request = Request {
            into: None,
            device: device.as_ref(),
            stream: None,
            deadline: deadline(timeout),
        };
        let mut tensors = Vec::new();
        loop {
            let next = match self.next(py, &request, progress) {
                Ok(next) => next,
                Err(error) => {
                    let Some(stream) = request.stream else { return Err(error) };
                    let note = format!(
                        "{} tensors of the stream have arrived: recv() returns them",
                        tensors.len()
                    );
                    if let Ok(state) = &mut self.state.begin(py) {
                        let received = tensors.into_iter().rev().map(Incoming::Tensor);
                        received.for_each(|tensor| state.ready.push_front((stream, tensor)));
                        error.value(py).call_method1(intern!(py, "add_note"), (note,))?;
                    }
                    return Err(error);
                }
            };
            match next {
                None if tensors.is_empty() => return Ok(None),
                None => {
                    let what = format!(
                        "the peer closed it before the end of a stream (received {} tensors)",
                        tensors.len()
                    );
                    return Err(wire_error(py, &Error::Lost { what }));
                }
                Some((stream, Incoming::Tensor(tensor))) => {
                    request.stream = Some(stream);
                    tensors.push(tensor);
                }
                Some((_, Incoming::Message(_))) => {
                    return Err(configuration_error(
                        py,
                        "expected a tensor, got a message: receive messages with recv()",
                    ));
                }
                Some((_, Incoming::Finished)) => {
                    move_all(py, &mut tensors, device.as_ref())?;
                    let tensors = tensors.into_iter().map(|tensor| Bound::new(py, tensor));
                    return tensors.collect::<PyResult<_>>().map(Some);
                }
                Some((stream, Incoming::Cancelled(reason))) => {
                    return Err(wire_error(py, &Error::Cancelled { stream, reason }));
                }
            }
        }
    }

    /// Returns the statistics of the connection and of its pool, with the keys of
    /// ``ConnectionStats``.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let state = &mut *self.state.begin(py)?;
        let (stats, dict) = (state.link.stats(), PyDict::new(py));
        dict.set_item("sent_bytes", stats.sent_bytes)?;
        dict.set_item("received_bytes", stats.received_bytes)?;
        dict.set_item("copied_bytes", stats.copied_bytes)?;
        dict.set_item("seconds", state.since.elapsed().as_secs_f64())?;
        if let Some(pool) = &state.pool {
            let blocks = pool.stats();
            let pool_dict = PyDict::new(py);
            pool_dict.set_item("hit_rate", blocks.hit_rate())?;
            pool_dict.set_item("in_use_bytes", blocks.in_use_bytes)?;
            pool_dict.set_item("available_bytes", blocks.available_bytes)?;
            dict.set_item("pool", pool_dict)?;
        }
        Ok(dict)
    }

    /// Allows other threads to call ``_abort``.
    fn _allow_abort(&self, py: Python<'_>) -> PyResult<()> {
        let handle = self.state.begin(py)?.link.abort_handle();
        // If there is a handle already, it stays.
        let _ = self.abort.set(handle.map_err(|error| wire_error(py, &error))?);
        Ok(())
    }

    /// Ends the connection, also while another thread uses it. Does not block. Does nothing without
    /// ``_allow_abort``.
    fn _abort(&self) {
        if let Some(handle) = self.abort.get() {
            handle.abort();
        }
    }

    /// Closes the connection after everything that was sent. Does nothing if the connection is
    /// already closed. Ends the call of another thread that uses it, which raises
    /// ConfigurationError.
    ///
    /// Blocks until the operating system of the other side has received everything. On systems
    /// other than Linux, blocks until the other side has closed the connection.
    ///
    /// Args:
    ///     reason: A reason, which is sent to the other side and appears in its errors.
    #[pyo3(signature = (reason="the peer called close()"))]
    fn close(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let Some(state) = self.state.close(py)? else { return Ok(()) };
        py.detach(|| state.link.close(reason)).map_err(|error| wire_error(py, &error))
    }
}

/// Moves received tensors to a device, or to the host for None, unless they are there. Blocks.
/// Tensors that share memory share it afterwards, too.
fn move_all(
    py: Python<'_>,
    tensors: &mut [PyTensor],
    device: Option<&Py<Accelerator>>,
) -> PyResult<()> {
    let mut copies = HashMap::new();
    for tensor in tensors {
        let memory = match copies.entry(Arc::as_ptr(&tensor.memory)) {
            Entry::Occupied(copy) => Arc::clone(copy.get()),
            Entry::Vacant(none) => {
                let moved = py.detach(|| moved(&tensor.memory, &tensor.info, device));
                Arc::clone(none.insert(moved.map_err(|error| wire_error(py, &error))?))
            }
        };
        tensor.memory = memory;
        tensor.info.device = tensor.memory.device_name().as_str().into();
    }
    Ok(())
}

/// Returns the bytes of a tensor's storage for sending. Copies them if they are on a GPU.
fn payload(py: Python<'_>, tensor: &PyTensor) -> PyResult<Bytes> {
    if tensor.memory.bytes().is_some() {
        return Ok(Bytes::from_owner(Payload(Arc::clone(&tensor.memory))));
    }
    let copy = py.detach(|| tensor.memory.to_host()).map_err(|error| pool_error(py, &error))?;
    Ok(copy.into())
}

fn parse_compression(py: Python<'_>, name: Option<&str>) -> PyResult<Compression> {
    Compression::parse(name.unwrap_or("raw"), None)
        .map_err(|reason| configuration_error(py, &format!("invalid compression: {reason}")))
}
