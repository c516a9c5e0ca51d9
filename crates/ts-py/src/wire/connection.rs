// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream.connect`, and one end of a connection.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tensorstream::format::{Codec, Compression};
use tensorstream::pool::{self, PinnedMemoryPool};
use tensorstream::remote::{Bytes, Error, Event, Link, Role, SendOptions, Socket, TensorInfo};
use tensorstream::streams::AnyDevice;

use super::settings::{Settings, address, tls_client};
use crate::errors::{misuse, of_pool, of_wire, timed_out};
use crate::memory::{Memory, Shared, Target};
use crate::tensor::PyTensor;

/// How long something waits before it looks for a signal.
pub(super) const SLICE: Duration = Duration::from_millis(100);

/// What has come and was not asked for yet, and on which stream.
enum Received {
    Tensor(PyTensor),
    Message(Bytes),
    Finished,
    Cancelled(String),
}

struct State {
    link: Link<Target>,
    /// On which everything goes that is not said to go elsewhere.
    stream: Option<u32>,
    /// Storages that tensors to come may have.
    kept: HashMap<(u32, u64), Arc<Memory>>,
    /// The last tensor with such a storage has been announced.
    last: Option<(u32, u64)>,
    /// A tensor that was announced and has no memory yet.
    announced: Option<(u32, TensorInfo, bool)>,
    ready: VecDeque<(u32, Received)>,
    pool: Option<PinnedMemoryPool<AnyDevice>>,
    limit: u64,
    since: Instant,
}

/// One end of a connection by which tensors and messages come and go. For one thread at a time.
#[pyclass(frozen, weakref, module = "tensorstream", name = "Connection")]
pub(crate) struct PyConnection {
    state: Mutex<Option<State>>,
    peer: String,
}

pub(super) fn connection(
    py: Python<'_>,
    link: Link<Target>,
    settings: &Settings,
) -> PyResult<PyConnection> {
    let peer = link.peer().to_string();
    let state = State {
        link,
        stream: None,
        kept: HashMap::new(),
        last: None,
        announced: None,
        ready: VecDeque::new(),
        pool: settings.pool(py)?,
        limit: settings.limit_bytes,
        since: Instant::now(),
    };
    Ok(PyConnection { state: Mutex::new(Some(state)), peer })
}

/// Connects, and waits until both ends know each other.
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
        Ok(Link::unmet(socket, Role::Connector, options))
    });
    meet(py, link.map_err(|error: Error| of_wire(py, &error))?, &settings)
}

/// Waits until both ends know each other.
fn meet(py: Python<'_>, link: Link<Target>, settings: &Settings) -> PyResult<PyConnection> {
    let this = connection(py, link, settings)?;
    {
        let mut state = this.state(py)?;
        let state = state.as_mut().expect("it was just made");
        while !py.detach(|| state.link.meet_within(SLICE)).map_err(|error| of_wire(py, &error))? {
            py.check_signals()?;
        }
    }
    Ok(this)
}

pub(super) fn held<'a, T>(
    py: Python<'_>,
    lock: Option<MutexGuard<'a, T>>,
) -> PyResult<MutexGuard<'a, T>> {
    lock.ok_or_else(|| misuse(py, "another thread uses it now"))
}

pub(super) fn deadline(timeout: Option<f64>) -> Option<Instant> {
    let time = timeout
        .map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
    time.and_then(|time| Instant::now().checked_add(time))
}

pub(super) fn slice(end: Option<Instant>) -> Duration {
    end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()).min(SLICE))
}

/// Where what comes is to go, which of it, and until when it is waited for.
struct Wanted<'a> {
    into: Option<&'a PyTensor>,
    stream: Option<u32>,
    end: Option<Instant>,
}

impl PyConnection {
    fn state<'a>(&'a self, py: Python<'_>) -> PyResult<MutexGuard<'a, Option<State>>> {
        held(py, self.state.try_lock())
    }

