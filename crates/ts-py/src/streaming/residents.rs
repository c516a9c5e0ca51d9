// SPDX-License-Identifier: MIT OR Apache-2.0
//! Leases of all units while all are resident, and the modules that have the leased weights.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyType};
use tensorstream::orchestrator::Lease;

use super::torch::Torch;
use super::unit_tensors::UnitTensors;

/// Leases of all units. They are kept from pass to pass.
pub(super) struct Residents {
    /// The tensors of all units, in the order of the units.
    pub(super) tensors: Vec<Arc<UnitTensors>>,
    /// Further leases of units whose tensors already had one.
    _extra_leases: Vec<Lease>,
    /// The tensors that existed when nothing was written to and nothing else referenced them.
    unchanged: Mutex<Option<Unchanged>>,
}

/// Tensors to compare with those of a later time, all at once.
struct Unchanged {
    tensors: Py<PyList>,
    /// The addresses of their storages.
    storages: Py<PyList>,
    /// The number of owners of all storages.
    owners: usize,
}

impl Residents {
    pub(super) fn new(tensors: Vec<Arc<UnitTensors>>, extra_leases: Vec<Lease>) -> Self {
        Self { tensors, _extra_leases: extra_leases, unchanged: Mutex::default() }
    }

    /// Drops the further leases, and returns the tensors.
    pub(super) fn into_tensors(self) -> Vec<Arc<UnitTensors>> {
        self.tensors
    }

    /// Returns whether a weight was written to, or anything else references the memory of a unit.
    pub(super) fn need_checks(&self, py: Python<'_>, torch: &Torch) -> bool {
        let before = self.unchanged.lock().take();
        let holds = |before: &Unchanged| before.holds(py, &self.tensors, torch).unwrap_or(false);
        if let Some(before) = before.filter(holds) {
            *self.unchanged.lock() = Some(before);
            return false;
        }
        let need = self.tensors.iter().any(|of| of.is_written(py) || of.is_shared(py, torch));
        if !need {
            *self.unchanged.lock() = Unchanged::new(py, &self.tensors).ok();
        }
        need
    }
}

impl Unchanged {
    fn new(py: Python<'_>, units: &[Arc<UnitTensors>]) -> PyResult<Self> {
        let all: Vec<_> = units.iter().flat_map(|unit| unit.tensors(py)).collect();
        Ok(Self {
            tensors: PyList::new(py, all.iter().map(|(tensor, ..)| tensor))?.unbind(),
            storages: PyList::new(py, all.iter().map(|(_, storage, _)| storage))?.unbind(),
            owners: all.iter().map(|(.., owners)| owners).sum(),
        })
    }

    /// Returns whether the tensors are unchanged, and no tensor was created since.
    fn holds(&self, py: Python<'_>, units: &[Arc<UnitTensors>], torch: &Torch) -> PyResult<bool> {
        let count = units.iter().map(|unit| unit.tensor_count()).sum::<usize>();
        Ok(count == self.tensors.bind(py).len()
            && torch.all_owners(py, &self.storages)? == self.owners
            && torch.all_versions(py, &self.tensors)? == 0)
    }
}

/// The modules of a model, which can have leased weights instead of stand-ins and forwards that
/// lease them.
pub(super) struct Modules {
    modules: Vec<Module>,
    /// What modules have lent out, while a pass runs.
    lent: Mutex<Vec<Lent>>,
}

struct Module {
    /// A weak reference to the module.
    module: Py<PyAny>,
    /// Whether its attribute `forward` only leases a unit and calls the method of its class.
    has_leasing_forward: bool,
    classes: Arc<Classes>,
}

struct Classes {
    /// The class of a module's dictionary of stand-ins.
    parameters: Py<PyType>,
    /// The class of a forward that leases a unit.
    forward: Py<PyType>,
}

/// What a module has given up while it has leased weights.
struct Lent {
    /// The attributes of the module.
    attributes: Py<PyDict>,
    /// Its dictionary of stand-ins, and that of leased weights.
    parameters: Option<(Py<PyAny>, Py<PyAny>)>,
    forward: Option<Py<PyAny>>,
}

impl Modules {
    /// `modules` are weak references to modules, and whether the attribute `forward` of each only
    /// leases a unit and calls the method of its class.
    pub(super) fn new(
        modules: Vec<(Py<PyAny>, bool)>,
        parameters: Py<PyType>,
        forward: Py<PyType>,
    ) -> Self {
        let classes = Arc::new(Classes { parameters, forward });
        let module = |(module, has_leasing_forward): (Py<PyAny>, bool)| Module {
            module,
            has_leasing_forward,
            classes: Arc::clone(&classes),
        };
        Self { modules: modules.into_iter().map(module).collect(), lent: Mutex::default() }
    }

