// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors as DLPack capsules, in and out: <https://dmlc.github.io/dlpack/latest/c_api.html>,
//! version 1.1 and the unversioned structure before it, which every torch since 1.10 takes. Of this
//! crate's two unsafe modules the first.

use std::any::Any;
use std::ffi::{CStr, c_void};

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use tensorstream::format::{Dtype, TensorMeta};
use tensorstream::orchestrator::TensorBytes;

use crate::dtype::row_of;

const NAME: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
/// The version that is written. Of those that are read the first number must be the same.
pub(crate) const VERSION: (u32, u32) = (1, 1);

/// DLPack's numbers for kinds of devices.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const EXTENSION: i32 = 12;

/// Type codes from this one on are newer than the unversioned structure.
const FIRST_LATER_CODE: u8 = 7;

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

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

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

/// A tensor that is given to others.
pub(crate) struct Exported {
    /// Its first element.
    pub(crate) data: *mut c_void,
    /// DLPack's kind of device, and which one.
    pub(crate) device: (i32, i32),
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<i64>,
    /// In elements.
    pub(crate) strides: Vec<i64>,
    pub(crate) read_only: bool,
    /// It is a copy that was made for whoever asked.
    pub(crate) copied: bool,
    /// What the memory belongs to: dropped by the consumer's deleter, on any thread, with or
    /// without the interpreter.
    pub(crate) keep: Box<dyn Any + Send>,
}

/// What a managed tensor's context points to: all that it borrows from.
struct Owner<M> {
    managed: M,
    /// Shape, then strides.
    extents: Vec<i64>,
    _keep: Box<dyn Any + Send>,
}

/// A capsule over `bytes`, which it keeps alive until the consumer's deleter runs: on any thread,
/// with or without the interpreter. Dtypes that DLPack had no code for at first are given as bytes,
/// in one dimension.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    bytes: TensorBytes,
    meta: &TensorMeta,
) -> PyResult<Bound<'py, PyAny>> {
    let (dtype, shape) = match data_type(meta.dtype) {
        Some(_) => (meta.dtype, meta.shape.iter().map(|&n| n as i64).collect()),
        None => (Dtype::U8, vec![bytes.len() as i64]),
    };
    let exported = Exported {
        data: bytes.as_ptr().cast_mut().cast(),
        device: (CPU, 0),
        dtype,
        strides: contiguous(&shape),
        shape,
        read_only: false,
        copied: false,
        keep: Box::new(bytes),
    };
    unversioned(py, exported)
}

/// Whether torch takes this dtype by DLPack; others go as bytes.
pub(crate) fn has_code(dtype: Dtype) -> bool {
    data_type(dtype).is_some()
}

/// Strides of a tensor of this shape that is row-major and without gaps, in elements.
pub(crate) fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1].saturating_mul(shape[i + 1].max(1));
    }
    strides
}

/// A capsule of the structure that has no version.
///
/// # Errors
/// BufferError of a dtype that it has no code for.
pub(crate) fn unversioned<'py>(py: Python<'py>, exported: Exported) -> PyResult<Bound<'py, PyAny>> {
    let dtype = data_type(exported.dtype).ok_or_else(|| no_code(exported.dtype))?;
    let managed = owner(exported, dtype, |tensor, _, context| ManagedTensor {
        tensor,
        context,
        deleter: Some(delete::<ManagedTensor>),
    });
    // SAFETY: `managed` is what a capsule of this name must point to, and owned by nobody else.
    unsafe { new_capsule(py, managed, NAME, drop_unconsumed) }
}

/// A capsule of the structure that has a version, and can say that nobody may write.
///
/// # Errors
/// BufferError of a dtype that it has no code for.
pub(crate) fn versioned<'py>(py: Python<'py>, exported: Exported) -> PyResult<Bound<'py, PyAny>> {
    let dtype = later_data_type(exported.dtype).ok_or_else(|| no_code(exported.dtype))?;
    let managed = owner(exported, dtype, |tensor, flags, context| Versioned {
        major: VERSION.0,
        minor: VERSION.1,
        context,
        deleter: Some(delete::<Versioned>),
        flags,
        tensor,
    });
    // SAFETY: as above.
    unsafe { new_capsule(py, managed, VERSIONED_NAME, drop_unconsumed_versioned) }
}

