// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exports and imports tensors as capsules of [DLPack](tensorstream::pool::dlpack) 1.1, and of the
//! unversioned structure that preceded it, which every PyTorch since 1.10 accepts.

mod export;
mod import;

use std::ffi::CStr;

pub(crate) use export::{
    Exported, extension, tensor_capsule, unversioned_capsule, versioned_capsule,
};
pub(crate) use import::{CapsuleBytes, Imported};
pub(crate) use tensorstream::pool::dlpack::{CPU, CUDA, VERSION};
pub(crate) use tensorstream::remote::dlpack::has_unversioned_type;

/// Names of capsules. A consumer renames a capsule when it takes the tensor.
const UNVERSIONED: &CStr = c"dltensor";
const UNVERSIONED_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
