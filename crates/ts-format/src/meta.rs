// SPDX-License-Identifier: MIT OR Apache-2.0
use crate::Dtype;

/// What a tensor is, without its bytes: row-major and contiguous, little-endian.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMeta {
    /// Element type.
    pub dtype: Dtype,
    /// Elements along each dimension, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
}

impl TensorMeta {
    /// Number of elements, or `None` if it does not fit in 64 bits.
    pub fn element_count(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |count, &n| count.checked_mul(n))
    }

    /// Length in bytes, or `None` if it does not fit in 64 bits or is not a whole number of bytes.
    pub fn byte_len(&self) -> Option<u64> {
        self.dtype.byte_len(&self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(dtype: Dtype, shape: &[u64]) -> TensorMeta {
        TensorMeta { dtype, shape: shape.to_vec() }
    }

    #[test]
    fn lengths_are_exact_or_absent() {
        assert_eq!(meta(Dtype::F32, &[]).byte_len(), Some(4));
        assert_eq!(meta(Dtype::BF16, &[3, 0]).byte_len(), Some(0));
        assert_eq!(meta(Dtype::F4, &[2]).byte_len(), Some(1));
        assert_eq!(meta(Dtype::F4, &[3]).byte_len(), None);
        assert_eq!(meta(Dtype::F64, &[u64::MAX, 2]).byte_len(), None);
        assert_eq!(meta(Dtype::F64, &[1 << 60, 1]).byte_len(), None);
    }
}