/// A capsule of what is on a device that DLPack does not know, and no memory: `address` is only a
/// number, and nobody may follow it. `dtype` is DLPack's code and bits; `keep` is dropped with
/// PyTorch's storage.
pub(crate) fn extension<'py>(
    py: Python<'py>,
    (address, ordinal): (u64, u32),
    (code, bits): (u8, u8),
    shape: Vec<i64>,
    strides: Vec<i64>,
    keep: Box<dyn Any + Send>,
) -> PyResult<Bound<'py, PyAny>> {
    let exported = Exported {
        data: std::ptr::without_provenance_mut(address as usize),
        device: (EXTENSION, ordinal as i32),
        // Not looked at.
        dtype: Dtype::U8,
        shape,
        strides,
        read_only: false,
        copied: false,
        keep,
    };
    let managed = owner(exported, DataType { code, bits, lanes: 1 }, |tensor, _, context| {
        ManagedTensor { tensor, context, deleter: Some(delete::<ManagedTensor>) }
    });
    // SAFETY: as in `unversioned`.
    unsafe { new_capsule(py, managed, NAME, drop_unconsumed) }
}

fn no_code(dtype: Dtype) -> PyErr {
    PyBufferError::new_err(format!(
        "DLPack has no code for {dtype}, or not in the version that was asked for"
    ))
}

trait Managed {
    fn context(&self) -> *mut c_void;
}

impl Managed for ManagedTensor {
    fn context(&self) -> *mut c_void {
        self.context
    }
}

impl Managed for Versioned {
    fn context(&self) -> *mut c_void {
        self.context
    }
}

/// Puts a managed tensor on the heap beside what it borrows from.
fn owner<M>(
    exported: Exported,
    dtype: DataType,
    make: impl FnOnce(Tensor, u64, *mut c_void) -> M,
) -> *mut M {
    let Exported { data, device, shape, strides, read_only, copied, keep, .. } = exported;
    let ndim = shape.len();
    assert_eq!(ndim, strides.len(), "a stride for each dimension");
    let mut extents = shape;
    extents.extend(strides);
    let tensor = Tensor {
        data,
        device: Device { kind: device.0, ordinal: device.1 },
        ndim: i32::try_from(ndim).expect("a tensor's rank is small"),
        dtype,
        shape: extents.as_mut_ptr(),
        // SAFETY: extents holds `ndim` shape entries followed by `ndim` strides.
        strides: unsafe { extents.as_mut_ptr().add(ndim) },
        byte_offset: 0,
    };
    let flags = if read_only { READ_ONLY } else { 0 } | if copied { IS_COPIED } else { 0 };
    let mut place = Box::<Owner<M>>::new_uninit();
    let context = place.as_mut_ptr().cast();
    // Moving the Vec into the box does not move its heap data, which `shape` and `strides` point
    // to.
    let owner = Box::into_raw(Box::write(
        place,
        Owner { managed: make(tensor, flags, context), extents, _keep: keep },
    ));
    debug_assert_eq!(context, owner.cast());
    // SAFETY: just made from a box.
    unsafe {
        debug_assert_eq!((*owner).extents.len(), 2 * ndim);
        &raw mut (*owner).managed
    }
}

