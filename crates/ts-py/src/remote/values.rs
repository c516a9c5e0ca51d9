// SPDX-License-Identifier: MIT OR Apache-2.0
//! Conversions between Python objects and values that client and server share.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyComplex, PyFloat, PyInt, PyString};
use tensorstream::exec::Value;

/// Returns the value of a Python `int`. `None` for other objects, and for values that fit neither
/// into a signed nor into an unsigned 64-bit integer.
pub(super) fn integer(object: &Bound<'_, PyAny>) -> Option<Value> {
    let object = object.cast::<PyInt>().ok()?;
    let unsigned = || object.extract().ok().map(Value::Unsigned);
    object.extract().ok().map(Value::Int).or_else(unsigned)
}

/// Converts `Value::None`, a number or a string to Python. Returns `None` for other values.
pub(super) fn builtin(py: Python<'_>, value: &Value) -> Option<Py<PyAny>> {
    Some(match value {
        Value::None => py.None(),
        Value::Bool(value) => PyBool::new(py, *value).to_owned().into_any().unbind(),
        Value::Int(value) => PyInt::new(py, *value).into_any().unbind(),
        Value::Unsigned(value) => PyInt::new(py, *value).into_any().unbind(),
        Value::Float(value) => PyFloat::new(py, *value).into_any().unbind(),
        Value::Complex(real, imaginary) => {
            PyComplex::from_doubles(py, *real, *imaginary).into_any().unbind()
        }
        Value::Text(text) => PyString::new(py, text).into_any().unbind(),
        _ => return None,
    })
}
