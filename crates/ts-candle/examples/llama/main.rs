// SPDX-License-Identifier: MIT OR Apache-2.0
//! Generates tokens with a Llama checkpoint that is larger than the budget.
//!
//! ```sh
//! cargo run --release --example llama -- DIR [BUDGET_MIB] [TOKENS] [ID ...]
//! ```
//!
//! DIR has a `config.json` and safetensors files, as on the Hugging Face Hub. With a budget of 0,
//! candle loads all weights itself, as f32. Prints the id of each token, the seconds that it took,
//! and the resident memory of the process.

mod streamed;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{self, Config, LlamaConfig};
use streamed::Llama;
use ts_candle::ts_orchestrator::Bytes;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let dir =
        Path::new(arguments.first().ok_or("usage: llama DIR [BUDGET_MIB] [TOKENS] [ID ...]")?);
    let number = |at: usize, default: usize| arguments.get(at).map_or(Ok(default), |n| n.parse());
    let (budget, tokens) = (Bytes::mib(number(1, 600)?), number(2, 8)?);
    let mut ids: Vec<u32> =
        arguments.iter().skip(3).map(|id| id.parse()).collect::<std::result::Result<_, _>>()?;
    if ids.is_empty() {
        ids = vec![1, 450, 7483, 310, 3444, 338];
    }
    let config = std::fs::read(dir.join("config.json"))?;
    let config = serde_json::from_slice::<LlamaConfig>(&config)?.into_config(false);
    let mut forward = if budget == Bytes(0) {
        in_memory(dir, &config)?
    } else {
        let mut llama = Llama::open(dir, budget, config)?;
        Box::new(move |ids: &[u32], position| llama.forward(ids, position))
    };
    let mut position = 0;
    for _ in 0..tokens {
        let begun = Instant::now();
        let logits = forward(&ids, position)?;
        let next = logits.argmax(0)?.to_scalar::<u32>()?;
        let (seconds, rss) = (begun.elapsed().as_secs_f64(), resident_bytes());
        println!("token {next}: {seconds:.3} s, {} MB resident", rss / 1_000_000);
        position += ids.len();
        ids = vec![next];
    }
    Ok(())
}

/// Returns the logits after the last of some ids, which follow a number of earlier ones.
type Forward = Box<dyn FnMut(&[u32], usize) -> Result<Tensor>>;

/// Loads candle's own model.
fn in_memory(dir: &Path, config: &Config) -> Result<Forward> {
    let files = std::fs::read_dir(dir)?.map(|entry| Ok(entry?.path()));
    let mut files = files.collect::<std::io::Result<Vec<PathBuf>>>()?;
    files.retain(|path| path.extension().is_some_and(|suffix| suffix == "safetensors"));
    // SAFETY: nothing writes to the files while this example runs.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &Device::Cpu)? };
    let llama = llama::Llama::load(vb, config)?;
    let mut cache = llama::Cache::new(true, DType::F32, config, &Device::Cpu)?;
    Ok(Box::new(move |ids, position| {
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        llama.forward(&ids, position, &mut cache)?.squeeze(0)
    }))
}

/// Returns the resident memory of this process, or 0 if the system does not tell.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
