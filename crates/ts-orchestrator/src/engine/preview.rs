// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an engine would be like, without one.

use std::sync::Arc;

use ts_io::Source;

use crate::Error;
use crate::config::EngineConfig;
use crate::plan::{CurvePoint, Plan, Residency};
use crate::prepared::PreparedUnit;
use crate::sizing::{Place, Preparation, Requirement, Sizing};
use crate::stats::UnitStats;
use crate::unit::Unit;

use super::Engine;

impl Engine {
    /// Returns the plan that an engine would start with, and the initial statistics of each unit.
    /// The engine is one in host memory, unless the configuration has
    /// [`device_memory`](crate::EngineConfig::device_memory).
    ///
    /// Reserves no memory for weights, starts no threads and reads nothing.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new), except those of the backend and the system.
    pub fn preview(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
    ) -> Result<(Plan, Vec<UnitStats>), Error> {
        let Sizing { units, plan, least_buffer_bytes, .. } =
            Sizing::new(units, sources, config, Place::of_preview(config))?;
        let stats = units.iter().zip(&plan.residency).map(|(unit, &residency)| UnitStats {
            resident: residency == Residency::Resident,
            ..unit.initial_stats()
        });
        let stats = stats.collect();
        Ok((plan.with_buffers(least_buffer_bytes), stats))
    }

    /// Returns the smallest budget that works for units, and the smallest one with which no unit is
    /// streamed. Ignores the budget in `config`. Empty units need no memory.
    ///
    /// With `any_phase`, the smallest budget also works for [phases](crate::Phase) with which all
    /// tensors of a unit can be read in place, or none.
    ///
    /// Reserves no memory for weights, starts no threads and reads nothing.
    ///
    /// # Errors
    /// Returns the errors of [`preview`](Self::preview), except those of a budget.
    pub fn requirement(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
        any_phase: bool,
    ) -> Result<Requirement, Error> {
        Requirement::new(units, sources, config, any_phase)
    }

    /// Returns what passes of an engine like that of [`preview`](Self::preview) would be like with
    /// each of these budgets, in bytes. Leaves out budgets that are too small. Ignores the budget
    /// in `config`.
    ///
    /// Reserves no memory for weights, starts no threads and reads nothing.
    ///
    /// # Errors
    /// Returns the errors of [`preview`](Self::preview), except those of a budget.
    pub fn preview_curve(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
        budgets: &[usize],
    ) -> Result<Vec<CurvePoint>, Error> {
        let Preparation { units, order, overhead, .. } =
            Preparation::new(units, sources, config, Place::of_preview(config))?;
        let demands = PreparedUnit::demands(&units, &config.compute, config.rates);
        let request = config.plan_request(&demands, &order);
        Ok(overhead.curve(request, &config.tables, config.prefetch, budgets))
    }
}
