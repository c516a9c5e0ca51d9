// SPDX-License-Identifier: MIT OR Apache-2.0
//! Machines that this process has sessions with, and storages there.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard, RwLock};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyList};
use tensorstream::exec::{
    Answer, Call, Client, ClientStats, Request, ScalarType, StorageView, TensorRef, Value,
    WaitError,
};
use tensorstream::remote::{Bytes, Error};

use super::scalars::{Look, Scalars};
use super::torch::{Line, Torch, address_of, is_forked, storage_at, torch};
use super::way::Way;
use crate::dlpack;
use crate::errors::{configuration_error, operator_error, wire_error_at};
use crate::memory::{Memory, Payload, Target};
use crate::wire::Settings;

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

/// A session with a machine, or, while that is paused, what is to go on.
pub(crate) struct Session {
    client: RwLock<Option<Arc<Client<Target>>>>,
    pub(super) name: String,
    pub(super) scalars: Mutex<Scalars>,
    pub(super) operators: AtomicU64,
    /// Which of this process's it is.
    pub(super) number: u32,
    /// What the machine was told that numbers become.
    default_dtype: AtomicU8,
    /// The thread that pauses it or has it go on, or 0: others are refused meanwhile.
    paused_by: AtomicU64,
    /// How many uploads are under way.
    uploads: AtomicU64,
    /// What was done before it was paused.
    past: Mutex<ClientStats>,
    /// Storages that were given up while it pauses, until it has gone on.
    freed: Mutex<Option<Vec<u64>>>,
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

/// PyTorch's number for bytes.
const BYTES: ScalarType = ScalarType(0);
/// That for float32, which numbers become where nobody has said otherwise.
const FLOAT: u8 = 6;
/// As many of the user's lines are known.
const MAX_LINES: usize = 64 << 10;

static TRACING: AtomicBool = AtomicBool::new(false);
static TRACE: Mutex<Vec<Traced>> = Mutex::new(Vec::new());

/// Something has happened, if somebody wants to know.
fn trace(py: Python<'_>, what: &str, line: &Line, waited: Option<Duration>) {
    if TRACING.load(Ordering::Relaxed) {
        let traced = (what.to_string(), line.clone_ref(py), waited);
        TRACE.lock().push(traced);
    }
}

static SEATS: RwLock<Vec<Option<Seat>>> = RwLock::new(Vec::new());
static STORAGES: AtomicU64 = AtomicU64::new(1);
static SESSIONS: AtomicU32 = AtomicU32::new(0);
/// Storages that more than one of PyTorch's stand for, and how many more.
static SHARED: Mutex<Option<HashMap<u64, usize>>> = Mutex::new(None);
static ANY_SHARED: AtomicBool = AtomicBool::new(false);

pub(super) fn seat(py: Python<'_>, index: u32) -> PyResult<Seat> {
    if is_forked() {
        return Err(PyRuntimeError::new_err(
            "this process is a fork of one that has tensors on a device of tensorstream, whose \
             sessions it cannot use: start processes by \
             spawn or forkserver",
        ));
    }
    let seats = SEATS.read();
    seats.get(index as usize).cloned().flatten().ok_or_else(|| {
        configuration_error(
            py,
            &format!("there is no device ts:{index}: RemoteMachine(...).device() gives one"),
        )
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
            let mut shared = SHARED.lock();
            if let Some(count) = shared.as_mut().and_then(|shared| shared.get_mut(&self.storage)) {
                *count -= 1;
                if *count == 0 {
                    shared.as_mut().map(|shared| shared.remove(&self.storage));
                }
                return;
            }
        }
        self.machine.free(self.storage);
    }
}

/// A tensor, as PyTorch has it, that is a view of a storage of so many bytes; which this is the
/// only one to stand for.
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
    let row = torch.row(view.dtype)?;
    let whole = view.offset == 0 && extent(view) * row.bytes == bytes;
    // What is not all of its storage is a view of what is.
    let (shape, strides) = if whole {
        (view.sizes.iter().map(|&size| size as i64).collect(), view.strides.clone())
    } else {
        (vec![(bytes / row.bytes) as i64], vec![1])
    };
    let address = address_of(tensor.storage);
    let capsule = dlpack::extension(py, (address, index), row.dlpack_type(), shape, strides, keep)?;
    let made = torch.from_dlpack.bind(py).call1((capsule,))?;
    if whole {
        return Ok(made);
    }
    torch.hooks.as_strided.bind(py).call1((made, &view.sizes, &view.strides, view.offset))
}

