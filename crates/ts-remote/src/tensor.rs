// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors with their memory.

use bytes::Bytes;
use ts_format::Dtype;

use crate::{Error, TensorInfo};

/// A tensor: what it is, and the memory of its storage, whose elements `info` names.
///
/// ```
/// use ts_format::Dtype;
/// use ts_remote::Tensor;
///
/// let tensor = Tensor::zeros("embedding", Dtype::F32, [2, 3])?;
/// assert_eq!((tensor.info.meta.shape.as_slice(), tensor.buffer.len()), (&[2, 3][..], 24));
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor<B = Bytes> {
    /// What it is.
    pub info: TensorInfo,
    /// Its storage's bytes.
    pub buffer: B,
}

impl Tensor {
    /// A contiguous tensor of zeros, on the host.
    ///
    /// # Errors
    /// As [`TensorInfo::new`].
    pub fn zeros(
        name: impl Into<String>,
        dtype: Dtype,
        shape: impl Into<Vec<u64>>,
    ) -> Result<Self, Error> {
        let info = TensorInfo::new(name, dtype, shape)?;
        let mut buffer = Vec::new();
        let len = usize::try_from(info.storage_len).unwrap_or(usize::MAX);
        let none = |_| Error::Unsendable {
            tensor: info.name.clone(),
            reason: format!("no memory for {len} bytes"),
        };
        buffer.try_reserve_exact(len).map_err(none)?;
        buffer.resize(len, 0);
        Ok(Self { info, buffer: buffer.into() })
    }

    /// A contiguous tensor of these bytes, whose elements are little-endian.
    ///
    /// # Errors
    /// [`Error::Unsendable`] when they are not as many as it has.
    pub fn of_bytes(
        name: impl Into<String>,
        dtype: Dtype,
        shape: impl Into<Vec<u64>>,
        buffer: impl Into<Bytes>,
    ) -> Result<Self, Error> {
        let (info, buffer) = (TensorInfo::new(name, dtype, shape)?, buffer.into());
        if buffer.len() as u64 != info.storage_len {
            let reason =
                format!("it has {} bytes, and {} are given", info.storage_len, buffer.len());
            return Err(Error::Unsendable { tensor: info.name, reason });
        }
        Ok(Self { info, buffer })
    }
}
