// SPDX-License-Identifier: MIT OR Apache-2.0
//! Machines that this process has sessions with, and storages there.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyComplex, PyDict, PyFloat};
use tensorstream::remote::exec::{
    Answer, Client, ClientOptions, EXEC, Fault, Request, TensorRef, Value, View,
};
use tensorstream::remote::{Address, Bytes, ConnectionOptions, Error, Link, Role, Socket};

use super::torch::{Line, Torch, address_of, is_forked, storage_at, torch};
use crate::dlpack;
use crate::errors::{misuse, of_failure, of_wire, of_wire_at};
use crate::memory::{Memory, Shared, Target};
use crate::wire::{Settings, tls_client};

/// How long something waits before it looks for a signal.
const SLICE: Duration = Duration::from_millis(100);
/// Uploads up to this are copied, so that the program can go on; others are waited for.
const MAX_COPY: usize = 4 << 20;

/// A device: a machine's, by its index in this process.
#[derive(Clone)]
pub(super) struct Seat {
    pub(super) machine: Arc<Session>,
    /// Which of the machine's it is.
    pub(super) ordinal: u32,
}

/// A session with a machine.
pub(crate) struct Session {
    pub(super) client: Client<Target>,
    pub(super) name: String,
    /// The user's lines that asked last, by the requests' numbers.
    lines: Mutex<VecDeque<(u64, Line)>>,
    /// Waits by line: how many, and how long.
    waits: Mutex<HashMap<(usize, i32), Waited>>,
}

/// Waits at one line of the user's.
struct Waited {
    line: Line,
    count: u64,
    time: Duration,
}

/// What happens while somebody traces: what it was, the line, and for how long it was waited.
type Traced = (String, Line, Option<Duration>);

/// As many of the user's lines are known.
const MAX_LINES: usize = 64 << 10;

static TRACING: AtomicBool = AtomicBool::new(false);
static TRACE: Mutex<Vec<Traced>> = Mutex::new(Vec::new());

/// Something has happened, if somebody wants to know.
fn trace(py: Python<'_>, what: &str, line: &Line, waited: Option<Duration>) {
    if TRACING.load(Ordering::Relaxed) {
        let traced = (what.to_string(), line.clone_ref(py), waited);
        TRACE.lock().unwrap_or_else(PoisonError::into_inner).push(traced);
    }
}

static SEATS: RwLock<Vec<Option<Seat>>> = RwLock::new(Vec::new());
static STORAGES: AtomicU64 = AtomicU64::new(1);
/// Storages that more than one of PyTorch's stand for, and how many more.
static SHARED: Mutex<Option<HashMap<u64, usize>>> = Mutex::new(None);
static ANY_SHARED: AtomicBool = AtomicBool::new(false);

pub(super) fn seat(py: Python<'_>, index: u32) -> PyResult<Seat> {
    if is_forked() {
        return Err(PyRuntimeError::new_err(
            "this process is a fork of one that has tensors on a device of tensorstream, whose sessions it cannot use: start processes by \
             spawn or forkserver",
        ));
    }
    let seats = SEATS.read().unwrap_or_else(PoisonError::into_inner);
    seats.get(index as usize).cloned().flatten().ok_or_else(|| {
        misuse(py, &format!("there is no device ts:{index}: RemoteMachine(...).device() gives one"))
    })
}

/// The seats' machine, if both are of the same.
pub(super) fn same_machine(one: &Seat, other: &Seat) -> bool {
    Arc::ptr_eq(&one.machine, &other.machine)
}

/// So many numbers for storages, the first of them.
pub(super) fn new_storages(count: u64) -> u64 {
    STORAGES.fetch_add(count, Ordering::Relaxed)
}

/// What one of PyTorch's storages keeps of one that is elsewhere.
struct Handle {
    machine: Arc<Session>,
    storage: u64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        if ANY_SHARED.load(Ordering::Relaxed) {
            let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(count) = shared.as_mut().and_then(|shared| shared.get_mut(&self.storage)) {
                *count -= 1;
                if *count == 0 {
                    shared.as_mut().map(|shared| shared.remove(&self.storage));
                }
                return;
            }
        }
        self.machine.client.free(self.storage);
    }
}

