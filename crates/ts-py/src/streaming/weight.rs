// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streamed parameters of a model.

use pyo3::prelude::*;
use tensorstream::format::TensorMeta;
use tensorstream::orchestrator::Unit;

/// A parameter: the number of its unit, its index in the unit, its shape and strides if they differ
/// from those of its bytes, its name, and its `torch.dtype`.
pub(super) type WeightSpec = (u32, usize, Option<(Vec<i64>, Vec<i64>)>, String, Py<PyAny>);

/// A streamed parameter of a model.
pub(super) struct Weight {
    /// The number of the unit that contains the parameter.
    pub(super) unit: usize,
    /// The index of the parameter's tensor in the unit.
    pub(super) index: usize,
    /// The dtype and shape of its bytes.
    pub(super) meta: TensorMeta,
    /// Its shape and strides, if they differ from those of its bytes.
    pub(super) strided: Option<(Vec<i64>, Vec<i64>)>,
    pub(super) name: String,
    /// Its `torch.dtype`.
    pub(super) dtype: Py<PyAny>,
}

impl Weight {
    /// Creates a parameter. Returns None if the unit or the tensor does not exist.
    pub(super) fn new(spec: WeightSpec, units: &[Unit]) -> Option<Self> {
        let (unit, index, strided, name, dtype) = spec;
        let unit = unit as usize;
        let meta = units.get(unit)?.tensors.get(index)?.entry.meta.clone();
        Some(Self { unit, index, meta, strided, name, dtype })
    }
}
