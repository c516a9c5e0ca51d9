// SPDX-License-Identifier: MIT OR Apache-2.0
//! The owner of a managed tensor.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;

use bytes::Bytes;
use ts_streams::{Device, DeviceKind};

use super::abi::{
    CPU, CUDA, CUDA_HOST, DlDataType, DlDevice, DlManagedTensor, DlManagedTensorVersioned,
    DlTensor, IS_COPIED, IS_PADDED, READ_ONLY, VERSION,
};
use crate::{Error, TensorBuffer};

/// The structure of an exported tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// [`DlManagedTensor`], which every consumer knows. It cannot say that a tensor is read-only.
    Unversioned,
    /// [`DlManagedTensorVersioned`].
    Versioned,
}

/// A pointer to a managed tensor, which owns the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RawTensor {
    /// The structure before DLPack 1.0.
    Unversioned(NonNull<DlManagedTensor>),
    /// The structure since DLPack 1.0.
    Versioned(NonNull<DlManagedTensorVersioned>),
}

/// A tensor to export.
pub struct Export {
    /// The address of the first element.
    pub data: *mut c_void,
    /// The device of the memory.
    pub device: DlDevice,
    /// The type of the elements.
    pub data_type: DlDataType,
    /// The size of each dimension.
    pub shape: Vec<i64>,
    /// The step along each dimension, in elements.
    pub strides: Vec<i64>,
    /// Whether the consumer must not write to the tensor.
    pub read_only: bool,
    /// Whether the memory is a copy made for the consumer.
    pub copied: bool,
    /// The owner of the memory. It is dropped with the tensor, on any thread.
    pub owner: Box<dyn Any + Send>,
}

/// The memory, type and shape of a managed tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The address of the first element. May be null if the tensor has no elements.
    pub data: *mut u8,
    /// The device of the memory, where pinned host memory is host memory.
    pub device: DlDevice,
    /// The type of the elements.
    pub data_type: DlDataType,
    /// The size of each dimension.
    pub shape: Vec<u64>,
    /// The step along each dimension, in elements. `None` if the tensor is row-major without gaps.
    pub strides: Option<Vec<i64>>,
    /// Whether the tensor must not be written to.
    pub read_only: bool,
}

/// A tensor in a structure of DLPack, with its memory. Dropping it calls the deleter of the library
/// that made it.
#[derive(Debug)]
pub struct ManagedTensor(RawTensor);

// SAFETY: this value owns the structure, and DLPack allows any thread to use and delete it.
unsafe impl Send for ManagedTensor {}
// SAFETY: shared references only read the structure, which the producer does not change.
unsafe impl Sync for ManagedTensor {}

/// The heap allocation that the `context` of an exported tensor points to.
struct ExportBox<M> {
    managed: M,
    /// The shape, followed by the strides.
    extents: Vec<i64>,
    _owner: Box<dyn Any + Send>,
}

trait Managed {
    fn context(&self) -> *mut c_void;
}

impl Managed for DlManagedTensor {
    fn context(&self) -> *mut c_void {
        self.context
    }
}

impl Managed for DlManagedTensorVersioned {
    fn context(&self) -> *mut c_void {
        self.context
    }
}

impl Export {
    /// Moves the tensor to a structure of DLPack. A deleter belongs to it, which drops the owner.
    ///
    /// # Safety
    /// While the owner exists, the memory at [`data`](Self::data) must be valid for the elements,
    /// and, unless [`read_only`](Self::read_only), for writes. If the device is not the host, the
    /// address need only mean something to the consumers that use the device. The unversioned form
    /// cannot pass on `read_only`.
    ///
    /// # Panics
    /// Panics if shape and strides differ in length.
    pub unsafe fn into_managed(self, form: Form) -> ManagedTensor {
        ManagedTensor(match form {
            Form::Unversioned => RawTensor::Unversioned(self.boxed(|tensor, _, context| {
                DlManagedTensor { tensor, context, deleter: Some(delete::<DlManagedTensor>) }
            })),
            Form::Versioned => RawTensor::Versioned(self.boxed(|tensor, flags, context| {
                DlManagedTensorVersioned {
                    major: VERSION.0,
                    minor: VERSION.1,
                    context,
                    deleter: Some(delete::<DlManagedTensorVersioned>),
                    flags,
                    tensor,
                }
            })),
        })
    }