    /// Returns the next tensor or message; None at the end. Raises ConnectionTimeout when the time
    /// is over, after which the connection can still be used.
    fn next(
        &self,
        py: Python<'_>,
        wanted: &Wanted<'_>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<(u32, Received)>> {
        let mut state = self.state(py)?;
        let Some(state) = state.as_mut() else {
            return Err(misuse(py, "the connection is closed"));
        };
        let mut shown = Instant::now();
        loop {
            let of = |(stream, _): &(u32, Received)| {
                wanted.stream.is_none_or(|wanted| wanted == *stream)
            };
            if let Some(at) = state.ready.iter().position(of) {
                return Ok(state.ready.remove(at));
            }
            state.accept(py, wanted.into)?;
            let event = match py.detach(|| state.link.next_event_within(slice(wanted.end))) {
                Ok(event) => event,
                Err(Error::Closed { .. }) => return Ok(None),
                Err(error) => return Err(of_wire(py, &error)),
            };
            let none = event.is_none();
            if let Some(event) = event {
                state.hear(event);
            }
            if shown.elapsed() >= SLICE {
                shown = Instant::now();
                py.check_signals()?;
                if let Some(progress) = progress {
                    let stats = state.link.connection().stats();
                    progress.call1((stats.received_bytes,))?;
                }
            }
            if none && wanted.end.is_some_and(|end| Instant::now() >= end) {
                let what = format!("nothing arrived from {} within the timeout of recv", self.peer);
                return Err(timed_out(py, &what));
            }
        }
    }

    /// Waits until what was sent on a stream is on its way.
    fn flush(
        &self,
        py: Python<'_>,
        state: &mut State,
        stream: u32,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        loop {
            let done = py.detach(|| state.link.flush_within(stream, SLICE));
            if done.map_err(|error| of_wire(py, &error))? {
                return Ok(());
            }
            py.check_signals()?;
            if let (Some(progress), Some(stats)) =
                (progress, state.link.connection().stream_stats(stream))
            {
                progress.call1((stats.payload_bytes, stats.expected_bytes))?;
            }
        }
    }
}

impl State {
    fn hear(&mut self, event: Event<Target>) {
        match event {
            Event::Metadata { stream, info, known, kept } => {
                match (kept, known) {
                    (false, false) => drop(self.kept.remove(&(stream, info.storage_id))),
                    (false, true) => self.last = Some((stream, info.storage_id)),
                    _ => {}
                }
                if !known && info.storage_len > 0 {
                    self.announced = Some((stream, info, kept));
                }
            }
            Event::End { stream, info, sink } => {
                let key = (stream, info.storage_id);
                let memory = match sink {
                    Some(target) => Some(target.into_memory()),
                    None if info.storage_len == 0 => Memory::zeros(0).map(Arc::new),
                    None => self.kept.get(&key).cloned(),
                };
                if self.last.take_if(|last| *last == key).is_some() {
                    self.kept.remove(&key);
                }
                if let Some(memory) = memory {
                    self.ready
                        .push_back((stream, Received::Tensor(PyTensor { info: *info, memory })));
                }
            }
            Event::Message { stream, bytes } => {
                self.ready.push_back((stream, Received::Message(bytes)));
            }
            Event::Finished { stream } => {
                self.forget(stream);
                self.ready.push_back((stream, Received::Finished));
            }
            Event::Cancelled { stream, reason, .. } => {
                self.forget(stream);
                self.ready.push_back((stream, Received::Cancelled(reason)));
            }
            _ => {}
        }
    }

    fn forget(&mut self, stream: u32) {
        self.kept.retain(|(of, _), _| *of != stream);
        self.announced.take_if(|(of, ..)| *of == stream);
    }

    /// Gives the tensor that was announced its memory: that of `into`, or a block of the pool, or
    /// some of its own.
    fn accept(&mut self, py: Python<'_>, into: Option<&PyTensor>) -> PyResult<()> {
        let Some((stream, info, kept)) = self.announced.take() else { return Ok(()) };
        let len = info.storage_len as usize;
        let memory = match into {
            Some(into) => {
                let fits = into.info.is_contiguous()
                    && into.memory.len() == len
                    && !into.memory.is_read_only();
                if !fits {
                    let what = format!(
                        "tensor {:?} has {len} bytes, and is to go to {} that are {}",
                        info.name,
                        into.memory.len(),
                        if into.memory.is_read_only() {
                            "read-only"
                        } else {
                            "not contiguous, or not as many"
                        }
                    );
                    self.announced = Some((stream, info, kept));
                    return Err(misuse(py, &what));
                }
                Arc::clone(&into.memory)
            }
            None => match self.fresh(&info) {
                Ok(memory) => Arc::new(memory),
                Err(error) => {
                    self.link.connection().cancel(stream, "there is no memory for it");
                    return Err(of_wire(py, &error));
                }
            },
        };
        if kept {
            self.kept.insert((stream, info.storage_id), Arc::clone(&memory));
        }
        let target = Target::new(memory, 0, len)
            .ok_or_else(|| misuse(py, "the memory is not on the host"))?;
        self.link.connection().accept(stream, target).map_err(|error| of_wire(py, &error))
    }

