// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the arguments of a call to values that can be sent.

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyComplex, PyFloat, PyList, PyString, PyTuple};
use tensorstream::exec::Value;

use super::devices::{DeviceEntry, device};
use super::torch::Torch;
use crate::errors::cross_machine_error;
use crate::remote::values::integer;

/// The only operator whose tensors can be on several devices of a machine.
const COPY: &str = "aten::copy_";

/// The arguments of a call. Collects the tensors of the call, and their device.
pub(super) struct Arguments<'a, 'py> {
    pub(super) torch: &'a Torch,
    /// The name of the operator, for error messages.
    op: &'a str,
    /// Whether tensors on the host, such as indices, are copied to the device.
    takes_host: bool,
    /// The device of the call. The first argument that is a `ts` tensor or a device determines it.
    pub(super) device: Option<DeviceEntry>,
    tensors: Vec<Bound<'py, PyAny>>,
}

impl<'a, 'py> Arguments<'a, 'py> {
    pub(super) fn new(torch: &'a Torch, op: &'a str, takes_host: bool) -> Self {
        Self { torch, op, takes_host, device: None, tensors: Vec::new() }
    }

    /// Returns the tensor at a position among the tensor arguments.
    pub(super) fn tensor_at(&self, position: usize) -> PyResult<&Bound<'py, PyAny>> {
        let missing = || {
            PyRuntimeError::new_err(format!(
                "{}: the call has no tensor argument {position}",
                self.op
            ))
        };
        self.tensors.get(position).ok_or_else(missing)
    }

    /// Converts an argument, and adds its tensors and its device to those of the call.
    ///
    /// # Errors
    /// TypeError if objects of this type cannot be sent, or if an int exceeds 64 bits.
    /// RuntimeError or CrossMachineError if the argument is on another device than the earlier
    /// arguments. ConfigurationError if its device does not exist.
    pub(super) fn value(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Value> {
        let py = object.py();
        if object.is_none() {
            return Ok(Value::None);
        }
        if self.torch.is_tensor(object)? {
            return self.tensor_value(object);
        }
        if let Ok(value) = object.cast_exact::<PyBool>() {
            return Ok(Value::Bool(value.is_true()));
        }
        if let Some(value) = integer(object) {
            return Ok(value);
        }
        if let Ok(value) = object.cast::<PyFloat>() {
            return Ok(Value::Float(value.value()));
        }
        if let Ok(list) = object.cast::<PyList>() {
            return Ok(Value::List(
                list.iter().map(|value| self.value(&value)).collect::<PyResult<_>>()?,
            ));
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return Ok(Value::List(
                tuple.iter().map(|value| self.value(&value)).collect::<PyResult<_>>()?,
            ));
        }
        if object.is_instance(self.torch.dtype.bind(py))? {
            return Ok(Value::Dtype(self.torch.scalar_type(object)?));
        }
        if object.is_instance(self.torch.device.bind(py))? {
            return self.device_value(object);
        }
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(Value::Text(text.to_str()?.into()));
        }
        if let Ok(number) = object.cast::<PyComplex>() {
            return Ok(Value::Complex(number.real(), number.imag()));
        }
        for class in &self.torch.named {
            if object.is_instance(class.bind(py))? {
                let name = object.str()?.to_str()?.to_string();
                return Ok(Value::Name(name.trim_start_matches("torch.").into()));
            }
        }
        Err(PyTypeError::new_err(format!(
            "{}: cannot send an argument of type {} to a machine: expected None, a tensor, bool, \
             64-bit int, float, complex, string, dtype, device, layout or memory format, or \
             a list of these",
            self.op,
            object.get_type().name()?
        )))
    }

    fn device_value(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Value> {
        let py = object.py();
        let kind = object.getattr(intern!(py, "type"))?;
        if kind.cast::<PyString>()?.to_str()? != "ts" {
            let what = format!("{}: expected a ts device, got {object}", self.op);
            return Err(PyRuntimeError::new_err(what));
        }
        let index: Option<u32> = object.getattr(intern!(py, "index"))?.extract()?;
        let index = match index {
            Some(index) => index,
            None => self.torch.hooks.current_device.bind(py).call0()?.extract()?,
        };
        self.require_device(py, index)?;
        Ok(Value::Device(self.device.as_ref().map_or(0, |device| device.ordinal)))
    }

    /// Sets the device of the call, or checks that it is `ts:index`.
    fn require_device(&mut self, py: Python<'py>, index: u32) -> PyResult<()> {
        let known = match &self.device {
            Some(known) if known.index == index => return Ok(()),
            Some(known) => known.index,
            None => {
                self.device = Some(device(py, index)?);
                return Ok(());
            }
        };
        let (one, other) = (device(py, known)?, device(py, index)?);
        let op = self.op;
        if one.shares_session_with(&other) && op == COPY {
            return Ok(());
        }
        // Begins like PyTorch's message for its own devices.
        let what = format!(
            "Expected all tensors to be on the same device, but {op} was called with tensors on"
        );
        if one.shares_session_with(&other) {
            return Err(PyRuntimeError::new_err(format!("{what} ts:{known} and ts:{index}")));
        }
        let what = format!(
            "{what} two machines, {} (ts:{known}) and {} (ts:{index}); copy one with .to()",
            one.session.name, other.session.name
        );
        Err(cross_machine_error(py, &what))
    }

    fn tensor_value(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<Value> {
        let py = tensor.py();
        if let Some((index, described)) = self.torch.describe(tensor)? {
            self.require_device(py, index)?;
            self.tensors.push(tensor.clone());
            if described.view.is_complex()
                && tensor.call_method0(intern!(py, "is_conj"))?.extract()?
            {
                return Ok(Value::Conjugate(described));
            }
            return Ok(Value::Tensor(described));
        }
        let dims: usize = tensor.call_method0(intern!(py, "dim"))?.extract()?;
        if dims == 0 && tensor.getattr(intern!(py, "is_cpu"))?.extract()? {
            let dtype = self.torch.scalar_type(&tensor.getattr(intern!(py, "dtype"))?)?;
            let raw: Vec<u8> = self.torch.hooks.element.bind(py).call1((tensor,))?.extract()?;
            let mut bytes = [0; 16];
            bytes[..raw.len()].copy_from_slice(&raw);
            return Ok(Value::Scalar { dtype, bytes });
        }
        if let (true, Some(device)) = (self.takes_host, &self.device) {
            let copy = self.torch.hooks.to_device.bind(py).call1((tensor, device.index))?;
            return self.tensor_value(&copy);
        }
        let device = tensor.getattr(intern!(py, "device"))?;
        let own = self.device.as_ref().map(|own| format!("ts:{}", own.index));
        let what = format!(
            "Expected all tensors to be on the same device, but {} was called with tensors on \
             {device} and on {}",
            self.op,
            own.as_deref().unwrap_or("a ts device")
        );
        Err(PyRuntimeError::new_err(what))
    }
}
