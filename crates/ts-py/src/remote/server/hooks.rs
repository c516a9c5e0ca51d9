// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the sessions of a server use of Python and PyTorch.

use pyo3::intern;
use pyo3::prelude::*;
use tensorstream::exec::{OpFailure, ScalarType, StorageView};

use super::failures::refused;
use crate::dtype::{TorchDtype, TorchDtypes};
use crate::errors::configuration_error;

/// The Python half of the server, `tensorstream/remote/server/_server.py`.
#[derive(FromPyObject)]
pub(super) struct Hooks {
    /// `session()`: the Python half of a session. Its `define(name)` returns what to call for an
    /// operator, and which of its arguments it writes to.
    pub(super) session: Py<PyAny>,
    /// `allocate(bytes, device)`: an untyped storage of zeros.
    pub(super) allocate: Py<PyAny>,
    /// `view(storage, dtype, sizes, strides, offset)`: a tensor.
    pub(super) view: Py<PyAny>,
    /// `restrided(tensor, dtype, sizes, strides, offset, bytes)`: a copy with this layout.
    pub(super) restrided: Py<PyAny>,
    /// `scalar(dtype, bytes)`: a tensor without dimensions.
    pub(super) scalar: Py<PyAny>,
    /// `constant(name)`: a memory format or a layout.
    pub(super) constant: Py<PyAny>,
    /// `host_bytes(tensor)`: a capsule of its elements, contiguous and on the host.
    pub(super) host_bytes: Py<PyAny>,
    /// `storage_bytes(storage, offset, bytes)`: a capsule of a part of a storage on the host.
    pub(super) storage_bytes: Py<PyAny>,
    /// `staging(storage, bytes)`: host memory for bytes on their way to a storage on a device, as
    /// a tensor and as a capsule of it.
    pub(super) staging: Py<PyAny>,
    /// `copy_staged(storage, offset, tensor)`: copies such a tensor to the storage.
    pub(super) copy_staged: Py<PyAny>,
    /// The default dtype of sessions that have not set one.
    pub(super) default_dtype: Py<PyAny>,
    /// `with_default(dtype, operator, args, kwargs)`: calls an operator with a default dtype.
    pub(super) with_default: Py<PyAny>,
    /// `guard()`: the context in which operators run.
    pub(super) guard: Py<PyAny>,
    pub(super) devices: Vec<Py<PyAny>>,
    /// Whether storages are in host memory.
    pub(super) on_host: bool,
}

/// What the sessions of a server share: its Python half, and objects of PyTorch.
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
            return Err(configuration_error(py, "no devices: a server needs at least one"));
        }
        let torch = py.import("torch")?;
        let on_cpu = hooks.devices.iter().all(|device| device.to_string() == "cpu");
        let tensor = torch.getattr("Tensor")?.unbind();
        Ok(Self { hooks, dtypes: TorchDtypes::load(&torch)?, tensor, on_cpu })
    }

    /// Returns the dtype with this number.
    pub(super) fn dtype(&self, number: ScalarType) -> Result<&TorchDtype, OpFailure> {
        let unknown = || refused(format!("unknown dtype number {}", number.0));
        self.dtypes.get(number).ok_or_else(unknown)
    }

    /// Returns the name of the dtype with this number, such as "float32", for messages.
    pub(super) fn dtype_name(&self, number: ScalarType) -> &'static str {
        self.dtypes.get(number).map_or("?", |dtype| dtype.row.name)
    }

    /// Returns the layout of a tensor in its storage.
    pub(super) fn view_of(&self, tensor: &Bound<'_, PyAny>) -> PyResult<StorageView> {
        let py = tensor.py();
        let layout = tensor.getattr(intern!(py, "layout"))?.str()?;
        if layout.to_str()? != "torch.strided" {
            return Err(configuration_error(
                py,
                &format!("tensor has layout {layout} (expected torch.strided)"),
            ));
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let unsupported =
            || configuration_error(py, &format!("tensor has unsupported dtype {dtype}"));
        Ok(StorageView {
            dtype: self.dtypes.number(&dtype).ok_or_else(unsupported)?,
            sizes: tensor.getattr(intern!(py, "shape"))?.extract()?,
            strides: tensor.call_method0(intern!(py, "stride"))?.extract()?,
            offset: tensor.call_method0(intern!(py, "storage_offset"))?.extract()?,
        })
    }

    /// Returns the position of a tensor's device among those of the machine: its index if the
    /// machine has as many devices, or else 0.
    pub(super) fn device_of(&self, tensor: &Bound<'_, PyAny>) -> u32 {
        let py = tensor.py();
        let index = || -> Option<u32> {
            let device = tensor.getattr(intern!(py, "device")).ok()?;
            device.getattr(intern!(py, "index")).ok()?.extract().ok()
        };
        index().filter(|&index| (index as usize) < self.hooks.devices.len()).unwrap_or(0)
    }
}
