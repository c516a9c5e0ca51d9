// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream demo`.

use std::path::PathBuf;
use std::time::Instant;

use serde_json::json;
use ts_format::{Dtype, TensorMeta};
use ts_orchestrator::{EngineConfig, EngineStats, UnitId};

use super::arguments::{at_least_one, budget};
use super::console::{Console, MIB, say};
use crate::{Checkpoint, Error, FileWriter, NewTensor, WriteOptions};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The checkpoint to stream. By default, 256 MiB of random weights in the temporary directory.
    path: Option<PathBuf>,
    /// The memory for weights, such as 600MiB. By default, a third of the weights or, if that is
    /// too small, the smallest budget that works.
    #[arg(long, value_parser = budget)]
    budget: Option<usize>,
    /// Number of passes over all units.
    #[arg(long, default_value_t = 5, value_parser = at_least_one)]
    passes: usize,
}

pub(super) fn run(
    arguments: &Arguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let random = match &arguments.path {
        Some(_) => None,
        None => Some(RandomCheckpoint::create(interrupt)?),
    };
    let path = arguments.path.as_ref().or(random.as_ref().map(|random| &random.path));
    let checkpoint =
        Checkpoint::open(path.expect("a random checkpoint exists if there is no argument"))?;
    let units = checkpoint.units_by_module();
    let weights: u64 = checkpoint.catalog().tensors().map(|tensor| tensor.range().len).sum();
    let third = (weights / 3) as usize;
    let budget = match (arguments.budget, checkpoint.explain(&EngineConfig::with_budget(third))) {
        (Some(budget), _) => budget,
        (None, Err(Error::Engine(ts_orchestrator::Error::NeverFits(refusal)))) => {
            refusal.smallest_budget_bytes
        }
        (None, _) => third,
    };
    let engine = checkpoint.engine(units, EngineConfig::with_budget(budget))?;
    let began = Instant::now();
    for _ in 0..arguments.passes {
        let pass = engine.begin_pass_interruptible(interrupt)?;
        for unit in 0..engine.unit_count() as u32 {
            engine.acquire_interruptible(Some(pass), UnitId(unit), interrupt)?;
            // `acquire_interruptible` calls `interrupt` only if it waits.
            if interrupt() {
                return Err(Error::Interrupted);
            }
        }
        if engine.end_pass(pass) {
            engine.replan_interruptible(interrupt)?;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    print(console, &engine.stats(), weights, budget, arguments.passes, seconds);
    Ok(0)
}

fn print(
    console: Console,
    stats: &EngineStats,
    weights: u64,
    budget: usize,
    passes: usize,
    seconds: f64,
) {
    let read = stats.total_read_bytes();
    let paths: Vec<_> = stats.read_bytes.iter().filter(|(_, bytes)| *bytes > 0).collect();
    if console.json {
        let paths: serde_json::Map<_, _> =
            paths.iter().map(|(p, b)| (p.name().into(), json!(b))).collect();
        say(json!({
            "weight_bytes": weights, "budget_bytes": budget, "passes": passes, "seconds": seconds,
            "read_bytes": read, "read_bytes_by_path": paths, "backend": stats.backend,
            "reserved_high_water_bytes": stats.reserved_high_water_bytes,
        }));
        return;
    }
    let paths: Vec<_> =
        paths.iter().map(|(p, b)| format!("{} {:.1} MiB", p.name(), *b as f64 / MIB)).collect();
    say(format_args!(
        "weights {:.1} MiB, budget {:.1} MiB",
        weights as f64 / MIB,
        budget as f64 / MIB
    ));
    say(format_args!("{passes} passes in {seconds:.2} s; each unit was in memory once per pass"));
    say(format_args!(
        "read {:.1} MiB ({}), {:.2} GB/s",
        read as f64 / MIB,
        paths.join(", "),
        read as f64 / seconds / 1e9
    ));
    say(format_args!("peak memory {:.1} MiB", stats.reserved_high_water_bytes as f64 / MIB));
}

/// A checkpoint of random weights. Dropping it removes the file.
struct RandomCheckpoint {
    path: PathBuf,
}

impl RandomCheckpoint {
    fn create(interrupt: &mut dyn FnMut() -> bool) -> Result<Self, Error> {
        const LAYERS: usize = 16;
        const SIDE: u64 = 2048;
        let path =
            std::env::temp_dir().join(format!("tensorstream-demo-{}.ts", std::process::id()));
        let meta = TensorMeta { dtype: Dtype::F32, shape: vec![SIDE, SIDE] };
        let tensors = (0..LAYERS).map(|i| NewTensor {
            name: format!("layers.{i}.weight"),
            meta: meta.clone(),
            phase: None,
        });
        let mut writer = FileWriter::create(
            &path,
            tensors.collect(),
            Default::default(),
            WriteOptions::default(),
            interrupt,
        )?;
        let mut state = 1u32;
        let mut row = vec![0u8; 1 << 20];
        for _ in 0..LAYERS * (SIDE * SIDE * 4) as usize / row.len() {
            for value in row.chunks_exact_mut(4) {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                value.copy_from_slice(&state.to_le_bytes());
            }
            writer.write(&row)?;
            if interrupt() {
                return Err(Error::Interrupted);
            }
        }
        writer.commit()?;
        Ok(Self { path })
    }
}

impl Drop for RandomCheckpoint {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
