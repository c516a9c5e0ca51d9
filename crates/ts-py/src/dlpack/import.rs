// SPDX-License-Identifier: MIT OR Apache-2.0
//! Imports tensors of other libraries from DLPack capsules.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use tensorstream::exec::contiguous_strides;
use tensorstream::format::Dtype;

use tensorstream::pool;
use tensorstream::pool::dlpack::{self, ManagedTensor, RawTensor};
use tensorstream::remote;

use super::{CPU, UNVERSIONED, UNVERSIONED_USED, VERSIONED, VERSIONED_USED};
use crate::dtype::stored_shape;

/// A tensor of another library. Dropping it calls the deleter of that library.
pub(crate) struct Imported(ManagedTensor);

/// The memory, dtype and shape of an imported tensor.
pub(crate) struct Layout {
    /// The address of the first element. May be null if the tensor has no elements.
    pub(crate) data: *mut u8,
    /// DLPack's device type and device number.
    pub(crate) device: (i32, i32),
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// The step along each dimension, in elements. None for the strides of a row-major tensor
    /// without gaps.
    pub(crate) strides: Option<Vec<i64>>,
    pub(crate) read_only: bool,
}

impl Imported {
    /// Takes ownership of the tensor in a capsule.
    ///
    /// # Errors
    /// TypeError if the object is not an unconsumed DLPack capsule; BufferError if its major
    /// version is not supported.
    pub(crate) fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let raw = match consume(capsule, UNVERSIONED, UNVERSIONED_USED) {
            Some(managed) => RawTensor::Unversioned(managed.cast()),
            None => match consume(capsule, VERSIONED, VERSIONED_USED) {
                Some(managed) => RawTensor::Versioned(managed.cast()),
                None => {
                    return Err(PyTypeError::new_err(format!(
                        "cannot import an object of type {}: expected an object with \
                         `__dlpack__`, or a DLPack capsule that has not been consumed",
                        capsule.get_type().name()?
                    )));
                }
            },
        };
        // SAFETY: a capsule with this name points to this structure, and `consume` took it. Code
        // that borrows the bytes refers to the rules of `CapsuleBytes`.
        unsafe { ManagedTensor::from_raw(raw) }.map(Self).map_err(|error| refused(&reason(error)))
    }

    /// Returns the memory, dtype and shape of the tensor.
    ///
    /// # Errors
    /// BufferError if the shape is invalid or the dtype is not supported.
    pub(crate) fn layout(&self) -> PyResult<Layout> {
        let dlpack::Layout { data, device, data_type, shape, strides, read_only } =
            self.0.layout().map_err(|error| refused(&reason(error)))?;
        let dtype = remote::dlpack::dtype(data_type).ok_or_else(|| {
            let dlpack::DlDataType { code, bits, lanes } = data_type;
            refused(&format!(
                "unsupported dtype (DLPack type code {code}, {bits} bits, {lanes} lanes)"
            ))
        })?;
        if dtype.bits() < 8 && (strides.is_some() || shape.is_empty()) {
            return Err(refused(&format!(
                "the values of dtype {dtype} are smaller than a byte, so the tensor must be \
                 contiguous and have dimensions"
            )));
        }
        let shape = stored_shape(dtype, shape);
        let device = (device.kind, device.ordinal);
        Ok(Layout { data, device, dtype, shape, strides, read_only })
    }
}

fn reason(error: pool::Error) -> String {
    match error {
        pool::Error::DlPack { what } => what,
        error => error.to_string(),
    }
}

fn refused(what: &str) -> PyErr {
    PyBufferError::new_err(format!("cannot import a DLPack tensor: {what}"))
}

/// Takes the pointer out of a capsule of this name, and renames the capsule to `used`. Returns None
/// if the object is not a capsule of this name.
fn consume(
    capsule: &Bound<'_, PyAny>,
    name: &'static CStr,
    used: &'static CStr,
) -> Option<NonNull<c_void>> {
    // SAFETY: the object is a capsule with this name, which the first call checks. Renaming the
    // capsule and removing its destructor transfers the ownership, as DLPack requires.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) != 1 {
            return None;
        }
        let managed = ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr());
        ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr());
        ffi::PyCapsule_SetDestructor(capsule.as_ptr(), None);
        NonNull::new(managed)
    }
}

/// The bytes of a contiguous tensor in host memory, taken from its capsule.
pub(crate) struct CapsuleBytes {
    imported: Imported,
    data: *mut u8,
    len: usize,
    read_only: bool,
}

// SAFETY: `data` points into memory that `imported` owns, and `imported` is `Send`.
unsafe impl Send for CapsuleBytes {}

impl CapsuleBytes {
    /// Takes ownership of the tensor in a capsule.
    ///
    /// # Errors
    /// TypeError if the object is not an unconsumed capsule of a contiguous tensor on the host;
    /// BufferError if the DLPack version, the shape or the dtype is not supported.
    pub(crate) fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let imported = Imported::from_capsule(capsule)?;
        let Layout { data, device, dtype, shape, strides, read_only } = imported.layout()?;
        let len = dtype.byte_len(&shape).and_then(|len| usize::try_from(len).ok());
        // The stride of a dimension with one element does not matter.
        let is_contiguous = strides.as_ref().is_none_or(|strides| {
            let expected = contiguous_strides(&shape);
            len == Some(0) || (0..shape.len()).all(|i| shape[i] == 1 || strides[i] == expected[i])
        });
        match len {
            Some(len) if is_contiguous && device.0 == CPU => {
                Ok(Self { imported, data, len, read_only })
            }
            _ if device.0 != CPU => Err(PyTypeError::new_err(format!(
                "invalid DLPack capsule: expected a tensor in host memory, got one on DLPack \
                 device {device:?}"
            ))),
            _ => Err(PyTypeError::new_err(format!(
                "invalid DLPack capsule: expected a contiguous tensor, got one of shape {shape:?} \
                 and strides {:?}",
                strides.unwrap_or_else(|| contiguous_strides(&shape))
            ))),
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the tensor, the address of its bytes, and their number.
    pub(crate) fn into_parts(self) -> (Imported, *mut u8, usize) {
        (self.imported, self.data, self.len)
    }

    /// Returns the bytes. Python code must not write to them while they are borrowed.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the data of a DLPack tensor is valid for its shape until its deleter is called,
        // which happens when `self` is dropped.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }

    /// Returns the bytes for writing. Python code must not use them while they are borrowed.
    ///
    /// # Errors
    /// BufferError if the tensor is read-only.
    pub(crate) fn bytes_mut(&mut self) -> PyResult<&mut [u8]> {
        if self.read_only {
            return Err(PyBufferError::new_err("cannot write to a read-only tensor"));
        }
        if self.len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: the data is valid, as in `bytes`. It is writable, and `self` is borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.data, self.len) })
    }
}
