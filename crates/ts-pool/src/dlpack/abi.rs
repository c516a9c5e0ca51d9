// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C structures of DLPack.

use std::ffi::c_void;

/// The version of exported versioned structures. Imported versioned structures must have the same
/// major version.
pub const VERSION: (u32, u32) = (1, 1);

/// DLPack's type of host memory.
pub const CPU: i32 = 1;
/// DLPack's type of the memory of NVIDIA GPUs.
pub const CUDA: i32 = 2;
/// DLPack's type of pinned host memory.
pub const CUDA_HOST: i32 = 3;

/// The flag of tensors that must not be written to.
pub const READ_ONLY: u64 = 1;
/// The flag of tensors that were copied for the consumer.
pub const IS_COPIED: u64 = 2;
/// The flag of tensors whose elements of less than a byte have a byte each. They are refused.
pub(super) const IS_PADDED: u64 = 4;

/// A device: `DLDevice`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DlDevice {
    /// The type, such as [`CPU`].
    pub kind: i32,
    /// The number of the device among those of its type, from 0.
    pub ordinal: i32,
}

/// The type of elements: `DLDataType`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DlDataType {
    /// The kind of number. Codes from 7 on exist in versioned structures only.
    pub code: u8,
    /// The size of a value in bits.
    pub bits: u8,
    /// The number of values of an element.
    pub lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct DlTensor {
    /// The address of the memory.
    pub data: *mut c_void,
    /// The device of the memory.
    pub device: DlDevice,
    /// The number of dimensions.
    pub ndim: i32,
    /// The type of the elements.
    pub dtype: DlDataType,
    /// `ndim` sizes.
    pub shape: *mut i64,
    /// `ndim` steps in elements, or null for a row-major tensor without gaps.
    pub strides: *mut i64,
    /// The offset of the first element from `data`, in bytes.
    pub byte_offset: u64,
}

/// `DLManagedTensor`, the structure before DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DlManagedTensor {
    /// The tensor.
    pub tensor: DlTensor,
    /// Data of the producer.
    pub context: *mut c_void,
    /// Frees the structure and the tensor. `None` if there is nothing to free.
    pub deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

/// `DLManagedTensorVersioned`, the structure since DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DlManagedTensorVersioned {
    /// The major version. If it is another one, only the version and the deleter are known.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
    /// Data of the producer.
    pub context: *mut c_void,
    /// Frees the structure and the tensor. `None` if there is nothing to free.
    pub deleter: Option<unsafe extern "C" fn(*mut DlManagedTensorVersioned)>,
    /// A combination of [`READ_ONLY`] and [`IS_COPIED`].
    pub flags: u64,
    /// The tensor.
    pub tensor: DlTensor,
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// The numbers are those of dlpack.h 1.1 on 64-bit systems.
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn structures_have_the_layout_of_dlpack() {
        assert_eq!((size_of::<DlDevice>(), size_of::<DlDataType>()), (8, 4));
        assert_eq!(
            [
                offset_of!(DlTensor, data),
                offset_of!(DlTensor, device),
                offset_of!(DlTensor, ndim),
                offset_of!(DlTensor, dtype),
                offset_of!(DlTensor, shape),
                offset_of!(DlTensor, strides),
                offset_of!(DlTensor, byte_offset),
                size_of::<DlTensor>(),
            ],
            [0, 8, 16, 20, 24, 32, 40, 48]
        );
        assert_eq!(
            [
                offset_of!(DlManagedTensor, tensor),
                offset_of!(DlManagedTensor, context),
                offset_of!(DlManagedTensor, deleter),
                size_of::<DlManagedTensor>(),
            ],
            [0, 48, 56, 64]
        );
        assert_eq!(
            [
                offset_of!(DlManagedTensorVersioned, major),
                offset_of!(DlManagedTensorVersioned, minor),
                offset_of!(DlManagedTensorVersioned, context),
                offset_of!(DlManagedTensorVersioned, deleter),
                offset_of!(DlManagedTensorVersioned, flags),
                offset_of!(DlManagedTensorVersioned, tensor),
                size_of::<DlManagedTensorVersioned>(),
            ],
            [0, 4, 8, 16, 24, 32, 80]
        );
    }
}
