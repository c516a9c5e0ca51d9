// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream plan`.

use serde_json::{Value, json};
use ts_orchestrator::EngineConfig;

use super::arguments::{CheckpointPath, at_least_one, budget};
use super::console::{Console, say};
use crate::{Checkpoint, Error, available_bytes};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    checkpoint: CheckpointPath,
    /// The memory for weights, such as 600MiB, or a share of the available memory, such as 25%. By
    /// default, half of the available memory.
    #[arg(long, value_parser = budget)]
    budget: Option<usize>,
    /// Number of forward passes that can run at the same time.
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    max_passes: usize,
}

pub(super) fn run(arguments: &Arguments, console: Console) -> Result<u8, Error> {
    let half_of_available = || available_bytes().map(|bytes| (bytes / 2) as usize);
    let budget = arguments.budget.or_else(half_of_available).ok_or(Error::NoBudget)?;
    let mut config = EngineConfig::with_budget(budget);
    config.max_passes = arguments.max_passes;
    let explanation = Checkpoint::open(&arguments.checkpoint.path)?.explain(&config)?;
    if !console.json {
        say(explanation);
        return Ok(0);
    }
    let plan = &explanation.plan;
    let units = explanation.units.iter().map(
        |unit| json!({ "name": unit.name, "bytes": unit.slot_bytes, "resident": unit.resident }),
    );
    let units: Vec<Value> = units.collect();
    say(json!({
        "budget_bytes": explanation.budget_bytes,
        "smallest_budget_bytes": plan.smallest_budget_bytes,
        "resident_bytes": plan.resident_bytes,
        "ring_bytes": plan.ring_bytes,
        "peak_bytes": plan.peak_bytes(),
        "streamed_bytes_per_pass": plan.streamed_bytes_per_pass,
        "predicted_pass_s": plan.predicted_pass_s,
        "bottleneck": plan.bottleneck.to_string(),
        "units": units,
    }));
    Ok(0)
}