    fn fresh(&self, info: &TensorInfo) -> Result<Memory, Error> {
        let block =
            self.pool.as_ref().and_then(|pool| pool.acquire(info.storage_len as usize).ok());
        // What a pool has no block for has memory of its own.
        if let Some(memory) = block.and_then(Memory::of_pool) {
            return Ok(memory);
        }
        let requested_bytes = info.storage_len as usize;
        let none = |source| Error::Memory {
            tensor: info.name.clone(),
            bytes: info.storage_len,
            source: Arc::new(source),
        };
        if info.storage_len > self.limit {
            return Err(none(pool::Error::NeverFits {
                requested_bytes,
                capacity_bytes: self.limit as usize,
            }));
        }
        Memory::zeros(requested_bytes).ok_or_else(|| {
            let source = std::io::ErrorKind::OutOfMemory.into();
            none(pool::Error::Map { bytes: requested_bytes, source })
        })
    }

    fn stream(&mut self) -> Result<u32, Error> {
        // One that the other end has given up is over.
        let open =
            self.stream.filter(|&stream| self.link.connection().stream_stats(stream).is_some());
        match open {
            Some(stream) => Ok(stream),
            None => Ok(*self.stream.insert(self.link.connection().open_stream()?)),
        }
    }
}

/// A tensor's storage, as what is sent.
fn payload(py: Python<'_>, tensor: &PyTensor) -> PyResult<Bytes> {
    if tensor.memory.bytes().is_some() {
        return Ok(Bytes::from_owner(Shared(Arc::clone(&tensor.memory))));
    }
    let copy = py.detach(|| tensor.memory.to_host()).map_err(|error| of_pool(py, &error))?;
    Ok(copy.into())
}

fn compression(py: Python<'_>, name: Option<&str>) -> PyResult<Compression> {
    match name {
        None | Some("raw") => Ok(Compression::None),
        Some("auto") => Ok(Compression::Auto),
        Some(name) => match Codec::from_name(name) {
            Some(codec) => Ok(Compression::Codec(codec, None)),
            None => Err(misuse(
                py,
                &format!("compression={name:?}: \"lz4\", \"zstd\", \"split\" and \"auto\" are"),
            )),
        },
    }
}

#[pymethods]
impl PyConnection {
    /// Who is at the other end.
    #[getter]
    fn peer(&self) -> &str {
        &self.peer
    }

