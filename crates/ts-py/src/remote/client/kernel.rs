// SPDX-License-Identifier: MIT OR Apache-2.0
//! What PyTorch calls for an operator of the device: puts its arguments into a request, and makes
//! its outputs, as they are known to be.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyComplex, PyDict, PyFloat, PyList, PyString, PyTuple};
use tensorstream::exec::{
    Answer, Call, Output, Request, ScalarKeying, ScalarType, Signature, SignatureCache,
    StorageView, TensorRef, Value,
};

use super::machine::{Seat, Session, new_storages, new_tensor, plain, same_machine, seat};
use super::torch::{Torch, integer, torch};
use crate::errors::cross_machine_error;

/// As many calls are known at least, if they were made last.
const KNOWN: usize = 32 << 10;
/// A list of tensors of which nobody knows how many it will have gets so many numbers for storages.
const MANY: u64 = 1 << 16;

/// What calls give, by operator and signature.
static PLANS: LazyLock<Mutex<Plans>> = LazyLock::new(|| Mutex::new(SignatureCache::new(KNOWN)));
static KERNELS: AtomicU32 = AtomicU32::new(0);

type Plans = SignatureCache<Box<[u8]>, Arc<Plan>>;

fn plans() -> MutexGuard<'static, Plans> {
    PLANS.lock()
}

/// An operator of the device.
#[pyclass(frozen, module = "tensorstream", name = "RemoteKernel")]
pub(crate) struct Kernel {
    number: u32,
    /// Namespace, name and overload.
    name: String,
    op: Py<PyAny>,
    scalars: ScalarKeying,
    /// Tensors on the host are taken to the device: indices.
    takes_host: bool,
    /// The name by which an overload for numbers is found, and places of arguments that are tensors
    /// and may be numbers.
    for_numbers: String,
    tensors: Vec<usize>,
    /// What it gives is asked for once for each signature.
    learned: bool,
    /// It may write to arguments.
    writes: bool,
    /// The place of a generator among arguments without names.
    generator: Option<usize>,
    returns: Vec<Return>,
}

/// What an operator's schema says of what it returns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Return {
    Tensor,
    Tensors,
    Other,
    /// An argument, which it writes to: by its place among the tensors.
    Written(usize),
}

/// Where a call runs: the device's index here, and what it is of its machine.
struct Place {
    index: u32,
    seat: Seat,
}

/// What a call gives.
struct Plan {
    returns: Vec<Given>,
}

enum Given {
    One(Option<Leaf>),
    Many(Vec<Option<Leaf>>),
}

/// A tensor that a call gives. None where it gives none.
#[derive(FromPyObject)]
enum Leaf {
    /// The tensor argument of this place.
    #[pyo3(transparent)]
    Argument(usize),
    /// A view of the tensor argument of this place: sizes, strides, offset.
    #[pyo3(transparent)]
    View((usize, Vec<u64>, Vec<i64>, u64)),
    #[pyo3(transparent)]
    New(NewTensor),
}

/// A tensor that a call makes.
struct NewTensor {
    view: StorageView,
    /// The size of its storage, in bytes.
    bytes: u64,
    /// Which of the call's new storages it is a view of.
    storage: usize,
}

impl<'py> FromPyObject<'_, 'py> for NewTensor {
    type Error = PyErr;

    /// Extracts the tuple of `_infer.infer`: dtype, sizes, strides, offset, bytes, storage.
    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (dtype, sizes, strides, offset, bytes, storage) = object.extract()?;
        let view = StorageView { dtype: ScalarType(dtype), sizes, strides, offset };
        Ok(Self { view, bytes, storage })
    }
}

impl NewTensor {
    /// Returns its reference on the machine, if the call's storages are numbered from `first`.
    fn reference(&self, first: u64) -> TensorRef {
        TensorRef { storage: first + self.storage as u64, view: self.view.clone() }
    }
}

/// The arguments of a call.
struct Arguments<'a, 'py> {
    torch: &'a Torch,
    kernel: &'a Kernel,
    /// The device's index.
    index: Option<u32>,
    tensors: Vec<Bound<'py, PyAny>>,
    seat: Option<Seat>,
}

