// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exports and imports tensors as DLPack capsules.
//!
//! Supports [DLPack](https://dmlc.github.io/dlpack/latest/c_api.html) 1.1, and the unversioned
//! structure that preceded it, which every PyTorch since 1.10 accepts.

mod abi;
mod export;
mod import;

pub(crate) use abi::{CPU, CUDA, VERSION, has_unversioned_code};
pub(crate) use export::{
    Exported, extension, tensor_capsule, unversioned_capsule, versioned_capsule,
};
pub(crate) use import::{CapsuleBytes, Imported};
