// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Pass`, which ends a pass over the units.

use std::sync::Arc;

use pyo3::prelude::*;

use super::inner::{RunningPass, StreamerInner};
use super::lease::Use;
use crate::errors::{with_pending_set_aside, written_error};

/// A pass over the units on one thread. Has no effect if the thread was already in a pass. Dropping
/// this object ends the pass.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Pass {
    begun: Option<(Arc<StreamerInner>, RunningPass)>,
}

#[pymethods]
impl Pass {
    /// Gives all modules the leased weights until ``take_back``, if all units are resident and
    /// autocast is disabled. Does nothing in a pass within another one.
    ///
    /// Args:
    ///     grad: Whether gradients are recorded.
    fn lend(&self, py: Python<'_>, grad: bool) -> PyResult<()> {
        match &self.begun {
            Some((inner, pass)) => inner.lend(py, pass, grad),
            None => Ok(()),
        }
    }

    /// Makes all modules lease their weights again, if they have leased weights for this pass.
    ///
    /// Returns:
    ///     A use to end, if a weight was written to or other objects reference its memory.
    fn take_back(&self, py: Python<'_>) -> Option<Use> {
        let (inner, pass) = self.begun.as_ref()?;
        let tensors = inner.end_lending(py, pass)?;
        Some(Use::of_tensors(inner, tensors))
    }

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
    pub(super) fn begin(py: Python<'_>, inner: &Arc<StreamerInner>) -> PyResult<Self> {
        let pass = inner.begin_pass(py)?;
        Ok(Self { begun: pass.map(|pass| (Arc::clone(inner), pass)) })
    }

    /// Begins a pass, or returns None if any thread is in a pass.
    pub(super) fn try_begin(py: Python<'_>, inner: &Arc<StreamerInner>) -> PyResult<Option<Self>> {
        let pass = inner.try_begin_pass(py)?;
        Ok(pass.map(|pass| Self { begun: Some((Arc::clone(inner), pass)) }))
    }

    /// Ends the pass. Returns whether to replan, and the names of weights that were written to.
    fn finish(&self, py: Python<'_>) -> (bool, Option<String>) {
        let Some((inner, pass)) = &self.begun else { return (false, None) };
        // Dropping a use ends it.
        drop(self.take_back(py));
        inner.end_pass(py, pass)
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        Python::attach(|py| with_pending_set_aside(py, || _ = self.close(py)));
    }
}