impl<'py> Arguments<'_, 'py> {
    fn value(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Value> {
        let py = object.py();
        if object.is_none() {
            return Ok(Value::None);
        }
        if self.torch.is_tensor(object)? {
            return self.tensor(object);
        }
        if let Ok(value) = object.cast_exact::<PyBool>() {
            return Ok(Value::Bool(value.is_true()));
        }
        if let Some(value) = integer(object) {
            return Ok(Value::Int(value));
        }
        if let Ok(value) = object.cast::<PyFloat>() {
            return Ok(Value::Float(value.value()));
        }
        if let Ok(list) = object.cast::<PyList>() {
            return Ok(Value::List(
                list.iter().map(|value| self.value(&value)).collect::<PyResult<_>>()?,
            ));
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return Ok(Value::List(
                tuple.iter().map(|value| self.value(&value)).collect::<PyResult<_>>()?,
            ));
        }
        if object.is_instance(self.torch.dtype.bind(py))? {
            return Ok(Value::Dtype(self.torch.scalar_type(object)?));
        }
        if object.is_instance(self.torch.device.bind(py))? {
            return self.device(object);
        }
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(Value::Text(text.to_str()?.into()));
        }
        if let Ok(number) = object.cast::<PyComplex>() {
            return Ok(Value::Complex(number.real(), number.imag()));
        }
        for class in &self.torch.named {
            if object.is_instance(class.bind(py))? {
                let name = object.str()?.to_str()?.to_string();
                return Ok(Value::Name(name.trim_start_matches("torch.").into()));
            }
        }
        let (name, class) = (&self.kernel.name, object.get_type());
        Err(PyTypeError::new_err(format!(
            "{name} was called with {class}, which cannot be sent to a machine"
        )))
    }

    fn device(&mut self, device: &Bound<'py, PyAny>) -> PyResult<Value> {
        let py = device.py();
        let kind = device.getattr(intern!(py, "type"))?;
        if kind.cast::<PyString>()?.to_str()? != "ts" {
            let what =
                format!("{} makes nothing on {device} of tensors that are on ts", self.kernel.name);
            return Err(PyRuntimeError::new_err(what));
        }
        let index: Option<u32> = device.getattr(intern!(py, "index"))?.extract()?;
        let index = match index {
            Some(index) => index,
            None => self.torch.hooks.current_device.bind(py).call0()?.extract()?,
        };
        self.on(py, index)?;
        Ok(Value::Device(self.seat.as_ref().map_or(0, |seat| seat.ordinal)))
    }

    /// Something is on this device.
    fn on(&mut self, py: Python<'py>, index: u32) -> PyResult<()> {
        match self.index {
            Some(known) if known == index => Ok(()),
            None => {
                self.seat = Some(seat(py, index)?);
                self.index = Some(index);
                Ok(())
            }
            Some(known) => {
                let (one, other) = (seat(py, known)?, seat(py, index)?);
                let name = &self.kernel.name;
                if same_machine(&one, &other) && self.kernel.name == "aten::copy_" {
                    return Ok(());
                }
                if same_machine(&one, &other) {
                    let what = format!(
                        "Expected all tensors to be on the same device, but {name} was called with \
                         tensors on ts:{known} and ts:{index}"
                    );
                    return Err(PyRuntimeError::new_err(what));
                }
                let what = format!(
                    "{name} was called with tensors of two machines: {} (ts:{known}) and {} \
                     (ts:{index}); .to() takes a tensor from one to the other",
                    one.machine.name, other.machine.name
                );
                Err(cross_machine_error(py, &what))
            }
        }
    }

    fn tensor(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<Value> {
        let py = tensor.py();
        if let Some((index, described)) = self.torch.describe(tensor)? {
            self.on(py, index)?;
            self.tensors.push(tensor.clone());
            if described.view.is_complex()
                && tensor.call_method0(intern!(py, "is_conj"))?.extract()?
            {
                return Ok(Value::Conjugate(described));
            }
            return Ok(Value::Tensor(described));
        }
        let dims: usize = tensor.call_method0(intern!(py, "dim"))?.extract()?;
        if dims == 0 && tensor.getattr(intern!(py, "is_cpu"))?.extract()? {
            let dtype = self.torch.scalar_type(&tensor.getattr(intern!(py, "dtype"))?)?;
            let raw: Vec<u8> = self.torch.hooks.element.bind(py).call1((tensor,))?.extract()?;
            let mut bytes = [0; 16];
            bytes[..raw.len()].copy_from_slice(&raw);
            return Ok(Value::Scalar { dtype, bytes });
        }
        if let (true, Some(index)) = (self.kernel.takes_host, self.index) {
            let there = self.torch.hooks.to_device.bind(py).call1((tensor, index))?;
            return self.tensor(&there);
        }
        let device = tensor.getattr(intern!(py, "device"))?;
        let what = format!(
            "Expected all tensors to be on the same device, but {} was called with one on {device} \
             and one on ts",
            self.kernel.name
        );
        Err(PyRuntimeError::new_err(what))
    }
}

