// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans for streaming a checkpoint.

use std::fmt::{self, Write as _};

use ts_orchestrator::{
    CurvePoint, Engine, EngineConfig, Plan, Rates, Requirement, Unit, UnitStats,
};

use crate::{Checkpoint, Error};

/// A plan for streaming a checkpoint. Its `Display` output is a table.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Explanation {
    /// Memory for weights, in bytes.
    pub budget_bytes: usize,
    /// Division of the budget between resident and streamed units.
    pub plan: Plan,
    /// Name, size and residency of each unit. The counters are 0.
    pub units: Vec<UnitStats>,
    /// The speeds that the prediction assumes.
    pub rates: Rates,
}

impl Checkpoint {
    /// Plans how to stream this checkpoint, with the units of
    /// [`units_by_module`](Self::units_by_module). Reads no files.
    ///
    /// # Errors
    /// Returns [`Error::Engine`] if the budget is too small. The error contains the smallest budget
    /// that works.
    pub fn explain(&self, config: &EngineConfig) -> Result<Explanation, Error> {
        self.explain_units(self.units_by_module(), config)
    }

    /// Like [`explain`](Self::explain), with these units.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::preview`].
    pub fn explain_units(
        &self,
        units: Vec<Unit>,
        config: &EngineConfig,
    ) -> Result<Explanation, Error> {
        let (plan, units) = Engine::preview(units, self.sources(), config)?;
        Ok(Explanation { budget_bytes: config.budget_bytes, plan, units, rates: config.rates })
    }

    /// Returns what passes over these units would be like with other budgets: with `budgets`, in
    /// bytes, or with `None`, with nine from the smallest that works to one with which no unit is
    /// streamed. Leaves out budgets that are too small. Reads no files.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::preview_curve`].
    pub fn curve(
        &self,
        units: Vec<Unit>,
        config: &EngineConfig,
        budgets: Option<&[usize]>,
    ) -> Result<Vec<CurvePoint>, Error> {
        let spread;
        let budgets = match budgets {
            Some(budgets) => budgets,
            None => {
                const STEPS: usize = 8;
                let sources = self.sources();
                let Requirement { smallest, whole, .. } =
                    Engine::requirement(units.clone(), sources, config, false)?;
                let step = (whole - smallest) / STEPS;
                spread = (0..=STEPS).map(|i| if i == STEPS { whole } else { smallest + i * step });
                &spread.collect::<Vec<_>>()
            }
        };
        Ok(Engine::preview_curve(units, self.sources(), config, budgets)?)
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
        let routed: Vec<u64> =
            self.units.iter().filter(|unit| unit.routed).map(|u| u.slot_bytes as u64).collect();
        if !routed.is_empty() {
            writeln!(
                f,
                "read if needed     {}   {} units, such as experts; not predicted",
                mib(routed.iter().sum()),
                routed.len()
            )?;
        }
        writeln!(f, "largest unit       {}   {largest}", mib(largest_bytes))?;
        let (seconds, limit) = (plan.predicted_pass_s, plan.bottleneck);
        write!(
            f,
            "predicted          {seconds:10.3} s a pass {}, limited by {limit}",
            speed(self.rates)
        )
    }
}

/// Describes a speed of reading, and where it is from.
fn speed(rates: Rates) -> String {
    let is_assumed = rates.read_bytes_per_s == Rates::default().read_bytes_per_s;
    let origin = if is_assumed { "assumed" } else { "as measured" };
    format!("at {:.3} GB/s ({origin})", rates.read_bytes_per_s / 1e9)
}

/// Returns a table of a curve.
pub fn curve_table(points: &[CurvePoint]) -> String {
    let mut table = "budget MiB   s a pass   reads MiB   limited by".to_owned();
    for point in points {
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let (budget, seconds) = (mib(point.budget_bytes as f64), point.predicted_pass_s);
        let (reads, limit) = (mib(point.streamed_bytes_per_pass as f64), point.bottleneck);
        let _ = write!(table, "\n{budget:10.1} {seconds:10.4} {reads:11.1}   {limit}");
    }
    table
}