/// # Safety
/// `managed` was made by `owner`, is what a capsule of this name points to, and `destructor` fits
/// the name.
unsafe fn new_capsule<'py, M: Managed>(
    py: Python<'py>,
    managed: *mut M,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the name lives for ever; the rest is this function's contract. A null return is an
    // error set, which from_owned_ptr_or_err fetches.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed.cast(), name.as_ptr(), Some(destructor));
        if capsule.is_null() {
            delete(managed);
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// The deleter of the DLPack protocol.
///
/// # Safety
/// `managed` was made by `owner`, and nobody uses it or its data any more.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: `context` is the box that `owner` let go of, and by this function's contract it is
    // taken back once.
    unsafe { drop(Box::from_raw((*managed).context().cast::<Owner<M>>())) }
}

/// Destructor of a capsule that may not have been consumed; a consumer renames it.
///
/// # Safety
/// Called by the interpreter with a capsule made by `unversioned`.
unsafe extern "C" fn drop_unconsumed(capsule: *mut ffi::PyObject) {
    // SAFETY: the object is a live capsule; its pointer is asked for only under the name it still
    // has.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete::<ManagedTensor>(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// As [`drop_unconsumed`].
///
/// # Safety
/// Called by the interpreter with a capsule made by `versioned`.
unsafe extern "C" fn drop_unconsumed_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED_NAME.as_ptr()) == 1 {
            delete::<Versioned>(ffi::PyCapsule_GetPointer(capsule, VERSIONED_NAME.as_ptr()).cast());
        }
    }
}

/// A tensor of others, which this owns until it is dropped: then their deleter runs.
pub(crate) struct Imported {
    managed: Foreign,
}

enum Foreign {
    Plain(*mut ManagedTensor),
    Versioned(*mut Versioned),
}

// SAFETY: the pointer is this value's alone, and a DLPack tensor may be used and deleted on any
// thread.
unsafe impl Send for Imported {}
// SAFETY: a shared reference only reads what the producer no longer changes: the structure.
unsafe impl Sync for Imported {}

/// What an imported tensor says of itself.
pub(crate) struct Layout {
    /// Its first element; may be null if it has none.
    pub(crate) data: *mut u8,
    pub(crate) device: (i32, i32),
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// In elements; None if it is row-major and without gaps.
    pub(crate) strides: Option<Vec<i64>>,
    pub(crate) read_only: bool,
}

impl Imported {
    /// Takes a capsule over.
    ///
    /// # Errors
    /// TypeError of what is no capsule that was not taken before; BufferError of a version that is
    /// not known.
    pub(crate) fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Some(managed) = take(capsule, NAME, USED) {
            return Ok(Self { managed: Foreign::Plain(managed.cast()) });
        }
        let Some(managed) = take(capsule, VERSIONED_NAME, VERSIONED_USED) else {
            return Err(PyTypeError::new_err("needs a DLPack capsule that nobody has taken"));
        };
        let managed = managed.cast::<Versioned>();
        let this = Self { managed: Foreign::Versioned(managed) };
        // SAFETY: the version is where it is in every version of the structure.
        let major = unsafe { (*managed).major };
        if major == VERSION.0 {
            return Ok(this);
        }
        Err(PyBufferError::new_err(format!(
            "DLPack of version {major}, where {} was asked for",
            VERSION.0
        )))
    }

    /// # Errors
    /// BufferError of what is no tensor that this package knows.
    pub(crate) fn layout(&self) -> PyResult<Layout> {
        let refused = |what: String| PyBufferError::new_err(format!("a DLPack tensor {what}"));
        // SAFETY: the structure is live until this is dropped, and nobody writes to it.
        let (tensor, flags) = unsafe {
            match self.managed {
                Foreign::Plain(managed) => (&(*managed).tensor, 0),
                Foreign::Versioned(managed) => (&(*managed).tensor, (*managed).flags),
            }
        };
        let Tensor { data, device, ndim, dtype, shape, strides, byte_offset } = tensor;
        let ndim = usize::try_from(*ndim).map_err(|_| refused(format!("of {ndim} dimensions")))?;
        let DataType { code, bits, lanes } = *dtype;
        let known = Dtype::ALL.iter().copied().find(|&known| {
            later_data_type(known).is_some_and(|t| (t.code, t.bits, t.lanes) == (code, bits, lanes))
        });
        let dtype =
            known.ok_or_else(|| refused(format!("of code {code}, {bits} bits, {lanes} lanes")))?;
        // SAFETY: shape has `ndim` entries, as have strides where there are some.
        let (shape, strides) = unsafe {
            let list = |from: *const i64| match ndim {
                0 => Vec::new(),
                _ => std::slice::from_raw_parts(from, ndim).to_vec(),
            };
            (list(*shape), (!strides.is_null()).then(|| list(*strides)))
        };
        let strides = strides.filter(|strides| *strides != contiguous(&shape));
        let length = |&n: &i64| u64::try_from(n).map_err(|_| refused(format!("of {n} elements")));
        let shape = shape.iter().map(length).collect::<PyResult<Vec<u64>>>()?;
        let device =
            if device.kind == CUDA_HOST { (CPU, 0) } else { (device.kind, device.ordinal) };
        let data = data.cast::<u8>().wrapping_add(*byte_offset as usize);
        Ok(Layout { data, device, dtype, shape, strides, read_only: flags & READ_ONLY != 0 })
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        // SAFETY: the structure is owned, and nothing borrows from `self` any more.
        unsafe {
            match self.managed {
                Foreign::Plain(managed) => {
                    if let Some(deleter) = (*managed).deleter {
                        deleter(managed);
                    }
                }
                Foreign::Versioned(managed) => {
                    if let Some(deleter) = (*managed).deleter {
                        deleter(managed);
                    }
                }
            }
        }
    }
}