#[pymethods]
impl Kernel {
    /// returns: for each return "tensor", "tensors", "other", or the place of the tensor argument
    /// that it is.
    #[new]
    #[allow(clippy::too_many_arguments)] // a call of Python's
    fn new(
        name: String,
        op: Py<PyAny>,
        by_value: bool,
        takes_host: bool,
        learned: bool,
        writes: bool,
        generator: Option<usize>,
        tensors: Vec<usize>,
        returns: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let kind = |given: Bound<'_, PyAny>| match given.extract::<usize>() {
            Ok(place) => Ok(Return::Written(place)),
            Err(_) => match given.extract::<String>()?.as_str() {
                "tensor" => Ok(Return::Tensor),
                "tensors" => Ok(Return::Tensors),
                "other" => Ok(Return::Other),
                other => Err(PyValueError::new_err(format!("a return of kind {other}"))),
            },
        };
        let returns = returns.into_iter().map(kind).collect::<PyResult<_>>()?;
        let scalars = if by_value { ScalarKeying::ByValue } else { ScalarKeying::ByKind };
        let base = name.split('.').next().unwrap_or(&name);
        let for_numbers = format!("{base}.*");
        let number = KERNELS.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            number,
            name,
            for_numbers,
            op,
            scalars,
            takes_host,
            learned,
            writes,
            generator,
            tensors,
            returns,
        })
    }

    #[pyo3(signature = (*args, **kwargs))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let torch = torch(py)?;
        let generator = match (kwargs, self.generator) {
            (Some(kwargs), _) if kwargs.contains(intern!(py, "generator"))? => {
                kwargs.get_item("generator")?
            }
            (_, Some(place)) if place < args.len() => Some(args.get_item(place)?),
            _ => None,
        };
        if generator.is_some_and(|of| !of.is_none() && !of.is_instance_of::<PyString>()) {
            let kwargs = kwargs.map_or_else(|| PyDict::new(py), Clone::clone);
            return torch.hooks.draw.bind(py).call1((&self.op, args, kwargs));
        }
        // Whoever infers may find that an argument is to have another shape first.
        for _ in 0..4 {
            let mut arguments =
                Arguments { torch, kernel: self, index: None, tensors: Vec::new(), seat: None };
            let values =
                args.iter().map(|value| arguments.value(&value)).collect::<PyResult<Vec<_>>>()?;
            let number = |place: &usize| {
                matches!(
                    values.get(*place),
                    Some(Value::Int(_) | Value::Float(_) | Value::Bool(_) | Value::Complex(..))
                )
            };
            let called =
                if self.tensors.iter().any(number) { &self.for_numbers } else { &self.name };
            let mut named = Vec::new();
            for (name, value) in kwargs.into_iter().flatten() {
                named.push((name.extract::<String>()?, arguments.value(&value)?));
            }
            let mut call =
                Call { op: 0, args: values, kwargs: named, outputs: Vec::new(), reply: None };
            let Some((index, seat)) = arguments.index.zip(arguments.seat.clone()) else {
                let what = format!(
                    "{} was called without a tensor of a device of tensorstream",
                    self.name
                );
                return Err(PyRuntimeError::new_err(what));
            };
            let place = Place { index, seat };
            // What numbers become, and of some what the machine is.
            let default = torch.default_dtype(py)?;
            place.seat.machine.tell_default_dtype(py, default)?;
            let whose = if self.learned { place.seat.machine.number + 1 } else { 0 };
            let mut signature = Signature::new([self.number, u32::from(default.0), whose]);
            let (unnamed, named) = (call.args.iter(), call.kwargs.iter());
            let all = unnamed
                .map(|value| ("", value))
                .chain(named.map(|(name, value)| (&name[..], value)));
            let key = signature.compute(all, self.scalars);
            let known = plans().get(key);
            let plan = if let Some(plan) = known {
                plan
            } else {
                let key: Box<[u8]> = key.into();
                let found = if self.learned {
                    py.None().into_bound(py)
                } else {
                    torch.hooks.infer.bind(py).call1((&self.op, args, kwargs))?
                };
                if found.is_none() {
                    return self.run_and_wait(called, call, key, &arguments, &place, py);
                }
                if let Ok(done) = found.cast::<PyTuple>() {
                    return done.get_item(0);
                }
                if let Ok(returns) = found.cast::<PyList>() {
                    let plan = Arc::new(Plan {
                        returns: returns.iter().map(|of| given(&of)).collect::<PyResult<_>>()?,
                    });
                    plans().put(key, plan.clone());
                    plan
                } else {
                    // It was resized.
                    continue;
                }
            };
            return self.run(called, &mut call, &plan, &arguments, &place, py);
        }
        Err(PyRuntimeError::new_err(format!(
            "{}: what it writes to has not the shape that it needs",
            self.name
        )))
    }

    /// Namespace, name and overload.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn __name__(&self) -> &str {
        &self.name
    }
}