    /// Gives all modules the leased weights, for callers that record gradients or do not. Returns
    /// whether it has: another thread may have done so.
    ///
    /// No signal handler and no other thread runs between the first and the last change.
    pub(super) fn lend(&self, py: Python<'_>, grad: bool) -> PyResult<bool> {
        let lent = self.modules.iter().map(|module| module.prepare(py, grad));
        let lent = lent.filter_map(PyResult::transpose).collect::<PyResult<Vec<_>>>()?;
        if self.are_lent() {
            return Ok(false);
        }
        let replaced = lent.iter().try_for_each(|each| each.replace(py));
        self.lent.lock().extend(lent);
        replaced.map(|()| true)
    }

    pub(super) fn are_lent(&self) -> bool {
        !self.lent.lock().is_empty()
    }

    /// Gives all modules their stand-ins and forwards again.
    pub(super) fn take_back(&self, py: Python<'_>) {
        let lent = std::mem::take(&mut *self.lent.lock());
        for each in lent {
            let _ = each.put_back(py);
        }
    }

    /// Makes the dictionaries of stand-ins forget the leased weights.
    pub(super) fn forget(&self, py: Python<'_>) -> PyResult<()> {
        for each in &self.modules {
            if let Some(parameters) = each.stand_ins(py)? {
                parameters.call_method0(intern!(py, "forget_lent"))?;
            }
        }
        Ok(())
    }
}

impl Module {
    /// Returns the attributes of the module, unless it no longer exists.
    fn attributes<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let module = self.module.bind(py).call0()?;
        if module.is_none() {
            return Ok(None);
        }
        Ok(Some(module.getattr(intern!(py, "__dict__"))?.cast_into::<PyDict>()?))
    }

    /// Returns the dictionary of stand-ins, if the module has one now.
    fn stand_ins<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(attributes) = self.attributes(py)? else { return Ok(None) };
        let own = attributes.get_item(intern!(py, "_parameters"))?;
        Ok(own.filter(|own| own.get_type().is(&self.classes.parameters)))
    }

    /// Prepares to give the module the leased weights. Returns None if it no longer exists.
    fn prepare(&self, py: Python<'_>, grad: bool) -> PyResult<Option<Lent>> {
        let Some(attributes) = self.attributes(py)? else { return Ok(None) };
        let own = attributes.get_item(intern!(py, "_parameters"))?;
        let stand_ins = own.filter(|own| own.get_type().is(&self.classes.parameters));
        let weights = |stand_ins: Bound<'_, PyAny>| -> PyResult<_> {
            let name = match grad {
                true => intern!(py, "lent_while_recording"),
                false => intern!(py, "lent_while_not_recording"),
            };
            let mut weights = stand_ins.getattr(name)?;
            if weights.is_none() {
                weights = stand_ins.call_method1(intern!(py, "lend"), (grad,))?;
            }
            Ok((stand_ins.unbind(), weights.unbind()))
        };
        let parameters = stand_ins.map(weights).transpose()?;
        let forward = match self.has_leasing_forward {
            true => attributes.get_item(intern!(py, "forward"))?,
            false => None,
        };
        // Another library may have wrapped it.
        let forward = forward.filter(|own| own.get_type().is(&self.classes.forward));
        let forward = forward.map(Bound::unbind);
        Ok(Some(Lent { attributes: attributes.unbind(), parameters, forward }))
    }
}

impl Lent {
    fn replace(&self, py: Python<'_>) -> PyResult<()> {
        let attributes = self.attributes.bind(py);
        if let Some((_, weights)) = &self.parameters {
            attributes.set_item(intern!(py, "_parameters"), weights)?;
        }
        match &self.forward {
            Some(_) => attributes.del_item(intern!(py, "forward")),
            None => Ok(()),
        }
    }

    /// Undoes `replace`. Keeps what somebody else has set in the meantime.
    fn put_back(&self, py: Python<'_>) -> PyResult<()> {
        let attributes = self.attributes.bind(py);
        if let Some((stand_ins, weights)) = &self.parameters {
            let name = intern!(py, "_parameters");
            if attributes.get_item(name)?.is_some_and(|now| now.is(weights)) {
                attributes.set_item(name, stand_ins)?;
            }
        }
        if let Some(forward) = &self.forward
            && !attributes.contains(intern!(py, "forward"))?
        {
            attributes.set_item(intern!(py, "forward"), forward)?;
        }
        Ok(())
    }
}