/// A tensor, as PyTorch has it, that is a view of a storage of so many bytes; which this is the only one to stand for.
pub(super) fn new_tensor<'py>(
    py: Python<'py>,
    torch: &Torch,
    seat: &Seat,
    index: u32,
    tensor: &TensorRef,
    bytes: u64,
) -> PyResult<Bound<'py, PyAny>> {
    let keep = Box::new(Handle { machine: seat.machine.clone(), storage: tensor.storage });
    let view = &tensor.view;
    let element = torch.element(view.dtype)?;
    let whole = view.offset == 0 && extent(view) * element.bytes == bytes;
    // What is not all of its storage is a view of what is.
    let (shape, strides) = if whole {
        (view.sizes.iter().map(|&size| size as i64).collect(), view.strides.clone())
    } else {
        (vec![(bytes / element.bytes) as i64], vec![1])
    };
    let address = address_of(tensor.storage);
    let capsule = dlpack::extension(py, (address, index), element.dlpack, shape, strides, keep)?;
    let made = torch.from_dlpack.bind(py).call1((capsule,))?;
    if whole {
        return Ok(made);
    }
    torch.as_strided.bind(py).call1((made, &view.sizes, &view.strides, view.offset))
}

/// One more than the last element that a view has, of its storage.
fn extent(view: &View) -> u64 {
    if view.sizes.contains(&0) {
        return 0;
    }
    let reach = |(&size, &stride): (&u64, &i64)| (size - 1).saturating_mul(stride.max(0) as u64);
    let last = view.sizes.iter().zip(&view.strides).map(reach).fold(view.offset, u64::saturating_add);
    last.saturating_add(1)
}

impl Session {
    /// Waits for an answer, as long as it takes: of `what`.
    pub(super) fn wait(&self, py: Python<'_>, reply: u64, what: &str) -> PyResult<Answer<Target>> {
        let since = Instant::now();
        let answer = loop {
            let answer = py.detach(|| self.client.wait(reply, SLICE));
            if let Some(answer) = answer.map_err(|fault| self.raise(py, &fault))? {
                break answer;
            }
            py.check_signals()?;
        };
        let time = since.elapsed();
        if let Some(line) = torch(py)?.line(py) {
            trace(py, what, &line, Some(time));
            let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
            let key = (line.code.as_ptr() as usize, line.instruction);
            let waited = waits.entry(key).or_insert_with(|| Waited { line, count: 0, time: Duration::ZERO });
            waited.count += 1;
            waited.time += time;
        }
        Ok(answer)
    }

    /// A request with this number was asked: of `what`, by the line that is under way.
    pub(super) fn note(&self, py: Python<'_>, number: u64, what: &str) -> PyResult<()> {
        let Some(line) = torch(py)?.line(py) else { return Ok(()) };
        trace(py, what, &line, None);
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() >= MAX_LINES {
            lines.pop_front();
        }
        lines.push_back((number, line));
        Ok(())
    }

    /// Where a request was asked.
    fn place(&self, py: Python<'_>, request: u64) -> Option<String> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        // Threads may have noted theirs in another order than they asked.
        let line = lines.iter().rev().find(|(number, _)| *number == request)?.1.clone_ref(py);
        drop(lines);
        Some(line.place(py))
    }

    /// What is due to be sent is.
    pub(super) fn settle(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.client.settle()).map_err(|error| self.lost(py, &error))
    }

    pub(super) fn ask(&self, py: Python<'_>, request: &Request) -> PyResult<u64> {
        let (number, due) =
            self.client.post(|batch| request.encode(batch)).map_err(|error| self.lost(py, &error))?;
        if due {
            self.settle(py)?;
        }
        Ok(number)
    }

    pub(super) fn lost(&self, py: Python<'_>, error: &Error) -> PyErr {
        of_wire_at(py, error, &format!("machine {}: ", self.name))
    }

    pub(super) fn raise(&self, py: Python<'_>, fault: &Fault) -> PyErr {
        match fault {
            Fault::Lost(error) => self.lost(py, error),
            Fault::Failed { request, failure, others } => {
                let asked =
                    self.place(py, *request).map_or_else(String::new, |at| format!("\n  asked at {at}"));
                let more = match others {
                    0 => String::new(),
                    1 => "\n(another operator failed after it)".into(),
                    _ => format!("\n({others} more operators failed after it)"),
                };
                let text = format!("machine {}: {}{asked}{more}", self.name, failure.message);
                of_failure(py, failure.kind, &text)
            }
        }
    }
}

