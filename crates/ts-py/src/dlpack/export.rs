// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exports tensors as DLPack capsules to other libraries.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use tensorstream::exec::contiguous_strides;
use tensorstream::format::{Dtype, TensorMeta};
use tensorstream::streams::MemoryRange;

use tensorstream::pool::dlpack::{DlDataType, DlDevice, Export, Form, ManagedTensor, RawTensor};
use tensorstream::remote::dlpack::{data_type, has_unversioned_type};

use super::{UNVERSIONED, VERSIONED};

/// DLPack's type of devices that it does not know.
const EXTENSION: i32 = 12;

/// A tensor to export.
pub(crate) struct Exported {
    /// The address of the first element.
    pub(crate) data: *mut c_void,
    /// DLPack's device type and device number.
    pub(crate) device: (i32, i32),
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<i64>,
    /// The step along each dimension, in elements.
    pub(crate) strides: Vec<i64>,
    pub(crate) read_only: bool,
    /// Whether the memory is a copy made for the consumer.
    pub(crate) copied: bool,
    /// The owner of the memory. It is dropped when the consumer calls the deleter, on any thread,
    /// with or without the GIL. Without a consumer, it is dropped with the capsule.
    pub(crate) owner: Box<dyn Any + Send>,
}

/// Creates an unversioned capsule over `bytes`. `owner` keeps them alive. It is dropped when the
/// consumer calls the deleter, or when the capsule is freed without a consumer.
///
/// `device` is DLPack's device type and device number. If the unversioned structure has no code for
/// the dtype, the capsule contains a one-dimensional tensor of bytes.
pub(crate) fn tensor_capsule<'py>(
    py: Python<'py>,
    bytes: MemoryRange,
    device: (i32, i32),
    meta: &TensorMeta,
    owner: impl Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let as_bytes = TensorMeta { dtype: Dtype::U8, shape: vec![bytes.len() as u64] };
    let TensorMeta { dtype, shape } =
        if has_unversioned_type(meta.dtype) { meta } else { &as_bytes };
    let exported = Exported {
        data: bytes.as_ptr().cast(),
        device,
        dtype: *dtype,
        shape: shape.iter().map(|&n| n as i64).collect(),
        strides: contiguous_strides(shape),
        read_only: false,
        copied: false,
        owner: Box::new(owner),
    };
    unversioned_capsule(py, exported)
}

/// Creates a capsule of the unversioned structure.
///
/// # Errors
/// BufferError if the structure has no code for the dtype.
pub(crate) fn unversioned_capsule<'py>(
    py: Python<'py>,
    exported: Exported,
) -> PyResult<Bound<'py, PyAny>> {
    let known = data_type(exported.dtype).filter(|_| has_unversioned_type(exported.dtype));
    let data_type = known.ok_or_else(|| no_code(exported.dtype))?;
    capsule(py, exported, data_type, Form::Unversioned)
}

/// Creates a capsule of the versioned structure, which can mark a tensor as read-only.
///
/// # Errors
/// BufferError if DLPack has no such dtype.
pub(crate) fn versioned_capsule<'py>(
    py: Python<'py>,
    exported: Exported,
) -> PyResult<Bound<'py, PyAny>> {
    let data_type = data_type(exported.dtype).ok_or_else(|| no_code(exported.dtype))?;
    capsule(py, exported, data_type, Form::Versioned)
}

/// Creates a capsule of a tensor on a device that is unknown to DLPack.
///
/// `address` is only a number: no code may dereference it. `ordinal` is the number of the device.
/// `owner` is dropped when PyTorch frees the storage, or with the capsule if PyTorch has not
/// consumed it.
pub(crate) fn extension<'py>(
    py: Python<'py>,
    (address, ordinal): (u64, u32),
    data_type: DlDataType,
    shape: Vec<i64>,
    strides: Vec<i64>,
    owner: Box<dyn Any + Send>,
) -> PyResult<Bound<'py, PyAny>> {
    let exported = Exported {
        data: std::ptr::without_provenance_mut(address as usize),
        device: (EXTENSION, ordinal as i32),
        // Ignored, because the other arguments give the data type.
        dtype: Dtype::U8,
        shape,
        strides,
        read_only: false,
        copied: false,
        owner,
    };
    capsule(py, exported, data_type, Form::Unversioned)
}

