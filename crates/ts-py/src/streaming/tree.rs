// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the modules of a model. Loading asks often, and models can have tens of thousands.

use std::collections::HashSet;
use std::ops::ControlFlow;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

/// Returns the attributes of a module.
pub(super) fn attributes_of<'py>(module: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    Ok(module.getattr(intern!(module.py(), "__dict__"))?.cast_into()?)
}

/// Calls a function with each name and value of a dictionary that is an attribute of a module, in
/// order, until it breaks. Skips None.
pub(super) fn for_each_entry<'py>(
    attributes: &Bound<'py, PyDict>,
    dictionary: &Bound<'py, PyString>,
    mut visit: impl FnMut(Bound<'py, PyAny>, Bound<'py, PyAny>) -> PyResult<ControlFlow<()>>,
) -> PyResult<()> {
    let Some(entries) = attributes.get_item(dictionary)? else { return Ok(()) };
    // The order of an `OrderedDict` is not that of its entries.
    if let Ok(entries) = entries.cast_exact::<PyDict>() {
        for (name, value) in entries.iter().filter(|(_, value)| !value.is_none()) {
            if visit(name, value)?.is_break() {
                break;
            }
        }
        return Ok(());
    }
    for entry in entries.call_method0(intern!(entries.py(), "items"))?.try_iter()? {
        let (name, value): (Bound<'py, PyAny>, Bound<'py, PyAny>) = entry?.extract()?;
        if !value.is_none() && visit(name, value)?.is_break() {
            break;
        }
    }
    Ok(())
}

/// Returns the name of a part of a module.
fn joined<'py>(
    prefix: &Bound<'py, PyString>,
    name: Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyString>> {
    let name = name.cast_into::<PyString>()?;
    Ok(match prefix.to_str()? {
        "" => name,
        prefix => PyString::new(name.py(), &format!("{prefix}.{}", name.to_str()?)),
    })
}

/// Returns a model and all modules in it, each once, in the order of ``nn.Module.modules``.
#[pyfunction]
pub(crate) fn modules<'py>(model: Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let children = intern!(model.py(), "_modules");
    let (mut seen, mut found, mut stack) = (HashSet::new(), Vec::new(), vec![model]);
    while let Some(module) = stack.pop() {
        if !seen.insert(module.as_ptr().addr()) {
            continue;
        }
        let begin = stack.len();
        for_each_entry(&attributes_of(&module)?, children, |_, child| {
            stack.push(child);
            Ok(ControlFlow::Continue(()))
        })?;
        stack[begin..].reverse();
        found.push(module);
    }
    Ok(found)
}

/// Returns a model and all modules in it with their names, as ``nn.Module.named_modules`` does.
///
/// Args:
///     model: The model.
///     prefix: The name of the model.
///     remove_duplicate: Whether a shared module has only its first name.
#[pyfunction]
pub(crate) fn named_modules<'py>(
    model: Bound<'py, PyAny>,
    prefix: Bound<'py, PyString>,
    remove_duplicate: bool,
) -> PyResult<Vec<(Bound<'py, PyString>, Bound<'py, PyAny>)>> {
    let children = intern!(model.py(), "_modules");
    let (mut seen, mut found, mut stack) = (HashSet::new(), Vec::new(), vec![(prefix, model)]);
    while let Some((name, module)) = stack.pop() {
        if remove_duplicate && !seen.insert(module.as_ptr().addr()) {
            continue;
        }
        let begin = stack.len();
        for_each_entry(&attributes_of(&module)?, children, |own, child| {
            stack.push((joined(&name, own)?, child));
            Ok(ControlFlow::Continue(()))
        })?;
        stack[begin..].reverse();
        found.push((name, module));
    }
    Ok(found)
}

/// Returns the parameters or buffers of a model with their names.
///
/// Args:
///     model: The model.
///     kind: The dictionary of a module that has them: ``_parameters`` or ``_buffers``.
///     remove_duplicate: Whether a shared one has only its first name.
#[pyfunction]
pub(crate) fn named_tensors<'py>(
    model: Bound<'py, PyAny>,
    kind: &Bound<'py, PyString>,
    remove_duplicate: bool,
) -> PyResult<Vec<(Bound<'py, PyString>, Bound<'py, PyAny>)>> {
    let py = model.py();
    let (mut seen, mut found) = (HashSet::new(), Vec::new());
    for (prefix, module) in named_modules(model, PyString::new(py, ""), remove_duplicate)? {
        for_each_entry(&attributes_of(&module)?, kind, |name, tensor| {
            if !remove_duplicate || seen.insert(tensor.as_ptr().addr()) {
                found.push((joined(&prefix, name)?, tensor));
            }
            Ok(ControlFlow::Continue(()))
        })?;
    }
    Ok(found)
}
