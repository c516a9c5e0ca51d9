// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors with their elements.

use bytes::Bytes;
use ts_format::Dtype;

use crate::{Error, TensorInfo};

/// A tensor: its description and the bytes of its storage.
///
/// ```
/// use ts_remote::ts_format::Dtype;
/// use ts_remote::{Tensor, TensorInfo};
///
/// let tensor = Tensor::zeros(TensorInfo::new("embedding", Dtype::F32, [2, 3])?)?;
/// assert_eq!((tensor.info.meta.shape.as_slice(), tensor.buffer.len()), (&[2, 3][..], 24));
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor<B = Bytes> {
    /// The description, which includes the position of the elements in the storage.
    pub info: TensorInfo,
    /// The bytes of the storage.
    pub buffer: B,
}

impl Tensor {
    /// Creates a tensor whose storage is zeros in host memory.
    ///
    /// # Errors
    /// Returns [`Error::Unsendable`] if the memory cannot be allocated.
    pub fn zeros(info: TensorInfo) -> Result<Self, Error> {
        let mut buffer = Vec::new();
        let len = usize::try_from(info.storage_len).unwrap_or(usize::MAX);
        let none = |_| Error::Unsendable {
            tensor: info.name.clone(),
            reason: format!("allocating {len} bytes failed"),
        };
        buffer.try_reserve_exact(len).map_err(none)?;
        buffer.resize(len, 0);
        Ok(Self { info, buffer: buffer.into() })
    }

    /// Creates a contiguous tensor from its bytes. Elements are little-endian.
    ///
    /// # Errors
    /// Returns [`Error::Unsendable`] if [`TensorInfo::new`] rejects the shape, or if `buffer` does
    /// not have the length of the tensor.
    pub fn of_bytes(
        name: impl Into<String>,
        dtype: Dtype,
        shape: impl Into<Vec<u64>>,
        buffer: impl Into<Bytes>,
    ) -> Result<Self, Error> {
        let (info, buffer) = (TensorInfo::new(name, dtype, shape)?, buffer.into());
        if buffer.len() as u64 != info.storage_len {
            let reason = format!(
                "wrong length of the buffer (expected {} bytes, got {})",
                info.storage_len,
                buffer.len()
            );
            return Err(Error::Unsendable { tensor: info.name, reason });
        }
        Ok(Self { info, buffer })
    }
}
