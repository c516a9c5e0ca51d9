// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine: operators of PyTorch's, run by their names.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyComplex, PyDict, PyFloat, PyList, PyString, PyTuple};
use pyo3::{IntoPyObjectExt, intern};
use tensorstream::exec::{
    Call, Executor, OpFailure, OpFailureKind, Output, ScalarType, StorageView, TensorRef, Value,
};
use tensorstream::remote::Bytes;

use crate::dtype::{TorchDtype, TorchDtypes};
use crate::errors::configuration_error;
use crate::memory::{Memory, Payload, Target, copy_address};
use crate::remote::client::torch::integer;

/// The most views of a storage that are kept for the next operator that asks for them.
const MAX_VIEWS: usize = 8;
/// As many of a list's values are told of to who reads of an error.
const MAX_TOLD: usize = 32;
/// The most storages of a client.
const MAX_STORAGES: usize = 1 << 20;
/// Reads up to so many bytes are copied at once.
const SMALL: u64 = 4096;
/// Operators that are a machine's own.
const OWN: &str = "tensorstream::";
/// That which says what dtype numbers become that have none.
const DEFAULT_DTYPE: &str = "tensorstream::default_dtype";
/// How many sessions have said so.
static ODD: AtomicUsize = AtomicUsize::new(0);
/// How many operators are under way that began when none had.
static LOOSE: AtomicUsize = AtomicUsize::new(0);

/// The Python half of the server, `tensorstream/remote/server/_server.py`.
#[derive(FromPyObject)]
pub(super) struct Hooks {
    /// `session()`: the Python half of a session. Its `define(name)` returns what to call for an
    /// operator, and which of its arguments it writes to.
    session: Py<PyAny>,
    /// `allocate(bytes, device)`: an untyped storage of zeros.
    allocate: Py<PyAny>,
    /// `view(storage, dtype, sizes, strides, offset)`: a tensor.
    view: Py<PyAny>,
    /// `restrided(tensor, dtype, sizes, strides, offset, bytes)`: a copy with this layout.
    restrided: Py<PyAny>,
    /// `scalar(dtype, bytes)`: a tensor without dimensions.
    scalar: Py<PyAny>,
    /// `constant(name)`: a memory format or a layout.
    constant: Py<PyAny>,
    /// `host_bytes(tensor)`: a capsule of its elements, contiguous and on the host.
    host_bytes: Py<PyAny>,
    /// `storage_bytes(storage, offset, bytes)`: a capsule of a part of a storage on the host.
    storage_bytes: Py<PyAny>,
    /// `staging(storage, bytes)`: host memory for bytes on their way to a storage on a device, as
    /// a tensor and as a capsule of it.
    staging: Py<PyAny>,
    /// `copy_staged(storage, offset, tensor)`: copies such a tensor to the storage.
    copy_staged: Py<PyAny>,
    /// The default dtype of sessions that have not set one.
    default_dtype: Py<PyAny>,
    /// `with_default(dtype, operator, args, kwargs)`: calls an operator with a default dtype.
    with_default: Py<PyAny>,
    /// `guard()`: the context in which operators run.
    guard: Py<PyAny>,
    devices: Vec<Py<PyAny>>,
    /// Whether storages are in host memory.
    on_host: bool,
}

/// What the sessions of a server share: its Python half, and objects of PyTorch.
pub(super) struct Backend {
    hooks: Hooks,
    dtypes: TorchDtypes,
    tensor: Py<PyAny>,
    /// Whether all devices are the CPU.
    on_cpu: bool,
}

struct Operator {
    name: String,
    /// None of that which says what dtype numbers become.
    call: Option<Py<PyAny>>,
    /// Which arguments it writes to, by place and by name.
    writes: Vec<usize>,
    writes_named: Vec<String>,
}

struct Held {
    bytes: u64,
    device: u32,
    /// Of its storage, once it has one.
    identity: usize,
    /// Once something was written to it.
    storage: Option<Py<PyAny>>,
    views: Vec<(StorageView, Py<PyAny>)>,
}