    /// Sends tensors, one behind the other: views of one storage if `storage` is given, which goes
    /// once. On a stream of their own that ends with them if `apart`.
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
        let compression = self::compression(py, compression)?;
        let wire = |error| of_wire(py, &error);
        let mut state = self.state(py)?;
        let state = state.as_mut().ok_or_else(|| misuse(py, "the connection is closed"))?;
        let stream = if apart { state.link.connection().open_stream() } else { state.stream() }
            .map_err(wire)?;
        let mut last = 0;
        for (number, (tensor, storage, keep)) in tensors.iter().enumerate() {
            let tensor = tensor.get();
            let mut info = tensor.info.clone();
            info.storage_id = *storage;
            let connection = state.link.connection();
            if *storage != 0 && *storage == last {
                connection.send_view(stream, info, *keep).map_err(wire)?;
            } else {
                let options = SendOptions { compression, checksums, keep: *keep };
                connection.send(stream, info, payload(py, tensor)?, options).map_err(wire)?;
            }
            last = *storage;
            // So much may wait for the socket at a time.
            if number % 64 == 63 {
                self.flush(py, state, stream, progress)?;
            }
        }
        if apart {
            state.link.connection().finish(stream).map_err(wire)?;
        }
        self.flush(py, state, stream, progress)
    }

    /// Sends a message of at most 64 KiB.
    fn send_message(&self, py: Python<'_>, message: &[u8]) -> PyResult<()> {
        let mut state = self.state(py)?;
        let state = state.as_mut().ok_or_else(|| misuse(py, "the connection is closed"))?;
        let stream = state.stream().map_err(|error| of_wire(py, &error))?;
        let message = Bytes::copy_from_slice(message);
        state
            .link
            .connection()
            .send_message(stream, message)
            .map_err(|error| of_wire(py, &error))?;
        self.flush(py, state, stream, None)
    }

    /// Returns the next tensor or message; None at the end. Raises ConnectionTimeout when none
    /// arrives within `timeout` seconds.
    #[pyo3(signature = (*, into=None, timeout=None, progress=None))]
    fn _recv<'py>(
        &self,
        py: Python<'py>,
        into: Option<&Bound<'py, PyTensor>>,
        timeout: Option<f64>,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let into = into.map(|tensor| tensor.get().clone());
        let wanted = Wanted { into: into.as_ref(), stream: None, end: deadline(timeout) };
        loop {
            match self.next(py, &wanted, progress)? {
                None => return Ok(None),
                Some((_, Received::Tensor(tensor))) => {
                    return Ok(Some(Bound::new(py, tensor)?.into_any()));
                }
                Some((_, Received::Message(bytes))) => {
                    return Ok(Some(PyBytes::new(py, &bytes).into_any()));
                }
                Some((_, Received::Finished)) => {}
                Some((stream, Received::Cancelled(reason))) => {
                    return Err(of_wire(py, &Error::Cancelled { stream, reason }));
                }
            }
        }
    }

    /// Returns all tensors of the next stream that ends; None at the end. Raises ConnectionTimeout
    /// when nothing arrives within `timeout` seconds; the next call continues.
    #[pyo3(signature = (*, timeout=None, progress=None))]
    fn _recv_all<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Vec<Bound<'py, PyTensor>>>> {
        let mut wanted = Wanted { into: None, stream: None, end: deadline(timeout) };
        let mut tensors = Vec::new();
        loop {
            let next = match self.next(py, &wanted, progress) {
                Ok(next) => next,
                Err(error) => {
                    // The next call gets them again, if the connection can still be used.
                    if let (Some(stream), Some(state)) = (wanted.stream, &mut *self.state(py)?) {
                        let received = tensors.into_iter().rev().map(Received::Tensor);
                        received.for_each(|tensor| state.ready.push_front((stream, tensor)));
                    }
                    return Err(error);
                }
            };
            match next {
                None if tensors.is_empty() => return Ok(None),
                None => {
                    return Err(of_wire(
                        py,
                        &Error::Lost { what: format!("after {} tensors", tensors.len()) },
                    ));
                }
                Some((stream, Received::Tensor(tensor))) => {
                    wanted.stream = Some(stream);
                    tensors.push(tensor);
                }
                Some((_, Received::Message(_))) => {
                    return Err(misuse(py, "a message where tensors are received"));
                }
                Some((_, Received::Finished)) => {
                    let tensors = tensors.into_iter().map(|tensor| Bound::new(py, tensor));
                    return tensors.collect::<PyResult<_>>().map(Some);
                }
                Some((stream, Received::Cancelled(reason))) => {
                    return Err(of_wire(py, &Error::Cancelled { stream, reason }));
                }
            }
        }
    }

    /// What it has done so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let state = self.state(py)?;
        let state = state.as_ref().ok_or_else(|| misuse(py, "the connection is closed"))?;
        let (stats, dict) = (state.link.stats(), PyDict::new(py));
        dict.set_item("sent_bytes", stats.sent_bytes)?;
        dict.set_item("received_bytes", stats.received_bytes)?;
        dict.set_item("copied_bytes", stats.copied_bytes)?;
        dict.set_item("seconds", state.since.elapsed().as_secs_f64())?;
        if let Some(pool) = &state.pool {
            let blocks = pool.stats();
            let of_pool = PyDict::new(py);
            of_pool.set_item("hit_rate", blocks.hit_rate())?;
            of_pool.set_item("in_use_bytes", blocks.in_use_bytes)?;
            of_pool.set_item("available_bytes", blocks.available_bytes)?;
            dict.set_item("pool", of_pool)?;
        }
        Ok(dict)
    }

    /// Says that this is the end, behind what was sent. Does nothing the second time.
    #[pyo3(signature = (reason="it was closed"))]
    fn close(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let Some(state) = self.state(py)?.take() else { return Ok(()) };
        py.detach(|| state.link.close(reason)).map_err(|error| of_wire(py, &error))
    }
}
