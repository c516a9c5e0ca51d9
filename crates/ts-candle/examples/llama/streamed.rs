// SPDX-License-Identifier: MIT OR Apache-2.0
//! Llama whose layers are streamed: the modules of candle, with leased weights.

use std::path::Path;

use candle_core::{DType, Device, IndexOp, Module, Result, Tensor};
use candle_nn::ops::{silu, softmax_last_dim};
use candle_nn::rotary_emb::rope;
use candle_transformers::models::llama::Config;
use candle_transformers::utils::repeat_kv;
use ts_candle::ts_orchestrator::{Bytes, Error, Model, ModelUnit};
use ts_candle::{Linear, embedding, to_tensor};

const EMBEDDING: &str = "model.embed_tokens.weight";

pub(crate) struct Llama {
    model: Model,
    config: Config,
    /// The keys and values of each layer.
    cache: Vec<Option<(Tensor, Tensor)>>,
    cos: Tensor,
    sin: Tensor,
}

impl Llama {
    /// Opens a checkpoint. Reads no weights.
    pub(crate) fn open(dir: &Path, budget: Bytes, config: Config) -> Result<Self> {
        let mut options = Model::open(dir).map_err(wrap)?.budget(budget);
        if !config.tie_word_embeddings {
            options = options.rows_of(EMBEDDING);
        }
        let model = options.build().map_err(wrap)?;
        let size = config.hidden_size / config.num_attention_heads;
        let frequency = |i: usize| config.rope_theta.powf(i as f32 / size as f32).recip();
        let frequencies: Vec<f32> = (0..size).step_by(2).map(frequency).collect();
        let frequencies = Tensor::new(frequencies, &Device::Cpu)?.unsqueeze(0)?;
        let positions = Tensor::arange(0, config.max_position_embeddings as u32, &Device::Cpu)?;
        let angles = positions.to_dtype(DType::F32)?.unsqueeze(1)?.matmul(&frequencies)?;
        let cache = vec![None; config.num_hidden_layers];
        Ok(Self { model, config, cache, cos: angles.cos()?, sin: angles.sin()? })
    }

    /// Returns the logits after the last of `ids`, which follow `position` earlier ones.
    pub(crate) fn forward(&mut self, ids: &[u32], position: usize) -> Result<Tensor> {
        let pass = self.model.pass().map_err(wrap)?;
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        let mut x = embedding(&self.model, EMBEDDING, &ids)?;
        for layer in 0..self.config.num_hidden_layers {
            let unit = pass.unit(&format!("model.layers.{layer}")).map_err(wrap)?;
            x = (self.attention(
                &unit,
                &self.norm(&unit, "input_layernorm.weight", &x)?,
                layer,
                position,
            )? + x)?;
            let y = self.norm(&unit, "post_attention_layernorm.weight", &x)?;
            let gate = silu(&linear(&unit, "mlp.gate_proj.weight")?.forward(&y)?)?;
            let y = (gate * linear(&unit, "mlp.up_proj.weight")?.forward(&y)?)?;
            x = (linear(&unit, "mlp.down_proj.weight")?.forward(&y)? + x)?;
        }
        let x = x.i((.., x.dim(1)? - 1, ..))?.contiguous()?;
        let x = self.norm(&pass.unit("model.norm").map_err(wrap)?, "weight", &x)?;
        let head = match self.config.tie_word_embeddings {
            true => "model.embed_tokens",
            false => "lm_head",
        };
        linear(&pass.unit(head).map_err(wrap)?, "weight")?.forward(&x)?.squeeze(0)
    }

    fn attention(
        &mut self,
        unit: &ModelUnit,
        x: &Tensor,
        layer: usize,
        at: usize,
    ) -> Result<Tensor> {
        let config = &self.config;
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let (_, count, width) = x.dims3()?;
        let size = width / heads;
        let project = |name: &str, heads: usize| {
            let y = linear(unit, &format!("self_attn.{name}_proj.weight"))?.forward(x)?;
            y.reshape((1, count, heads, size))?.transpose(1, 2)?.contiguous()
        };
        let (cos, sin) = (self.cos.narrow(0, at, count)?, self.sin.narrow(0, at, count)?);
        let q = rope(&project("q", heads)?, &cos, &sin)?;
        let mut k = rope(&project("k", kv_heads)?, &cos, &sin)?;
        let mut v = project("v", kv_heads)?;
        if let Some((earlier_k, earlier_v)) = &self.cache[layer] {
            k = Tensor::cat(&[earlier_k, &k], 2)?.contiguous()?;
            v = Tensor::cat(&[earlier_v, &v], 2)?.contiguous()?;
        }
        self.cache[layer] = Some((k.clone(), v.clone()));
        let k = repeat_kv(k, heads / kv_heads)?;
        let v = repeat_kv(v, heads / kv_heads)?.contiguous()?;
        let mut scores = (q.matmul(&k.t()?)? / (size as f64).sqrt())?;
        if count > 1 {
            let seen = |i: usize, j: usize| if j > at + i { f32::NEG_INFINITY } else { 0.0 };
            let mask = (0..count).flat_map(|i| (0..at + count).map(move |j| seen(i, j)));
            let mask = Tensor::from_iter(mask, &Device::Cpu)?.reshape((1, 1, count, at + count))?;
            scores = scores.broadcast_add(&mask)?;
        }
        let y = softmax_last_dim(&scores)?.matmul(&v)?.transpose(1, 2)?;
        linear(unit, "self_attn.o_proj.weight")?.forward(&y.reshape((1, count, width))?)
    }

    fn norm(&self, unit: &ModelUnit, weight: &str, x: &Tensor) -> Result<Tensor> {
        let weight = to_tensor(&unit.tensor(weight).map_err(wrap)?, &Device::Cpu)?;
        candle_nn::RmsNorm::new(weight.to_dtype(DType::F32)?, self.config.rms_norm_eps).forward(x)
    }
}

fn linear(unit: &ModelUnit, weight: &str) -> Result<Linear> {
    Linear::new(unit.tensor(weight).map_err(wrap)?)
}

fn wrap(error: Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}
