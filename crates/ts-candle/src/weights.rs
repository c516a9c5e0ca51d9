// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bytes of weights as numbers.

use std::marker::PhantomData;

use candle_core::{DType, Result, bail};
use half::{bf16, f16};
use pulp::{Arch, Simd, WithSimd};
use ts_orchestrator::ts_format::Dtype;

/// Returns candle's name of a dtype.
pub(crate) fn dtype(dtype: Dtype) -> Result<DType> {
    Ok(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F8_E4M3 => DType::F8E4M3,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::U32 => DType::U32,
        Dtype::U8 | Dtype::Bool => DType::U8,
        other => bail!("candle has no dtype {other}"),
    })
}

/// A number of a weight, in memory as little-endian bytes at any address.
pub(crate) trait Number: Copy + Send + Sync {
    const BYTES: usize;

    /// Converts the number at the beginning of `bytes`.
    fn read(bytes: &[u8]) -> f32;
}

impl Number for f32 {
    const BYTES: usize = 4;

    #[inline(always)]
    fn read(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

impl Number for bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn read(bytes: &[u8]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
    }
}

impl Number for f16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn read(bytes: &[u8]) -> f32 {
        f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }
}

/// The numbers that are summed up independently, so that the compiler uses vectors.
const LANES: usize = 32;

/// Returns the dot product of a row of weights with `x`, which has as many numbers. Uses the
/// widest vectors of this processor.
///
/// The order of the sums depends only on the length, so results depend neither on threads nor on
/// the processor.
pub(crate) fn dot<T: Number>(row: &[u8], x: &[f32]) -> f32 {
    Arch::new().dispatch(Dot { row, x, number: PhantomData::<T> })
}

/// A dot product that is compiled for each set of instructions.
struct Dot<'a, T> {
    row: &'a [u8],
    x: &'a [f32],
    number: PhantomData<T>,
}

impl<T: Number> WithSimd for Dot<'_, T> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) -> f32 {
        sum_up::<T>(self.row, self.x)
    }
}

#[inline(always)]
fn sum_up<T: Number>(row: &[u8], x: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    let (bytes, rest_bytes) = row.split_at(chunks.len() * LANES * T::BYTES);
    for (bytes, x) in bytes.chunks_exact(LANES * T::BYTES).zip(chunks) {
        for i in 0..LANES {
            sums[i] += T::read(&bytes[i * T::BYTES..][..T::BYTES]) * x[i];
        }
    }
    let rest = rest_bytes.chunks_exact(T::BYTES).zip(rest).map(|(bytes, x)| T::read(bytes) * x);
    sums.iter().sum::<f32>() + rest.sum::<f32>()
}
