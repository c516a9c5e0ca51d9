// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls of modules, which lend streamed weights to forwards and are passes.
//!
//! `nn.Module.__call__` is the only place through which every forward goes. Nothing is stored in a
//! module: what it uses is looked up in its parameters, at each call.

use std::ops::ControlFlow;
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};
use smallvec::SmallVec;

use super::lease::Use;
use super::outermost_call::{Call, end_passes, has_function_modes};
use super::shared::Shared;
use super::tree::{attributes_of, for_each_entry};
use super::weight_ref::{Own, WeightRef};

/// What `call_module` needs of Python. See `_calls.py`.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct ModuleCalls {
    /// The method `__call__` of `nn.Module` that was replaced.
    original: Py<PyAny>,
    /// Returns whether a forward records gradients: of its positional arguments, with the module as
    /// the first one, and the others.
    records_gradients: Py<PyAny>,
    /// Returns the result of a forward without leased weights: of the result and the use.
    without_weights: Py<PyAny>,
    /// Returns the number of PyTorch's modes that see functions, such as those of users.
    function_modes: Py<PyAny>,
    /// A class of contexts without these modes.
    no_function_modes: Py<PyAny>,
    /// Functions that announce what a module is about to use, by its `id`.
    announcers: Py<PyDict>,
    /// The classes of streamed parameters.
    classes: Vec<Py<PyType>>,
}

#[pymethods]
impl ModuleCalls {
    #[new]
    fn new(
        py: Python<'_>,
        original: Py<PyAny>,
        records_gradients: Py<PyAny>,
        without_weights: Py<PyAny>,
        announcers: Py<PyDict>,
        classes: Vec<Py<PyType>>,
    ) -> PyResult<Self> {
        let native = py.import("torch")?.getattr("_C")?;
        Ok(Self {
            original,
            records_gradients,
            without_weights,
            function_modes: native.getattr("_len_torch_function_stack")?.unbind(),
            no_function_modes: native.getattr("DisableTorchFunction")?.unbind(),
            announcers,
            classes,
        })
    }

    /// Calls a module. Lends it its weights while it runs.
    ///
    /// Args:
    ///     module: The module.
    ///     args: The positional arguments of the call.
    ///     kwargs: The other arguments.
    fn call<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = args.py();
        let mut all: SmallVec<[Bound<'py, PyAny>; 4]> = SmallVec::new();
        all.push(module.clone());
        all.extend(args.iter());
        let args = &PyTuple::new(py, all)?;
        let call = Call::begin(module, || self.function_modes.call0(py)?.is_truthy(py))?;
        let result = self.call_announced(module, args, kwargs);
        drop(call);
        match end_passes(py, result.is_ok()) {
            Some(error) if result.is_ok() => Err(error),
            _ => result,
        }
    }

    /// Calls the forward of a module if its unit is in memory, and otherwise returns None. The
    /// caller must not record gradients.
    fn forward_if_present<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = module.py();
        let attributes = attributes_of(module)?;
        let own = self.own_parameters(&attributes)?;
        let Some((shared, unit)) = unit_of_leaf(&attributes, &own)? else { return Ok(None) };
        let Some(used) = Use::if_present(py, &shared, unit, &own)? else { return Ok(None) };
        let result = module.getattr(intern!(py, "forward"))?.call1(args);
        let used = match used.finish(py)? {
            Some(used) => used,
            None => return result.map(Some),
        };
        used.close(py);
        result.map(Some)
    }
}

