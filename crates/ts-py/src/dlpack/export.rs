// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exports tensors as DLPack capsules to other libraries.

use std::any::Any;
use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use tensorstream::exec::contiguous_strides;
use tensorstream::format::{Dtype, TensorMeta};
use tensorstream::streams::MemoryRange;

use super::abi::{
    DataType, Device, EXTENSION, IS_COPIED, ManagedTensor, ManagedTensorVersioned, READ_ONLY,
    Tensor, UNVERSIONED, VERSION, VERSIONED, has_unversioned_code, unversioned_type,
    versioned_type,
};

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

/// The heap allocation that the `context` of an exported tensor points to.
struct ExportBox<M> {
    managed: M,
    /// The shape, followed by the strides.
    extents: Vec<i64>,
    _owner: Box<dyn Any + Send>,
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
        if has_unversioned_code(meta.dtype) { meta } else { &as_bytes };
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
    let dtype = unversioned_type(exported.dtype).ok_or_else(|| no_code(exported.dtype))?;
    let managed = export(exported, dtype, |tensor, _, context| ManagedTensor {
        tensor,
        context,
        deleter: Some(delete::<ManagedTensor>),
    });
    // SAFETY: `export` made `managed`, no other pointer to it exists, and name and destructor are
    // those of the unversioned structure.
    unsafe { new_capsule(py, managed, UNVERSIONED, drop_unconsumed) }
}

/// Creates a capsule of the versioned structure, which can mark a tensor as read-only.
///
/// # Errors
/// BufferError if DLPack has no such dtype.
pub(crate) fn versioned_capsule<'py>(
    py: Python<'py>,
    exported: Exported,
) -> PyResult<Bound<'py, PyAny>> {
    let dtype = versioned_type(exported.dtype).ok_or_else(|| no_code(exported.dtype))?;
    let managed = export(exported, dtype, |tensor, flags, context| ManagedTensorVersioned {
        major: VERSION.0,
        minor: VERSION.1,
        context,
        deleter: Some(delete::<ManagedTensorVersioned>),
        flags,
        tensor,
    });
    // SAFETY: `export` made `managed`, no other pointer to it exists, and name and destructor are
    // those of the versioned structure.
    unsafe { new_capsule(py, managed, VERSIONED, drop_unconsumed_versioned) }
}

/// Creates a capsule of a tensor on a device that is unknown to DLPack.
///
/// `address` is only a number: no code may dereference it. `ordinal` is the number of the device.
/// `code`, `bits` and `lanes` are DLPack's data type. `owner` is dropped when PyTorch frees the
/// storage, or with the capsule if PyTorch has not consumed it.
pub(crate) fn extension<'py>(
    py: Python<'py>,
    (address, ordinal): (u64, u32),
    (code, bits, lanes): (u8, u8, u16),
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
    let managed = export(exported, DataType { code, bits, lanes }, |tensor, _, context| {
        ManagedTensor { tensor, context, deleter: Some(delete::<ManagedTensor>) }
    });
    // SAFETY: `export` made `managed`, no other pointer to it exists, and name and destructor are
    // those of the unversioned structure.
    unsafe { new_capsule(py, managed, UNVERSIONED, drop_unconsumed) }
}

fn no_code(dtype: Dtype) -> PyErr {
    let why = match versioned_type(dtype) {
        Some(_) => "versions before 1.1 have no type code for it; request max_version=(1, 1)",
        None => "DLPack has no such type; use tobytes()",
    };
    PyBufferError::new_err(format!("cannot export dtype {dtype} through DLPack: {why}"))
}

/// The unversioned or the versioned structure of a managed tensor.
trait Managed {
    fn context(&self) -> *mut c_void;
}

impl Managed for ManagedTensor {
    fn context(&self) -> *mut c_void {
        self.context
    }
}

impl Managed for ManagedTensorVersioned {
    fn context(&self) -> *mut c_void {
        self.context
    }
}

