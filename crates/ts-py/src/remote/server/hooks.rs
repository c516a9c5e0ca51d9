// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts of Python and PyTorch that the sessions of a server use.

use pyo3::intern;
use pyo3::prelude::*;
use tensorstream::exec::{OpFailure, ScalarType, StorageView};

use super::failures::refused;
use crate::dtype::{TorchDtype, TorchDtypes, missing_dtype, name_of};
use crate::errors::configuration_error;

/// The Python half of the server, `tensorstream/remote/server/_server.py`.
#[derive(FromPyObject)]
pub(super) struct Hooks {
    /// `session()`: creates the Python half of a session. Its `define(name)` returns the function
    /// for an operator, and the arguments that the operator writes to.
    pub(super) session: Py<PyAny>,
    /// `allocate(bytes, device)`: returns an untyped storage of zeros.
    pub(super) allocate: Py<PyAny>,
    /// `view(storage, dtype, sizes, strides, offset)`: returns a tensor over a storage.
    pub(super) view: Py<PyAny>,
    /// `restrided(tensor, dtype, sizes, strides, offset, bytes)`: returns a copy with this layout,
    /// in a new storage.
    pub(super) restrided: Py<PyAny>,
    /// `from_capsule(capsule)`: returns a tensor over the memory of a DLPack capsule.
    pub(super) from_capsule: Py<PyAny>,
    /// `scalar(dtype, bytes)`: returns a zero-dimensional tensor.
    pub(super) scalar: Py<PyAny>,
    /// `constant(name)`: returns a memory format or a layout.
    pub(super) constant: Py<PyAny>,
    /// `host_bytes(tensor)`: returns a capsule of the elements, contiguous and on the host.
    pub(super) host_bytes: Py<PyAny>,
    /// `storage_bytes(storage, offset, bytes)`: returns a capsule of a part of a host storage.
    pub(super) storage_bytes: Py<PyAny>,
    /// `staging(storage, bytes)`: returns host memory for an upload to a storage on another device,
    /// as a tensor and as a capsule of the tensor.
    pub(super) staging: Py<PyAny>,
    /// `copy_staged(storage, offset, tensor)`: copies a tensor of `staging` to its storage.
    pub(super) copy_staged: Py<PyAny>,
    /// The settings of sessions that have not set their own.
    pub(super) default_settings: Py<PyAny>,
    /// `settings(args)`: checks and returns the settings that a client has sent.
    pub(super) settings: Py<PyAny>,
    /// `with_settings(settings, operator, args, kwargs)`: calls an operator with settings.
    pub(super) with_settings: Py<PyAny>,
    /// `guard()`: returns a guard, which disables autograd until it is dropped.
    pub(super) guard: Py<PyAny>,
    pub(super) devices: Vec<Py<PyAny>>,
    /// Whether storages are in host memory that uploads and reads can access directly.
    pub(super) on_host: bool,
}

/// The state that all sessions of a server share: its Python half, and objects of PyTorch.
pub(super) struct Backend {
    pub(super) hooks: Hooks,
    pub(super) dtypes: TorchDtypes,
    /// The class `torch.Tensor`.
    pub(super) tensor: Py<PyAny>,
    /// Whether all devices are the CPU.
    pub(super) on_cpu: bool,
}

impl Backend {
    pub(super) fn new(py: Python<'_>, hooks: Hooks) -> PyResult<Self> {
        if hooks.devices.is_empty() {
            return Err(configuration_error(
                py,
                "cannot create a server without devices: pass at least one",
            ));
        }
        let torch = py.import("torch")?;
        let on_cpu = hooks.devices.iter().all(|device| device.to_string() == "cpu");
        let tensor = torch.getattr("Tensor")?.unbind();
        Ok(Self { hooks, dtypes: TorchDtypes::load(&torch)?, tensor, on_cpu })
    }

    /// Returns the dtype with this number.
    ///
    /// # Errors
    /// Returns a failure if the installed PyTorch or this package lacks the dtype.
    pub(super) fn dtype(&self, number: ScalarType) -> Result<&TorchDtype, OpFailure> {
        self.dtypes.get(number).ok_or_else(|| refused(missing_dtype(number, "this machine")))
    }

    /// Returns the device at this position among the devices of the machine.
    ///
    /// # Errors
    /// Returns a failure if the machine has fewer devices.
    pub(super) fn device(&self, position: u32) -> Result<&Py<PyAny>, OpFailure> {
        let devices = &self.hooks.devices;
        devices.get(position as usize).ok_or_else(|| {
            refused(format!(
                "device {position} does not exist: this machine has {} devices, numbered from 0",
                devices.len()
            ))
        })
    }

    /// Returns the name of the dtype with this number, such as "float32", or "?" if it is unknown.
    pub(super) fn dtype_name(&self, number: ScalarType) -> &'static str {
        name_of(number).unwrap_or("?")
    }

    /// Returns the layout of a tensor in its storage.
    ///
    /// # Errors
    /// ConfigurationError if the layout or the dtype of the tensor is not supported.
    pub(super) fn view_of(&self, tensor: &Bound<'_, PyAny>) -> PyResult<StorageView> {
        let py = tensor.py();
        let layout = tensor.getattr(intern!(py, "layout"))?.str()?;
        if layout.to_str()? != "torch.strided" {
            return Err(configuration_error(
                py,
                &format!("unsupported tensor layout {layout}: expected torch.strided"),
            ));
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let unsupported = || configuration_error(py, &format!("unsupported tensor dtype {dtype}"));
        Ok(StorageView {
            dtype: self.dtypes.number(&dtype).ok_or_else(unsupported)?,
            sizes: tensor.getattr(intern!(py, "shape"))?.extract()?,
            strides: tensor.call_method0(intern!(py, "stride"))?.extract()?,
            offset: tensor.call_method0(intern!(py, "storage_offset"))?.extract()?,
        })
    }

    /// Returns the position of a tensor's device among the devices of the machine. That is the
    /// index of the device, or 0 if the device has no index or the machine has fewer devices.
    pub(super) fn device_of(&self, tensor: &Bound<'_, PyAny>) -> u32 {
        let py = tensor.py();
        let index = || -> Option<u32> {
            let device = tensor.getattr(intern!(py, "device")).ok()?;
            device.getattr(intern!(py, "index")).ok()?.extract().ok()
        };
        index().filter(|&index| (index as usize) < self.hooks.devices.len()).unwrap_or(0)
    }
}
