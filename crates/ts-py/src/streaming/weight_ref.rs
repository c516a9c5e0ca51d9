// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `WeightRef`: which weight a Python tensor stands for, and whether it has its memory.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pyo3::exceptions::PyReferenceError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType, PyWeakrefMethods, PyWeakrefReference};

use super::shared::{Shared, Streamer};
use super::unit_tensors::UnitTensors;

/// The attribute of a tensor that contains its `WeightRef`.
const ATTRIBUTE: &str = "_ref";

/// Which weight a stand-in represents. It is the attribute ``_ref`` of the tensor.
///
/// A parameter keeps its Python object. Its implementation is that of a stand-in, except while a
/// forward has borrowed the weight: then it is a tensor over the memory of the unit.
///
/// Args:
///     weights: The weights of the model, with the streamer as attribute ``streamer``.
///     key: The key of the weight. Those of divided weights exceed the keys of the streamer.
///     original: The class that a parameter has in memory. ``None`` for views.
///     is_copy: Whether the tensor is a copy of a parameter, which nothing else refers to.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct WeightRef {
    /// The object itself, or a weak reference to it.
    weights: Py<PyAny>,
    is_weak: bool,
    shared: Weak<Shared>,
    key: usize,
    original: Option<Py<PyAny>>,
    is_copy: bool,
    borrowed: Mutex<Borrowed>,
    /// A reference to the same weight that does not keep the weights alive.
    weak: PyOnceLock<Py<WeightRef>>,
}

/// The forwards that use the memory of a parameter.
#[derive(Default)]
struct Borrowed {
    count: usize,
    /// The parameter and the tensor that has the implementation of the stand-in meanwhile, and the
    /// class of the parameter before.
    swapped: Option<(Py<PyTuple>, Py<PyType>)>,
}

#[pymethods]
impl WeightRef {
    #[new]
    #[pyo3(signature = (weights, key, original=None, is_copy=false))]
    fn new(
        weights: &Bound<'_, PyAny>,
        key: usize,
        original: Option<Py<PyAny>>,
        is_copy: bool,
    ) -> PyResult<Self> {
        let streamer = weights.getattr(intern!(weights.py(), "streamer"))?;
        let shared = Arc::downgrade(&streamer.cast::<Streamer>()?.get().shared);
        let weights = weights.clone().unbind();
        Ok(Self {
            weights,
            is_weak: false,
            shared,
            key,
            original,
            is_copy,
            borrowed: Mutex::default(),
            weak: PyOnceLock::new(),
        })
    }

    /// The weights of the model.
    #[getter]
    fn weights<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let weights = self.weights.bind(py);
        if !self.is_weak {
            return Ok(weights.clone());
        }
        weights.cast::<PyWeakrefReference>()?.upgrade().ok_or_else(|| {
            PyReferenceError::new_err("the model of this streamed weight no longer exists")
        })
    }

    /// The key of the weight.
    #[getter]
    pub(super) fn key(&self) -> usize {
        self.key
    }

    /// The class that a parameter has in memory, or ``None``.
    #[getter]
    fn original(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.original.as_ref().map(|class| class.clone_ref(py))
    }

    /// Whether the tensor is a copy of a parameter.
    #[getter]
    fn is_copy(&self) -> bool {
        self.is_copy
    }
}

/// A streamed parameter that a module owns.
pub(super) struct Own<'py> {
    pub(super) parameter: Bound<'py, PyAny>,
    pub(super) weight: Bound<'py, WeightRef>,
}

impl WeightRef {
    /// Returns the `WeightRef` of a tensor, or None if it has none.
    pub(super) fn of<'py>(tensor: &Bound<'py, PyAny>) -> Option<Bound<'py, Self>> {
        let py = tensor.py();
        tensor.getattr(intern!(py, ATTRIBUTE)).ok()?.cast_into::<Self>().ok()
    }

    /// Returns whether this is the reference of a parameter, and not of a view.
    pub(super) fn is_whole(&self) -> bool {
        self.original.is_some()
    }

    /// Returns the streamer, or None if it no longer exists.
    pub(super) fn shared(&self) -> Option<Arc<Shared>> {
        self.shared.upgrade()
    }

    /// Returns a reference to the same weight that does not keep the weights alive, for tensors
    /// that the streamer owns.
    fn weak(&self, py: Python<'_>) -> PyResult<&Py<Self>> {
        self.weak.get_or_try_init(py, || {
            let weights = PyWeakrefReference::new(self.weights.bind(py))?;
            let (weights, shared) = (weights.into_any().unbind(), Weak::clone(&self.shared));
            Py::new(
                py,
                Self {
                    weights,
                    is_weak: true,
                    shared,
                    key: self.key,
                    original: None,
                    is_copy: false,
                    borrowed: Mutex::default(),
                    weak: PyOnceLock::new(),
                },
            )
        })
    }

    /// Gives a parameter the memory of its unit, unless it has it already. Returns false if it
    /// must stay a stand-in, because something refers weakly to its implementation.
    ///
    /// # Errors
    /// Returns an error if PyTorch cannot create the tensor. Then the parameter is unchanged.
    pub(super) fn borrow_memory(
        this: &Bound<'_, Self>,
        shared: &Shared,
        parameter: &Bound<'_, PyAny>,
        tensors: &UnitTensors,
    ) -> PyResult<bool> {
        let (py, own) = (this.py(), this.get());
        let mut borrowed = own.borrowed.lock();
        if borrowed.count > 0 {
            borrowed.count += 1;
            return Ok(true);
        }
        drop(borrowed);
        let torch = &shared.torch;
        let requires_grad = torch.requires_grad(parameter)?;
        let weight = &shared.weights[own.key];
        let identity = this.as_ptr().addr();
        let other = tensors.for_parameter(py, torch, weight, identity, requires_grad, |new| {
            new.setattr(intern!(py, ATTRIBUTE), own.weak(py)?)
        })?;
        let pair = PyTuple::new(py, [parameter, other.bind(py)])?;
        let class = parameter.get_type().unbind();
        // Nothing below allocates an object of Python, so no other thread runs until it has ended.
        let mut borrowed = own.borrowed.lock();
        if borrowed.count == 0 {
            if torch.swap(py, &pair).is_err() {
                return Ok(false);
            }
            torch.set_class(parameter, torch.weight_class(py))?;
            borrowed.swapped = Some((pair.unbind(), class));
        }
        borrowed.count += 1;
        Ok(true)
    }

    /// Ends a use of `borrow_memory`. The last one gives the parameter the stand-in back.
    pub(super) fn return_memory(&self, shared: &Shared, parameter: &Bound<'_, PyAny>) {
        let py = parameter.py();
        // Nothing here allocates an object of Python, so no other thread runs until it has ended.
        let mut borrowed = self.borrowed.lock();
        borrowed.count = borrowed.count.saturating_sub(1);
        if borrowed.count > 0 {
            return;
        }
        let Some((pair, class)) = borrowed.swapped.take() else { return };
        let torch = &shared.torch;
        let swapped =
            torch.swap(py, pair.bind(py)).and_then(|()| torch.set_class(parameter, class.bind(py)));
        if let Err(error) = swapped {
            error.write_unraisable(py, Some(parameter));
        }
        drop(borrowed);
        drop((pair, class));
    }
}
