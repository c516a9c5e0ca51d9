// SPDX-License-Identifier: MIT OR Apache-2.0
//! What streaming a checkpoint would do, before anything is loaded.

use std::fmt;

use ts_orchestrator::{Engine, EngineConfig, Plan, Unit, UnitStats};

use crate::{Checkpoint, Error};

/// A plan, and what it is about. Printing it gives a table.
#[derive(Debug, Clone)]
pub struct Explanation {
    /// All memory for weights, in bytes.
    pub budget_bytes: usize,
    /// How it would be used.
    pub plan: Plan,
    /// Name, size and residency of each unit; nothing has happened to them yet.
    pub units: Vec<UnitStats>,
}

impl Checkpoint {
    /// Plans the streaming of this checkpoint by its tensors' names. Reads nothing.
    ///
    /// # Errors
    /// [`Error::Engine`] when the budget can never work: the message names the smallest that would
    /// do.
    pub fn explain(&self, config: &EngineConfig) -> Result<Explanation, Error> {
        let (plan, units) = Engine::preview(self.units_by_module(), self.sources(), config)?;
        Ok(Explanation { budget_bytes: config.budget_bytes, plan, units })
    }
}

impl Checkpoint {
    /// The smallest budget under which units of this checkpoint can run, whatever the
    /// configuration's, and the one under which none is streamed, in bytes. Reads nothing.
    ///
    /// # Errors
    /// As [`Engine::preview`], but for budgets.
    pub fn requirement(
        &self,
        units: Vec<Unit>,
        mut config: EngineConfig,
    ) -> Result<(usize, usize), Error> {
        config.budget_bytes = 0;
        let smallest = match Engine::preview(units.clone(), self.sources(), &config) {
            Err(ts_orchestrator::Error::NeverFits(refusal)) => refusal.smallest_budget_bytes,
            // Units without bytes need none.
            other => other.map(|_| 0)?,
        };
        config.budget_bytes = usize::MAX >> 1;
        let (plan, _) = Engine::preview(units, self.sources(), &config)?;
        Ok((smallest, plan.peak_bytes().max(smallest)))
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| format!("{:10.1} MiB", bytes as f64 / f64::from(1 << 20));
        let plan = &self.plan;
        let kept = self.units.iter().filter(|unit| unit.resident).count();
        let largest = self.units.iter().max_by_key(|unit| unit.slot_bytes);
        let (largest_bytes, largest) =
            largest.map_or((0, "-"), |u| (u.slot_bytes as u64, u.name.as_str()));
        writeln!(f, "budget             {}", mib(self.budget_bytes as u64))?;
        writeln!(f, "smallest budget    {}", mib(plan.smallest_budget_bytes as u64))?;
        let units = self.units.len();
        writeln!(
            f,
            "kept in memory     {}   {kept} of {units} units",
            mib(plan.resident_bytes as u64)
        )?;
        writeln!(
            f,
            "ring               {}   for the units that are streamed",
            mib(plan.ring_bytes as u64)
        )?;
        writeln!(f, "streamed per pass  {}", mib(plan.streamed_bytes_per_pass))?;
        writeln!(f, "largest unit       {}   {largest}", mib(largest_bytes))?;
        let (seconds, limit) = (plan.predicted_pass_s, plan.bottleneck);
        write!(f, "predicted          {seconds:10.3} s a pass at 1 GB/s, limited by {limit}")
    }
}
