// SPDX-License-Identifier: MIT OR Apache-2.0
//! Imports tensors of other libraries through DLPack, without a copy.

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorstream::remote::TensorInfo;

use crate::dlpack::{CPU, Imported, VERSION};
use crate::errors::tensor_error;
use crate::memory::Memory;

/// Imports a tensor on the host from an object that supports DLPack, or from a DLPack capsule.
///
/// # Errors
/// TypeError if the object does not support DLPack; BufferError if the tensor is not on the host or
/// has a dtype or strides that are not supported, or is lazily negated; ConfigurationError if it
/// has more than 64 dimensions. Also the exceptions of `__dlpack__`.
pub(super) fn import(value: &Bound<'_, PyAny>) -> PyResult<(TensorInfo, Memory)> {
    let py = value.py();
    // PyTorch exports the memory of such a view, which has other values.
    if value.call_method0(intern!(py, "is_neg")).is_ok_and(|is| is.is_truthy().unwrap_or(false)) {
        return Err(PyBufferError::new_err(
            "cannot import a lazily negated tensor: call its resolve_neg() first",
        ));
    }
    let capsule = if let Ok(export) = value.getattr("__dlpack__") {
        let newest = PyDict::new(py);
        newest.set_item("max_version", VERSION)?;
        match export.call((), Some(&newest)) {
            // Libraries that are older than DLPack 1.0 do not accept `max_version`.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => export.call0()?,
            done => done?,
        }
    } else {
        value.clone()
    };
    in_memory(py, Imported::from_capsule(&capsule)?)
}

/// Returns a tensor as a view of the smallest range of memory that contains all of its elements.
fn in_memory(py: Python<'_>, tensor: Imported) -> PyResult<(TensorInfo, Memory)> {
    let layout = tensor.layout()?;
    if layout.device.0 != CPU {
        return Err(PyBufferError::new_err(format!(
            "cannot import a tensor on DLPack device {:?}: copy it to the host first",
            layout.device
        )));
    }
    let to_python = |error| tensor_error(py, &error);
    let row_major = TensorInfo::new("", layout.dtype, layout.shape).map_err(to_python)?;
    let bytes = i64::from(layout.dtype.bits()) / 8;
    let empty = row_major.meta.shape.contains(&0);
    // The range, in bytes relative to the first element.
    let (mut begin, mut end) = (0i64, if empty { 0 } else { row_major.storage_len as i64 });
    if let Some(strides) = layout.strides.as_ref().filter(|_| !empty) {
        // The distance between the first and the last element of a dimension, in bytes.
        let reach =
            |(&n, &stride): (&u64, &i64)| (n as i64 - 1).checked_mul(stride)?.checked_mul(bytes);
        end = bytes;
        for step in row_major.meta.shape.iter().zip(strides).map(reach) {
            let side = if step.is_some_and(|step| step < 0) { &mut begin } else { &mut end };
            *side = step.and_then(|step| side.checked_add(step)).ok_or_else(|| {
                PyBufferError::new_err(format!(
                    "invalid strides {strides:?}: the tensor exceeds the address space"
                ))
            })?;
        }
    }
    let len = (end - begin) as usize;
    let strides = layout.strides.filter(|_| !empty);
    let info = row_major.in_storage(0, len as u64, (-begin) as u64, strides).map_err(to_python)?;
    let first = layout.data.wrapping_offset(begin as isize);
    // SAFETY: these bytes are the tensor's elements and the gaps between them. They are valid until
    // the tensor is dropped, and writable unless DLPack marks them as read-only.
    let memory = unsafe { Memory::from_import(tensor, first, len, (CPU, 0), layout.read_only) };
    Ok((info, memory))
}
