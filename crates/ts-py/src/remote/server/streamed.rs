// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors of checkpoints that stream to a session under a budget.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorstream::Error;
use tensorstream::exec::{ScalarType, StorageView};
use tensorstream::orchestrator::{
    Engine, EngineConfig, Lease, PassId, Phase, Unit, UnitId, UnitTensor, Verify,
};

use crate::dtype::row_of;
use crate::errors::to_python;
use crate::files::checkpoint::Checkpoint;

/// Tensors of a checkpoint that stream under a budget. They share an engine, which has one unit for
/// each of them.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct StreamedTensors {
    inner: Arc<Streamed>,
}

/// A tensor that streams. If an operator of a session returns it, it becomes a storage of the
/// session that is in memory only while an operator uses it.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct StreamedTensor {
    pub(super) of: Arc<Streamed>,
    pub(super) unit: UnitId,
    pub(super) view: StorageView,
    pub(super) bytes: u64,
}

/// An engine, and the pass that is running.
pub(super) struct Streamed {
    engine: Engine,
    pass: Mutex<Option<Pass>>,
}

/// A pass, which ends when its first unit is used again after others.
struct Pass {
    id: PassId,
    first: UnitId,
    has_left_first: bool,
}

#[pymethods]
impl StreamedTensors {
    /// Creates an engine for tensors of a checkpoint. Reads no tensor yet.
    ///
    /// Args:
    ///     checkpoint: The checkpoint.
    ///     names: The names of the tensors.
    ///     budget: The most memory for them, in bytes.
    ///     verify: Whether to compare bytes with their checksums when they are first read.
    ///
    /// Raises:
    ///     BudgetError: The budget is too small.
    ///     MissingTensorError: The checkpoint lacks one of the tensors.
    ///     StorageError: The system refuses memory or threads.
    ///
    /// Returns:
    ///     An object for the engine, and the tensors, in the order of the names.
    #[staticmethod]
    fn open(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        names: Vec<String>,
        budget: usize,
        verify: bool,
    ) -> PyResult<(Self, Vec<Py<StreamedTensor>>)> {
        let (mut units, mut described) = (Vec::new(), Vec::new());
        let catalog = checkpoint.inner.catalog();
        for name in &names {
            let tensor = catalog.require(name).map_err(|e| to_python(py, &e.into()))?;
            let row = row_of(tensor.dtype()).ok_or_else(|| {
                PyValueError::new_err(format!(
                    "cannot stream tensor `{name}`: unsupported dtype {}",
                    tensor.dtype()
                ))
            })?;
            let aligned = tensor.range().offset.is_multiple_of(row.bytes);
            let phase = if aligned { Phase::Mapped } else { Phase::At(0) };
            let streamed = UnitTensor::new(catalog, name, tensor.entry(), phase);
            units.push(Unit::new(name.as_str(), vec![streamed]));
            let dtype = ScalarType(row.scalar_type);
            let shape = checkpoint.torch_shape(py, tensor)?;
            let view = StorageView::contiguous(dtype, shape);
            described.push((view, tensor.range().len));
        }
        let mut config = EngineConfig::with_budget(budget);
        config.verify = if verify { Verify::Once } else { Verify::Never };
        let engine = py.detach(|| checkpoint.inner.engine(units, config));
        let engine = engine.map_err(|e| to_python(py, &e))?;
        let inner = Arc::new(Streamed { engine, pass: Mutex::default() });
        let tensor = |(unit, (view, bytes))| {
            let of = Arc::clone(&inner);
            Py::new(py, StreamedTensor { of, unit: UnitId(unit), view, bytes })
        };
        let tensors = (0..).zip(described).map(tensor).collect::<PyResult<_>>()?;
        Ok((Self { inner }, tensors))
    }

    /// Whether a session still has one of the tensors.
    #[getter]
    fn in_use(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }
}

impl Streamed {
    /// Leases units for an operator. Blocks until they are in memory.
    pub(super) fn acquire(&self, units: &[UnitId]) -> Result<Vec<Lease>, Error> {
        let pass = self.pass_for(units);
        Ok(self.engine.acquire_all(Some(pass), units)?)
    }

    /// Returns the pass to which a use of these units belongs, which is a new one if the last one
    /// has come to its beginning again.
    fn pass_for(&self, units: &[UnitId]) -> PassId {
        let mut running = self.pass.lock();
        if let Some(pass) = &mut *running {
            let is_first = units.contains(&pass.first);
            if !(is_first && pass.has_left_first) {
                pass.has_left_first |= !is_first;
                return pass.id;
            }
            if self.engine.end_pass(pass.id) {
                // Nothing is leased between operators.
                self.engine.replan();
            }
        }
        let id = self.engine.begin_pass();
        *running = Some(Pass { id, first: units[0], has_left_first: units.len() > 1 });
        id
    }
}