/// A client's storages, and operators on them.
pub(super) struct TorchExecutor {
    backend: Arc<Backend>,
    session: Option<Py<PyAny>>,
    ops: Vec<Option<Operator>>,
    storages: HashMap<u64, Held>,
    /// Which of PyTorch's storages have a number: each has one.
    numbered: HashSet<usize>,
    /// What is received before it goes to a storage that is not on the host.
    staged: Option<Py<PyAny>>,
    /// What numbers become, once the client has said so.
    default_dtype: Option<Py<PyAny>>,
}

/// An operator that is under way as if nobody had a default dtype of its own.
struct Loose;

impl Loose {
    fn unless_odd() -> Option<Self> {
        LOOSE.fetch_add(1, Ordering::SeqCst);
        let loose = Self;
        (ODD.load(Ordering::SeqCst) == 0).then_some(loose)
    }
}

impl Drop for Loose {
    fn drop(&mut self) {
        LOOSE.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for TorchExecutor {
    fn drop(&mut self) {
        if self.default_dtype.is_some() {
            ODD.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn refused(what: impl Into<String>) -> OpFailure {
    OpFailure::new(OpFailureKind::Refused, what)
}

/// What PyTorch says went wrong.
fn raised(py: Python<'_>, what: &str, error: &PyErr) -> OpFailure {
    let text = error.value(py).str().map_or_else(|_| "?".into(), |text| text.to_string());
    let kind = error.get_type(py).name().map_or_else(|_| "?".into(), |name| name.to_string());
    let memory = kind == "OutOfMemoryError"
        || kind == "MemoryError"
        || text.contains("can't allocate memory");
    let kind_of = if memory { OpFailureKind::OutOfMemory } else { OpFailureKind::Operator };
    let kind = if kind == "RuntimeError" { String::new() } else { format!("{kind}: ") };
    OpFailure::new(kind_of, format!("{what}: {kind}{text}"))
}

impl Backend {
    pub(super) fn new(py: Python<'_>, hooks: Hooks) -> PyResult<Self> {
        if hooks.devices.is_empty() {
            return Err(configuration_error(py, "a machine has at least one device"));
        }
        let torch = py.import("torch")?;
        let on_cpu = hooks.devices.iter().all(|device| device.to_string() == "cpu");
        let tensor = torch.getattr("Tensor")?.unbind();
        Ok(Self { hooks, dtypes: TorchDtypes::load(&torch)?, tensor, on_cpu })
    }

    fn dtype(&self, number: ScalarType) -> Result<&TorchDtype, OpFailure> {
        let unknown = || refused(format!("there is no dtype {}", number.0));
        self.dtypes.get(number).ok_or_else(unknown)
    }
}

/// How a tensor lies in its storage.
fn view_of(backend: &Backend, tensor: &Bound<'_, PyAny>) -> PyResult<StorageView> {
    let py = tensor.py();
    let layout = tensor.getattr(intern!(py, "layout"))?.str()?;
    if layout.to_str()? != "torch.strided" {
        return Err(configuration_error(
            py,
            &format!("it gave a tensor of layout {layout}, which no device of tensorstream has"),
        ));
    }
    let dtype = tensor.getattr(intern!(py, "dtype"))?;
    let unknown = || {
        configuration_error(
            py,
            &format!("an operator has given a tensor of {dtype}, which does not travel"),
        )
    };
    Ok(StorageView {
        dtype: backend.dtypes.number(&dtype).ok_or_else(unknown)?,
        sizes: tensor.getattr(intern!(py, "shape"))?.extract()?,
        strides: tensor.call_method0(intern!(py, "stride"))?.extract()?,
        offset: tensor.call_method0(intern!(py, "storage_offset"))?.extract()?,
    })
}

impl TorchExecutor {
    /// Of a client that has no tensors yet.
    pub(super) fn new(backend: Arc<Backend>) -> Self {
        Self {
            backend,
            session: None,
            ops: Vec::new(),
            storages: HashMap::new(),
            numbered: HashSet::new(),
            staged: None,
            default_dtype: None,
        }
    }

    fn session<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.session.is_none() {
            self.session = Some(self.backend.hooks.session.call0(py)?);
        }
        Ok(self.session.as_ref().expect("it was just made").bind(py).clone())
    }

    fn held(&mut self, storage: u64) -> Result<&mut Held, OpFailure> {
        let stale = || {
            OpFailure::new(
                OpFailureKind::Stale,
                format!("storage {storage} is not there, or no more"),
            )
        };
        self.storages.get_mut(&storage).ok_or_else(stale)
    }

    /// A storage, with its memory.
    fn storage(&mut self, py: Python<'_>, storage: u64) -> Result<Py<PyAny>, OpFailure> {
        let backend = self.backend.clone();
        let held = self.held(storage)?;
        if held.storage.is_none() {
            let device = &backend.hooks.devices[held.device as usize];
            let made = backend.hooks.allocate.call1(py, (held.bytes, device));
            let made =
                made.map_err(|error| raised(py, &format!("{} bytes", held.bytes), &error))?;
            let own = identity(made.bind(py)).map_err(|error| raised(py, "a storage", &error))?;
            (held.storage, held.identity) = (Some(made), own);
            self.numbered.insert(own);
        }
        let held = self.held(storage)?;
        Ok(held.storage.as_ref().expect("it was just made").clone_ref(py))
    }

    fn tensor(&mut self, py: Python<'_>, tensor: &TensorRef) -> Result<Py<PyAny>, OpFailure> {
        let held = self.held(tensor.storage)?;
        if let Some((_, known)) = held.views.iter().find(|(view, _)| *view == tensor.view) {
            return Ok(known.clone_ref(py));
        }
        let storage = self.storage(py, tensor.storage)?;
        let backend = self.backend.clone();
        let dtype = &backend.dtype(tensor.view.dtype)?.object;
        let StorageView { sizes, strides, offset, .. } = &tensor.view;
        let made = backend.hooks.view.call1(py, (storage, dtype, sizes, strides, offset));
        let made = made.map_err(|error| {
            raised(py, &format!("a view of storage {}", tensor.storage), &error)
        })?;
        self.keep(py, tensor, &made)?;
        Ok(made)
    }

    /// Keeps a view for the next that asks for it.
    fn keep(
        &mut self,
        py: Python<'_>,
        tensor: &TensorRef,
        object: &Py<PyAny>,
    ) -> Result<(), OpFailure> {
        let views = &mut self.held(tensor.storage)?.views;
        if views.len() >= MAX_VIEWS {
            views.remove(0);
        }
        views.push((tensor.view.clone(), object.clone_ref(py)));
        Ok(())
    }

    fn argument(&mut self, py: Python<'_>, value: &Value) -> Result<Py<PyAny>, OpFailure> {
        let backend = self.backend.clone();
        let object =
            |made: PyResult<Py<PyAny>>| made.map_err(|error| raised(py, "an argument", &error));
        Ok(match value {
            Value::None => py.None(),
            Value::Bool(value) => PyBool::new(py, *value).to_owned().into_any().unbind(),
            Value::Int(value) => object(value.into_py_any(py))?,
            Value::Float(value) => PyFloat::new(py, *value).into_any().unbind(),
            Value::Complex(real, imaginary) => {
                PyComplex::from_doubles(py, *real, *imaginary).into_any().unbind()
            }
            Value::Text(text) => PyString::new(py, text).into_any().unbind(),
            Value::Dtype(dtype) => backend.dtype(*dtype)?.object.clone_ref(py),
            Value::Device(ordinal) => {
                let device = backend.hooks.devices.get(*ordinal as usize);
                device
                    .ok_or_else(|| refused(format!("there is no device {ordinal}")))?
                    .clone_ref(py)
            }
            Value::Name(name) => object(backend.hooks.constant.call1(py, (name,)))?,
            Value::Tensor(tensor) => self.tensor(py, tensor)?,
            Value::Conjugate(tensor) => {
                object(self.tensor(py, tensor)?.call_method0(py, intern!(py, "conj")))?
            }
            Value::Scalar { dtype, bytes } => {
                let TorchDtype { object: object_of, row } = backend.dtype(*dtype)?;
                let bytes = &bytes[..(row.bytes as usize).min(16)];
                object(backend.hooks.scalar.call1(py, (object_of, bytes)))?
            }
            Value::List(values) => {
                let values = values.iter().map(|value| self.argument(py, value)).collect::<Result<
                    Vec<_>,
                    _,
                >>(
                )?;
                object(PyList::new(py, values).map(|list| list.into_any().unbind()))?
            }
            other => return Err(refused(format!("an argument of no known kind: {other:?}"))),
        })
    }

    fn run(&mut self, py: Python<'_>, call: &Call) -> Result<Vec<Value>, OpFailure> {
        let backend = self.backend.clone();
        let args = call
            .args
            .iter()
            .map(|value| self.argument(py, value))
            .collect::<Result<Vec<_>, _>>()?;
        let kwargs = PyDict::new(py);
        let failed = |error: PyErr| raised(py, "it", &error);
        for (name, value) in &call.kwargs {
            kwargs.set_item(name, self.argument(py, value)?).map_err(failed)?;
        }
        let args = PyTuple::new(py, args).map_err(failed)?;
        let op = self.ops.get(call.op as usize).and_then(Option::as_ref);
        let op = op.ok_or_else(|| refused("an operator that was not defined"))?;
        let kwargs = (!kwargs.is_empty()).then_some(&kwargs);
        let Some(callable) = &op.call else {
            let dtype = args.get_item(0).map_err(failed)?;
            if !dtype.get_type().is(backend.hooks.default_dtype.bind(py).get_type()) {
                return Err(refused(format!("{DEFAULT_DTYPE} of {dtype}, which is no dtype")));
            }
            if self.default_dtype.replace(dtype.unbind()).is_none() {
                ODD.fetch_add(1, Ordering::SeqCst);
                // Those that began before are to end as they began.
                py.detach(|| {
                    while LOOSE.load(Ordering::SeqCst) > 0 {
                        thread::sleep(Duration::from_micros(100));
                    }
                });
            }
            return Ok(Vec::new());
        };
        // PyTorch has one for all sessions. What a machine has of its own may wait for another
        // machine, and makes no numbers.
        let result = if op.name.starts_with(OWN) {
            callable.bind(py).call(args, kwargs)
        } else if let Some(_loose) = Loose::unless_odd() {
            callable.bind(py).call(args, kwargs)
        } else {
            let own = self.default_dtype.as_ref().unwrap_or(&backend.hooks.default_dtype);
            backend.hooks.with_default.bind(py).call1((own, callable, args, kwargs))
        };
        let result = result.map_err(|error| OpFailure {
            message: error.value(py).str().map_or_else(|_| "?".into(), |text| text.to_string()),
            ..raised(py, "", &error)
        })?;
        let mut outputs = call.outputs.iter();
        let mut values = Vec::new();
        let returns: Vec<Bound<'_, PyAny>> = match result.cast::<PyTuple>() {
            Ok(tuple) => tuple.iter().collect(),
            Err(_) => vec![result],
        };
        for returned in returns {
            let list = returned.cast::<PyList>().ok();
            let value = match (list, outputs.clone().next()) {
                (Some(list), Some(Output::Described { storage })) => {
                    outputs.next();
                    let bound =
                        |(at, tensor)| self.bind_asked(py, &backend, storage + at as u64, &tensor);
                    Value::List(list.iter().enumerate().map(bound).collect::<Result<_, _>>()?)
                }
                (Some(list), _) => {
                    for tensor in list.iter() {
                        self.bind(py, &backend, outputs.next(), &tensor)?;
                    }
                    Value::None
                }
                (None, Some(Output::Described { storage })) => {
                    outputs.next();
                    self.bind_asked(py, &backend, *storage, &returned)?
                }
                (None, _) => {
                    self.bind(py, &backend, outputs.next(), &returned)?;
                    if call.reply.is_some() { number(&backend, &returned) } else { Value::None }
                }
            };
            values.push(value);
        }
        Ok(values)
    }

    /// What an operator gave, as it can begin a storage: on a device of the machine, with memory
    /// that is no other storage's, and with elements that are as they lie there. And how it lies,
    /// that storage, and what tells it from others.
    fn as_new<'py>(
        &self,
        backend: &Backend,
        given: &Bound<'py, PyAny>,
    ) -> Result<(Bound<'py, PyAny>, StorageView, Bound<'py, PyAny>, usize), OpFailure> {
        let py = given.py();
        let failed = |error: PyErr| raised(py, "what it gave", &error);
        let call = |of: &Bound<'py, PyAny>, method| of.call_method0(method).map_err(failed);
        if !backend.on_cpu
            || !given
                .getattr(intern!(py, "is_cpu"))
                .and_then(|is| is.is_truthy())
                .map_err(failed)?
        {
            let device = given.getattr(intern!(py, "device")).map_err(failed)?;
            let ours = |own: &Py<PyAny>| device.eq(own.bind(py)).unwrap_or(false);
            if !backend.hooks.devices.iter().any(ours) {
                let what =
                    format!("it gave a tensor on {device}, which is no device of this machine");
                return Err(refused(what));
            }
        }
        let mut given = given.clone();
        let mut view = view_of(backend, &given).map_err(failed)?;
        if view.is_complex() {
            // What PyTorch only notes of its elements is done.
            given = call(&call(&given, intern!(py, "resolve_conj"))?, intern!(py, "resolve_neg"))?;
            view = view_of(backend, &given).map_err(failed)?;
        }
        let mut storage = call(&given, intern!(py, "untyped_storage"))?;
        let mut own = identity(&storage).map_err(failed)?;
        if self.numbered.contains(&own) {
            given = call(&given, intern!(py, "clone"))?;
            view = view_of(backend, &given).map_err(failed)?;
            storage = call(&given, intern!(py, "untyped_storage"))?;
            own = identity(&storage).map_err(failed)?;
        }
        Ok((given, view, storage, own))
    }

    fn refuse_too_many(&self) -> Result<(), OpFailure> {
        if self.storages.len() < MAX_STORAGES {
            return Ok(());
        }
        Err(OpFailure::new(
            OpFailureKind::OutOfMemory,
            format!("a machine keeps {MAX_STORAGES} storages of a client"),
        ))
    }

    /// Gives a storage a number.
    fn hold(&mut self, number: u64, held: Held) -> Result<(), OpFailure> {
        self.refuse_too_many()?;
        self.numbered.insert(held.identity);
        self.storages.insert(number, held);
        Ok(())
    }

    /// What an operator gave is what the client said it would be, and where.
    fn bind(
        &mut self,
        py: Python<'_>,
        backend: &Backend,
        output: Option<&Output>,
        given: &Bound<'_, PyAny>,
    ) -> Result<(), OpFailure> {
        let Some(Output::New { tensor, bytes }) = output else { return Ok(()) };
        let failed = |error: PyErr| raised(py, "what it gave", &error);
        if self.storages.contains_key(&tensor.storage) {
            // Another output of the same call began it: the elements go there.
            let there = self.tensor(py, tensor)?;
            there.call_method1(py, intern!(py, "copy_"), (given,)).map_err(failed)?;
            return Ok(());
        }
        let (given, view, mut storage, mut own) = self.as_new(backend, given)?;
        if view.sizes != tensor.view.sizes || view.dtype != tensor.view.dtype {
            let what = format!(
                "it gave a tensor of shape {:?} and dtype {}, where {:?} and {} were expected",
                view.sizes, view.dtype.0, tensor.view.sizes, tensor.view.dtype.0
            );
            return Err(OpFailure::new(OpFailureKind::Operator, what));
        }
        let settled = if view == tensor.view {
            given
        } else {
            let dtype = &backend.dtype(tensor.view.dtype)?.object;
            let StorageView { sizes, strides, offset, .. } = &tensor.view;
            let settled = backend
                .hooks
                .restrided
                .bind(py)
                .call1((given, dtype, sizes, strides, offset, bytes));
            let settled = settled.map_err(failed)?;
            storage = settled.call_method0(intern!(py, "untyped_storage")).map_err(failed)?;
            own = identity(&storage).map_err(failed)?;
            settled
        };
        let storage = storage.unbind();
        let device = self.device_of(call_device(&settled));
        let views = vec![(tensor.view.clone(), settled.unbind())];
        self.hold(
            tensor.storage,
            Held { bytes: *bytes, device, identity: own, storage: Some(storage), views },
        )
    }

    /// What an operator gave begins a storage.
    fn bind_asked(
        &mut self,
        py: Python<'_>,
        backend: &Backend,
        storage: u64,
        given: &Bound<'_, PyAny>,
    ) -> Result<Value, OpFailure> {
        if given.is_none() {
            return Ok(Value::None);
        }
        let failed = |error: PyErr| raised(py, "what it gave", &error);
        if !given.is_instance(backend.tensor.bind(py)).map_err(failed)? {
            return Ok(number(backend, given));
        }
        if self.storages.contains_key(&storage) {
            return Err(refused(format!("there is a storage {storage}")));
        }
        let (given, view, own, identity) = self.as_new(backend, given)?;
        let bytes: u64 = own
            .call_method0(intern!(py, "nbytes"))
            .and_then(|bytes| bytes.extract())
            .map_err(failed)?;
        let device = self.device_of(call_device(&given));
        let views = vec![(view.clone(), given.unbind())];
        self.hold(storage, Held { bytes, device, identity, storage: Some(own.unbind()), views })?;
        Ok(Value::List(vec![Value::Tensor(TensorRef { storage, view }), Value::Int(bytes as i64)]))
    }

    /// An argument, for who reads of an error.
    fn describe(&self, value: &Value) -> String {
        let dtype = |dtype: ScalarType| {
            let name = self.backend.dtype(dtype).map(|dtype| dtype.object.to_string());
            name.map_or_else(|_| "?".into(), |name| name.trim_start_matches("torch.").to_string())
        };
        match value {
            Value::Tensor(TensorRef { view, .. }) | Value::Conjugate(TensorRef { view, .. }) => {
                format!("{}{:?}", dtype(view.dtype), view.sizes)
            }
            Value::Scalar { dtype: of, .. } => format!("{}[]", dtype(*of)),
            Value::Dtype(of) => dtype(*of),
            Value::List(values) => {
                let told = values.iter().take(MAX_TOLD).map(|value| self.describe(value));
                let more =
                    (values.len() > MAX_TOLD).then(|| format!("{} more", values.len() - MAX_TOLD));
                format!("[{}]", told.chain(more).collect::<Vec<_>>().join(", "))
            }
            Value::Int(value) => value.to_string(),
            Value::Float(value) => value.to_string(),
            Value::Bool(value) => value.to_string(),
            Value::None => "None".into(),
            Value::Text(text) | Value::Name(text) => text.clone(),
            other => format!("{other:?}"),
        }
    }

    /// Which of the machine's devices this is.
    fn device_of(&self, index: Option<u32>) -> u32 {
        index.filter(|&index| (index as usize) < self.backend.hooks.devices.len()).unwrap_or(0)
    }

    /// The elements of a tensor of few, where they are at hand: for who waits for a number.
    fn small(&mut self, py: Python<'_>, tensor: &TensorRef) -> Result<Option<Vec<u8>>, OpFailure> {
        let (backend, view) = (self.backend.clone(), &tensor.view);
        let element = backend.dtype(view.dtype)?.row.bytes;
        let Some(count) = view.elements().filter(|&count| count * element <= SMALL) else {
            return Ok(None);
        };
        if !backend.hooks.on_host
            || view.strides != StorageView::contiguous(view.dtype, view.sizes.clone()).strides
        {
            return Ok(None);
        }
        let storage = self.storage(py, tensor.storage)?;
        let numbers = |name| storage.call_method0(py, name)?.extract::<u64>(py);
        let failed = |error: PyErr| raised(py, "a storage", &error);
        let bytes = numbers(intern!(py, "nbytes")).map_err(failed)?;
        let end = view.offset.checked_add(count).and_then(|end| end.checked_mul(element));
        if end.is_none_or(|end| end > bytes) {
            return Err(refused(format!(
                "a tensor that is not within the {bytes} bytes of storage {}",
                tensor.storage
            )));
        }
        let first = numbers(intern!(py, "data_ptr")).map_err(failed)?;
        if first == 0 {
            return Err(refused(format!("storage {} has no memory", tensor.storage)));
        }
        let address = first + view.offset * element;
        // SAFETY: they are within the storage, which is on the host and held; what writes to it
        // runs on this thread.
        Ok(Some(unsafe { copy_address(address as usize, (count * element) as usize) }))
    }

    /// A part of a storage to write to, or memory on the host in its place, which then is staged.
    fn part(
        &mut self,
        py: Python<'_>,
        storage: u64,
        offset: u64,
        bytes: u64,
    ) -> Result<Arc<Memory>, OpFailure> {
        let backend = self.backend.clone();
        let object = self.storage(py, storage)?;
        let there = self.held(storage)?.bytes;
        if offset.checked_add(bytes).is_none_or(|end| end > there) {
            return Err(refused(format!(
                "{bytes} bytes at {offset} of storage {storage}, which has {there}"
            )));
        }
        let failed = |error: PyErr| {
            raised(py, &format!("{bytes} bytes at {offset} of storage {storage}"), &error)
        };
        let capsule = if backend.hooks.on_host {
            backend.hooks.storage_bytes.bind(py).call1((object, offset, bytes)).map_err(failed)?
        } else {
            let staged = backend.hooks.staging.bind(py).call1((object, bytes));
            let (tensor, capsule) = staged.and_then(|staged| staged.extract()).map_err(failed)?;
            self.staged = Some(tensor);
            capsule
        };
        Memory::from_capsule(&capsule).map_err(failed)
    }

    /// What was staged goes to its storage.
    fn land(&mut self, py: Python<'_>, storage: u64, offset: u64) -> Result<(), OpFailure> {
        let Some(staged) = self.staged.take() else { return Ok(()) };
        let backend = self.backend.clone();
        let object = self.storage(py, storage)?;
        let landed = backend.hooks.copy_staged.call1(py, (object, offset, staged));
        landed
            .map(drop)
            .map_err(|error| raised(py, &format!("writing to storage {storage}"), &error))
    }
}

/// What tells one of PyTorch's storages from others.
fn identity(storage: &Bound<'_, PyAny>) -> PyResult<usize> {
    storage.getattr(intern!(storage.py(), "_cdata"))?.extract()
}

fn call_device(tensor: &Bound<'_, PyAny>) -> Option<u32> {
    let py = tensor.py();
    tensor.getattr(intern!(py, "device")).ok()?.getattr(intern!(py, "index")).ok()?.extract().ok()
}

/// A value that is no tensor.
fn number(backend: &Backend, object: &Bound<'_, PyAny>) -> Value {
    if let Ok(value) = object.cast_exact::<PyBool>() {
        return Value::Bool(value.is_true());
    }
    if let Some(value) = integer(object) {
        return Value::Int(value);
    }
    if let Ok(value) = object.cast::<PyFloat>() {
        return Value::Float(value.value());
    }
    if let Ok(value) = object.cast::<PyComplex>() {
        return Value::Complex(value.real(), value.imag());
    }
    if let Ok(text) = object.extract::<String>() {
        return Value::Text(text);
    }
    backend.dtypes.number(object).map_or(Value::None, Value::Dtype)
}

impl Executor for TorchExecutor {
    type Sink = Target;

    fn batch(&mut self, run: &mut dyn FnMut(&mut Self)) {
        Python::attach(|py| {
            let backend = self.backend.clone();
            // Operators are run as they are below autograd, which the client has seen to.
            let guard = backend.hooks.guard.call0(py);
            run(self);
            drop(guard);
        });
    }

    fn define(&mut self, _: u32, name: &str) -> Result<(), OpFailure> {
        Python::attach(|py| {
            let found = self.session(py).and_then(|session| {
                session.call_method1(intern!(py, "define"), (name,))?.extract()
            });
            let op = match found {
                Ok((call, writes, writes_named)) => {
                    let call = (name != DEFAULT_DTYPE).then_some(call);
                    Ok(Operator { name: name.into(), call, writes, writes_named })
                }
                Err(error) => {
                    Err(OpFailure { kind: OpFailureKind::Refused, ..raised(py, name, &error) })
                }
            };
            let (op, failure) = match op {
                Ok(op) => (Some(op), Ok(())),
                Err(failure) => (None, Err(failure)),
            };
            self.ops.push(op);
            failure
        })
    }

    fn create(&mut self, storage: u64, bytes: u64, device: u32) -> Result<(), OpFailure> {
        if device as usize >= self.backend.hooks.devices.len() {
            return Err(refused(format!("there is no device {device}")));
        }
        if self.storages.contains_key(&storage) {
            return Err(refused(format!("there is a storage {storage}")));
        }
        self.refuse_too_many()?;
        self.storages
            .insert(storage, Held { bytes, device, identity: 0, storage: None, views: Vec::new() });
        Ok(())
    }

    fn resize(&mut self, storage: u64, bytes: u64) -> Result<(), OpFailure> {
        Python::attach(|py| {
            let object = self.storage(py, storage)?;
            let resized = object.call_method1(py, intern!(py, "resize_"), (bytes,));
            resized.map_err(|error| {
                raised(py, &format!("resizing a storage to {bytes} bytes"), &error)
            })?;
            let held = self.held(storage)?;
            held.bytes = bytes;
            held.views.clear();
            Ok(())
        })
    }

    fn free(&mut self, storage: u64) {
        // Its objects are dropped with the interpreter at hand.
        Python::attach(|_| {
            if let Some(held) = self.storages.remove(&storage).filter(|held| held.storage.is_some())
            {
                self.numbered.remove(&held.identity);
            }
        });
    }

    fn write(&mut self, storage: u64, offset: u64, bytes: &[u8]) -> Result<(), OpFailure> {
        Python::attach(|py| {
            let part = self.part(py, storage, offset, bytes.len() as u64)?;
            let mut target = Target::new(part, 0, bytes.len())
                .ok_or_else(|| refused("it is not on the host"))?;
            target.put(bytes);
            self.land(py, storage, offset)
        })
    }

    fn sink(&mut self, storage: u64, offset: u64, bytes: u64) -> Result<Target, OpFailure> {
        Python::attach(|py| {
            let part = self.part(py, storage, offset, bytes)?;
            Target::new(part, 0, bytes as usize).ok_or_else(|| refused("it is not on the host"))
        })
    }

    fn received(&mut self, storage: u64, offset: u64, _: Target) -> Result<(), OpFailure> {
        Python::attach(|py| self.land(py, storage, offset))
    }

    fn read(&mut self, tensor: &TensorRef) -> Result<Bytes, OpFailure> {
        Python::attach(|py| {
            if let Some(bytes) = self.small(py, tensor)? {
                return Ok(bytes.into());
            }
            let object = self.tensor(py, tensor)?;
            let capsule = self
                .backend
                .hooks
                .host_bytes
                .bind(py)
                .call1((object,))
                .and_then(|capsule| Memory::from_capsule(&capsule));
            let memory = capsule.map_err(|error| raised(py, "reading a tensor", &error))?;
            Ok(Bytes::from_owner(Payload(memory)))
        })
    }

    fn call(&mut self, call: &Call) -> Result<Vec<Value>, OpFailure> {
        let done = Python::attach(|py| self.run(py, call));
        done.map_err(|failure| {
            let op = self.ops.get(call.op as usize).and_then(Option::as_ref);
            let op = op.map_or("an operator", |op| &op.name);
            let named =
                call.kwargs.iter().map(|(name, value)| format!("{name}={}", self.describe(value)));
            let arguments: Vec<String> =
                call.args.iter().map(|value| self.describe(value)).chain(named).collect();
            let message = format!("{}\n  in {op}({})", failure.message, arguments.join(", "));
            OpFailure { message, ..failure }
        })
    }

    fn storages(&self) -> Vec<(u64, u64, u32, bool)> {
        let told = |(&storage, held): (&u64, &Held)| {
            (storage, held.bytes, held.device, held.storage.is_some())
        };
        self.storages.iter().map(told).collect()
    }

    fn writes(&self, call: &Call) -> Vec<u64> {
        let Some(Some(op)) = self.ops.get(call.op as usize) else { return Vec::new() };
        let unnamed = op.writes.iter().filter_map(|&at| call.args.get(at));
        let named = call
            .kwargs
            .iter()
            .filter(|(name, _)| op.writes_named.contains(name))
            .map(|(_, value)| value);
        let mut storages = Vec::new();
        let mut rest: Vec<&Value> = unnamed.chain(named).collect();
        while let Some(value) = rest.pop() {
            match value {
                Value::Tensor(tensor) | Value::Conjugate(tensor) => storages.push(tensor.storage),
                Value::List(values) => rest.extend(values),
                _ => {}
            }
        }
        storages
    }
}
