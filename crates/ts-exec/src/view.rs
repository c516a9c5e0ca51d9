// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors as views of numbered storages.

use crate::codec::{Decoder, put_number, unzigzag, zigzag};
use ts_remote::Error;

/// The largest number of dimensions of a tensor, as in PyTorch.
pub const MAX_DIMS: usize = 64;

/// The type of a tensor's elements, given by PyTorch's number for the type (`c10::ScalarType`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScalarType(pub u8);

impl ScalarType {
    /// `torch.float32`.
    pub const FLOAT32: Self = Self(6);
}

/// The layout of a tensor in its storage: dtype, sizes, strides and offset.
///
/// # Examples
///
/// ```
/// use ts_exec::{ScalarType, StorageView};
///
/// let matrix = StorageView::contiguous(ScalarType::FLOAT32, vec![2, 3]);
/// assert_eq!(matrix.strides, [3, 1]);
///
/// // Its transpose is another view of the same elements.
/// let transposed = StorageView { sizes: vec![3, 2], strides: vec![1, 3], ..matrix };
/// assert_eq!(transposed.elements(), Some(6));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StorageView {
    /// The type of the elements.
    pub dtype: ScalarType,
    /// The length of each dimension, in elements.
    pub sizes: Vec<u64>,
    /// The distance between neighbouring elements of each dimension, in elements.
    pub strides: Vec<i64>,
    /// The position of the first element in the storage, in elements of `dtype`.
    pub offset: u64,
}

/// A remote tensor: a view of a storage on the server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorRef {
    /// The number of the storage.
    pub storage: u64,
    /// The layout of the tensor in the storage.
    pub view: StorageView,
}

/// Returns the strides of a contiguous row-major tensor, in elements.
///
/// As in PyTorch, a dimension of size 0 counts as 1. Strides beyond `i64::MAX` saturate.
///
/// # Examples
///
/// ```
/// use ts_exec::contiguous_strides;
///
/// assert_eq!(contiguous_strides(&[2, 3, 4]), [12, 4, 1]);
/// assert_eq!(contiguous_strides(&[2, 0, 4]), [4, 4, 1]);
/// assert_eq!(contiguous_strides(&[]), [0i64; 0]);
/// ```
pub fn contiguous_strides(sizes: &[u64]) -> Vec<i64> {
    let mut strides = vec![1; sizes.len()];
    for at in (1..sizes.len()).rev() {
        let size = i64::try_from(sizes[at].max(1)).unwrap_or(i64::MAX);
        strides[at - 1] = size.saturating_mul(strides[at]);
    }
    strides
}

impl StorageView {
    /// Creates a contiguous row-major view that begins at the first byte of the storage.
    pub fn contiguous(dtype: ScalarType, sizes: Vec<u64>) -> Self {
        let strides = contiguous_strides(&sizes);
        Self { dtype, sizes, strides, offset: 0 }
    }

    /// Returns whether the elements are in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1;
        self.sizes.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == step;
            step = step.saturating_mul(i64::try_from(size.max(1)).unwrap_or(i64::MAX));
            fits
        }) || self.sizes.contains(&0)
    }

    /// Returns whether the elements are complex numbers.
    pub fn is_complex(&self) -> bool {
        // The numbers of complex32, complex64 and complex128.
        matches!(self.dtype.0, 8..=10)
    }

    /// Returns the number of elements. Returns `None` if the product of the first sizes exceeds 64
    /// bits, even if a later size is 0.
    pub fn elements(&self) -> Option<u64> {
        self.sizes.iter().try_fold(1u64, |count, &size| count.checked_mul(size))
    }

    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        let contiguous = self.strides == contiguous_strides(&self.sizes);
        into.push(self.dtype.0);
        // The lowest two bits record whether strides and an offset follow.
        let head =
            self.sizes.len() << 2 | usize::from(!contiguous) << 1 | usize::from(self.offset != 0);
        put_number(into, head as u64);
        self.sizes.iter().for_each(|&size| put_number(into, size));
        if !contiguous {
            self.strides.iter().for_each(|&stride| put_number(into, zigzag(stride)));
        }
        if self.offset != 0 {
            put_number(into, self.offset);
        }
    }

    pub(crate) fn decode(from: &mut Decoder<'_>) -> Result<Self, Error> {
        let dtype = ScalarType(from.byte()?);
        let head = from.number()?;
        let dims = usize::try_from(head >> 2).ok().filter(|&dims| dims <= MAX_DIMS);
        let dims = dims.ok_or_else(|| {
            let got = head >> 2;
            from.error(format!("a tensor has {got} dimensions (expected at most {MAX_DIMS})"))
        })?;
        from.charge(dims * (size_of::<u64>() + size_of::<i64>()))?;
        let sizes: Vec<u64> = (0..dims).map(|_| from.number()).collect::<Result<_, _>>()?;
        let strides = if head & 2 == 0 {
            contiguous_strides(&sizes)
        } else {
            (0..dims).map(|_| Ok(unzigzag(from.number()?))).collect::<Result<_, Error>>()?
        };
        let offset = if head & 1 == 0 { 0 } else { from.number()? };
        Ok(Self { dtype, sizes, strides, offset })
    }
}

impl TensorRef {
    /// Returns a hash of the storage's number and the layout. Logs use the hash to name the tensor.
    ///
    /// The hash is the 64-bit [FNV-1a](http://www.isthe.com/chongo/tech/comp/fnv/) hash of the
    /// sizes, strides, dtype, offset and storage, each number as 8 bytes, little-endian.
    pub fn metadata_hash(&self) -> u64 {
        let StorageView { dtype, sizes, strides, offset } = &self.view;
        let strides = strides.iter().map(|&stride| stride as u64);
        let numbers =
            sizes.iter().copied().chain(strides).chain([u64::from(dtype.0), *offset, self.storage]);
        numbers.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        put_number(into, self.storage);
        self.view.encode(into);
    }

    pub(crate) fn decode(from: &mut Decoder<'_>) -> Result<Self, Error> {
        Ok(Self { storage: from.number()?, view: StorageView::decode(from)? })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    fn views() -> impl Strategy<Value = StorageView> {
        let sizes = prop::collection::vec(any::<u64>(), 0..5);
        let strides = prop::option::of(any::<i64>());
        (any::<u8>(), sizes, strides, prop_oneof![Just(0), any::<u64>()]).prop_map(
            |(dtype, sizes, stride, offset)| {
                let mut view = StorageView::contiguous(ScalarType(dtype), sizes);
                view.strides.iter_mut().zip(stride).for_each(|(first, stride)| *first = stride);
                StorageView { offset, ..view }
            },
        )
    }

    pub(crate) fn tensors() -> impl Strategy<Value = TensorRef> {
        (any::<u64>(), views()).prop_map(|(storage, view)| TensorRef { storage, view })
    }
}
