// SPDX-License-Identifier: MIT OR Apache-2.0
//! Embeds a sentence with a BERT checkpoint that is larger than the budget.
//!
//! ```sh
//! cargo run --release --example bert -- DIR [BUDGET_MIB] [ID ...]
//! ```
//!
//! The encoder's layers are candle's own: each is loaded from its unit, used and dropped. Prints
//! the mean of the last hidden states.

use std::error::Error;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use candle_transformers::models::bert::{BertEncoder, BertModel, Config};
use ts_candle::ts_orchestrator::{Bytes, Model, Pass};

#[allow(dead_code)] // the tests include this file, and call only `forward`
fn main() -> std::result::Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let dir = Path::new(arguments.first().ok_or("usage: bert DIR [BUDGET_MIB] [ID ...]")?);
    let budget = Bytes::mib(arguments.get(1).map_or(Ok(64), |n| n.parse())?);
    let mut ids: Vec<u32> =
        arguments.iter().skip(2).map(|id| id.parse()).collect::<std::result::Result<_, _>>()?;
    if ids.is_empty() {
        ids = vec![101, 7592, 2088, 102];
    }
    let config: Config = serde_json::from_slice(&std::fs::read(dir.join("config.json"))?)?;
    let model = Model::open(dir)?.budget(budget).build()?;
    let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
    let states = forward(&model.pass()?, &config, &ids)?;
    println!("{}", states.mean(1)?);
    Ok(())
}

/// Returns the last hidden states of a pass, which has all positions see each other.
pub(crate) fn forward(pass: &Pass, config: &Config, ids: &Tensor) -> Result<Tensor> {
    let vb = ts_candle::var_builder(pass, DType::F32, &Device::Cpu);
    // A model without layers is the embeddings.
    let none = Config { num_hidden_layers: 0, ..config.clone() };
    let mut states = BertModel::load(vb.clone(), &none)?.forward(ids, &ids.zeros_like()?, None)?;
    let mask = Tensor::zeros((1, 1, 1, ids.dim(1)?), DType::F32, &Device::Cpu)?;
    let one = Config { num_hidden_layers: 1, ..config.clone() };
    for layer in 0..config.num_hidden_layers {
        let name = move |name: &str| name.replace("layer.0.", &format!("layer.{layer}."));
        let encoder = BertEncoder::load(vb.clone().rename_f(name).pp("encoder"), &one)?;
        states = encoder.forward(&states, &mask)?;
    }
    Ok(states)
}
