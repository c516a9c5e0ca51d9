// SPDX-License-Identifier: MIT OR Apache-2.0
//! [DLPack](https://dmlc.github.io/dlpack/latest/c_api.html) 1.1, and the unversioned structure
//! before it: tensors that libraries hand to each other without a copy.
//!
//! A [`ManagedTensor`] owns a tensor of either structure, of this library or of another one, and
//! calls its deleter. [`into_raw`](ManagedTensor::into_raw) and
//! [`from_raw`](ManagedTensor::from_raw) convert to and from the pointers that cross libraries.
//!
//! ```
//! use ts_pool::TensorBuffer;
//! use ts_pool::dlpack::{DlDataType, Form, ManagedTensor};
//!
//! let f32 = DlDataType { code: 2, bits: 32, lanes: 1 };
//! let buffer = TensorBuffer::cpu(vec![7; 24]);
//! let tensor = ManagedTensor::of_buffer(Form::Unversioned, buffer, 0, f32, vec![2, 3], None)?;
//! let raw = tensor.into_raw(); // to another library, or back here:
//! // SAFETY: the pointer comes from `into_raw`, and is used once.
//! let tensor = unsafe { ManagedTensor::from_raw(raw) }?;
//! assert_eq!(tensor.layout()?.shape, [2, 3]);
//! assert_eq!(tensor.bytes()?, [7; 24]);
//! # Ok::<(), ts_pool::Error>(())
//! ```

mod abi;
mod managed;

pub use abi::{
    CPU, CUDA, CUDA_HOST, DlDataType, DlDevice, DlManagedTensor, DlManagedTensorVersioned,
    DlTensor, IS_COPIED, READ_ONLY, VERSION,
};
pub use managed::{Export, Form, Layout, ManagedTensor, RawTensor};