/// A machine, for Python: a session, and its devices.
#[pyclass(frozen, weakref, module = "tensorstream", name = "RemoteSession")]
pub(crate) struct Machine {
    session: Arc<Session>,
    first: u32,
    count: u32,
}

#[pymethods]
impl Machine {
    /// Connects, and gives `count` devices of the machine the next indices.
    #[new]
    #[pyo3(signature = (address, name, count, settings, retry, ca=None, cert=None, key=None))]
    #[allow(clippy::too_many_arguments)] // a call of Python's, by name
    fn new(
        py: Python<'_>,
        address: &str,
        name: String,
        count: u32,
        settings: Settings,
        retry: f64,
        ca: Option<PathBuf>,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
    ) -> PyResult<Self> {
        let to: Address = address.parse().map_err(|error| of_wire(py, &error))?;
        let options = ConnectionOptions { service: EXEC.into(), ..settings.options(py)? };
        let tls = tls_client(py, ca.as_ref(), cert.as_ref(), key.as_ref())?;
        let retry = Duration::try_from_secs_f64(retry)
            .map_err(|_| misuse(py, &format!("retry={retry}: 0 seconds or more are")))?;
        let dial = move || {
            let mut socket = Socket::connect(&to, options.timeout)?;
            if let Some(tls) = &tls {
                socket = socket.into_tls_client(tls)?;
            }
            Link::new(socket, Role::Connector, options.clone())
        };
        let random = py.import("os")?.call_method1("urandom", (16,))?.extract::<[u8; 16]>()?;
        let options = ClientOptions { dial: Box::new(dial), retry };
        let client = py.detach(|| Client::connect(options, random)).map_err(|error| of_wire(py, &error))?;
        let session = Arc::new(Session { client, name, lines: Mutex::default(), waits: Mutex::default() });
        let mut seats = SEATS.write().unwrap_or_else(PoisonError::into_inner);
        let first = seats.len() as u32;
        seats.extend((0..count).map(|ordinal| Some(Seat { machine: session.clone(), ordinal })));
        Ok(Self { session, first, count })
    }

    /// Index of its first device in this process.
    #[getter]
    fn first(&self) -> u32 {
        self.first
    }

    /// Numbers of what was done.
    fn stats(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let stats = py.detach(|| self.session.client.stats());
        let dict = PyDict::new(py);
        dict.set_item("requests", stats.requests)?;
        dict.set_item("batches", stats.batches)?;
        dict.set_item("waits", stats.waits)?;
        dict.set_item("reconnects", stats.reconnects)?;
        dict.set_item("uploaded_bytes", stats.uploaded_bytes)?;
        dict.set_item("downloaded_bytes", stats.downloaded_bytes)?;
        Ok(dict.unbind())
    }

    /// Where the program has waited: place, how often, and for how many seconds; longest first.
    fn waits(&self, py: Python<'_>) -> Vec<(String, u64, f64)> {
        let waits = self.session.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<_> =
            waits.values().map(|waited| (waited.line.clone_ref(py), waited.count, waited.time)).collect();
        drop(waits);
        let mut told: Vec<_> = lines
            .into_iter()
            .map(|(line, count, time)| (line.place(py), count, time.as_secs_f64()))
            .collect();
        told.sort_by(|one, other| other.2.total_cmp(&one.2));
        told
    }