fn given(of: &Bound<'_, PyAny>) -> PyResult<Given> {
    match of.cast::<PyList>() {
        Ok(list) => {
            Ok(Given::Many(list.iter().map(|leaf| leaf.extract()).collect::<PyResult<_>>()?))
        }
        Err(_) => Ok(Given::One(of.extract()?)),
    }
}

impl Kernel {
    /// Asks for it, and gives what it will give.
    fn run<'py>(
        &self,
        name: &str,
        call: &mut Call,
        plan: &Plan,
        arguments: &Arguments<'_, 'py>,
        Place { index, seat }: &Place,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let session = &seat.machine;
        let leaves = || {
            plan.returns.iter().flat_map(|given| match given {
                Given::One(leaf) => std::slice::from_ref(leaf),
                Given::Many(leaves) => leaves,
            })
        };
        let count = leaves()
            .filter_map(
                |leaf| if let Some(Leaf::New(new)) = leaf { Some(new.storage + 1) } else { None },
            )
            .max();
        let first = new_storages(count.unwrap_or(0) as u64);
        call.op = session.client(py)?.operator_id(name).map_err(|error| session.lost(py, &error))?;
        call.outputs = leaves()
            .map(|leaf| match leaf {
                Some(Leaf::New(new)) => {
                    Output::New { tensor: new.reference(first), bytes: new.bytes }
                }
                _ => Output::Known,
            })
            .collect();
        let none =
            Call { op: 0, args: Vec::new(), kwargs: Vec::new(), outputs: Vec::new(), reply: None };
        let request = Request::Call(std::mem::replace(call, none));
        let number = session.ask(py, &request)?;
        let line = session.note(py, number, &self.name)?;
        if let Request::Call(call) = &request {
            self.record(py, session, call)?;
            for (at, output) in call.outputs.iter().enumerate() {
                if let (Some(line), Output::New { tensor, bytes }) = (line, output)
                    && *bytes <= 16
                    && tensor.view.elements() == Some(1)
                {
                    session.made(py, tensor, line, self.number, at)?;
                }
            }
        }
        // What stands for storages that more than one output has is made once.
        let mut made: Vec<(usize, Bound<'py, PyAny>)> = Vec::new();
        let mut tensor = |leaf: &Option<Leaf>| -> PyResult<Bound<'py, PyAny>> {
            let Some(leaf) = leaf else { return Ok(py.None().into_bound(py)) };
            match leaf {
                Leaf::Argument(at) => Ok(argument(arguments, *at)?.clone()),
                Leaf::View((at, sizes, strides, offset)) => arguments
                    .torch
                    .hooks
                    .as_strided
                    .bind(py)
                    .call1((argument(arguments, *at)?, sizes, strides, offset)),
                Leaf::New(new) => {
                    let NewTensor { view, bytes, storage } = new;
                    if let Some((_, other)) = made.iter().find(|(made, _)| made == storage) {
                        let (sizes, strides) = (&view.sizes, &view.strides);
                        let as_strided = arguments.torch.hooks.as_strided.bind(py);
                        return as_strided.call1((other, sizes, strides, view.offset));
                    }
                    let reference = new.reference(first);
                    let tensor = new_tensor(py, arguments.torch, seat, *index, &reference, *bytes)?;
                    made.push((*storage, tensor.clone()));
                    Ok(tensor)
                }
            }
        };
        let mut results = Vec::with_capacity(plan.returns.len());
        for given in &plan.returns {
            results.push(match given {
                Given::One(leaf) => tensor(leaf)?,
                Given::Many(leaves) => {
                    PyList::new(py, leaves.iter().map(&mut tensor).collect::<PyResult<Vec<_>>>()?)?
                        .into_any()
                }
            });
        }
        together(py, results)
    }

    /// What a call means for others, now that it was asked for.
    fn record(&self, py: Python<'_>, session: &Session, call: &Call) -> PyResult<()> {
        session.operators.fetch_add(1, Ordering::Relaxed);
        if self.writes {
            session.written(call.tensors().map(|tensor| tensor.storage));
        }
        torch(py)?.log(py, &self.name, call)
    }

    /// Asks what it gives, and waits for that.
    fn run_and_wait<'py>(
        &self,
        name: &str,
        mut call: Call,
        key: Box<[u8]>,
        arguments: &Arguments<'_, 'py>,
        Place { index, seat }: &Place,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let session = &seat.machine;
        call.op = session.client(py)?.operator_id(name).map_err(|error| session.lost(py, &error))?;
        let output = |kind: &Return| match kind {
            Return::Tensor => Output::Described { storage: new_storages(1) },
            Return::Tensors => Output::Described { storage: new_storages(MANY) },
            Return::Other | Return::Written(_) => Output::Known,
        };
        call.outputs = self.returns.iter().map(output).collect();
        let reply = session.client(py)?.new_reply();
        call.reply = Some(reply);
        let request = Request::Call(call);
        let number = session.ask(py, &request)?;
        session.note(py, number, &self.name)?;
        if let Request::Call(call) = &request {
            self.record(py, session, call)?;
        }
        let Answer::Values(values) = session.wait(py, reply, &self.name)? else {
            return Err(PyRuntimeError::new_err("an answer that is not that to the question"));
        };
        if values.len() != self.returns.len() && !self.returns.is_empty() {
            let what = format!(
                "{} gave {} values, and its schema {}",
                self.name,
                values.len(),
                self.returns.len()
            );
            return Err(PyRuntimeError::new_err(what));
        }
        if self.learned {
            let leaves = values
                .iter()
                .enumerate()
                .map(|(storage, value)| Given::One(leaf_of(value, storage)));
            let plan = Arc::new(Plan { returns: leaves.collect() });
            plans().put(key, plan);
        }
        let mut results = Vec::new();
        for (kind, value) in self.returns.iter().zip(&values) {
            results.push(match (kind, value) {
                (Return::Written(at), _) => argument(arguments, *at)?.clone(),
                (Return::Tensors, Value::List(list)) => {
                    let tensors =
                        list.iter().map(|value| told(py, arguments.torch, seat, *index, value));
                    PyList::new(py, tensors.collect::<PyResult<Vec<_>>>()?)?.into_any()
                }
                (Return::Tensor, value) => told(py, arguments.torch, seat, *index, value)?,
                (_, value) => plain(py, value)?.into_bound(py),
            });
        }
        together(py, results)
    }
}