fn no_code(dtype: Dtype) -> PyErr {
    let why = match data_type(dtype) {
        Some(_) => "versions before 1.1 have no type code for it; request max_version=(1, 1)",
        None => "DLPack has no such type; use tobytes()",
    };
    PyBufferError::new_err(format!("cannot export dtype {dtype} through DLPack: {why}"))
}

/// Creates a capsule that owns a tensor.
fn capsule<'py>(
    py: Python<'py>,
    exported: Exported,
    data_type: DlDataType,
    form: Form,
) -> PyResult<Bound<'py, PyAny>> {
    let Exported { data, device, shape, strides, read_only, copied, owner, .. } = exported;
    let device = DlDevice { kind: device.0, ordinal: device.1 };
    let export = Export { data, device, data_type, shape, strides, read_only, copied, owner };
    // SAFETY: the owner keeps the memory of an `Exported`. For read-only tensors,
    // `PyTensor::__dlpack__` refuses the unversioned form.
    let raw = unsafe { export.into_managed(form) }.into_raw();
    let (managed, name, destructor): (*mut c_void, _, ffi::PyCapsule_Destructor) = match raw {
        RawTensor::Unversioned(managed) => (managed.as_ptr().cast(), UNVERSIONED, drop_unconsumed),
        RawTensor::Versioned(managed) => {
            (managed.as_ptr().cast(), VERSIONED, drop_unconsumed_versioned)
        }
    };
    // SAFETY: the name is static, and `managed` and `destructor` belong to it. If `PyCapsule_New`
    // returns null, no capsule owns `managed`, so it is deleted here, and the interpreter has an
    // exception for `from_owned_ptr_or_err` to fetch.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed, name.as_ptr(), Some(destructor));
        if capsule.is_null() {
            drop(ManagedTensor::from_raw(raw));
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// Destroys an unversioned capsule. Does nothing if a consumer has taken the tensor.
///
/// # Safety
/// `object` must come from [`capsule`] in the unversioned form. Only the interpreter may call this
/// function, when it frees the capsule.
unsafe extern "C" fn drop_unconsumed(object: *mut ffi::PyObject) {
    // SAFETY: as this function requires.
    unsafe { drop_if_named(object, UNVERSIONED, |managed| RawTensor::Unversioned(managed.cast())) }
}

/// Destroys a versioned capsule. Does nothing if a consumer has taken the tensor.
///
/// # Safety
/// `object` must come from [`capsule`] in the versioned form. Only the interpreter may call this
/// function, when it frees the capsule.
unsafe extern "C" fn drop_unconsumed_versioned(object: *mut ffi::PyObject) {
    // SAFETY: as this function requires.
    unsafe { drop_if_named(object, VERSIONED, |managed| RawTensor::Versioned(managed.cast())) }
}

/// Deletes the tensor of a capsule that still has this name.
///
/// # Safety
/// While the capsule has this name, its pointer must be that of an unconsumed tensor, which `raw`
/// casts to its type.
unsafe fn drop_if_named(
    capsule: *mut ffi::PyObject,
    name: &CStr,
    raw: fn(NonNull<c_void>) -> RawTensor,
) {
    // SAFETY: the caller guarantees that `capsule` and what it points to are alive.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) == 1
            && let Some(managed) = NonNull::new(ffi::PyCapsule_GetPointer(capsule, name.as_ptr()))
        {
            drop(ManagedTensor::from_raw(raw(managed)));
        }
    }
}