    /// Waits until all that was asked is done.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let reply = self.session.client.reply();
        self.session.ask(py, &Request::Sync { reply })?;
        self.session.wait(py, reply, "synchronize").map(drop)
    }

    /// Sends what waits to be sent.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.session.client.flush()).map_err(|error| self.session.lost(py, &error))
    }

    /// Ends the session: its tensors are gone.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.session.client.close()).map_err(|error| self.session.lost(py, &error))
    }

    /// Its devices' indices mean nothing any more.
    fn forget(&self) {
        let mut seats = SEATS.write().unwrap_or_else(PoisonError::into_inner);
        for at in self.first..self.first + self.count {
            seats[at as usize] = None;
        }
    }
}

/// A new tensor of the device, of zeros that take no memory before something is written to them.
#[pyfunction]
pub(crate) fn remote_empty<'py>(
    py: Python<'py>,
    index: u32,
    sizes: Vec<u64>,
    strides: Vec<i64>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let (torch, seat) = (torch(py)?, seat(py, index)?);
    let dtype = torch.scalar_type(dtype)?;
    let view = View { dtype, sizes, strides, offset: 0 };
    let bytes = extent(&view).saturating_mul(torch.element(dtype)?.bytes);
    let storage = new_storages(1);
    seat.machine.ask(py, &Request::Create { storage, bytes, device: seat.ordinal })?;
    new_tensor(py, torch, &seat, index, &TensorRef { storage, view }, bytes)
}

/// Another tensor of a storage, all of it and in one dimension: by the device's index, what stands for the storage's address, and its bytes; which
/// it has from now on, if `resized` says so.
#[pyfunction]
#[pyo3(signature = (index, address, bytes, dtype, resized=false))]
pub(crate) fn remote_whole<'py>(
    py: Python<'py>,
    index: u32,
    address: u64,
    bytes: u64,
    dtype: &Bound<'py, PyAny>,
    resized: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let (torch, seat) = (torch(py)?, seat(py, index)?);
    let storage = storage_at(address)
        .ok_or_else(|| PyTypeError::new_err("needs a storage of a device of tensorstream"))?;
    if resized {
        seat.machine.ask(py, &Request::Resize { storage, bytes })?;
    }
    {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        *shared.get_or_insert_default().entry(storage).or_default() += 1;
        ANY_SHARED.store(true, Ordering::Relaxed);
    }
    let dtype = torch.scalar_type(dtype)?;
    let element = torch.element(dtype)?.bytes;
    let view = View::contiguous(dtype, vec![bytes / element]);
    new_tensor(py, torch, &seat, index, &TensorRef { storage, view }, bytes / element * element)
}

fn elsewhere(tensor: &Bound<'_, PyAny>) -> PyErr {
    let device = tensor.getattr("device").map_or_else(|_| "?".into(), |device| device.to_string());
    PyTypeError::new_err(format!("needs a tensor of a device of tensorstream, and this is on {device}"))
}

/// The value of a tensor of one element; its bytes, where Python has no such numbers.
#[pyfunction]
pub(crate) fn remote_scalar<'py>(py: Python<'py>, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let torch = torch(py)?;
    let (index, from) = torch.describe(tensor)?.ok_or_else(|| elsewhere(tensor))?;
    let (seat, dtype) = (seat(py, index)?, from.view.dtype);
    let reply = seat.machine.client.reply();
    let number = seat.machine.ask(py, &Request::Read { reply, tensor: from })?;
    seat.machine.note(py, number, "item")?;
    let Answer::Bytes(bytes) = seat.machine.wait(py, reply, "item")? else {
        return Err(PyRuntimeError::new_err("an answer that is not that to the question"));
    };
    Ok(match (dtype.0, &bytes[..]) {
        (0, &[a]) => a.into_pyobject(py)?.into_any(),
        (1, &[a]) => (a as i8).into_pyobject(py)?.into_any(),
        (2, &[a, b]) => i16::from_le_bytes([a, b]).into_pyobject(py)?.into_any(),
        (3, &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]).into_pyobject(py)?.into_any(),
        (4, &[a, b, c, d, e, f, g, h]) => {
            i64::from_le_bytes([a, b, c, d, e, f, g, h]).into_pyobject(py)?.into_any()
        }
        (6, &[a, b, c, d]) => PyFloat::new(py, f64::from(f32::from_le_bytes([a, b, c, d]))).into_any(),
        (7, &[a, b, c, d, e, f, g, h]) => {
            PyFloat::new(py, f64::from_le_bytes([a, b, c, d, e, f, g, h])).into_any()
        }
        (11, &[a]) => PyBool::new(py, a != 0).to_owned().into_any(),
        (_, bytes) => PyBytes::new(py, bytes).into_any(),
    })
}

