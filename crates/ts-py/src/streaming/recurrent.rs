// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Recurrent`: the parameter lists of recurrent modules.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::inner::StreamerInner;

/// The list of parameters that a recurrent module keeps in addition to its dictionary.
///
/// Args:
///     module: A weak reference to the module.
///     stand_ins: The list, with stand-ins for streamed parameters.
///     keys: For each parameter in the list, the key of its weight, or None if it is not streamed.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Recurrent {
    list: FlatWeights,
    keys: Vec<Option<usize>>,
}

#[pymethods]
impl Recurrent {
    #[new]
    fn new(module: Py<PyAny>, stand_ins: Py<PyAny>, keys: Vec<Option<usize>>) -> Self {
        let list = FlatWeights { module: Arc::new(module), stand_ins: Arc::new(stand_ins) };
        Self { list, keys }
    }
}

impl Recurrent {
    pub(super) fn list(&self) -> &FlatWeights {
        &self.list
    }

    /// Returns the list with the parameters of the forward that runs on this thread.
    pub(super) fn current_parameters<'py>(
        &self,
        py: Python<'py>,
        inner: &StreamerInner,
    ) -> PyResult<Bound<'py, PyList>> {
        let grad = inner.torch.is_grad_enabled(py)?;
        let stand_ins = self.list.stand_ins.bind(py);
        let parameters = PyList::empty(py);
        for (index, key) in self.keys.iter().enumerate() {
            match key {
                Some(key) => parameters.append(inner.current_parameter(py, *key, grad)?)?,
                None => parameters.append(stand_ins.get_item(index)?)?,
            }
        }
        Ok(parameters)
    }
}

/// The attribute `_flat_weights` of a recurrent module.
#[derive(Clone)]
pub(super) struct FlatWeights {
    /// A weak reference to the module.
    module: Arc<Py<PyAny>>,
    stand_ins: Arc<Py<PyAny>>,
}

impl FlatWeights {
    /// Returns the module, or None if it no longer exists.
    pub(super) fn module<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let module = self.module.bind(py).call0()?;
        Ok((!module.is_none()).then_some(module))
    }

    /// Sets the attribute to the list of stand-ins, if the module still exists.
    pub(super) fn restore(&self, py: Python<'_>) {
        if let Ok(Some(module)) = self.module(py) {
            let _ = set_flat_weights(&module, self.stand_ins.bind(py));
        }
    }
}

/// Sets the attribute `_flat_weights` without calling the module's `__setattr__`.
pub(super) fn set_flat_weights(module: &Bound<'_, PyAny>, list: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = module.py();
    module
        .getattr(intern!(py, "__dict__"))?
        .cast::<PyDict>()?
        .set_item(intern!(py, "_flat_weights"), list)
}