    /// Allocates a managed tensor together with its shape, strides and owner. [`delete`] frees
    /// them.
    fn boxed<M>(self, make: impl FnOnce(DlTensor, u64, *mut c_void) -> M) -> NonNull<M> {
        let Export { data, device, data_type, shape, strides, read_only, copied, owner } = self;
        let ndim = shape.len();
        assert_eq!(ndim, strides.len(), "shape and strides must have the same length");
        let mut extents = shape;
        extents.extend(strides);
        let (shape, strides) = extents.split_at_mut(ndim);
        let tensor = DlTensor {
            data,
            device,
            ndim: i32::try_from(ndim).expect("the number of dimensions fits into 32 bits"),
            dtype: data_type,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
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
            NonNull::new_unchecked(&raw mut (*export).managed)
        }
    }
}

/// Frees an exported tensor, as the deleter of the DLPack protocol.
///
/// # Safety
/// `managed` must come from [`Export::boxed`]. Neither it nor its data may be used afterwards.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: `context` points to the box that `boxed` leaked. The caller guarantees that the
    // tensor is not used afterwards, so the box is freed only once.
    unsafe { drop(Box::from_raw((*managed).context().cast::<ExportBox<M>>())) }
}

/// Returns the strides of a row-major tensor without gaps, or `None` if they overflow.
fn row_major(shape: &[i64]) -> Option<Vec<i64>> {
    let mut strides = vec![1i64; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].checked_mul(shape[i].max(1))?;
    }
    Some(strides)
}

/// Returns the range of bytes that elements occupy, relative to the first one. `None` if it
/// overflows, or if elements of less than a byte are not contiguous.
fn extent(data_type: DlDataType, shape: &[i64], strides: &[i64]) -> Option<(i128, i128)> {
    if shape.contains(&0) {
        return Some((0, 0));
    }
    let bits = i128::from(data_type.bits) * i128::from(data_type.lanes);
    if !data_type.bits.is_multiple_of(8) && row_major(shape)? != strides {
        return None;
    }
    let (mut first, mut last) = (0i128, 0i128);
    for (&n, &stride) in shape.iter().zip(strides) {
        let step = (i128::from(n) - 1).checked_mul(i128::from(stride))?;
        let side = if step < 0 { &mut first } else { &mut last };
        *side = side.checked_add(step)?;
    }
    Some((first.checked_mul(bits)? / 8, ((last + 1).checked_mul(bits)? + 7) / 8))
}

fn refused(what: impl Into<String>) -> Error {
    Error::DlPack { what: what.into() }
}