/// Sends the bytes of a capsule - contiguous, on the host - to a tensor's elements, which are contiguous too.
#[pyfunction]
pub(crate) fn remote_upload(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    capsule: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let torch = torch(py)?;
    let (index, to) = torch.describe(tensor)?.ok_or_else(|| elsewhere(tensor))?;
    let (seat, memory) = (seat(py, index)?, Memory::of_capsule(capsule)?);
    let offset = to.view.offset * torch.element(to.view.dtype)?.bytes;
    let session = &seat.machine;
    let long = memory.len() > MAX_COPY;
    let bytes = if long {
        Bytes::from_owner(Shared(memory))
    } else {
        Bytes::copy_from_slice(memory.bytes().unwrap_or_default())
    };
    py.detach(|| session.client.write(to.storage, offset, bytes))
        .map_err(|error| session.lost(py, &error))?;
    while long
        && !py.detach(|| session.client.delivered_within(SLICE)).map_err(|error| session.lost(py, &error))?
    {
        py.check_signals()?;
    }
    Ok(())
}

/// Receives a tensor's elements to a capsule's bytes: contiguous, on the host. Blocks.
#[pyfunction]
pub(crate) fn remote_download(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    capsule: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let torch = torch(py)?;
    let (index, from) = torch.describe(tensor)?.ok_or_else(|| elsewhere(tensor))?;
    let (seat, memory) = (seat(py, index)?, Memory::of_capsule(capsule)?);
    let len = memory.len();
    let target = Target::new(memory, 0, len)
        .ok_or_else(|| PyTypeError::new_err("needs memory on the host that may be written to"))?;
    let session = &seat.machine;
    let reply = py.detach(|| session.client.read(from, target)).map_err(|error| session.lost(py, &error))?;
    session.wait(py, reply, "copy to the host").map(drop)
}

/// What a call tells of a tensor: the number of its storage, and that by which logs name it. None of one that is elsewhere.
#[pyfunction]
pub(crate) fn remote_names(py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<Option<(u64, u64)>> {
    Ok(torch(py)?.describe(tensor)?.map(|(_, tensor)| (tensor.storage, tensor.metadata_hash())))
}

/// Begins a trace, or ends it and gives what has happened: what it was, where, and the seconds that were waited for it.
#[pyfunction]
pub(crate) fn remote_trace(py: Python<'_>, on: bool) -> Vec<(String, String, Option<f64>)> {
    TRACING.store(on, Ordering::Relaxed);
    let traced = std::mem::take(&mut *TRACE.lock().unwrap_or_else(PoisonError::into_inner));
    let told = |(what, line, time): Traced| (what, line.place(py), time.map(|time| time.as_secs_f64()));
    traced.into_iter().map(told).collect()
}

/// What an operator gave that is no tensor.
pub(super) fn plain(py: Python<'_>, value: &Value) -> PyResult<Py<PyAny>> {
    Ok(match value {
        Value::None => py.None(),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any().unbind(),
        Value::Int(value) => value.into_pyobject(py)?.into_any().unbind(),
        Value::Float(value) => value.into_pyobject(py)?.into_any().unbind(),
        Value::Complex(real, imaginary) => PyComplex::from_doubles(py, *real, *imaginary).into_any().unbind(),
        Value::Text(text) => text.into_pyobject(py)?.into_any().unbind(),
        other => return Err(PyRuntimeError::new_err(format!("an answer of no known kind: {other:?}"))),
    })
}