/// One more than the last element that a view has, of its storage.
fn extent(view: &StorageView) -> u64 {
    if view.sizes.contains(&0) {
        return 0;
    }
    let reach = |(&size, &stride): (&u64, &i64)| (size - 1).saturating_mul(stride.max(0) as u64);
    let last =
        view.sizes.iter().zip(&view.strides).map(reach).fold(view.offset, u64::saturating_add);
    last.saturating_add(1)
}

impl Session {
    pub(super) fn client(&self, py: Python<'_>) -> PyResult<Arc<Client<Target>>> {
        let by = self.paused_by.load(Ordering::SeqCst);
        if by != 0 && by != this_thread() {
            let what = format!(
                "machine {} is just being paused, or resumed, by another thread",
                self.name
            );
            return Err(configuration_error(py, &what));
        }
        let client = self.client.read().clone();
        client.ok_or_else(|| {
            configuration_error(py, &format!("machine {} is paused: resume() it first", self.name))
        })
    }

    /// The machine knows what numbers become that have no dtype: as PyTorch has it here.
    pub(super) fn tell_default_dtype(&self, py: Python<'_>, now: ScalarType) -> PyResult<()> {
        if self.default_dtype.load(Ordering::Relaxed) == now.0 {
            return Ok(());
        }
        let op = self
            .client(py)?
            .operator_id("tensorstream::default_dtype")
            .map_err(|error| self.lost(py, &error))?;
        let args = vec![Value::Dtype(now)];
        let call = Call { op, args, kwargs: Vec::new(), outputs: Vec::new(), reply: None };
        self.ask(py, &Request::Call(call))?;
        // Not before: others would ask as if it was told.
        self.default_dtype.store(now.0, Ordering::Relaxed);
        Ok(())
    }

