// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of the device `ts`, which PyTorch calls: they submit a call and return its results.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};
use tensorstream::exec::{Answer, Call, Output, Request, ScalarKeying, Signature, Value};

use super::arguments::Arguments;
use super::devices::DeviceEntry;
use super::plan::{NewTensor, Plan, PlannedReturn, PlannedTensor, plans};
use super::replies;
use super::scalar_prefetch::ScalarSource;
use super::session::Session;
use super::storage::{new_tensor, reserve_storages};
use super::torch::torch;

/// The number of storages that a call reserves for a result that is a list of unknown length.
const MAX_LISTED_TENSORS: u64 = 1 << 16;
/// The maximum number of inferences of a call. After an inference that resizes arguments, the call
/// is inferred again.
const MAX_INFERENCES: usize = 4;
/// Elements are prefetched only from new storages of at most this size, in bytes.
const MAX_SCALAR_BYTES: u64 = 16;

static NEXT_ID: AtomicU32 = AtomicU32::new(0);

/// The kernel of an operator on the device `ts`, which PyTorch calls.
#[pyclass(frozen, module = "tensorstream", name = "RemoteKernel")]
pub(crate) struct Kernel {
    /// The number of the kernel in this process.
    id: u32,
    /// Namespace, name and overload of the operator.
    name: String,
    op: Py<PyAny>,
    /// How numbers among the arguments enter the signature.
    scalars: ScalarKeying,
    /// Whether arguments that are tensors on the host, such as indices, are copied to the device.
    takes_host: bool,
    /// The name with the overload `*`: the machine chooses the overload by the arguments.
    any_overload: String,
    /// The positions of the arguments that are tensors in the schema. If a call has a number at one
    /// of these positions, the machine chooses the overload.
    tensors: Vec<usize>,
    /// Whether the plan comes from an earlier reply of the machine, because the results on the
    /// machine have other shapes than on meta tensors.
    from_machine: bool,
    /// The same if an argument is not contiguous, because the results have other strides then.
    strides_from_machine: bool,
    /// Whether the operator may write to arguments.
    writes: bool,
    /// The position of a generator among positional arguments.
    generator: Option<usize>,
    returns: Vec<Return>,
}

/// The kind of a result, according to the schema of the operator.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Return {
    Tensor,
    Tensors,
    Other,
    /// A tensor argument that the operator returns, by its position among the tensor arguments.
    Argument(usize),
}

