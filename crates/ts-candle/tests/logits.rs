// SPDX-License-Identifier: MIT OR Apache-2.0
//! Logits of streamed models are those of candle's own loader.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::{bert, llama};
use tempfile::TempDir;
use ts_candle::ts_orchestrator::{Bytes, Model};
use ts_candle::{Linear, to_tensor, var_builder};

#[path = "../examples/bert.rs"]
mod streamed_bert;
#[path = "../examples/llama/streamed.rs"]
mod streamed_llama;

fn llama_config() -> llama::Config {
    llama::Config {
        hidden_size: 64,
        intermediate_size: 96,
        vocab_size: 200,
        num_hidden_layers: 6,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 64,
        ..llama::Config::config_7b_v2(false)
    }
}

/// Writes the weights that `load` asks for, as random numbers of a dtype.
fn checkpoint(dtype: DType, load: impl Fn(VarBuilder<'_>)) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let weights = VarMap::new();
    load(VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu));
    let random = |shape: &[usize]| Tensor::randn(0f32, 0.3, shape, &Device::Cpu).unwrap();
    let weights = weights.data().lock().unwrap();
    let tensors = weights.iter().map(|(name, var)| {
        let values = random(var.dims()).to_dtype(dtype).unwrap();
        (name.clone(), values)
    });
    let tensors: HashMap<String, Tensor> = tensors.collect();
    candle_core::safetensors::save(&tensors, &path).unwrap();
    (dir, path)
}

/// Candle's own loader, which reads the whole file.
fn own(path: &Path) -> VarBuilder<'static> {
    let bytes = std::fs::read(path).unwrap();
    VarBuilder::from_buffered_safetensors(bytes, DType::F32, &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

const IDS: [u32; 7] = [3, 199, 0, 42, 42, 7, 120];

#[test]
fn llama_with_leased_weights_has_the_logits_of_candle() {
    let config = llama_config();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let (dir, path) = checkpoint(dtype, |vb| drop(llama::Llama::load(vb, &config).unwrap()));
        let reference = llama::Llama::load(own(&path), &config).unwrap();
        let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
        let budget = Bytes::kib(200);
        let mut streamed = streamed_llama::Llama::open(dir.path(), budget, config.clone()).unwrap();
        let (mut ids, mut position) = (IDS.to_vec(), 0);
        for _ in 0..4 {
            let input = Tensor::new(&ids[..], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let expected = values(&reference.forward(&input, position, &mut cache).unwrap());
            let found = streamed.forward(&ids, position).unwrap();
            let next = found.argmax(0).unwrap().to_scalar::<u32>().unwrap();
            let scale = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
            for (found, expected) in values(&found).iter().zip(&expected) {
                assert!((found - expected).abs() <= 1e-5 * scale, "{found} {expected} {scale}");
            }
            position += ids.len();
            ids = vec![next];
        }
    }
}

#[test]
fn llama_of_candle_loads_the_same_weights() {
    let config = llama_config();
    let (dir, path) = checkpoint(DType::BF16, |vb| drop(llama::Llama::load(vb, &config).unwrap()));
    let model = Model::open(dir.path()).unwrap().budget(Bytes::kib(200)).build().unwrap();
    let pass = model.pass().unwrap();
    let ids = Tensor::new(&[IDS], &Device::Cpu).unwrap();
    let logits = |vb| {
        let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
        let llama = llama::Llama::load(vb, &config).unwrap();
        values(&llama.forward(&ids, 0, &mut cache).unwrap())
    };
    let found = logits(var_builder(&pass, DType::F32, &Device::Cpu));
    assert_eq!(found, logits(own(&path)));
    assert!(found.iter().any(|x| *x != 0.0));
}

#[test]
fn bert_with_streamed_layers_has_the_states_of_candle() {
    let config = bert::Config {
        vocab_size: 200,
        hidden_size: 64,
        num_hidden_layers: 6,
        num_attention_heads: 4,
        intermediate_size: 96,
        max_position_embeddings: 32,
        ..bert::Config::default()
    };
    let (dir, path) =
        checkpoint(DType::F32, |vb| drop(bert::BertModel::load(vb, &config).unwrap()));
    let ids = Tensor::new(&[IDS], &Device::Cpu).unwrap();
    let reference = bert::BertModel::load(own(&path), &config).unwrap();
    let expected = reference.forward(&ids, &ids.zeros_like().unwrap(), None).unwrap();
    let model = Model::open(dir.path()).unwrap().budget(Bytes::kib(300)).build().unwrap();
    for _ in 0..3 {
        let pass = model.pass().unwrap();
        let found = streamed_bert::forward(&pass, &config, &ids).unwrap();
        assert_eq!(values(&found), values(&expected));
    }
    assert!(model.engine().stats().in_use_high_water_bytes <= 300 << 10);
}

#[test]
fn products_are_those_of_candle() {
    let (dir, _path) = checkpoint(DType::BF16, |vb| {
        drop(candle_nn::linear(70, 45, vb.pp("layers.0.up")).unwrap());
    });
    let model = Model::open(dir.path()).unwrap().build().unwrap();
    let pass = model.pass().unwrap();
    let unit = pass.unit("layers.0").unwrap();
    let (weight, bias) = (unit.tensor("up.weight").unwrap(), unit.tensor("up.bias").unwrap());
    let copy = |tensor| to_tensor(tensor, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    let reference = candle_nn::Linear::new(copy(&weight), Some(copy(&bias)));
    let leased = Linear::new(weight).unwrap().with_bias(&bias).unwrap();
    drop((unit, pass, model)); // the layer keeps its weight
    for shape in [vec![1, 70], vec![2, 2, 70], vec![3, 5, 70], vec![0, 70]] {
        let x = Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap();
        let (found, expected) = (leased.forward(&x).unwrap(), reference.forward(&x).unwrap());
        assert_eq!(found.dims(), expected.dims());
        for (found, expected) in values(&found).iter().zip(values(&expected)) {
            assert!((found - expected).abs() < 1e-4, "{found} {expected}");
        }
    }
    let error = leased.forward(&Tensor::zeros((1, 69), DType::F32, &Device::Cpu).unwrap());
    assert!(error.unwrap_err().to_string().contains("expected inputs of F32 [.., 70]"));
}

#[test]
fn errors_are_those_of_candles_loader() {
    let (dir, path) = checkpoint(DType::F32, |vb| {
        drop(candle_nn::linear(8, 4, vb.pp("layers.0.up")).unwrap());
    });
    let model = Model::open(dir.path()).unwrap().build().unwrap();
    let pass = model.pass().unwrap();
    let streamed = var_builder(&pass, DType::F32, &Device::Cpu).pp("layers.0.up");
    let own = own(&path).pp("layers.0.up");
    assert!(streamed.contains_tensor("weight") && !streamed.contains_tensor("wight"));
    let missing = |vb: &VarBuilder<'_>| vb.get(4, "wight").unwrap_err().to_string();
    for error in [missing(&streamed), missing(&own)] {
        assert!(error.contains("layers.0.up.wight"), "{error}");
    }
    let shape = |vb: &VarBuilder<'_>| vb.get((8, 4), "weight").unwrap_err().to_string();
    assert_eq!(shape(&streamed).lines().next(), shape(&own).lines().next());
    let bias = pass.unit("layers.0").unwrap().tensor("up.bias").unwrap();
    assert!(Linear::new(bias).unwrap_err().to_string().contains("expected a matrix"));
}