    fn numbers(&self) -> MutexGuard<'_, Scalars> {
        self.scalars.lock()
    }

    /// Nobody has a view of a storage any more.
    fn free(&self, storage: u64) {
        let unwanted = self.numbers().gone(storage);
        if let Some(freed) = &mut *self.freed.lock() {
            freed.push(storage);
            return;
        }
        if let Some(client) = &*self.client.read() {
            unwanted.into_iter().for_each(|reply| client.discard_reply(reply));
            client.free(storage);
        }
    }

    /// Something was asked that writes to these storages.
    pub(super) fn written(&self, storages: impl Iterator<Item = u64>) {
        for storage in storages {
            let unwanted = self.numbers().written(storage);
            if let (Some(reply), Some(client)) = (unwanted, &*self.client.read()) {
                client.discard_reply(reply);
            }
        }
    }

    /// A storage of one element was made at this line, by this output of an operator: if the
    /// program looks at such it is asked for now.
    pub(super) fn made(
        &self,
        py: Python<'_>,
        tensor: &TensorRef,
        line: (usize, i32),
        op: u32,
        output: usize,
    ) -> PyResult<()> {
        if self.numbers().made(tensor.storage, (line.0, line.1, op, output)) {
            let reply = self.client(py)?.new_reply();
            self.numbers().ask_early(tensor.storage, tensor.view.clone(), reply);
            self.ask(py, &Request::Read { reply, tensor: tensor.clone() })?;
        }
        Ok(())
    }

    /// The bytes of a tensor of one element, which is waited for if it is not known.
    fn number(&self, py: Python<'_>, tensor: TensorRef) -> PyResult<Vec<u8>> {
        let mut reply = self.client(py)?.new_reply();
        let storage = tensor.storage;
        let look = self.numbers().look(storage, &tensor.view, reply);
        match look {
            Look::Known(bytes) => return Ok(bytes),
            Look::Early(early) => reply = early,
            Look::Unknown => {
                let number = self.ask(py, &Request::Read { reply, tensor })?;
                self.note(py, number, "item")?;
            }
        }
        let answer = self.wait(py, reply, "item");
        let bytes = match &answer {
            Ok(Answer::Bytes(bytes)) => Some(&bytes[..]),
            _ => None,
        };
        self.numbers().answered(storage, reply, bytes);
        match answer? {
            Answer::Bytes(bytes) => Ok(bytes),
            _ => Err(PyRuntimeError::new_err("an answer that is not that to the question")),
        }
    }

    /// Waits for an answer, as long as it takes: of `what`.
    pub(super) fn wait(&self, py: Python<'_>, reply: u64, what: &str) -> PyResult<Answer<Target>> {
        let (since, client) = (Instant::now(), self.client(py)?);
        let answer = loop {
            let answer = py.detach(|| client.wait(reply, SLICE));
            if let Some(answer) = answer.map_err(|fault| self.raise(py, &fault))? {
                break answer;
            }
            py.check_signals().inspect_err(|_| client.discard_reply(reply))?;
        };
        let time = since.elapsed();
        if let Some(line) = torch(py)?.line(py) {
            trace(py, what, &line, Some(time));
            let mut waits = self.waits.lock();
            let key = (line.code.as_ptr() as usize, line.instruction);
            let waited =
                waits.entry(key).or_insert_with(|| Waited { line, count: 0, time: Duration::ZERO });
            waited.count += 1;
            waited.time += time;
        }
        Ok(answer)
    }

    /// A request with this number was asked: of `what`, by the line that is under way.
    /// The line: its function's code, and the instruction.
    pub(super) fn note(
        &self,
        py: Python<'_>,
        number: u64,
        what: &str,
    ) -> PyResult<Option<(usize, i32)>> {
        let Some(line) = torch(py)?.line(py) else { return Ok(None) };
        trace(py, what, &line, None);
        let at = (line.code.as_ptr() as usize, line.instruction);
        let mut lines = self.lines.lock();
        let oldest = if lines.len() >= MAX_LINES { lines.pop_front() } else { None };
        lines.push_back((number, line));
        drop(lines);
        // Code that is gone with its line may have had tensors.
        drop(oldest);
        Ok(Some(at))
    }

    /// Where a request was asked.
    fn place(&self, py: Python<'_>, request: u64) -> Option<String> {
        let lines = self.lines.lock();
        // Threads may have noted theirs in another order than they asked.
        let line = lines.iter().rev().find(|(number, _)| *number == request)?.1.clone_ref(py);
        drop(lines);
        Some(line.place(py))
    }

    pub(super) fn ask(&self, py: Python<'_>, request: &Request) -> PyResult<u64> {
        let client = self.client(py)?;
        let submitted = client.submit(request).map_err(|error| self.lost(py, &error))?;
        if submitted.batch_full {
            py.detach(|| client.send_batches()).map_err(|error| self.lost(py, &error))?;
        }
        Ok(submitted.request)
    }

    pub(super) fn lost(&self, py: Python<'_>, error: &Error) -> PyErr {
        wire_error_at(py, error, &format!("machine {}: ", self.name))
    }

    pub(super) fn raise(&self, py: Python<'_>, fault: &WaitError) -> PyErr {
        match fault {
            WaitError::Ended(error) => self.lost(py, error),
            WaitError::Failed { request, failure, others } => {
                let asked = self
                    .place(py, *request)
                    .map_or_else(String::new, |at| format!("\n  asked at {at}"));
                let more = match others {
                    0 => String::new(),
                    1 => "\n(another operator failed after it)".into(),
                    _ => format!("\n({others} more operators failed after it)"),
                };
                let text = format!("machine {}: {}{asked}{more}", self.name, failure.message);
                operator_error(py, failure.kind, &text)
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
    way: Way,
}

#[pymethods]
impl Machine {
    /// Connects, and gives `count` devices of the machine indices that are free, from `first` on if
    /// those are. returns: whether somebody may come to listen at the address where nobody does any
    /// more.
    #[new]
    #[pyo3(signature = (address, name, count, settings, retry, *, first=None, returns=true, ca=None,
        cert=None, key=None))]
    #[allow(clippy::too_many_arguments)] // a call of Python's, by name
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
        let retry = Duration::try_from_secs_f64(retry).map_err(|_| {
            configuration_error(py, &format!("retry={retry}: 0 seconds or more are"))
        })?;
        let way = Way { settings, retry, returns, tls: [ca, cert, key] };
        let session = Arc::new(Session {
            client: RwLock::new(Some(Arc::new(way.connect(py, address)?))),
            name,
            scalars: Mutex::default(),
            operators: AtomicU64::new(0),
            number: SESSIONS.fetch_add(1, Ordering::Relaxed),
            default_dtype: AtomicU8::new(FLOAT),
            paused_by: AtomicU64::new(0),
            uploads: AtomicU64::new(0),
            past: Mutex::default(),
            freed: Mutex::default(),
            lines: Mutex::default(),
            waits: Mutex::default(),
        });
        let mut seats = SEATS.write();
        let Some(first) = free_indices(&seats, count as usize, first) else {
            let what = format!(
                "machine {} has {count} devices, and PyTorch counts those of all machines up to \
                 {MAX_DEVICES}: stop() others",
                session.name
            );
            return Err(configuration_error(py, &what));
        };
        let end = first + count as usize;
        if seats.len() < end {
            seats.resize(end, None);
        }
        for (ordinal, seat) in seats[first..end].iter_mut().enumerate() {
            *seat = Some(Seat { machine: session.clone(), ordinal: ordinal as u32 });
        }
        Ok(Self { session, first: first as u32, count, way })
    }

    /// Whether the session is over, and nothing can be asked any more. Not while it is paused.
    fn is_over(&self) -> bool {
        let client = self.session.client.read();
        client.as_ref().is_some_and(|client| client.has_ended())
    }

    /// Index of its first device in this process.
    #[getter]
    fn first(&self) -> u32 {
        self.first
    }

    /// Numbers of what was done.
    fn stats(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let session = &self.session;
        let client = session.client.read().clone();
        let now = py.detach(|| client.map(|client| client.stats())).unwrap_or_default();
        let stats = *session.past.lock() + now;
        let dict = PyDict::new(py);
        dict.set_item("operators", session.operators.load(Ordering::Relaxed))?;
        dict.set_item("requests", stats.requests)?;
        dict.set_item("batches", stats.batches)?;
        dict.set_item("waits", stats.waits)?;
        dict.set_item("reconnects", stats.reconnects)?;
        dict.set_item("uploaded_bytes", stats.uploaded_bytes)?;
        dict.set_item("downloaded_bytes", stats.downloaded_bytes)?;
        let numbers = session.numbers();
        dict.set_item("cached_scalars", numbers.cached)?;
        dict.set_item("early_scalars", numbers.early)?;
        Ok(dict.unbind())
    }

    /// Where the program has waited: place, how often, and for how many seconds; longest first.
    fn waits(&self, py: Python<'_>) -> Vec<(String, u64, f64)> {
        let waits = self.session.waits.lock();
        let lines: Vec<_> = waits
            .values()
            .map(|waited| (waited.line.clone_ref(py), waited.count, waited.time))
            .collect();
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
        let reply = self.session.client(py)?.new_reply();
        self.session.ask(py, &Request::Sync { reply })?;
        self.session.wait(py, reply, "synchronize").map(drop)
    }

    /// Sends what waits to be sent.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let client = self.session.client(py)?;
        py.detach(|| client.flush()).map_err(|error| self.session.lost(py, &error))
    }

    /// Begins or ends a pause or what ends it, on this thread, while others are refused. Storages
    /// that are given up from its beginning on are not there any more when the machine has gone on:
    /// until then (`end_freed`) they are noted.
    #[pyo3(signature = (begins, end_freed=false))]
    fn pausing(&self, py: Python<'_>, begins: bool, end_freed: bool) {
        self.session.paused_by.store(if begins { this_thread() } else { 0 }, Ordering::SeqCst);
        // What has begun to go there is to be there whole.
        py.detach(|| {
            while begins && self.session.uploads.load(Ordering::SeqCst) > 0 {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let freed = {
            let mut freed = self.session.freed.lock();
            if begins {
                freed.get_or_insert_default();
            }
            if end_freed { freed.take().unwrap_or_default() } else { Vec::new() }
        };
        freed.into_iter().for_each(|storage| self.session.free(storage));
    }

    /// What storages the machine has: of each its number, bytes, device, and 0 if nothing was
    /// written to it, 1, or 2 if that failed.
    fn storages(&self, py: Python<'_>) -> PyResult<Vec<(u64, u64, u32, u8)>> {
        let reply = self.session.client(py)?.new_reply();
        self.session.ask(py, &Request::List { reply })?;
        let Answer::Values(values) = self.session.wait(py, reply, "pause")? else {
            return Err(PyRuntimeError::new_err("an answer that is not that to the question"));
        };
        let number =
            |value: &Value| if let Value::Int(number) = value { *number as u64 } else { 0 };
        let told = values.as_chunks::<4>().0.iter().map(|of| of.each_ref().map(number));
        Ok(told
            .map(|[storage, bytes, device, state]| (storage, bytes, device as u32, state as u8))
            .collect())
    }

    /// Ends the session, which may go on with `resume`; or, without a pause, its tensors are
    /// gone. What has failed and nobody was told of, as an exception, or None.
    fn close(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let session = &self.session;
        let client = session.client.write().take();
        let Some(client) = client else { return Ok(None) };
        session.numbers().clear();
        session.default_dtype.store(FLOAT, Ordering::Relaxed);
        let (closed, stats, failed) =
            py.detach(|| (client.close(), client.stats(), client.take_failure()));
        let failed = failed.map(|fault| session.raise(py, &fault));
        // Requests are counted anew by whoever goes on.
        let lines = std::mem::take(&mut *session.lines.lock());
        drop(lines);
        let mut past = session.past.lock();
        *past = *past + stats;
        closed.map(|()| failed).map_err(|error| session.lost(py, &error))
    }

    /// Goes on with a new session: connects.
    fn resume(&self, py: Python<'_>, address: &str) -> PyResult<()> {
        let client = self.way.connect(py, address)?;
        *self.session.client.write() = Some(Arc::new(client));
        Ok(())
    }

    /// Whether a storage was given up since the pause began.
    fn was_freed(&self, storage: u64) -> bool {
        let freed = self.session.freed.lock();
        freed.as_ref().is_some_and(|freed| freed.contains(&storage))
    }

    /// A storage of so many bytes begins again on one of the machine's devices.
    fn create(&self, py: Python<'_>, storage: u64, bytes: u64, ordinal: u32) -> PyResult<()> {
        self.session.ask(py, &Request::Create { storage, bytes, device: ordinal }).map(drop)
    }

    /// Receives bytes of a storage from `offset` on, as many as a capsule has. Blocks.
    fn read(
        &self,
        py: Python<'_>,
        storage: u64,
        offset: u64,
        capsule: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let memory = Memory::from_capsule(capsule)?;
        let mut view = StorageView::contiguous(BYTES, vec![memory.len() as u64]);
        view.offset = offset;
        download(py, &self.session, TensorRef { storage, view }, memory)
    }

    /// Sends a capsule's bytes to a storage, from `offset` on.
    fn write(
        &self,
        py: Python<'_>,
        storage: u64,
        offset: u64,
        capsule: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        upload(py, &self.session, storage, offset, Memory::from_capsule(capsule)?)
    }

    /// Its devices' indices mean nothing any more.
    fn forget(&self) {
        let mut seats = SEATS.write();
        for at in self.first..self.first + self.count {
            seats[at as usize] = None;
        }
    }
}

/// As many devices PyTorch can tell from each other.
const MAX_DEVICES: usize = 127;

/// So many indices in a row that no machine has: those from `wanted` on, or the first.
fn free_indices(seats: &[Option<Seat>], count: usize, wanted: Option<u32>) -> Option<usize> {
    let free =
        |first: &usize| (*first..first + count).all(|at| seats.get(at).is_none_or(Option::is_none));
    let last = MAX_DEVICES.checked_sub(count)?;
    let wanted = wanted.map(|wanted| wanted as usize).filter(|&wanted| wanted <= last);
    wanted.into_iter().chain(0..=last).find(free)
}

/// A number for this thread, which is not 0.
fn this_thread() -> u64 {
    static THREADS: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = THREADS.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
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
    let view = StorageView { dtype, sizes, strides, offset: 0 };
    let bytes = extent(&view).saturating_mul(torch.row(dtype)?.bytes);
    let storage = new_storages(1);
    seat.machine.ask(py, &Request::Create { storage, bytes, device: seat.ordinal })?;
    new_tensor(py, torch, &seat, index, &TensorRef { storage, view }, bytes)
}

/// Another tensor of a storage, all of it and in one dimension: by the device's index, what stands
/// for the storage's address, and its bytes; which it has from now on, if `resized` says so.
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
        seat.machine.written([storage].into_iter());
    }
    {
        let mut shared = SHARED.lock();
        *shared.get_or_insert_default().entry(storage).or_default() += 1;
        ANY_SHARED.store(true, Ordering::Relaxed);
    }
    let dtype = torch.scalar_type(dtype)?;
    let element = torch.row(dtype)?.bytes;
    let view = StorageView::contiguous(dtype, vec![bytes / element]);
    new_tensor(py, torch, &seat, index, &TensorRef { storage, view }, bytes / element * element)
}