/// Takes over what a capsule of this name points to.
fn take(
    capsule: &Bound<'_, PyAny>,
    name: &'static CStr,
    used: &'static CStr,
) -> Option<*mut c_void> {
    // SAFETY: the pointer is asked for under the name the capsule has, which promises what it
    // points to; renaming it takes the ownership over, as the protocol wants.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) != 1 {
            return None;
        }
        let managed = ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr());
        ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr());
        ffi::PyCapsule_SetDestructor(capsule.as_ptr(), None);
        Some(managed)
    }
}

/// A tensor of bytes that torch lends to a call, taken from its capsule.
pub(crate) struct Lent {
    _imported: Imported,
    data: *mut u8,
    len: usize,
}

// SAFETY: the pointer is into what this value alone owns.
unsafe impl Send for Lent {}

impl Lent {
    /// Takes a capsule over a contiguous, one-dimensional tensor of u8 on the CPU.
    pub(crate) fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let refused =
            |_| PyTypeError::new_err("needs a DLPack capsule of contiguous bytes on the CPU");
        let imported = Imported::from_capsule(capsule)?;
        let layout = imported.layout().map_err(refused)?;
        match (layout.device.0, layout.dtype, &layout.shape[..]) {
            (CPU, Dtype::U8, &[len]) if layout.strides.is_none() || len < 2 => {
                let len = usize::try_from(len).map_err(|_| refused(PyErr::fetch(capsule.py())))?;
                Ok(Self { _imported: imported, data: layout.data, len })
            }
            _ => Err(refused(PyBufferError::new_err(""))),
        }
    }

    /// Its bytes. The caller of the Python function sees to it that nobody writes to them
    /// meanwhile.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: a DLPack tensor's data is valid for its shape until its deleter runs, in this
        // value's drop.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }

    /// Its bytes, to be written to. The caller of the Python function made the tensor for that.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`; torch gives capsules of writable memory only, and `self` is
        // borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.len) }
    }
}

fn data_type(dtype: Dtype) -> Option<DataType> {
    later_data_type(dtype).filter(|kind| kind.code < FIRST_LATER_CODE)
}

/// As [`data_type`], with what later versions have added.
fn later_data_type(dtype: Dtype) -> Option<DataType> {
    let (code, bits) = row_of(dtype)?.dlpack_type();
    Some(DataType { code, bits, lanes: 1 })
}
