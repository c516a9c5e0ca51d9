// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions of PyTorch that streaming calls.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tensorstream::format::TensorMeta;

use super::TensorBytes;
use super::weight::Weight;
use crate::dlpack::{has_unversioned_type, tensor_capsule};
use crate::dtype::torch_shape;

/// Functions of PyTorch, looked up once.
pub(super) struct Torch {
    from_dlpack: Py<PyAny>,
    make_subclass: Py<PyAny>,
    inference_mode_guard: Py<PyAny>,
    is_inference_mode_enabled: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    /// Returns whether a tensor requires gradients, without `__torch_function__`.
    requires_grad: Py<PyAny>,
    is_any_autocast_enabled: Py<PyAny>,
    clear_autocast_cache: Py<PyAny>,
    is_profiler_enabled: Py<PyAny>,
    storage_use_count: Py<PyAny>,
    swap: Py<PyAny>,
    set_eval_frame: Py<PyAny>,
    /// The class of parameters with the memory of their unit.
    weight_class: Py<PyAny>,
    /// The class of stand-ins.
    stand_in_class: Py<PyAny>,
    /// DLPack's device type and device number of weights.
    device: (i32, i32),
}

impl Torch {
    pub(super) fn new(
        py: Python<'_>,
        (weight_class, stand_in_class): (Py<PyAny>, Py<PyAny>),
        device: (i32, i32),
    ) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let native = torch.getattr("_C")?;
        Ok(Self {
            from_dlpack: native.getattr("_from_dlpack")?.unbind(),
            make_subclass: torch.getattr("Tensor")?.getattr("_make_subclass")?.unbind(),
            inference_mode_guard: native.getattr("_InferenceMode")?.unbind(),
            is_inference_mode_enabled: torch.getattr("is_inference_mode_enabled")?.unbind(),
            is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            requires_grad: native
                .getattr("TensorBase")?
                .getattr("requires_grad")?
                .getattr("__get__")?
                .unbind(),
            is_any_autocast_enabled: native.getattr("_is_any_autocast_enabled")?.unbind(),
            clear_autocast_cache: torch.getattr("clear_autocast_cache")?.unbind(),
            is_profiler_enabled: native
                .getattr("_autograd")?
                .getattr("_profiler_enabled")?
                .unbind(),
            storage_use_count: native.getattr("_storage_Use_Count")?.unbind(),
            swap: native.getattr("_swap_tensor_impl")?.unbind(),
            set_eval_frame: native
                .getattr("_dynamo")?
                .getattr("eval_frame")?
                .getattr("set_eval_frame")?
                .unbind(),
            weight_class,
            stand_in_class,
            device,
        })
    }

    /// Returns the number of owners of a PyTorch storage, such as tensors.
    pub(super) fn storage_owners(&self, py: Python<'_>, storage: usize) -> PyResult<usize> {
        self.storage_use_count.bind(py).call1((storage,))?.extract()
    }

    /// Swaps the implementations of two tensors, which keep their Python objects.
    ///
    /// # Errors
    /// Returns an error if something other than autocast's cache refers to an implementation
    /// weakly. Then nothing is swapped.
    pub(super) fn swap(&self, py: Python<'_>, pair: &Bound<'_, PyTuple>) -> PyResult<()> {
        let swap = self.swap.bind(py);
        if swap.call1(pair).is_ok() {
            return Ok(());
        }
        self.clear_autocast_cache.bind(py).call0()?;
        swap.call1(pair).map(drop)
    }

    /// Calls a function of Python that `torch.compile` must not compile.
    pub(super) fn uncompiled<T>(
        &self,
        py: Python<'_>,
        call: impl FnOnce() -> PyResult<T>,
    ) -> PyResult<T> {
        let set_eval_frame = self.set_eval_frame.bind(py);
        let before = set_eval_frame.call1((py.None(),))?;
        let result = call();
        set_eval_frame.call1((before,))?;
        result
    }

    /// Sets the class of a Python object.
    pub(super) fn set_class(
        &self,
        tensor: &Bound<'_, PyAny>,
        class: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        tensor.setattr(intern!(tensor.py(), "__class__"), class)
    }

    pub(super) fn weight_class<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.weight_class.bind(py)
    }

    pub(super) fn stand_in_class<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.stand_in_class.bind(py)
    }

    /// Returns whether gradients are recorded.
    pub(super) fn is_grad_enabled(&self, py: Python<'_>) -> PyResult<bool> {
        is_true(py, &self.is_grad_enabled)
    }

    /// Returns whether the profiler runs.
    pub(super) fn is_profiler_enabled(&self, py: Python<'_>) -> PyResult<bool> {
        is_true(py, &self.is_profiler_enabled)
    }

    /// Returns whether a streamed parameter requires gradients.
    pub(super) fn requires_grad(&self, parameter: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.requires_grad.bind(parameter.py()).call1((parameter,))?.is_truthy()
    }

    /// Clears autocast's cache if autocast is enabled and no gradients are recorded.
    ///
    /// Autocast caches the casts of weights that require gradients. The cached casts have autograd
    /// graphs, which keep streamed weights in memory.
    pub(super) fn clear_autocast_cache(&self, py: Python<'_>) -> PyResult<()> {
        if is_true(py, &self.is_any_autocast_enabled)? && !self.is_grad_enabled(py)? {
            self.clear_autocast_cache.bind(py).call0()?;
        }
        Ok(())
    }

    /// Creates a tensor over the bytes of a weight, without a copy.
    pub(super) fn tensor(
        &self,
        py: Python<'_>,
        bytes: TensorBytes,
        weight: &Weight,
    ) -> PyResult<Py<PyAny>> {
        let tensor = self.row_major(py, bytes, self.device, &weight.meta, &weight.dtype)?;
        match &weight.strided {
            None => Ok(tensor),
            Some((shape, strides)) => {
                let (shape, strides) = (shape.clone(), strides.clone());
                let tensor = tensor.bind(py);
                Ok(tensor.call_method1(intern!(py, "as_strided"), (shape, strides))?.unbind())
            }
        }
    }

    /// Creates a row-major tensor over bytes, without a copy. `device` is DLPack's device type and
    /// device number.
    pub(super) fn row_major(
        &self,
        py: Python<'_>,
        bytes: TensorBytes,
        device: (i32, i32),
        meta: &TensorMeta,
        dtype: &Py<PyAny>,
    ) -> PyResult<Py<PyAny>> {
        // Backward cannot use an inference tensor, so none is created even if the caller is in
        // inference mode.
        let guard = match is_true(py, &self.is_inference_mode_enabled)? {
            true => Some(self.inference_mode_guard.bind(py).call1((false,))?),
            false => None,
        };
        if let Some(guard) = &guard {
            guard.call_method0(intern!(py, "__enter__"))?;
        }
        let tensor = self.row_major_in_mode(py, bytes, device, meta, dtype);
        if let Some(guard) = &guard {
            guard.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None()))?;
        }
        tensor
    }

    fn row_major_in_mode(
        &self,
        py: Python<'_>,
        bytes: TensorBytes,
        device: (i32, i32),
        meta: &TensorMeta,
        dtype: &Py<PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let capsule = tensor_capsule(py, bytes.range(), device, meta, bytes)?;
        let mut tensor = self.from_dlpack.bind(py).call1((capsule,))?;
        if !has_unversioned_type(meta.dtype) {
            let shape = torch_shape(meta.dtype, &meta.shape);
            tensor = tensor.call_method1(intern!(py, "view"), (dtype.bind(py),))?;
            tensor = tensor.call_method1(intern!(py, "view"), (shape,))?;
        }
        Ok(tensor.unbind())
    }

    /// Creates a parameter over the memory of a tensor. Both have the same version counter.
    pub(super) fn parameter(
        &self,
        py: Python<'_>,
        tensor: &Py<PyAny>,
        requires_grad: bool,
    ) -> PyResult<Py<PyAny>> {
        let make_subclass = self.make_subclass.bind(py);
        Ok(make_subclass.call1((&self.weight_class, tensor, requires_grad))?.unbind())
    }
}

/// Calls a function of PyTorch, and returns whether its result is true.
fn is_true(py: Python<'_>, predicate: &Py<PyAny>) -> PyResult<bool> {
    predicate.bind(py).call0()?.is_truthy()
}