fn elsewhere(tensor: &Bound<'_, PyAny>) -> PyErr {
    let device = tensor.getattr("device").map_or_else(|_| "?".into(), |device| device.to_string());
    PyTypeError::new_err(format!(
        "needs a tensor of a device of tensorstream, and this is on {device}"
    ))
}

/// The value of a tensor of one element; its bytes, where Python has no such numbers.
#[pyfunction]
pub(crate) fn remote_scalar<'py>(
    py: Python<'py>,
    tensor: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let torch = torch(py)?;
    let (index, from) = torch.describe(tensor)?.ok_or_else(|| elsewhere(tensor))?;
    let (seat, dtype) = (seat(py, index)?, from.view.dtype);
    let bytes = seat.machine.number(py, from)?;
    Ok(match (dtype.0, &bytes[..]) {
        (0, &[a]) => a.into_pyobject(py)?.into_any(),
        (1, &[a]) => (a as i8).into_pyobject(py)?.into_any(),
        (2, &[a, b]) => i16::from_le_bytes([a, b]).into_pyobject(py)?.into_any(),
        (3, &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]).into_pyobject(py)?.into_any(),
        (4, &[a, b, c, d, e, f, g, h]) => {
            i64::from_le_bytes([a, b, c, d, e, f, g, h]).into_pyobject(py)?.into_any()
        }
        (6, &[a, b, c, d]) => {
            PyFloat::new(py, f64::from(f32::from_le_bytes([a, b, c, d]))).into_any()
        }
        (7, &[a, b, c, d, e, f, g, h]) => {
            PyFloat::new(py, f64::from_le_bytes([a, b, c, d, e, f, g, h])).into_any()
        }
        (11, &[a]) => PyBool::new(py, a != 0).to_owned().into_any(),
        (_, bytes) => PyBytes::new(py, bytes).into_any(),
    })
}