impl ModuleCalls {
    fn call_announced<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = module.py();
        let announcers = self.announcers.bind(py);
        let announcer = match announcers.is_empty() {
            true => None,
            false => announcers.get_item(module.as_ptr().addr())?,
        };
        let announced = announcer.map(|announcer| announcer.call1((args, kwargs)));
        let announced = announced.transpose()?;
        let result = self.call_with_weights(module, args, kwargs);
        if let Some(announced) = announced
            && !announced.is_none()
        {
            announced.call_method0(intern!(py, "close"))?;
        }
        result
    }

    fn call_with_weights<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
        kwargs: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = module.py();
        let attributes = attributes_of(module)?;
        let own = self.own_parameters(&attributes)?;
        let Some((shared, unit)) = unit_of_leaf(&attributes, &own)? else {
            return self.original.bind(py).call(args, Some(kwargs));
        };
        let used = self.without_modes(py, || {
            let lent: &[Own<'_>] = match self.lends(&shared, &own, args, kwargs)? {
                true => &own,
                false => &[],
            };
            Use::for_forward(py, &shared, unit, lent)
        })?;
        // If the call fails, dropping the use ends it.
        let result = self.original.bind(py).call(args, Some(kwargs))?;
        self.without_modes(py, || {
            let Some(used) = used.finish(py)? else { return Ok(result) };
            let used = Bound::new(py, used)?;
            // Afterwards, nothing here references the memory any more.
            let without_weights = self.without_weights.bind(py);
            let result = shared
                .torch
                .uncompiled(py, || without_weights.call1((result, &used, own[0].weight.clone())))?;
            used.get().close(py);
            Ok(result)
        })
    }

    /// Calls a function whose work modes of the user do not see.
    fn without_modes<T>(&self, py: Python<'_>, call: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
        if !has_function_modes() {
            return call();
        }
        let guard = self.no_function_modes.bind(py).call0()?;
        guard.call_method0(intern!(py, "__enter__"))?;
        let result = call();
        guard.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None()))?;
        result
    }

    /// Returns the streamed parameters among those of a module.
    fn own_parameters<'py>(
        &self,
        attributes: &Bound<'py, PyDict>,
    ) -> PyResult<SmallVec<[Own<'py>; 2]>> {
        let mut own = SmallVec::new();
        for_each_entry(attributes, intern!(attributes.py(), "_parameters"), |_, parameter| {
            let class = parameter.get_type();
            if self.classes.iter().any(|each| class.is(each))
                && let Some(weight) = WeightRef::of(&parameter)
            {
                own.push(Own { parameter, weight });
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(own)
    }

    /// Returns whether the parameters get the memory of the unit.
    ///
    /// An autograd graph of leased weights would keep their memory until backward. A graph of
    /// stand-ins does not, because backward leases the weights again.
    fn lends(
        &self,
        shared: &Shared,
        own: &[Own<'_>],
        args: &Bound<'_, PyTuple>,
        kwargs: &Bound<'_, PyDict>,
    ) -> PyResult<bool> {
        let py = args.py();
        if !shared.torch.is_grad_enabled(py)? {
            return Ok(true);
        }
        for Own { parameter, .. } in own {
            if shared.torch.requires_grad(parameter)? {
                return Ok(false);
            }
        }
        let records_gradients = self.records_gradients.bind(py);
        let records = shared.torch.uncompiled(py, || records_gradients.call1((args, kwargs)))?;
        Ok(!records.is_truthy()?)
    }
}

/// Returns the unit of a module whose forward leases it, and the streamer.
///
/// Such a module uses one unit only, has no divided weights, and no module below it has parameters.
/// The weights of other modules are leased for each operation, so that no unit stays leased while
/// another one is needed.
fn unit_of_leaf(
    attributes: &Bound<'_, PyDict>,
    own: &[Own<'_>],
) -> PyResult<Option<(Arc<Shared>, usize)>> {
    let Some(first) = own.first() else { return Ok(None) };
    let Some(shared) = first.weight.get().shared() else { return Ok(None) };
    let unit_of = |each: &Own<'_>| {
        let weight = each.weight.get();
        let is_own = weight.shared().is_some_and(|other| Arc::ptr_eq(&other, &shared));
        let is_own = is_own && weight.is_whole();
        shared.weights.get(weight.key()).filter(|_| is_own).map(|weight| weight.unit)
    };
    let Some(unit) = unit_of(first) else { return Ok(None) };
    if own[1..].iter().any(|each| unit_of(each) != Some(unit)) || has_parameters_below(attributes)?
    {
        return Ok(None);
    }
    Ok(Some((shared, unit)))
}

/// Returns whether a module below this one has parameters.
fn has_parameters_below(attributes: &Bound<'_, PyDict>) -> PyResult<bool> {
    let py = attributes.py();
    let mut found = false;
    for_each_entry(attributes, intern!(py, "_modules"), |_, child| {
        let attributes = attributes_of(&child)?;
        for_each_entry(&attributes, intern!(py, "_parameters"), |_, _| {
            found = true;
            Ok(ControlFlow::Break(()))
        })?;
        found = found || has_parameters_below(&attributes)?;
        Ok(if found { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(found)
}