#[pymethods]
impl Kernel {
    /// Creates a kernel.
    ///
    /// `by_value` selects [`ScalarKeying::ByValue`]. Each of `returns` is "tensor", "tensors",
    /// "other", or the position of the tensor argument that is returned.
    #[new]
    #[allow(clippy::too_many_arguments)] // called from Python
    fn new(
        name: String,
        op: Py<PyAny>,
        by_value: bool,
        takes_host: bool,
        from_machine: bool,
        strides_from_machine: bool,
        writes: bool,
        generator: Option<usize>,
        tensors: Vec<usize>,
        returns: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let kind = |returned: Bound<'_, PyAny>| match returned.extract::<usize>() {
            Ok(position) => Ok(Return::Argument(position)),
            Err(_) => match returned.extract::<String>()?.as_str() {
                "tensor" => Ok(Return::Tensor),
                "tensors" => Ok(Return::Tensors),
                "other" => Ok(Return::Other),
                other => Err(PyValueError::new_err(format!(
                    "invalid result kind {other:?}: expected \"tensor\", \"tensors\", \"other\" or \
                     a position"
                ))),
            },
        };
        let returns = returns.into_iter().map(kind).collect::<PyResult<_>>()?;
        let scalars = if by_value { ScalarKeying::ByValue } else { ScalarKeying::ByKind };
        let base = name.split('.').next().unwrap_or(&name);
        let any_overload = format!("{base}.*");
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            id,
            name,
            any_overload,
            op,
            scalars,
            takes_host,
            from_machine,
            strides_from_machine,
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
            (_, Some(position)) if position < args.len() => Some(args.get_item(position)?),
            _ => None,
        };
        if generator.is_some_and(|of| !of.is_none() && !of.is_instance_of::<PyString>()) {
            let kwargs = kwargs.map_or_else(|| PyDict::new(py), Clone::clone);
            return torch.hooks.draw.bind(py).call1((&self.op, args, kwargs));
        }
        for _ in 0..MAX_INFERENCES {
            let mut arguments = Arguments::new(torch, &self.name, self.takes_host);
            let values =
                args.iter().map(|value| arguments.value(&value)).collect::<PyResult<Vec<_>>>()?;
            let is_number = |position: &usize| {
                matches!(
                    values.get(*position),
                    Some(
                        Value::Int(_)
                            | Value::Unsigned(_)
                            | Value::Float(_)
                            | Value::Bool(_)
                            | Value::Complex(..)
                    )
                )
            };
            let name =
                if self.tensors.iter().any(is_number) { &self.any_overload } else { &self.name };
            let mut named = Vec::new();
            for (name, value) in kwargs.into_iter().flatten() {
                named.push((name.extract::<String>()?, arguments.value(&value)?));
            }
            let mut call =
                Call { op: 0, args: values, kwargs: named, outputs: Vec::new(), reply: None };
            let Some(device) = arguments.device.clone() else {
                let what = format!("{}: expected an argument on a ts device, got none", self.name);
                return Err(PyRuntimeError::new_err(what));
            };
            let settings = torch.settings(py)?;
            device.session.send_settings(py, settings)?;
            // The signature contains the settings, such as the dtype that results may have. If the
            // plan comes from a reply, the signature also contains the session, because another
            // machine may reply differently.
            let from_machine = self.from_machine
                || self.strides_from_machine
                    && call.tensors().any(|tensor| !tensor.view.is_contiguous());
            let machine = if from_machine { device.session.id + 1 } else { 0 };
            let mut signature = Signature::new([self.id, settings.key(), machine]);
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
                let inferred = if from_machine {
                    py.None().into_bound(py)
                } else {
                    torch.hooks.infer.bind(py).call1((&self.op, args, kwargs))?
                };
                if inferred.is_none() {
                    let keep = from_machine.then_some(key);
                    return self.run_and_wait(name, call, keep, &arguments, &device, py);
                }
                if let Ok(done) = inferred.cast::<PyTuple>() {
                    return done.get_item(0);
                }
                if let Ok(returns) = inferred.cast::<PyList>() {
                    let plan = Arc::new(Plan::from_inferred(returns)?);
                    plans().put(key, plan.clone());
                    plan
                } else {
                    // Inference has resized arguments, so the call must be inferred again.
                    continue;
                }
            };
            return self.run(name, &mut call, &plan, &arguments, &device, py);
        }
        Err(PyRuntimeError::new_err(format!(
            "{}: an output argument has the wrong shape, even after it was resized",
            self.name
        )))
    }

    /// Namespace, name and overload of the operator.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn __name__(&self) -> &str {
        &self.name
    }
}

