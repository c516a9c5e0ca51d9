// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream plan`.

use serde_json::{Value, json};
use ts_orchestrator::{CurvePoint, Engine, EngineConfig};

use super::arguments::{CheckpointPath, at_least_one, budget};
use super::console::{Console, say};
use crate::{Checkpoint, Error, Speeds, available_bytes, curve_table};

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
    /// Also predict passes with other budgets.
    #[arg(long)]
    curve: bool,
}

pub(super) fn run(arguments: &Arguments, console: Console) -> Result<u8, Error> {
    let half_of_available = || available_bytes().map(|bytes| (bytes / 2) as usize);
    let budget = arguments.budget.or_else(half_of_available).ok_or(Error::NoBudget)?;
    let mut config = EngineConfig::with_budget(budget);
    config.max_passes = arguments.max_passes;
    let checkpoint = Checkpoint::open(&arguments.checkpoint.path)?;
    let units = checkpoint.units_by_module();
    let mut config = Speeds::default().recall(&checkpoint, &units, config);
    // A model can need other addresses of weights than those in a mapping of the file.
    let sources = checkpoint.sources();
    let least = Engine::requirement(units.clone(), sources, &config, true)?.smallest;
    if budget < least {
        config.budget_bytes = 0; // is refused too, for this reason
    }
    let mut explanation =
        checkpoint.explain_units(units.clone(), &config).map_err(|error| match error {
            Error::Engine(ts_orchestrator::Error::NeverFits(mut refusal)) => {
                (refusal.budget_bytes, refusal.smallest_budget_bytes) = (budget, least);
                ts_orchestrator::Error::NeverFits(refusal).into()
            }
            other => other,
        })?;
    explanation.plan.smallest_budget_bytes = least;
    let curve = match arguments.curve {
        true => Some(checkpoint.curve(units, &config, None)?),
        false => None,
    };
    if !console.json {
        say(explanation);
        say("assumes that all tensors are parameters; buffers of a model stay in memory");
        if let Some(curve) = curve {
            say(format_args!("\n{}", curve_table(&curve)));
        }
        return Ok(0);
    }
    let curve = curve.map(|points| {
        let point = |point: &CurvePoint| {
            json!({
                "budget_bytes": point.budget_bytes,
                "predicted_pass_s": point.predicted_pass_s,
                "streamed_bytes_per_pass": point.streamed_bytes_per_pass,
                "bottleneck": point.bottleneck.to_string(),
            })
        };
        points.iter().map(point).collect::<Vec<Value>>()
    });
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
        "read_bytes_per_s": explanation.rates.read_bytes_per_s,
        "units": units,
        "curve": curve,
    }));
    Ok(0)
}
