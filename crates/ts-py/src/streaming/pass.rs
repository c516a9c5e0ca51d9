// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Pass`, which ends a pass over the units.

use std::sync::Arc;

use pyo3::prelude::*;

use super::passes::RunningPass;
use super::shared::Shared;
use crate::errors::written_error;

/// A pass over the units on one thread. Has no effect if the thread was already in a pass. Dropping
/// this object ends the pass.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Pass {
    begun: Option<(Arc<Shared>, RunningPass)>,
}

#[pymethods]
impl Pass {
    /// Ends the pass. Does nothing if the pass has already ended.
    ///
    /// Returns:
    ///     Whether ``Streamer.replan`` should be called.
    ///
    /// Raises:
    ///     ModelError: A weight was written to without PyTorch noticing. Its unit is read again for
    ///         the next use.
    fn end(&self, py: Python<'_>) -> PyResult<bool> {
        match self.finish(py) {
            (_, Some(names)) => Err(written_error(py, &names)),
            (replan, None) => Ok(replan),
        }
    }

    /// Ends the pass like `end`, but does not report weights that were written to. Does nothing if
    /// the pass has already ended.
    ///
    /// Returns:
    ///     Whether ``Streamer.replan`` should be called.
    fn close(&self, py: Python<'_>) -> bool {
        self.finish(py).0
    }
}

impl Pass {
    pub(super) fn begin(py: Python<'_>, shared: &Arc<Shared>) -> PyResult<Self> {
        let pass = shared.begin_pass(py)?;
        Ok(Self { begun: pass.map(|pass| (Arc::clone(shared), pass)) })
    }

    /// Ends the pass. Returns whether to replan, and the names of weights that were written to.
    fn finish(&self, py: Python<'_>) -> (bool, Option<String>) {
        match &self.begun {
            Some((shared, pass)) => shared.end_pass(py, pass),
            None => (false, None),
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        Python::attach(|py| self.close(py));
    }
}
