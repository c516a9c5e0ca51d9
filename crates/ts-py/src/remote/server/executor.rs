// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the requests of a session with PyTorch.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tensorstream::exec::{Call, Executor, OpFailure, TensorRef, Value};
use tensorstream::remote::Bytes;

use super::arguments::{describe, to_python};
use super::failures::{message, raised, raised_by_operator, refused};
use super::hooks::Backend;
use super::settings::{ParallelCall, Settings};
use super::storages::Storages;
use crate::memory::Target;

/// The prefix of the operators that this package defines.
const OWN_PREFIX: &str = "tensorstream::";
/// The operator that sets the settings of a session.
const SETTINGS: &str = "tensorstream::settings";

/// The operator that offers a tensor to other sessions, under a ticket.
const OFFER: &str = "tensorstream::offer";

/// The executor of one session.
pub(super) struct TorchExecutor {
    storages: Storages,
    /// The Python half of the session. `None` until the first operator is defined.
    session: Option<Py<PyAny>>,
    /// The operators, by number. `None` for operators whose definition failed.
    ops: Vec<Option<Operator>>,
    settings: Settings,
}

struct Operator {
    name: String,
    /// The function that runs the operator. `None` for [`SETTINGS`].
    call: Option<Py<PyAny>>,
    /// The positions of the positional arguments that the operator writes to.
    writes: Vec<usize>,
    /// The names of the keyword arguments that the operator writes to.
    writes_named: Vec<String>,
}

impl TorchExecutor {
    pub(super) fn new(backend: Arc<Backend>) -> Self {
        Self {
            storages: Storages::new(backend),
            session: None,
            ops: Vec::new(),
            settings: Settings::default(),
        }
    }

    fn session<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let session = match self.session.take() {
            Some(session) => session,
            None => self.storages.backend.hooks.session.call0(py)?,
        };
        Ok(self.session.insert(session).bind(py).clone())
    }

    fn run(&mut self, py: Python<'_>, call: &Call) -> Result<Vec<Value>, OpFailure> {
        let backend = self.storages.backend.clone();
        let failed = |error: PyErr| raised(py, "cannot convert the arguments", &error);
        self.storages.check_writable(self.writes(call))?;
        self.storages.lease(py, call.tensors().map(|tensor| tensor.storage))?;
        let args = call
            .args
            .iter()
            .map(|value| to_python(&mut self.storages, py, value))
            .collect::<Result<Vec<_>, _>>()?;
        let kwargs = PyDict::new(py);
        for (name, value) in &call.kwargs {
            kwargs.set_item(name, to_python(&mut self.storages, py, value)?).map_err(failed)?;
        }
        let args = PyTuple::new(py, args).map_err(failed)?;
        let op = self.ops.get(call.op as usize).and_then(Option::as_ref);
        let op = op.ok_or_else(|| {
            let why = if (call.op as usize) < self.ops.len() {
                "its definition failed"
            } else {
                "the client did not define it"
            };
            refused(format!("operator number {} is not defined: {why}", call.op))
        })?;
        let kwargs = (!kwargs.is_empty()).then_some(&kwargs);
        let Some(callable) = &op.call else {
            let checked = backend.hooks.settings.call1(py, (args,));
            self.settings.set(py, checked.map_err(|error| raised_by_operator(py, &error))?);
            return Ok(Vec::new());
        };
        // Operators of this package do not depend on the settings, and must not hold the lock while
        // they wait for another machine.
        let result = if op.name.starts_with(OWN_PREFIX) {
            callable.bind(py).call(args, kwargs)
        } else if let Some(_parallel) = ParallelCall::begin() {
            callable.bind(py).call(args, kwargs)
        } else {
            let settings = self.settings.get().unwrap_or(&backend.hooks.default_settings);
            backend.hooks.with_settings.bind(py).call1((settings, callable, args, kwargs))
        };
        let result = result.map_err(|error| raised_by_operator(py, &error))?;
        self.storages.store(&backend, call, result)
    }
}

impl Executor for TorchExecutor {
    type Sink = Target;