impl Kernel {
    /// Submits a call, and returns its planned results without waiting for them.
    fn run<'py>(
        &self,
        name: &str,
        call: &mut Call,
        plan: &Plan,
        arguments: &Arguments<'_, 'py>,
        device: &DeviceEntry,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let session = &device.session;
        let first = reserve_storages(plan.storages() as u64);
        call.op = session
            .client(py)?
            .operator_id(name)
            .map_err(|error| session.connection_error(py, &error))?;
        call.outputs = plan
            .tensors()
            .map(|tensor| match tensor {
                Some(PlannedTensor::New(new)) => {
                    Output::New { tensor: new.reference(first), bytes: new.bytes }
                }
                _ => Output::Known,
            })
            .collect();
        let empty =
            Call { op: 0, args: Vec::new(), kwargs: Vec::new(), outputs: Vec::new(), reply: None };
        let request = Request::Call(mem::replace(call, empty));
        let number = session.submit(py, &request)?;
        let call_site = session.record_call_site(py, number, &self.name)?;
        if let Request::Call(call) = &request {
            self.record(py, session, call)?;
            for (position, output) in call.outputs.iter().enumerate() {
                if let (Some(call_site), Output::New { tensor, bytes }) = (call_site, output)
                    && *bytes <= MAX_SCALAR_BYTES
                    && tensor.view.elements() == Some(1)
                {
                    let source = ScalarSource { call_site, kernel: self.id, output: position };
                    session.prefetch_scalar(py, tensor, source)?;
                }
            }
        }
        // Results that share a new storage are views of the first of them.
        let mut bases: Vec<(usize, Bound<'py, PyAny>)> = Vec::new();
        let mut tensor = |planned: &Option<PlannedTensor>| -> PyResult<Bound<'py, PyAny>> {
            let Some(planned) = planned else { return Ok(py.None().into_bound(py)) };
            let as_strided = arguments.torch.hooks.as_strided.bind(py);
            match planned {
                PlannedTensor::Argument(position) => Ok(arguments.tensor_at(*position)?.clone()),
                PlannedTensor::View((position, sizes, strides, offset)) => {
                    as_strided.call1((arguments.tensor_at(*position)?, sizes, strides, offset))
                }
                PlannedTensor::New(new) => {
                    let NewTensor { view, bytes, storage } = new;
                    if let Some((_, base)) = bases.iter().find(|(of, _)| of == storage) {
                        return as_strided.call1((base, &view.sizes, &view.strides, view.offset));
                    }
                    let reference = new.reference(first);
                    let tensor = new_tensor(py, arguments.torch, device, &reference, *bytes)?;
                    bases.push((*storage, tensor.clone()));
                    Ok(tensor)
                }
            }
        };
        let mut results = Vec::with_capacity(plan.returns.len());
        for returned in &plan.returns {
            results.push(match returned {
                PlannedReturn::One(planned) => tensor(planned)?,
                PlannedReturn::List(planned) => {
                    let tensors = planned.iter().map(&mut tensor).collect::<PyResult<Vec<_>>>()?;
                    PyList::new(py, tensors)?.into_any()
                }
            });
        }
        replies::pack(py, results)
    }

    /// Submits a call whose results only the machine can determine. Blocks until the reply arrives.
    /// Keeps a plan of the results for later calls with the signature `key`, if there is one.
    fn run_and_wait<'py>(
        &self,
        name: &str,
        mut call: Call,
        key: Option<Box<[u8]>>,
        arguments: &Arguments<'_, 'py>,
        device: &DeviceEntry,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let session = &device.session;
        call.op = session
            .client(py)?
            .operator_id(name)
            .map_err(|error| session.connection_error(py, &error))?;
        let output = |kind: &Return| match kind {
            Return::Tensor => Output::Described { storage: reserve_storages(1) },
            Return::Tensors => Output::Described { storage: reserve_storages(MAX_LISTED_TENSORS) },
            Return::Other | Return::Argument(_) => Output::Known,
        };
        call.outputs = self.returns.iter().map(output).collect();
        let reply = session.client(py)?.new_reply();
        call.reply = Some(reply);
        let request = Request::Call(call);
        let number = session.submit(py, &request)?;
        session.record_call_site(py, number, &self.name)?;
        if let Request::Call(call) = &request {
            self.record(py, session, call)?;
        }
        let values = match session.wait(py, reply, &self.name)? {
            Answer::Values(values) => values,
            other => return Err(session.unexpected_reply("the results of an operator", &other)),
        };
        if values.len() != self.returns.len() && !self.returns.is_empty() {
            let what = format!(
                "machine {}: unexpected number of results of {} (protocol error): expected {}, got \
                 {}",
                session.name,
                self.name,
                self.returns.len(),
                values.len()
            );
            return Err(PyRuntimeError::new_err(what));
        }
        if let Some(key) = key {
            plans().put(key, Arc::new(Plan::from_reply(&values)));
        }
        let tensor = |value| replies::tensor(py, arguments.torch, device, value);
        let mut results = Vec::new();
        for (kind, value) in self.returns.iter().zip(&values) {
            results.push(match (kind, value) {
                (Return::Argument(position), _) => arguments.tensor_at(*position)?.clone(),
                (Return::Tensors, Value::List(list)) => {
                    let tensors = list.iter().map(tensor).collect::<PyResult<Vec<_>>>()?;
                    PyList::new(py, tensors)?.into_any()
                }
                (Return::Tensor, value) => tensor(value)?,
                (_, value) => replies::object(py, value)?.into_bound(py),
            });
        }
        replies::pack(py, results)
    }

    /// Counts and logs a submitted call. Drops the cached scalars of the storages that the call may
    /// write to.
    fn record(&self, py: Python<'_>, session: &Session, call: &Call) -> PyResult<()> {
        session.operators.fetch_add(1, Ordering::Relaxed);
        if self.writes {
            session.invalidate_scalars(call.tensors().map(|tensor| tensor.storage));
        }
        torch(py)?.log(py, &self.name, call)
    }
}