impl ManagedTensor {
    /// Exports the memory of a buffer, without a copy. `offset` is that of the first element, in
    /// bytes. `strides` are in elements; `None` means row-major without gaps.
    ///
    /// [`Bytes`] that others share are exported as read-only, or copied for the unversioned form,
    /// which cannot say so. The contents of a buffer on a device are complete. The consumer must
    /// not call the deleter before its own work on the memory is done.
    ///
    /// # Errors
    /// Returns [`Error::DlPack`] if elements would be outside the buffer, if the number of strides
    /// is wrong, if a size is negative, or if DLPack does not know the device. Returns
    /// [`Error::Stale`] if the memory of the buffer was freed.
    pub fn of_buffer(
        form: Form,
        mut buffer: TensorBuffer,
        offset: usize,
        data_type: DlDataType,
        shape: Vec<i64>,
        strides: Option<Vec<i64>>,
    ) -> Result<Self, Error> {
        if let Some(n) = shape.iter().find(|n| **n < 0) {
            return Err(refused(format!("invalid size {n} of a dimension: expected 0 or more")));
        }
        let strides = strides.or_else(|| row_major(&shape)).filter(|s| s.len() == shape.len());
        let inside = strides.as_ref().and_then(|strides| {
            let (begin, end) = extent(data_type, &shape, strides)?;
            let (offset, len) = (offset as i128, buffer.len() as i128);
            (offset + begin >= 0 && offset + end <= len).then_some(())
        });
        let (Some(strides), Some(())) = (strides, inside) else {
            return Err(refused(format!(
                "the elements of shape {shape:?} from byte {offset} on are not inside the buffer \
                 of {} bytes",
                buffer.len()
            )));
        };
        let shared = if form == Form::Versioned { buffer.as_shared() } else { None };
        let read_only = shared.is_some();
        let (first, device, guard) = if let Some(bytes) = shared {
            (bytes.as_ptr().cast_mut(), DlDevice { kind: CPU, ordinal: 0 }, None)
        } else if let Some(bytes) = buffer.as_mut_slice() {
            (bytes.as_mut_ptr(), DlDevice { kind: CPU, ordinal: 0 }, None)
        } else {
            let memory = buffer.as_device().expect("it is not on the host");
            let info = memory.device().info();
            let device = match info.kind {
                DeviceKind::Cuda => DlDevice { kind: CUDA, ordinal: info.ordinal as i32 },
                _ if info.host_memory => DlDevice { kind: CPU, ordinal: 0 },
                kind => return Err(refused(format!("DLPack has no device {kind:?}"))),
            };
            let (range, guard) = memory.pin()?;
            (range.as_ptr(), device, Some(guard))
        };
        let data = first.wrapping_add(offset).cast();
        let owner = Box::new((guard, buffer));
        let export =
            Export { data, device, data_type, shape, strides, read_only, copied: false, owner };
        // SAFETY: the elements are inside the buffer, as checked above. Moving the buffer to the
        // heap does not move its bytes, and the guard keeps its pool from freeing them. Nothing
        // else can use the buffer, and bytes that others read are marked as read-only.
        Ok(unsafe { export.into_managed(form) })
    }

    /// Takes ownership of a managed tensor.
    ///
    /// # Safety
    /// The pointer must lead to a structure as DLPack describes it, which nothing else owns. The
    /// shape, the strides and the memory must be valid until the deleter is called. While Rust
    /// borrows [`bytes`](Self::bytes), or owns [`Bytes`] of the tensor, nothing may write to the
    /// memory.
    ///
    /// # Errors
    /// Returns [`Error::DlPack`] if the major version is not supported. The tensor is deleted.
    pub unsafe fn from_raw(raw: RawTensor) -> Result<Self, Error> {
        let this = Self(raw);
        let RawTensor::Versioned(managed) = raw else { return Ok(this) };
        // SAFETY: the caller guarantees that the pointer is valid. All versions of the structure
        // begin with the version number.
        let major = unsafe { managed.as_ref().major };
        if major == VERSION.0 {
            return Ok(this);
        }
        let expected = VERSION.0;
        Err(refused(format!("unsupported version {major}.x (expected {expected}.x)")))
    }

    /// Returns the pointer. Its new owner calls the deleter.
    pub fn into_raw(self) -> RawTensor {
        std::mem::ManuallyDrop::new(self).0
    }

