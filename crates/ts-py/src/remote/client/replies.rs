// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the values of a reply to Python objects.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use tensorstream::exec::Value;

use super::devices::DeviceEntry;
use super::storage::new_tensor;
use super::torch::Torch;
use crate::remote::values::builtin;

/// Converts a result that is a tensor, or None.
pub(super) fn tensor<'py>(
    py: Python<'py>,
    torch: &Torch,
    device: &DeviceEntry,
    value: &Value,
) -> PyResult<Bound<'py, PyAny>> {
    match value {
        Value::None => return Ok(py.None().into_bound(py)),
        Value::List(pair) => {
            if let [Value::Tensor(tensor), Value::Int(bytes)] = &pair[..] {
                return new_tensor(py, torch, device, tensor, *bytes as u64);
            }
        }
        _ => {}
    }
    Err(unexpected("a tensor", value))
}

/// Converts a result that is not a tensor.
pub(super) fn object(py: Python<'_>, value: &Value) -> PyResult<Py<PyAny>> {
    if let Value::List(values) = value {
        let values = values.iter().map(|value| object(py, value)).collect::<PyResult<Vec<_>>>()?;
        return Ok(PyList::new(py, values)?.into_any().unbind());
    }
    builtin(py, value).ok_or_else(|| unexpected("numbers or strings", value))
}

/// Returns the results in the form of an operator's return value: None, one result, or a tuple.
pub(super) fn pack<'py>(
    py: Python<'py>,
    mut results: Vec<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    match results.len() {
        0 => Ok(py.None().into_bound(py)),
        1 => Ok(results.remove(0)),
        _ => Ok(PyTuple::new(py, results)?.into_any()),
    }
}

fn unexpected(expected: &str, value: &Value) -> PyErr {
    PyRuntimeError::new_err(format!(
        "unexpected reply from a machine (protocol error): expected {expected}, got {value:?}"
    ))
}
