// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `UnitForward`: the forward of a module that uses one unit.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::{PyDict, PyTuple, PyWeakref, PyWeakrefMethods};

use super::inner::{Streamer, StreamerInner};
use super::lease::Use;
use super::unit_tensors::UnitTensors;
use crate::errors::written_error;

/// Calls a method of a module while the unit of the module has a kept lease. Otherwise, calls the
/// method ``lease_and_call`` of a subclass, with the same arguments.
///
/// Args:
///     streamer: The streamer.
///     unit: The number of the unit.
///     module: A weak reference to the module.
///     method: The function to call with the module and the arguments. None if every call is one of
///         ``lease_and_call``.
#[pyclass(frozen, subclass, module = "tensorstream._native")]
pub(crate) struct UnitForward {
    inner: Arc<StreamerInner>,
    unit: usize,
    module: Py<PyWeakref>,
    method: Option<Py<PyAny>>,
}

#[pymethods]
impl UnitForward {
    #[new]
    fn new(
        streamer: &Streamer,
        unit: u32,
        module: Py<PyWeakref>,
        method: Option<Py<PyAny>>,
    ) -> Self {
        Self { inner: Arc::clone(&streamer.inner), unit: unit as usize, module, method }
    }

    #[pyo3(signature = (*args, **kwargs))]
    fn __call__<'py>(
        slf: &Bound<'py, Self>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let Some((method, tensors)) = this.begin(py)? else {
            return slf.getattr(intern!(py, "lease_and_call"))?.call(args, kwargs);
        };
        let result = this.call(method.bind(py), args, kwargs);
        let ended = this.inner.end(py, tensors, Some(std::thread::current().id()));
        // Dropping this use closes it.
        let leaked = ended.leaked.map(|leaked| Use::of_leaked(&this.inner, leaked));
        match (result, ended.written, leaked) {
            (Err(error), ..) => Err(error),
            (Ok(_), Some(name), _) => Err(written_error(py, &format!("`{name}`"))),
            (Ok(result), None, None) => Ok(result),
            (Ok(result), None, Some(leaked)) => {
                let leaked = Bound::new(py, leaked)?;
                let method = intern!(py, "without_weights");
                // Afterwards, nothing here references the memory any more.
                let result = slf.call_method1(method, (result, &leaked))?;
                leaked.get().close(py);
                Ok(result)
            }
        }
    }

    /// Lets the cycle collector find the method, which can refer to the module.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.module)?;
        visit.call(&self.method)
    }
}

impl UnitForward {
    /// Begins to lend the weights to this thread, if the caller records no gradients and the lease
    /// of the unit is kept.
    fn begin(&self, py: Python<'_>) -> PyResult<Option<(&Py<PyAny>, Arc<UnitTensors>)>> {
        let Some(method) = &self.method else { return Ok(None) };
        if !self.inner.keeps_leases() || self.inner.torch.is_grad_enabled(py)? {
            return Ok(None);
        }
        let stream = self.inner.current_stream(py)?;
        let Some(tensors) = self.inner.use_kept(self.unit) else { return Ok(None) };
        if let Err(error) = self.inner.use_on(py, stream.as_ref(), &tensors) {
            self.inner.end(py, tensors, None);
            return Err(error);
        }
        tensors.begin_forward();
        Ok(Some((method, tensors)))
    }

    fn call<'py>(
        &self,
        method: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = method.py();
        let module = self.module.bind(py).upgrade();
        let module = module.unwrap_or_else(|| py.None().into_bound(py));
        let all: Vec<_> = std::iter::once(module).chain(args.iter()).collect();
        method.call(PyTuple::new(py, all)?, kwargs)
    }
}
