// SPDX-License-Identifier: MIT OR Apache-2.0
//! Computes the logits of candle's Llama, up to the order of sums, with less memory than the
//! weights need: each layer is streamed when it is used. The checkpoint is small and random. For a
//! checkpoint of the Hugging Face Hub and a cache of keys and values, see the example `llama` of
//! tensorstream-candle.

use std::collections::HashMap;
use std::error::Error;

use candle_core::{DType, Device, IndexOp, Module, Result, Tensor};
use candle_nn::ops::{silu, softmax_last_dim};
use candle_nn::rotary_emb::rope;
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::llama::{self, Config};
use candle_transformers::utils::repeat_kv;
use ts_candle::ts_orchestrator::{Bytes, Model, ModelUnit};
use ts_candle::{Linear, embedding, to_tensor};

const EMBEDDING: &str = "model.embed_tokens.weight";

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let config = Config {
        hidden_size: 64,
        intermediate_size: 96,
        vocab_size: 200,
        num_hidden_layers: 8,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 64,
        ..Config::config_7b_v2(false)
    };
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("model.safetensors");
    candle_core::safetensors::save(&random_weights(&config)?, &file)?;
    let bytes = std::fs::read(&file)?;
    let weights_bytes = bytes.len();

    let budget = Bytes::kib(200);
    let model = Model::open(directory.path())?.budget(budget).rows_of(EMBEDDING).build()?;
    let weights = VarBuilder::from_buffered_safetensors(bytes, DType::F32, &Device::Cpu)?;
    let own = llama::Llama::load(weights, &config)?;

    let mut ids = vec![3u32, 199, 0, 42];
    for _ in 0..4 {
        let logits = forward(&model, &config, &ids)?;
        let mut no_cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
        let input = Tensor::new(&ids[..], &Device::Cpu)?.unsqueeze(0)?;
        let expected = own.forward(&input, 0, &mut no_cache)?.squeeze(0)?;
        let scale = expected.abs()?.max_all()?.to_scalar::<f32>()?;
        let error = (&logits - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(error <= 1e-5 * scale, "{error} of {scale}");
        ids.push(logits.argmax(0)?.to_scalar()?);
    }
    let most = model.engine().stats().in_use_high_water_bytes;
    assert!(most <= budget.0);
    println!("tokens {:?}, at most {most} of {weights_bytes} bytes in use", &ids[4..]);
    Ok(())
}

/// Returns the logits after the last id.
fn forward(
    model: &Model,
    config: &Config,
    ids: &[u32],
) -> std::result::Result<Tensor, Box<dyn Error>> {
    let pass = model.pass()?;
    let mut x = embedding(model, EMBEDDING, &Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?)?;
    for layer in 0..config.num_hidden_layers {
        let unit = pass.unit(&format!("model.layers.{layer}"))?;
        let y = norm(&unit, "input_layernorm.weight", config, &x)?;
        x = (attention(&unit, config, &y)? + x)?;
        let y = norm(&unit, "post_attention_layernorm.weight", config, &x)?;
        let gate = silu(&linear(&unit, "mlp.gate_proj.weight", &y)?)?;
        let y = (gate * linear(&unit, "mlp.up_proj.weight", &y)?)?;
        x = (linear(&unit, "mlp.down_proj.weight", &y)? + x)?;
    }
    let last = x.i((.., ids.len() - 1, ..))?.contiguous()?;
    let x = norm(&pass.unit("model.norm")?, "weight", config, &last)?;
    Ok(linear(&pass.unit("lm_head")?, "weight", &x)?.squeeze(0)?)
}

fn attention(unit: &ModelUnit, config: &Config, x: &Tensor) -> Result<Tensor> {
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    let (_, count, width) = x.dims3()?;
    let size = width / heads;
    let project = |name: &str, heads: usize| {
        let y = linear(unit, &format!("self_attn.{name}_proj.weight"), x)?;
        y.reshape((1, count, heads, size))?.transpose(1, 2)?.contiguous()
    };
    let frequency = |i: usize| config.rope_theta.powf(2. * i as f32 / size as f32).recip();
    let angles = (0..count).flat_map(|at| (0..size / 2).map(move |i| at as f32 * frequency(i)));
    let angles = Tensor::from_iter(angles, &Device::Cpu)?.reshape((count, size / 2))?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let q = rope(&project("q", heads)?, &cos, &sin)?;
    let k = repeat_kv(rope(&project("k", kv_heads)?, &cos, &sin)?, heads / kv_heads)?;
    let v = repeat_kv(project("v", kv_heads)?, heads / kv_heads)?.contiguous()?;
    let later = |i: usize, j: usize| if j > i { f32::NEG_INFINITY } else { 0. };
    let mask = (0..count).flat_map(|i| (0..count).map(move |j| later(i, j)));
    let mask = Tensor::from_iter(mask, &Device::Cpu)?.reshape((1, 1, count, count))?;
    let scores = (q.matmul(&k.t()?)? / (size as f64).sqrt())?.broadcast_add(&mask)?;
    let y = softmax_last_dim(&scores)?.matmul(&v)?.transpose(1, 2)?.reshape((1, count, width))?;
    linear(unit, "self_attn.o_proj.weight", &y)
}

fn linear(unit: &ModelUnit, weight: &str, x: &Tensor) -> Result<Tensor> {
    Linear::new(unit.tensor(weight).map_err(candle_core::Error::wrap)?)?.forward(x)
}

fn norm(unit: &ModelUnit, weight: &str, config: &Config, x: &Tensor) -> Result<Tensor> {
    let weight = unit.tensor(weight).map_err(candle_core::Error::wrap)?;
    let weight = to_tensor(&weight, &Device::Cpu)?.to_dtype(DType::F32)?;
    candle_nn::RmsNorm::new(weight, config.rms_norm_eps).forward(x)
}

/// Returns random weights, in bf16, with the names and shapes that candle's Llama loads.
fn random_weights(config: &Config) -> Result<HashMap<String, Tensor>> {
    let weights = VarMap::new();
    llama::Llama::load(VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu), config)?;
    let weights = weights.data().lock().expect("no thread panics");
    let random = |shape: &[usize]| Tensor::randn(0f32, 0.3, shape, &Device::Cpu);
    let one = |(name, var): (&String, &candle_core::Var)| {
        Ok((name.clone(), random(var.dims())?.to_dtype(DType::BF16)?))
    };
    weights.iter().map(one).collect()
}
