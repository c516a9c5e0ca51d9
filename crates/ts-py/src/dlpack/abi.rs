// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C structures of DLPack, and its numbers for devices and data types.

use std::ffi::{CStr, c_void};

use tensorstream::format::Dtype;

use crate::dtype::row_of;

/// Names of capsules. A consumer renames a capsule when it takes the tensor.
pub(super) const UNVERSIONED: &CStr = c"dltensor";
pub(super) const UNVERSIONED_USED: &CStr = c"used_dltensor";
pub(super) const VERSIONED: &CStr = c"dltensor_versioned";
pub(super) const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
/// The version of exported versioned structures. Imported versioned structures must have the same
/// major version.
pub(crate) const VERSION: (u32, u32) = (1, 1);

/// DLPack's device types.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
pub(super) const CUDA_HOST: i32 = 3;
pub(super) const EXTENSION: i32 = 12;

/// The lowest type code that only versioned structures have.
const FIRST_VERSIONED_CODE: u8 = 7;

/// Flags of versioned structures.
pub(super) const READ_ONLY: u64 = 1;
pub(super) const IS_COPIED: u64 = 2;

#[repr(C)]
pub(super) struct Device {
    pub(super) kind: i32,
    pub(super) ordinal: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DataType {
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
}

#[repr(C)]
pub(super) struct Tensor {
    pub(super) data: *mut c_void,
    pub(super) device: Device,
    pub(super) ndim: i32,
    pub(super) dtype: DataType,
    pub(super) shape: *mut i64,
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

#[repr(C)]
pub(super) struct ManagedTensor {
    pub(super) tensor: Tensor,
    pub(super) context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

#[repr(C)]
pub(super) struct ManagedTensorVersioned {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut ManagedTensorVersioned)>,
    pub(super) flags: u64,
    pub(super) tensor: Tensor,
}

/// Returns whether the unversioned structure has a type code for this dtype.
pub(crate) fn has_unversioned_code(dtype: Dtype) -> bool {
    unversioned_type(dtype).is_some()
}

/// Returns the data type in unversioned structures, or None if they have no code for it.
pub(super) fn unversioned_type(dtype: Dtype) -> Option<DataType> {
    versioned_type(dtype).filter(|data_type| data_type.code < FIRST_VERSIONED_CODE)
}

/// Returns the data type in versioned structures, or None if they have none.
pub(super) fn versioned_type(dtype: Dtype) -> Option<DataType> {
    let (code, bits, lanes) = row_of(dtype)?.dlpack_type();
    Some(DataType { code, bits, lanes })
}
