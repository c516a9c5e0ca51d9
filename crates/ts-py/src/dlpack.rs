// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensor bytes as DLPack capsules: <https://dmlc.github.io/dlpack/latest/c_api.html>. This crate's one unsafe
//! module. The unversioned structure, which every torch since 1.10 takes.

use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use tensorstream::format::{Dtype, TensorMeta};
use tensorstream::orchestrator::TensorBytes;

const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;

#[repr(C)]
struct Device {
    kind: i32,
    ordinal: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// What a managed tensor's context points to: all that it borrows from.
struct Owner {
    managed: ManagedTensor,
    /// Shape, then strides.
    extents: Vec<i64>,
    _bytes: TensorBytes,
}

/// A capsule over `bytes`, which it keeps alive until the consumer's deleter runs: on any thread, with or
/// without the interpreter. Dtypes that DLPack has no code for are given as bytes, in one dimension.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    bytes: TensorBytes,
    meta: &TensorMeta,
) -> PyResult<Bound<'py, PyAny>> {
    let (dtype, shape) = match data_type(meta.dtype) {
        Some(dtype) => (dtype, meta.shape.iter().map(|&n| n as i64).collect()),
        None => (DataType { code: 1, bits: 8, lanes: 1 }, vec![bytes.len() as i64]),
    };
    let managed = owner(bytes, dtype, shape);
    // SAFETY: the name lives for ever, `managed` is what a capsule of this name must point to, and
    // `drop_unconsumed` fits it. A null return is an error set, which from_owned_ptr_or_err fetches.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(drop_unconsumed));
        if capsule.is_null() {
            delete(managed);
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

fn owner(bytes: TensorBytes, dtype: DataType, shape: Vec<i64>) -> *mut ManagedTensor {
    let ndim = shape.len();
    let mut extents = shape;
    let mut strides = vec![1i64; ndim];
    for i in (0..ndim.saturating_sub(1)).rev() {
        strides[i] = strides[i + 1] * extents[i + 1].max(1);
    }
    extents.extend(strides);
    let tensor = Tensor {
        data: bytes.as_ptr().cast_mut().cast(),
        device: Device { kind: CPU, ordinal: 0 },
        ndim: i32::try_from(ndim).expect("a tensor's rank is small"),
        dtype,
        shape: extents.as_mut_ptr(),
        // SAFETY: extents holds `ndim` shape entries followed by `ndim` strides.
        strides: unsafe { extents.as_mut_ptr().add(ndim) },
        byte_offset: 0,
    };
    let managed = ManagedTensor { tensor, context: std::ptr::null_mut(), deleter: Some(delete) };
    let owner = Box::into_raw(Box::new(Owner { managed, extents, _bytes: bytes }));
    // SAFETY: just made from a box; moving the Vec into the box did not move its heap data, which `shape` and
    // `strides` point to.
    unsafe {
        debug_assert_eq!((*owner).extents.len(), 2 * ndim);
        (*owner).managed.context = owner.cast();
        &raw mut (*owner).managed
    }
}

/// The deleter of the DLPack protocol.
///
/// # Safety
/// `managed` was made by `owner`, and nobody uses it or its data any more.
unsafe extern "C" fn delete(managed: *mut ManagedTensor) {
    // SAFETY: `context` is the box that `owner` let go of, and by this function's contract it is taken back once.
    unsafe { drop(Box::from_raw((*managed).context.cast::<Owner>())) }
}

/// Destructor of a capsule that may not have been consumed; a consumer renames it.
///
/// # Safety
/// Called by the interpreter with a capsule made by `capsule`.
unsafe extern "C" fn drop_unconsumed(capsule: *mut ffi::PyObject) {
    // SAFETY: the object is a live capsule; its pointer is asked for only under the name it still has.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// A tensor of bytes that torch lends to a call, taken from its capsule.
pub(crate) struct Lent {
    managed: *mut ManagedTensor,
    len: usize,
}

// SAFETY: the pointer is this value's alone, and a DLPack tensor may be used and deleted on any thread.
unsafe impl Send for Lent {}

impl Lent {
    /// Takes a capsule over a contiguous, one-dimensional tensor of u8 on the CPU.
    pub(crate) fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        const USED: &CStr = c"used_dltensor";
        let refused = || PyTypeError::new_err("needs a DLPack capsule of contiguous bytes on the CPU");
        // SAFETY: the pointer is asked for under the name the capsule has, which promises what it points to;
        // renaming it takes the ownership over, as the protocol wants.
        let managed = unsafe {
            if ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME.as_ptr()) != 1 {
                return Err(refused());
            }
            let managed: *mut ManagedTensor =
                ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()).cast();
            ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr());
            ffi::PyCapsule_SetDestructor(capsule.as_ptr(), None);
            managed
        };
        let mut this = Self { managed, len: 0 };
        // SAFETY: `managed` is a live tensor, owned since the renaming; shape and strides have ndim entries.
        let (plain, len) = unsafe {
            let tensor = &(*managed).tensor;
            let of_bytes = tensor.ndim == 1
                && tensor.device.kind == CPU
                && (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (1, 8, 1);
            let contiguous =
                of_bytes && (tensor.strides.is_null() || *tensor.strides == 1 || *tensor.shape < 2);
            (contiguous, if contiguous { *tensor.shape } else { 0 })
        };
        if !plain {
            return Err(refused());
        }
        this.len = usize::try_from(len).map_err(|_| refused())?;
        Ok(this)
    }

    /// Its bytes. The caller of the Python function sees to it that nobody writes to them meanwhile.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: a DLPack tensor's data is valid for its shape until its deleter runs, in this value's drop.
        unsafe { std::slice::from_raw_parts(self.data(), self.len) }
    }

    /// Its bytes, to be written to. The caller of the Python function made the tensor for that.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`; torch gives capsules of writable memory only, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data(), self.len) }
    }

    fn data(&self) -> *mut u8 {
        // SAFETY: `managed` is live until drop.
        unsafe { (*self.managed).tensor.data.cast::<u8>().add((*self.managed).tensor.byte_offset as usize) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: `managed` is owned, and nothing borrows from `self` any more.
        unsafe {
            if let Some(deleter) = (*self.managed).deleter {
                deleter(self.managed);
            }
        }
    }
}

fn data_type(dtype: Dtype) -> Option<DataType> {
    const INT: u8 = 0;
    const UINT: u8 = 1;
    const FLOAT: u8 = 2;
    const BFLOAT: u8 = 4;
    const COMPLEX: u8 = 5;
    const BOOL: u8 = 6;
    let code = match dtype {
        Dtype::Bool => BOOL,
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => UINT,
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => INT,
        Dtype::F16 | Dtype::F32 | Dtype::F64 => FLOAT,
        Dtype::BF16 => BFLOAT,
        Dtype::C64 => COMPLEX,
        _ => return None,
    };
    Some(DataType { code, bits: dtype.bits() as u8, lanes: 1 })
}
