// SPDX-License-Identifier: MIT OR Apache-2.0
use crate::Dtype;

/// The dtype and shape of a tensor. Its elements are little-endian, row-major and contiguous.
///
/// ```
/// use ts_format::{Dtype, TensorMeta};
///
/// let meta = TensorMeta { dtype: Dtype::BF16, shape: vec![3, 5] };
/// assert_eq!((meta.element_count(), meta.byte_len()), (Some(15), Some(30)));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMeta {
    /// Element type.
    pub dtype: Dtype,
    /// Length of each dimension in elements, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
}

impl TensorMeta {
    /// Returns the number of elements, or `None` if the product of the dimensions overflows 64
    /// bits.
    pub fn element_count(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |count, &n| count.checked_mul(n))
    }

    /// Returns the length in bytes. Returns `None` if the length is not a whole number of bytes, or
    /// if its number of bits does not fit in 64 bits (2^61 bytes or more).
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
    fn byte_len_is_exact_or_none() {
        assert_eq!(meta(Dtype::F32, &[]).byte_len(), Some(4));
        assert_eq!(meta(Dtype::BF16, &[3, 0]).byte_len(), Some(0));
        assert_eq!(meta(Dtype::F4, &[2]).byte_len(), Some(1));
        assert_eq!(meta(Dtype::F4, &[3]).byte_len(), None);
        assert_eq!(meta(Dtype::F64, &[u64::MAX, 2]).byte_len(), None);
        assert_eq!(meta(Dtype::F64, &[1 << 60, 1]).byte_len(), None);
    }
}
