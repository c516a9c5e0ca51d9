// SPDX-License-Identifier: MIT OR Apache-2.0
//! Computes plans without an engine.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tensorstream::Speeds;
use tensorstream::orchestrator::{
    self as orchestrator, EngineConfig, Requirement, Table, Unit, UnitDemand, UnitId,
};

use super::engine::{Settings, TableSpec, UnitSpec, config, model_tables, model_units, unit_sets};
use super::stats::{curve_list, plan_dict, units_list};
use crate::errors::to_python;
use crate::files::checkpoint::Checkpoint;

/// Plans how to stream a checkpoint. Reads no weights.
///
/// Args:
///     checkpoint: The checkpoint.
///     budget: The memory for weights, in bytes.
///     settings: The settings of the engine; None for the defaults.
///     units: The units, as for ``Streamer``. None for those that the names of tensors suggest.
///     together: Sets of units that one operation needs at the same time.
///     tables: The tables, as for ``Streamer``.
///     smallest: The smallest budget that works if the units may be divided further, in bytes.
///
/// Returns:
///     The plan, the units, a description, and what predicts other budgets, with the keys "plan",
///     "units", "text" and "preview".
///
/// Raises:
///     BudgetError: The budget is too small.
#[pyfunction]
#[pyo3(signature = (checkpoint, *, budget, settings=None, units=None, together=Vec::new(),
    tables=Vec::new(), smallest=None))]
#[allow(clippy::too_many_arguments)] // called from Python, by name
pub(crate) fn plan<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    budget: usize,
    settings: Option<Settings>,
    units: Option<Vec<UnitSpec>>,
    together: Vec<Vec<u32>>,
    tables: Vec<TableSpec>,
    smallest: Option<usize>,
) -> PyResult<Bound<'py, PyDict>> {
    let tables = tables.into_iter().map(|(spec, _)| spec).collect();
    let units = match units {
        None => checkpoint.inner.units_by_module(),
        Some(units) => model_units(py, checkpoint, units)?,
    };
    let preview = Preview {
        settings,
        together: unit_sets(together),
        tables: model_tables(py, checkpoint, tables)?,
        checkpoint: checkpoint.inner.clone(),
        units,
    };
    let config = preview.config(budget)?;
    let explanation = preview.checkpoint.explain_units(preview.units.clone(), &config);
    let mut explanation = explanation.map_err(|e| to_python(py, &e))?;
    let least = &mut explanation.plan.smallest_budget_bytes;
    *least = smallest.unwrap_or(*least).min(*least);
    let dict = PyDict::new(py);
    dict.set_item("plan", plan_dict(py, &explanation.plan)?)?;
    dict.set_item("units", units_list(py, &explanation.units)?)?;
    dict.set_item("text", explanation.to_string())?;
    dict.set_item("preview", preview)?;
    Ok(dict)
}

/// What a plan was made from.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Preview {
    checkpoint: tensorstream::Checkpoint,
    units: Vec<Unit>,
    settings: Option<Settings>,
    together: Vec<Vec<UnitId>>,
    tables: Vec<Table>,
}

impl Preview {
    /// Returns the configuration of an engine, with the speeds that earlier runs measured.
    fn config(&self, budget: usize) -> PyResult<EngineConfig> {
        let config = config(budget, self.settings.as_ref())?
            .with_together(self.together.clone())
            .with_tables(self.tables.clone());
        Ok(Speeds::default().recall(&self.checkpoint, &self.units, config))
    }
}

#[pymethods]
impl Preview {
    /// Predicts passes with other budgets.
    ///
    /// Args:
    ///     budgets: Budgets in bytes. None for nine from the smallest that works to one with which
    ///         all units stay in memory.
    ///
    /// Returns:
    ///     A dictionary for each budget that works.
    fn curve<'py>(
        &self,
        py: Python<'py>,
        budgets: Option<Vec<usize>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let curve = self.checkpoint.curve(self.units.clone(), &self.config(0)?, budgets.as_deref());
        curve_list(py, &curve.map_err(|e| to_python(py, &e))?)
    }
}

/// Returns the smallest budget that works for these units, and the smallest budget with which all
/// of them stay in memory, in bytes.
///
/// Args:
///     checkpoint: The checkpoint that contains the tensors.
///     units: The units, as for ``Streamer``. None for those that the names of tensors suggest.
///     together: Sets of units that one operation needs at the same time.
///     settings: The settings of the engine.
///     tables: The tables, as for ``Streamer``.
///     any_phase: Whether the smallest budget also works for addresses modulo 64 with which all
///         tensors of a unit can be read in place, or none.
#[pyfunction]
#[pyo3(signature = (checkpoint, units, *, together, settings, tables=Vec::new(), any_phase=false))]
pub(crate) fn requirement(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    units: Option<Vec<UnitSpec>>,
    together: Vec<Vec<u32>>,
    settings: Settings,
    tables: Vec<TableSpec>,
    any_phase: bool,
) -> PyResult<(usize, usize)> {
    let units = match units {
        None => checkpoint.inner.units_by_module(),
        Some(units) => model_units(py, checkpoint, units)?,
    };
    let tables = tables.into_iter().map(|(spec, _)| spec).collect();
    let config = config(0, Some(&settings))?
        .with_together(unit_sets(together))
        .with_tables(model_tables(py, checkpoint, tables)?);
    let sources = checkpoint.inner.sources();
    orchestrator::Engine::requirement(units, sources, &config, any_phase)
        .map(|Requirement { smallest, whole, .. }| (smallest, whole))
        .map_err(|e| to_python(py, &e.into()))
}

/// Returns the smallest budget that works for units of these sizes, in bytes.
///
/// Args:
///     sizes: The size of each unit, in bytes.
///     together: Sets of units that one operation needs at the same time.
///     max_passes: The number of passes that may run at the same time.
#[pyfunction]
pub(crate) fn smallest_budget(
    sizes: Vec<usize>,
    together: Vec<Vec<u32>>,
    max_passes: usize,
) -> usize {
    let units: Vec<_> = sizes.into_iter().map(|bytes| UnitDemand::new("", bytes)).collect();
    orchestrator::smallest_budget(&units, &unit_sets(together), max_passes)
}