/// Sends the bytes of a capsule - contiguous, on the host - to a tensor's elements, which are
/// contiguous too.
#[pyfunction]
pub(crate) fn remote_upload(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    capsule: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let torch = torch(py)?;
    let (index, to) = torch.describe(tensor)?.ok_or_else(|| elsewhere(tensor))?;
    let (seat, memory) = (seat(py, index)?, Memory::from_capsule(capsule)?);
    let offset = to.view.offset * torch.row(to.view.dtype)?.bytes;
    upload(py, &seat.machine, to.storage, offset, memory)
}

/// An upload that is under way.
struct Under<'a>(&'a AtomicU64);

impl<'a> Under<'a> {
    fn way(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Under<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn upload(
    py: Python<'_>,
    session: &Session,
    storage: u64,
    offset: u64,
    memory: Arc<Memory>,
) -> PyResult<()> {
    let _under = Under::way(&session.uploads);
    let client = session.client(py)?;
    let long = memory.len() > MAX_COPY;
    let bytes = if long {
        Bytes::from_owner(Payload(memory))
    } else {
        Bytes::copy_from_slice(memory.bytes().unwrap_or_default())
    };
    let written = py.detach(|| client.write(storage, offset, bytes));
    session.written([storage].into_iter());
    written.map_err(|error| session.lost(py, &error))?;
    while long
        && !py
            .detach(|| client.delivered_within(SLICE))
            .map_err(|error| session.lost(py, &error))?
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
    let (seat, memory) = (seat(py, index)?, Memory::from_capsule(capsule)?);
    download(py, &seat.machine, from, memory)
}

fn download(
    py: Python<'_>,
    session: &Session,
    from: TensorRef,
    memory: Arc<Memory>,
) -> PyResult<()> {
    let len = memory.len();
    let target = Target::new(memory, 0, len)
        .ok_or_else(|| PyTypeError::new_err("needs memory on the host that may be written to"))?;
    let client = session.client(py)?;
    let reply =
        py.detach(|| client.read(from, target)).map_err(|error| session.lost(py, &error))?;
    session.wait(py, reply, "copy to the host").map(drop)
}

/// What a call tells of a tensor: the number of its storage, and that by which logs name it. None
/// of one that is elsewhere.
#[pyfunction]
pub(crate) fn remote_names(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
) -> PyResult<Option<(u64, u64)>> {
    Ok(torch(py)?.describe(tensor)?.map(|(_, tensor)| (tensor.storage, tensor.metadata_hash())))
}

/// Begins a trace, or ends it and gives what has happened: what it was, where, and the seconds that
/// were waited for it.
#[pyfunction]
pub(crate) fn remote_trace(py: Python<'_>, on: bool) -> Vec<(String, String, Option<f64>)> {
    TRACING.store(on, Ordering::Relaxed);
    let traced = std::mem::take(&mut *TRACE.lock());
    let told =
        |(what, line, time): Traced| (what, line.place(py), time.map(|time| time.as_secs_f64()));
    traced.into_iter().map(told).collect()
}

/// What an operator gave that is no tensor.
pub(super) fn plain(py: Python<'_>, value: &Value) -> PyResult<Py<PyAny>> {
    Ok(match value {
        Value::None => py.None(),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any().unbind(),
        Value::Int(value) => value.into_pyobject(py)?.into_any().unbind(),
        Value::Float(value) => value.into_pyobject(py)?.into_any().unbind(),
        Value::Complex(real, imaginary) => {
            PyComplex::from_doubles(py, *real, *imaginary).into_any().unbind()
        }
        Value::Text(text) => text.into_pyobject(py)?.into_any().unbind(),
        Value::List(values) => {
            let values =
                values.iter().map(|value| plain(py, value)).collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, values)?.into_any().unbind()
        }
        other => {
            return Err(PyRuntimeError::new_err(format!("an answer of no known kind: {other:?}")));
        }
    })
}