/// Allocates a managed tensor together with its shape, strides and owner. [`delete`] frees them.
fn export<M>(
    exported: Exported,
    dtype: DataType,
    make: impl FnOnce(Tensor, u64, *mut c_void) -> M,
) -> *mut M {
    let Exported { data, device, shape, strides, read_only, copied, owner, .. } = exported;
    let ndim = shape.len();
    assert_eq!(ndim, strides.len(), "shape and strides must have the same length");
    let mut extents = shape;
    extents.extend(strides);
    let tensor = Tensor {
        data,
        device: Device { kind: device.0, ordinal: device.1 },
        ndim: i32::try_from(ndim).expect("the number of dimensions fits into 32 bits"),
        dtype,
        shape: extents.as_mut_ptr(),
        // SAFETY: `extents` has `2 * ndim` entries, so `ndim` is not beyond its end.
        strides: unsafe { extents.as_mut_ptr().add(ndim) },
        byte_offset: 0,
    };
    let flags = if read_only { READ_ONLY } else { 0 } | if copied { IS_COPIED } else { 0 };
    let mut allocation = Box::<ExportBox<M>>::new_uninit();
    let context = allocation.as_mut_ptr().cast();
    // Moving `extents` does not move its heap data, which `shape` and `strides` point to.
    let export = Box::into_raw(Box::write(
        allocation,
        ExportBox { managed: make(tensor, flags, context), extents, _owner: owner },
    ));
    debug_assert_eq!(context, export.cast());
    // SAFETY: `export` comes from `Box::into_raw`, so it points to an initialised `ExportBox`.
    unsafe {
        debug_assert_eq!((*export).extents.len(), 2 * ndim);
        &raw mut (*export).managed
    }
}

/// Creates a capsule that owns `managed`. Deletes `managed` on failure.
///
/// # Safety
/// `managed` must come from [`export`], and nothing else may use it. `name` must be the capsule
/// name of the structure `M`, and `destructor` the destructor for that name.
unsafe fn new_capsule<'py, M: Managed>(
    py: Python<'py>,
    managed: *mut M,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the name is static, and `managed` and `destructor` satisfy this function's contract.
    // If `PyCapsule_New` returns null, no capsule owns `managed`, so it is deleted here, and the
    // interpreter has an exception for `from_owned_ptr_or_err` to fetch.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed.cast(), name.as_ptr(), Some(destructor));
        if capsule.is_null() {
            delete(managed);
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// Frees an exported tensor, as the deleter of the DLPack protocol.
///
/// # Safety
/// `managed` must come from [`export`]. Neither it nor its data may be used afterwards.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: `context` points to the box that `export` leaked. The caller guarantees that the
    // tensor is not used afterwards, so the box is freed only once.
    unsafe { drop(Box::from_raw((*managed).context().cast::<ExportBox<M>>())) }
}

/// Destroys an unversioned capsule. Does nothing if a consumer has taken the tensor.
///
/// # Safety
/// `capsule` must come from [`unversioned_capsule`] or [`extension`]. Only the interpreter may
/// call this function, when it frees the capsule.
unsafe extern "C" fn drop_unconsumed(capsule: *mut ffi::PyObject) {
    // SAFETY: `capsule` is alive. While its name is `UNVERSIONED`, it points to a `ManagedTensor`
    // that no consumer has taken.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNVERSIONED.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, UNVERSIONED.as_ptr());
            delete::<ManagedTensor>(managed.cast());
        }
    }
}

/// Destroys a versioned capsule. Does nothing if a consumer has taken the tensor.
///
/// # Safety
/// `capsule` must come from [`versioned_capsule`]. Only the interpreter may call this function,
/// when it frees the capsule.
unsafe extern "C" fn drop_unconsumed_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: `capsule` is alive. While its name is `VERSIONED`, it points to a
    // `ManagedTensorVersioned` that no consumer has taken.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr());
            delete::<ManagedTensorVersioned>(managed.cast());
        }
    }
}
