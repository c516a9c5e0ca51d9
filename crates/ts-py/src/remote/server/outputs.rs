// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stores the results of operators.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyComplex, PyFloat, PyList, PyTuple};
use tensorstream::exec::{Call, OpFailure, OpFailureKind, Output, StorageView, TensorRef, Value};

use super::failures::{raised, refused};
use super::hooks::Backend;
use super::storages::{StorageEntry, Storages, exists, identity};
use super::streamed::StreamedTensor;
use crate::remote::values::integer;

/// A result whose storage does not belong to an entry yet.
struct NewTensor<'py> {
    tensor: Bound<'py, PyAny>,
    view: StorageView,
    storage: Bound<'py, PyAny>,
    /// The [`identity`] of `storage`.
    identity: usize,
}

impl Storages {
    /// Stores the results of a call as `call.outputs` specifies. Returns the values for the reply.
    pub(super) fn store(
        &mut self,
        backend: &Backend,
        call: &Call,
        result: Bound<'_, PyAny>,
    ) -> Result<Vec<Value>, OpFailure> {
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
                    let store =
                        |(at, tensor)| self.store_unplanned(backend, storage + at as u64, &tensor);
                    Value::List(list.iter().enumerate().map(store).collect::<Result<_, _>>()?)
                }
                (Some(list), _) => {
                    for tensor in list.iter() {
                        self.store_planned(backend, outputs.next(), &tensor)?;
                    }
                    Value::None
                }
                (None, Some(Output::Described { storage })) => {
                    outputs.next();
                    self.store_unplanned(backend, *storage, &returned)?
                }
                (None, _) => {
                    self.store_planned(backend, outputs.next(), &returned)?;
                    if call.reply.is_some() { to_value(backend, &returned) } else { Value::None }
                }
            };
            values.push(value);
        }
        Ok(values)
    }

    /// Stores a tensor in the storage that the client has planned. Does nothing if the output is
    /// not a new tensor.
    fn store_planned(
        &mut self,
        backend: &Backend,
        output: Option<&Output>,
        returned: &Bound<'_, PyAny>,
    ) -> Result<(), OpFailure> {
        let Some(Output::New { tensor: planned, bytes }) = output else { return Ok(()) };
        let py = returned.py();
        let failed = |error: PyErr| raised(py, "cannot store a result", &error);
        if self.contains(planned.storage) {
            // The output is a view of an earlier output, so its elements are copied to the storage
            // of that output.
            self.check_writable([planned.storage])?;
            let stored = self.tensor(py, planned)?;
            stored.call_method1(py, intern!(py, "copy_"), (returned,)).map_err(failed)?;
            return Ok(());
        }
        let mut new = self.as_new(backend, returned)?;
        let view = &planned.view;
        if new.view.sizes != view.sizes || new.view.dtype != view.dtype {
            let what = format!(
                "the operator returned a tensor of shape {:?} and dtype {} (expected shape {:?} \
                 and dtype {})",
                new.view.sizes,
                backend.dtype_name(new.view.dtype),
                view.sizes,
                backend.dtype_name(view.dtype)
            );
            return Err(OpFailure::new(OpFailureKind::Operator, what));
        }
        if new.view != *view {
            let dtype = &backend.dtype(view.dtype)?.object;
            let StorageView { sizes, strides, offset, .. } = view;
            let arguments = (new.tensor, dtype, sizes, strides, offset, bytes);
            new.tensor = backend.hooks.restrided.bind(py).call1(arguments).map_err(failed)?;
            new.storage =
                new.tensor.call_method0(intern!(py, "untyped_storage")).map_err(failed)?;
            new.identity = identity(&new.storage).map_err(failed)?;
            new.view = view.clone();
        }
        self.insert(planned.storage, new.into_entry(backend, *bytes))
    }

    /// Stores a result whose kind and shape the client has not planned. Returns the value for the
    /// reply.
    fn store_unplanned(
        &mut self,
        backend: &Backend,
        storage: u64,
        returned: &Bound<'_, PyAny>,
    ) -> Result<Value, OpFailure> {
        if returned.is_none() {
            return Ok(Value::None);
        }
        let py = returned.py();
        let failed = |error: PyErr| raised(py, "cannot store a result", &error);
        if !returned.is_instance(backend.tensor.bind(py)).map_err(failed)? {
            let Ok(streamed) = returned.cast::<StreamedTensor>() else {
                return Ok(to_value(backend, returned));
            };
            let (view, bytes) = (streamed.get().view.clone(), streamed.get().bytes);
            self.insert_streamed(storage, streamed.clone().unbind())?;
            return Ok(described(storage, view, bytes));
        }
        if self.contains(storage) {
            return Err(exists(storage));
        }
        let new = self.as_new(backend, returned)?;
        let view = new.view.clone();
        let bytes: u64 = new
            .storage
            .call_method0(intern!(py, "nbytes"))
            .and_then(|bytes| bytes.extract())
            .map_err(failed)?;
        self.insert(storage, new.into_entry(backend, bytes))?;
        Ok(described(storage, view, bytes))
    }

    /// Prepares a result for a new entry. Copies the result if its storage already belongs to an
    /// entry, or if its complex elements are only marked as conjugated or negated.
    ///
    /// # Errors
    /// Returns a failure if the result is not on a device of the machine.
    fn as_new<'py>(
        &self,
        backend: &Backend,
        returned: &Bound<'py, PyAny>,
    ) -> Result<NewTensor<'py>, OpFailure> {
        let py = returned.py();
        let failed = |error: PyErr| raised(py, "cannot store a result", &error);
        let call = |of: &Bound<'py, PyAny>, method| of.call_method0(method).map_err(failed);
        let is_cpu = |tensor: &Bound<'py, PyAny>| {
            tensor.getattr(intern!(py, "is_cpu")).and_then(|is_cpu| is_cpu.is_truthy())
        };
        if !backend.on_cpu || !is_cpu(returned).map_err(failed)? {
            let device = returned.getattr(intern!(py, "device")).map_err(failed)?;
            let is_own = |own: &Py<PyAny>| device.eq(own.bind(py)).unwrap_or(false);
            if !backend.hooks.devices.iter().any(is_own) {
                let what = format!(
                    "the operator returned a tensor on {device}, which is not a device of this \
                     machine"
                );
                return Err(refused(what));
            }
        }
        let mut tensor = returned.clone();
        let mut view = backend.view_of(&tensor).map_err(failed)?;
        if view.is_complex() {
            // PyTorch can mark elements as conjugated or negated without changing the memory.
            tensor =
                call(&call(&tensor, intern!(py, "resolve_conj"))?, intern!(py, "resolve_neg"))?;
            view = backend.view_of(&tensor).map_err(failed)?;
        }
        let mut storage = call(&tensor, intern!(py, "untyped_storage"))?;
        let mut own = identity(&storage).map_err(failed)?;
        if self.contains_identity(own) {
            tensor = call(&tensor, intern!(py, "clone"))?;
            view = backend.view_of(&tensor).map_err(failed)?;
            storage = call(&tensor, intern!(py, "untyped_storage"))?;
            own = identity(&storage).map_err(failed)?;
        }
        Ok(NewTensor { tensor, view, storage, identity: own })
    }
}

impl NewTensor<'_> {
    fn into_entry(self, backend: &Backend, bytes: u64) -> StorageEntry {
        StorageEntry {
            bytes,
            device: backend.device_of(&self.tensor),
            identity: self.identity,
            storage: Some(self.storage.unbind()),
            streamed: None,
            views: vec![(self.view, self.tensor.unbind())],
        }
    }
}

/// Returns the value for the reply that describes a new tensor.
fn described(storage: u64, view: StorageView, bytes: u64) -> Value {
    Value::List(vec![Value::Tensor(TensorRef { storage, view }), Value::Int(bytes as i64)])
}

/// Converts a result that is not a tensor. Unknown objects become `Value::None`.
fn to_value(backend: &Backend, object: &Bound<'_, PyAny>) -> Value {
    if let Ok(value) = object.cast_exact::<PyBool>() {
        return Value::Bool(value.is_true());
    }
    if let Some(value) = integer(object) {
        return value;
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