    /// Returns the memory, type and shape.
    ///
    /// # Errors
    /// Returns [`Error::DlPack`] if the shape is invalid, or if elements of less than a byte are
    /// not packed.
    pub fn layout(&self) -> Result<Layout, Error> {
        // SAFETY: the structure is valid until `self` is dropped, and nothing writes to it.
        let (tensor, flags) = unsafe {
            match &self.0 {
                RawTensor::Unversioned(managed) => (&managed.as_ref().tensor, 0),
                RawTensor::Versioned(managed) => (&managed.as_ref().tensor, managed.as_ref().flags),
            }
        };
        let &DlTensor { data, device, ndim, dtype, shape, strides, byte_offset } = tensor;
        let ndim = usize::try_from(ndim).map_err(|_| {
            refused(format!("invalid number of dimensions {ndim}: expected 0 or more"))
        })?;
        // SAFETY: DLPack requires that `shape` has `ndim` entries, and that `strides` is null or
        // has `ndim` entries too.
        let (sizes, strides) = unsafe {
            let list = |from: *const i64| match ndim {
                0 => Vec::new(),
                _ => std::slice::from_raw_parts(from, ndim).to_vec(),
            };
            (list(shape), (!strides.is_null()).then(|| list(strides)))
        };
        let size = |&n: &i64| {
            u64::try_from(n).map_err(|_| {
                refused(format!("invalid size {n} of a dimension: expected 0 or more"))
            })
        };
        let shape = sizes.iter().map(size).collect::<Result<Vec<u64>, Error>>()?;
        let strides = strides.filter(|strides| row_major(&sizes).as_ref() != Some(strides));
        if dtype.bits < 8 && flags & IS_PADDED != 0 {
            return Err(refused("the values are smaller than a byte, but not packed"));
        }
        let device =
            if device.kind == CUDA_HOST { DlDevice { kind: CPU, ordinal: 0 } } else { device };
        let data = data.cast::<u8>().wrapping_add(byte_offset as usize);
        let read_only = flags & READ_ONLY != 0;
        Ok(Layout { data, device, data_type: dtype, shape, strides, read_only })
    }

    /// Returns the bytes of a row-major tensor without gaps in host memory.
    ///
    /// # Errors
    /// Returns [`Error::DlPack`] if the tensor is another one.
    pub fn bytes(&self) -> Result<&[u8], Error> {
        let Layout { data, device, data_type, shape, strides, .. } = self.layout()?;
        if device.kind != CPU {
            return Err(refused(format!("it is on device {device:?}, not in host memory")));
        }
        let sizes: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let contiguous = row_major(&sizes).filter(|expected| {
            // The stride of a dimension with one element does not matter.
            let same = |(i, stride): (usize, &i64)| sizes[i] == 1 || *stride == expected[i];
            let empty = sizes.contains(&0);
            strides.as_ref().is_none_or(|s| empty || s.iter().enumerate().all(same))
        });
        let Some((_, end)) = contiguous.and_then(|s| extent(data_type, &sizes, &s)) else {
            return Err(refused(format!("its strides {strides:?} are not row-major without gaps")));
        };
        let len = usize::try_from(end).ok().filter(|&len| isize::try_from(len).is_ok());
        let len = len.ok_or_else(|| refused(format!("shape {shape:?} is too large")))?;
        if len == 0 {
            return Ok(&[]);
        }
        if data.is_null() {
            return Err(refused("its address is null"));
        }
        // SAFETY: the memory is valid for the elements until `self` is dropped, and nothing writes
        // to it meanwhile, as `from_raw` and `into_managed` require.
        Ok(unsafe { std::slice::from_raw_parts(data, len) })
    }

    /// Converts the tensor to its [`bytes`](Self::bytes). Copies nothing.
    ///
    /// # Errors
    /// The same as [`bytes`](Self::bytes).
    pub fn into_bytes(self) -> Result<Bytes, Error> {
        struct Owner(ManagedTensor);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                self.0.bytes().expect("checked before, and nothing changed")
            }
        }
        self.bytes()?;
        Ok(Bytes::from_owner(Owner(self)))
    }
}

impl Drop for ManagedTensor {
    fn drop(&mut self) {
        // SAFETY: `self` owns the structure, and nothing borrows from it any more. The deleter is
        // called only here.
        unsafe {
            match self.0 {
                RawTensor::Unversioned(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
                RawTensor::Versioned(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
            }
        }
    }
}