/// The next tensor that is as this one, which an operator gave.
fn leaf_of(value: &Value, storage: usize) -> Option<Leaf> {
    let Value::List(pair) = value else { return None };
    let [Value::Tensor(TensorRef { view, .. }), Value::Int(bytes)] = &pair[..] else { return None };
    Some(Leaf::New(NewTensor { view: view.clone(), bytes: *bytes as u64, storage }))
}

fn argument<'a, 'py>(
    arguments: &'a Arguments<'_, 'py>,
    at: usize,
) -> PyResult<&'a Bound<'py, PyAny>> {
    let missing =
        || PyRuntimeError::new_err(format!("{}: there is no tensor {at}", arguments.kernel.name));
    arguments.tensors.get(at).ok_or_else(missing)
}

/// A tensor of which the machine has said what it is.
fn told<'py>(
    py: Python<'py>,
    torch: &Torch,
    seat: &Seat,
    index: u32,
    value: &Value,
) -> PyResult<Bound<'py, PyAny>> {
    match value {
        Value::None => Ok(py.None().into_bound(py)),
        Value::List(pair) => match &pair[..] {
            [Value::Tensor(tensor), Value::Int(bytes)] => {
                new_tensor(py, torch, seat, index, tensor, *bytes as u64)
            }
            _ => Err(PyRuntimeError::new_err("an answer that is no tensor")),
        },
        _ => Err(PyRuntimeError::new_err("an answer that is no tensor")),
    }
}

/// As an operator returns it: nothing, one thing, or a tuple.
fn together<'py>(
    py: Python<'py>,
    mut results: Vec<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    match results.len() {
        0 => Ok(py.None().into_bound(py)),
        1 => Ok(results.remove(0)),
        _ => Ok(PyTuple::new(py, results)?.into_any()),
    }
}

/// Of calls whose outputs were known, of those whose outputs were not, and how many are known.
#[pyfunction]
pub(crate) fn remote_cache_stats() -> (u64, u64, usize) {
    let stats = plans().stats();
    (stats.hits, stats.misses, stats.entries)
}
