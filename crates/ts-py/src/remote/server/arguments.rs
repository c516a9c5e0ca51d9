// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the arguments of a call to Python objects.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use tensorstream::exec::{OpFailure, TensorRef, Value};

use super::failures::{raised, refused};
use super::hooks::Backend;
use super::storages::Storages;
use crate::dtype::TorchDtype;
use crate::remote::values::builtin;

/// The maximum number of values of a list that [`describe`] shows.
const MAX_DESCRIBED: usize = 32;

/// Converts an argument to a Python object.
pub(super) fn to_python(
    storages: &mut Storages,
    py: Python<'_>,
    value: &Value,
) -> Result<Py<PyAny>, OpFailure> {
    if let Some(object) = builtin(py, value) {
        return Ok(object);
    }
    let failed = |error: PyErr| raised(py, "cannot convert an argument", &error);
    match value {
        Value::Tensor(tensor) => storages.tensor(py, tensor),
        Value::Conjugate(tensor) => {
            storages.tensor(py, tensor)?.call_method0(py, intern!(py, "conj")).map_err(failed)
        }
        Value::List(values) => {
            let values = values
                .iter()
                .map(|value| to_python(storages, py, value))
                .collect::<Result<Vec<_>, _>>()?;
            PyList::new(py, values).map(|list| list.into_any().unbind()).map_err(failed)
        }
        Value::Dtype(dtype) => Ok(storages.backend.dtype(*dtype)?.object.clone_ref(py)),
        Value::Device(ordinal) => {
            let device = storages.backend.device(*ordinal)?;
            Ok(device.clone_ref(py))
        }
        Value::Name(name) => storages.backend.hooks.constant.call1(py, (name,)).map_err(failed),
        Value::Scalar { dtype, bytes } => {
            let TorchDtype { object, row } = storages.backend.dtype(*dtype)?;
            let bytes = &bytes[..(row.bytes as usize).min(bytes.len())];
            storages.backend.hooks.scalar.call1(py, (object, bytes)).map_err(failed)
        }
        other => Err(refused(format!("unsupported argument {other:?}"))),
    }
}

/// Describes an argument for error messages. A tensor becomes "float32[2, 3]", for example.
pub(super) fn describe(backend: &Backend, value: &Value) -> String {
    match value {
        Value::Tensor(TensorRef { view, .. }) | Value::Conjugate(TensorRef { view, .. }) => {
            format!("{}{:?}", backend.dtype_name(view.dtype), view.sizes)
        }
        Value::Scalar { dtype, .. } => format!("{}[]", backend.dtype_name(*dtype)),
        Value::Dtype(dtype) => backend.dtype_name(*dtype).into(),
        Value::List(values) => {
            let shown = values.iter().take(MAX_DESCRIBED).map(|value| describe(backend, value));
            let more = values.len().saturating_sub(MAX_DESCRIBED);
            let more = (more > 0).then(|| format!("{more} more"));
            format!("[{}]", shown.chain(more).collect::<Vec<_>>().join(", "))
        }
        Value::Int(value) => value.to_string(),
        Value::Unsigned(value) => value.to_string(),
        Value::Float(value) => value.to_string(),
        Value::Bool(value) => value.to_string(),
        Value::None => "None".into(),
        Value::Text(text) | Value::Name(text) => text.clone(),
        other => format!("{other:?}"),
    }
}