    fn batch(&mut self, run: &mut dyn FnMut(&mut Self)) {
        Python::attach(|py| {
            // The client runs autograd, so operators run without it here.
            let guard = self.storages.backend.hooks.guard.call0(py);
            run(self);
            drop(guard);
        });
    }

    fn define(&mut self, _: u32, name: &str) -> Result<(), OpFailure> {
        Python::attach(|py| {
            let defined = self.session(py).and_then(|session| {
                session.call_method1(intern!(py, "define"), (name,))?.extract()
            });
            match defined {
                Ok((call, writes, writes_named)) => {
                    let call = (name != SETTINGS).then_some(call);
                    self.ops.push(Some(Operator { name: name.into(), call, writes, writes_named }));
                    Ok(())
                }
                Err(error) => {
                    self.ops.push(None);
                    Err(refused(message(py, name, &error)))
                }
            }
        })
    }

    fn create(&mut self, storage: u64, bytes: u64, device: u32) -> Result<(), OpFailure> {
        self.storages.create(storage, bytes, device)
    }

    fn resize(&mut self, storage: u64, bytes: u64) -> Result<(), OpFailure> {
        Python::attach(|py| self.storages.resize(py, storage, bytes))
    }

    fn free(&mut self, storage: u64) {
        Python::attach(|_| self.storages.free(storage));
    }

    fn write(&mut self, storage: u64, offset: u64, bytes: &[u8]) -> Result<(), OpFailure> {
        Python::attach(|py| self.storages.write(py, storage, offset, bytes))
    }

    fn sink(&mut self, storage: u64, offset: u64, bytes: u64) -> Result<Target, OpFailure> {
        Python::attach(|py| self.storages.upload_target(py, storage, offset, bytes))
    }

    fn received(&mut self, storage: u64, offset: u64, _: Target) -> Result<(), OpFailure> {
        Python::attach(|py| self.storages.finish_upload(py, storage, offset))
    }

    fn read(&mut self, tensor: &TensorRef) -> Result<Bytes, OpFailure> {
        Python::attach(|py| {
            let read = self.storages.read(py, tensor);
            self.storages.release();
            read
        })
    }

    fn call(&mut self, call: &Call) -> Result<Vec<Value>, OpFailure> {
        let done = Python::attach(|py| {
            let done = self.run(py, call);
            self.storages.release();
            done
        });
        done.map_err(|failure| {
            let op = self.ops.get(call.op as usize).and_then(Option::as_ref);
            let op = op.map_or("an undefined operator", |op| &op.name);
            let describe = |value: &Value| describe(&self.storages.backend, value);
            let named = call.kwargs.iter().map(|(name, value)| (name, describe(value)));
            let named = named.map(|(name, value)| format!("{name}={value}"));
            let arguments: Vec<String> = call.args.iter().map(describe).chain(named).collect();
            let message = format!("{}\n  in {op}({})", failure.message, arguments.join(", "));
            OpFailure::new(failure.kind, message)
        })
    }

    fn skip(&mut self, call: &Call, failure: &OpFailure) {
        let Some(Some(op)) = self.ops.get(call.op as usize) else { return };
        // Another session may wait for the tensor that cannot be offered.
        if let (OFFER, [_, Value::Text(ticket), ..]) = (op.name.as_str(), call.args.as_slice()) {
            Python::attach(|py| {
                let told = self.session(py).and_then(|session| {
                    let arguments = (ticket, &failure.message);
                    session.call_method1(intern!(py, "skipped_offer"), arguments)
                });
                if let Err(error) = told {
                    error.write_unraisable(py, None);
                }
            });
        }
    }

    fn storages(&self) -> Vec<(u64, u64, u32, bool)> {
        self.storages.list()
    }

    fn is_constant(&self, storage: u64) -> bool {
        self.storages.is_streamed(storage)
    }

    fn writes(&self, call: &Call) -> Vec<u64> {
        let Some(Some(op)) = self.ops.get(call.op as usize) else { return Vec::new() };
        let unnamed = op.writes.iter().filter_map(|&position| call.args.get(position));
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
