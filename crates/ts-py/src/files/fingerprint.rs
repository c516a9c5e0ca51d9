// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fingerprints of the content of checkpoints.

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::format::{Digest, fingerprint, tensor_fingerprint};

use crate::dlpack::CapsuleBytes;
use crate::dtype::tensor_meta;

/// Computes a fingerprint of the names and content of tensors. It does not depend on the order of
/// the tensors.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Fingerprint {
    tensors: Mutex<Vec<(String, u128)>>,
}

#[pymethods]
impl Fingerprint {
    #[new]
    fn new() -> Self {
        Self { tensors: Mutex::new(Vec::new()) }
    }

    /// Adds a tensor. Reads its bytes without a copy.
    ///
    /// Args:
    ///     name: The name of the tensor.
    ///     dtype: The safetensors name of the dtype.
    ///     shape: The size of each dimension.
    ///     data: A DLPack capsule of the bytes.
    fn add(
        &self,
        py: Python<'_>,
        name: String,
        dtype: &str,
        shape: Vec<u64>,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (meta, data) = (tensor_meta(dtype, shape)?, CapsuleBytes::from_capsule(data)?);
        let bytes = data.bytes();
        let fingerprint = py.detach(|| tensor_fingerprint(&meta, &Digest::of(bytes)));
        py.check_signals()?;
        self.tensors.lock().push((name, fingerprint));
        Ok(())
    }

    /// Returns the fingerprint as 32 hexadecimal digits.
    fn hex(&self) -> String {
        let tensors = self.tensors.lock();
        let all = tensors.iter().map(|(name, fingerprint)| (name.as_str(), *fingerprint));
        format!("{:032x}", fingerprint(all))
    }
}
