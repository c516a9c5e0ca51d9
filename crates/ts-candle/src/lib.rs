// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs candle models whose weights do not fit in memory.
//!
//! A [`Model`] streams the layers of a checkpoint under a memory budget.
//! This crate gives them to candle in two ways:
//!
//! | | weights | results | cost of a use |
//! |---|---|---|---|
//! | [`var_builder`] | candle's own modules load them | equal to those of candle's loader | a copy |
//! | [`Linear`] | the bytes of a leased unit | equal up to the order of sums | no copy; conversions in parts for more than 4 rows |
//!
//! A candle tensor owns its memory, so it cannot be the memory of a unit: the tensors of a
//! [`VarBuilder`] are copies, which candle frees. Load one layer, use it and drop it; a model that
//! loads all layers at once takes the memory of all copies. [`Linear`] multiplies with the bytes of
//! a unit where they are, and keeps them in memory as long as it exists.
//!
//! Weights are bf16, f16 or f32, and activations of [`Linear`] are f32: candle has no products in
//! bf16 on the CPU.
//!
//! # Example
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use ts_candle::ts_orchestrator::{Bytes, Model};
//!
//! # let dir = tempfile::tempdir()?;
//! # let dir = dir.path();
//! # let w = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
//! # let tensors = std::collections::HashMap::from([("layers.0.up.weight", w)]);
//! # candle_core::safetensors::save(&tensors, dir.join("model.safetensors"))?;
//! let model = Model::open(dir)?.budget(Bytes::mib(600)).build()?;
//! let pass = model.pass()?;
//! let x = Tensor::new(&[[1f32, 10.]], &Device::Cpu)?;
//!
//! // Candle's own modules, which copy their weights out of the unit:
//! let vb = ts_candle::var_builder(&pass, DType::F32, &Device::Cpu).pp("layers.0");
//! let up = candle_nn::linear_no_bias(2, 2, vb.pp("up"))?;
//! assert_eq!(up.forward(&x)?.to_vec2::<f32>()?, [[21., 43.]]);
//! drop(vb); // ends the use of the unit
//!
//! // Without a copy:
//! let unit = pass.unit("layers.0")?;
//! let up = ts_candle::Linear::new(unit.tensor("up.weight")?)?;
//! assert_eq!(up.forward(&x)?.to_vec2::<f32>()?, [[21., 43.]]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod copies;
mod linear;
mod weights;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use ts_orchestrator::{Model, ModelTensor, Pass};

pub use linear::Linear;
/// The crate that streams models, whose types this crate takes.
pub use ts_orchestrator;

/// Returns a `VarBuilder` whose tensors are copies of those of a pass, on `device`.
///
/// A tensor gets the dtype that candle asks for, by candle's own conversion, so that results are
/// bit for bit those of `VarBuilder::from_mmaped_safetensors`. The unit of a tensor is read when
/// its first tensor is loaded, ahead of that if the pass before used it in the same order, and
/// stays in memory until a tensor of another unit is loaded or the `VarBuilder` is dropped.
///
/// Loading blocks until the unit is in memory. It fails with candle's `CannotFindTensor` or
/// `UnexpectedShape` like candle's loader, and wraps errors of the engine, which name the unit.
pub fn var_builder<'a>(pass: &'a Pass, dtype: DType, device: &Device) -> VarBuilder<'a> {
    VarBuilder::from_backend(Box::new(copies::Copies::new(pass)), dtype, device.clone())
}

/// Copies a tensor of a unit to a candle tensor of the same dtype. Blocks while it copies.
///
/// # Errors
/// Returns an error if candle has no such dtype, or `device` cannot take the tensor.
pub fn to_tensor(tensor: &ModelTensor, device: &Device) -> Result<Tensor> {
    let shape: Vec<usize> = tensor.shape().iter().map(|&n| n as usize).collect();
    let dtype = weights::dtype(tensor.dtype())?;
    Tensor::from_raw_buffer(tensor, dtype, &shape, device)
}

/// Returns the rows of an embedding for these ids, in f32: a tensor of the shape of `ids` and the
/// width of the embedding. Reads only these rows. Blocks until they are in memory.
///
/// [`ModelBuilder::rows_of`](ts_orchestrator::ModelBuilder::rows_of) keeps the embedding out of the
/// units, and caches rows.
///
/// # Errors
/// Returns an error if the dtype of `ids` is not u8, u32 or i64, if the model has no such tensor or
/// rows, or if a read fails.
pub fn embedding(model: &Model, tensor: &str, ids: &Tensor) -> Result<Tensor> {
    if !matches!(ids.dtype(), DType::U8 | DType::U32 | DType::I64) {
        candle_core::bail!("ids have dtype {:?} (expected u8, u32 or i64)", ids.dtype());
    }
    let rows = ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    // A negative row is behind the end of every tensor.
    let rows = rows.into_iter().map(|row| u64::try_from(row).unwrap_or(u64::MAX - 1));
    let ranges: Vec<_> = rows.map(|row| row..row + 1).collect();
    let rows = model.read_ranges(tensor, &ranges).map_err(candle_core::Error::wrap)?;
    let width = rows.shape()[1..].iter().map(|&n| n as usize);
    let shape: Vec<usize> = ids.dims().iter().copied().chain(width).collect();
    to_tensor(&rows, ids.device())?.to_dtype(DType::F32)?.reshape(shape)
}
