// SPDX-License-Identifier: MIT OR Apache-2.0
//! A linear layer that multiplies with the bytes of a leased unit.

use candle_core::{
    CpuStorage, CustomOp1, DType, Device, Layout, Module, Result, Shape, Tensor, bail,
};
use half::{bf16, f16};
use rayon::prelude::*;
use ts_orchestrator::{ModelTensor, TensorBytes};

use crate::to_tensor;
use crate::weights::{Number, dot, dtype};

/// Up to so many rows of `x` are multiplied with the bytes of the weight; for more, parts of the
/// weight are converted and multiplied by candle, which needs fewer conversions.
const FEW_ROWS: usize = 4;
/// The size of a converted part of the weight, in bytes.
const PART_BYTES: usize = 4 << 20;
/// The least rows of a weight that a thread multiplies with.
const LEAST_ROWS: usize = 32;

/// A linear layer whose weight is a tensor of a leased unit. Computes `x W^T + b` in f32.
///
/// The weight is not copied. It stays in memory as long as the layer exists, so drop the layer
/// after its use. Gradients do not flow through the layer.
///
/// # Examples
/// The [crate documentation](crate) multiplies with a layer of a model.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: ModelTensor,
    outputs: usize,
    inputs: usize,
    dtype: DType,
    bias: Option<Tensor>,
}

impl Linear {
    /// Creates a layer without a bias from a weight of the shape `[outputs, inputs]`.
    ///
    /// # Errors
    /// Returns an error if the weight is not a matrix of bf16, f16 or f32.
    pub fn new(weight: ModelTensor) -> Result<Self> {
        let dtype = dtype(weight.dtype())?;
        match (weight.shape(), dtype) {
            (&[outputs, inputs], DType::BF16 | DType::F16 | DType::F32) => {
                let (outputs, inputs) = (outputs as usize, inputs as usize);
                Ok(Self { weight, outputs, inputs, dtype, bias: None })
            }
            (shape, _) => bail!(
                "cannot multiply with a weight of {} {shape:?} (expected a matrix of BF16, F16 or \
                 F32)",
                weight.dtype()
            ),
        }
    }

    /// Adds a bias, which is copied as f32.
    ///
    /// # Errors
    /// Returns an error if the bias does not have the shape `[outputs]`, or candle has no such
    /// dtype.
    pub fn with_bias(self, bias: &ModelTensor) -> Result<Self> {
        if bias.shape() != [self.outputs as u64] {
            bail!("the bias has shape {:?} (expected [{}])", bias.shape(), self.outputs);
        }
        let bias = to_tensor(bias, &Device::Cpu)?.to_dtype(DType::F32)?;
        Ok(Self { bias: Some(bias), ..self })
    }

    /// Multiplies with parts of the weight that are converted to f32.
    fn multiply_in_parts(&self, x: &Tensor) -> Result<Tensor> {
        let rows = (PART_BYTES / 4 / self.inputs.max(1)).clamp(1, self.outputs.max(1));
        let row_bytes = self.inputs * self.dtype.size_in_bytes();
        let part = |bytes: &[u8]| {
            let shape = [bytes.len() / row_bytes, self.inputs];
            let part = Tensor::from_raw_buffer(bytes, self.dtype, &shape, &Device::Cpu)?;
            x.matmul(&part.to_dtype(DType::F32)?.t()?)
        };
        let parts = self.weight.chunks(rows * row_bytes).map(part).collect::<Result<Vec<_>>>()?;
        Tensor::cat(&parts, 1)
    }
}

impl Module for Linear {
    /// Multiplies f32 inputs of the shape `[.., inputs]` on the CPU. Blocks.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut shape = x.dims().to_vec();
        if x.dtype() != DType::F32 || shape.last() != Some(&self.inputs) {
            bail!("expected inputs of F32 [.., {}], got {:?} {shape:?}", self.inputs, x.dtype());
        }
        let rows = x.elem_count() / self.inputs.max(1);
        let x = x.reshape((rows, self.inputs))?;
        let empty = self.weight.is_empty();
        let y = match rows <= FEW_ROWS || empty {
            true => x.contiguous()?.apply_op1_no_bwd(&InPlace {
                weight: self.weight.bytes(),
                outputs: self.outputs,
                inputs: self.inputs,
                dtype: self.dtype,
            })?,
            false => self.multiply_in_parts(&x)?,
        };
        *shape.last_mut().expect("the shape has a last dimension") = self.outputs;
        let y = y.reshape(shape)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

/// The product with the bytes of a weight where they are.
struct InPlace<'a> {
    weight: &'a TensorBytes,
    outputs: usize,
    inputs: usize,
    dtype: DType,
}

impl InPlace<'_> {
    fn multiply<T: Number>(&self, x: &[f32]) -> Vec<f32> {
        let (rows, row_bytes) = (x.len() / self.inputs.max(1), self.inputs * T::BYTES);
        let product = |output: usize| {
            let row = &self.weight[output * row_bytes..][..row_bytes];
            (0..rows).map(move |i| dot::<T>(row, &x[i * self.inputs..][..self.inputs]))
        };
        let outputs = (0..self.outputs).into_par_iter().with_min_len(LEAST_ROWS);
        let by_output: Vec<f32> = outputs.flat_map_iter(product).collect();
        if rows == 1 {
            return by_output;
        }
        let mut y = vec![0.0; by_output.len()];
        for (at, &value) in by_output.iter().enumerate() {
            y[at % rows * self.outputs + at / rows] = value;
        }
        y
    }
}

impl CustomOp1 for InPlace<'_> {
    fn name(&self) -> &'static str {
        "leased-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = storage.as_slice::<f32>()?;
        let Some((begin, end)) = layout.contiguous_offsets() else {
            bail!("expected contiguous inputs");
        };
        let x = &x[begin..end];
        let y = match self.dtype {
            DType::BF16 => self.multiply::<bf16>(x),
            DType::F16 => self.multiply::<f16>(x),
            _ => self.multiply::<f32>(x),
        };
        let rows = layout.dims()[0];
        Ok((CpuStorage::F32(y), (rows, self.outputs).into()))
    }
}
