// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts of PyTorch that the client uses, and the mapping of PyTorch's tensors to remote ones.

use std::collections::HashMap;

use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyString, PyTuple, PyType};
use tensorstream::exec::{Call, Output, ScalarType, StorageView, TensorRef, Value};

use super::addresses::storage_at;
use crate::dtype::{Row, TorchDtypes, missing_dtype};

/// The level DEBUG of Python's `logging`.
const LOG_DEBUG: u8 = 10;

/// The Python half of the client, `tensorstream/remote/client/_bridge.py`.
#[derive(FromPyObject)]
pub(crate) struct Hooks {
    /// `infer(op, args, kwargs)`: infers the results of a call that is not in the cache.
    pub(super) infer: Py<PyAny>,
    /// `element(tensor)`: returns the bytes of a zero-dimensional tensor on the host.
    pub(super) element: Py<PyAny>,
    /// `to_device(tensor, index)`: copies a tensor from the host to the device `ts:index`.
    pub(super) to_device: Py<PyAny>,
    /// `current_device()`: returns the index of the current device.
    pub(super) current_device: Py<PyAny>,
    /// `draw(op, args, kwargs)`: runs an operator that draws random numbers from a generator of the
    /// host.
    pub(super) draw: Py<PyAny>,
    /// `as_strided(tensor, sizes, strides, offset)`: returns a view that autograd does not record.
    pub(super) as_strided: Py<PyAny>,
    /// `source_line(code, instruction)`: returns the file, line and function of an instruction.
    pub(super) source_line: Py<PyAny>,
    /// `is_logging(level)`: returns whether the logger writes messages of a level.
    is_logging: Py<PyAny>,
    /// `log(name, inputs, outputs)`: logs an operator and the hashes of its tensors.
    log: Py<PyAny>,
    /// The directories of PyTorch and of this package, whose code is not part of the program.
    pub(super) libraries: Vec<String>,
}

/// Objects of PyTorch and of the Python half of the client, looked up once.
pub(crate) struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    pub(super) device: Py<PyType>,
    pub(super) dtype: Py<PyType>,
    /// Classes whose values are sent by name: memory formats and layouts.
    pub(super) named: [Py<PyType>; 2],
    dtypes: TorchDtypes,
    pub(super) from_dlpack: Py<PyAny>,
    get_default_dtype: Py<PyAny>,
    /// The functions that return the other settings that machines must have too.
    get_deterministic: Py<PyAny>,
    get_warns_only: Py<PyAny>,
    get_precision: Py<PyAny>,
    /// `sys._getframe`.
    pub(super) getframe: Py<PyAny>,
    pub(super) hooks: Hooks,
    /// Code objects of functions, by address, and whether each is part of the user's program. The
    /// references keep the addresses valid.
    pub(super) known_code: Mutex<HashMap<usize, (Py<PyAny>, bool)>>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Sets the Python half of the client, when the device is set up. Later calls have no effect.
#[pyfunction]
pub(crate) fn remote_setup(py: Python<'_>, hooks: Hooks) -> PyResult<()> {
    let torch = py.import("torch")?;
    let class = |name: &str| Ok::<_, PyErr>(torch.getattr(name)?.cast_into::<PyType>()?.unbind());
    let native = |name: &str| torch.getattr("_C")?.getattr(name).map(Bound::unbind);
    let parameter = torch.getattr("nn")?.getattr("Parameter")?;
    let torch = Torch {
        tensor: class("Tensor")?,
        parameter: parameter.cast_into::<PyType>()?.unbind(),
        device: class("device")?,
        dtype: class("dtype")?,
        named: [class("memory_format")?, class("layout")?],
        dtypes: TorchDtypes::load(&torch)?,
        from_dlpack: native("_from_dlpack")?,
        get_default_dtype: torch.getattr("get_default_dtype")?.unbind(),
        get_deterministic: native("_get_deterministic_algorithms")?,
        get_warns_only: native("_get_deterministic_algorithms_warn_only")?,
        get_precision: native("_get_float32_matmul_precision")?,
        getframe: py.import("sys")?.getattr("_getframe")?.unbind(),
        hooks,
        known_code: Mutex::default(),
    };
    let _ = TORCH.set(py, torch);
    Ok(())
}

/// Returns the objects of PyTorch.
///
/// # Errors
/// RuntimeError before [`remote_setup`] was called.
pub(super) fn torch(py: Python<'_>) -> PyResult<&Torch> {
    TORCH.get(py).ok_or_else(|| {
        PyRuntimeError::new_err("the device ts is not set up: import tensorstream.remote first")
    })
}

/// The precisions of products of float32 matrices, as PyTorch names them.
const PRECISIONS: [&str; 3] = ["highest", "high", "medium"];

/// Settings of PyTorch in this process that results of operators depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Settings {
    dtype: ScalarType,
    deterministic: bool,
    /// Whether operators that are not deterministic warn instead of failing.
    warns_only: bool,
    /// An index of [`PRECISIONS`].
    precision: u8,
}

impl Settings {
    /// The settings of a new session.
    pub(super) const DEFAULT: Self =
        Self { dtype: ScalarType::FLOAT32, deterministic: false, warns_only: false, precision: 0 };

    /// Returns a number that differs from those of other settings.
    pub(super) fn key(self) -> u32 {
        let flags = u8::from(self.deterministic) | u8::from(self.warns_only) << 1;
        u32::from_le_bytes([self.dtype.0, flags, self.precision, 0])
    }

    /// Returns the arguments of the server's operator.
    pub(super) fn arguments(self) -> Vec<Value> {
        vec![
            Value::Dtype(self.dtype),
            Value::Bool(self.deterministic),
            Value::Bool(self.warns_only),
            Value::Text(PRECISIONS[usize::from(self.precision)].into()),
        ]
    }
}

impl Torch {
    /// Logs an operator and the hashes of its tensors, if the logger writes debug messages.
    pub(super) fn log(&self, py: Python<'_>, name: &str, call: &Call) -> PyResult<()> {
        if !self.hooks.is_logging.bind(py).call1((LOG_DEBUG,))?.extract::<bool>()? {
            return Ok(());
        }
        let hash = |tensor: &TensorRef| format!("{:016x}", tensor.metadata_hash());
        let inputs: Vec<String> = call.tensors().map(hash).collect();
        let outputs = call.outputs.iter().filter_map(|output| match output {
            Output::New { tensor, .. } => Some(hash(tensor)),
            _ => None,
        });
        let outputs: Vec<String> = outputs.collect();
        self.hooks.log.bind(py).call1((name, inputs, outputs)).map(drop)
    }

    /// Returns the settings of this process that results of operators depend on.
    pub(super) fn settings(&self, py: Python<'_>) -> PyResult<Settings> {
        let is = |get: &Py<PyAny>| get.bind(py).call0()?.is_truthy();
        let precision = self.get_precision.bind(py).call0()?;
        let precision = precision.cast::<PyString>()?.to_str()?;
        let known = PRECISIONS.iter().position(|name| *name == precision);
        let deterministic = is(&self.get_deterministic)?;
        Ok(Settings {
            dtype: self.scalar_type(&self.get_default_dtype.bind(py).call0()?)?,
            deterministic,
            warns_only: deterministic && is(&self.get_warns_only)?,
            precision: known.unwrap_or_default() as u8,
        })
    }

    pub(super) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let class = object.get_type_ptr();
        if class == self.tensor.as_ptr().cast() || class == self.parameter.as_ptr().cast() {
            return Ok(true);
        }
        object.is_instance(self.tensor.bind(object.py()))
    }

    /// Returns the number of a `torch.dtype`.
    ///
    /// # Errors
    /// TypeError if remote tensors cannot have the dtype.
    pub(super) fn scalar_type(&self, object: &Bound<'_, PyAny>) -> PyResult<ScalarType> {
        self.dtypes.number(object).ok_or_else(|| {
            PyTypeError::new_err(format!("unsupported dtype {object} on the device ts"))
        })
    }

    /// Returns the row of a dtype in the table.
    ///
    /// # Errors
    /// TypeError if the installed PyTorch or this package lacks the dtype.
    pub(super) fn row(&self, dtype: ScalarType) -> PyResult<&'static Row> {
        self.dtypes
            .get(dtype)
            .map(|dtype| dtype.row)
            .ok_or_else(|| PyTypeError::new_err(missing_dtype(dtype, "this client")))
    }

    /// Returns the index of a tensor's ts device, its remote storage, and its layout in this
    /// storage. Returns `None` for a tensor on another device.
    pub(super) fn describe(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<(u32, TensorRef)>> {
        let py = tensor.py();
        let index: i64 = tensor.call_method0(intern!(py, "get_device"))?.extract()?;
        let Ok(index) = u32::try_from(index) else { return Ok(None) };
        let dtype = self.scalar_type(&tensor.getattr(intern!(py, "dtype"))?)?;
        let sizes = tuple(&tensor.getattr(intern!(py, "shape"))?)?;
        let strides = tuple(&tensor.call_method0(intern!(py, "stride"))?)?;
        let element = self.row(dtype)?.bytes;
        let mut address: u64 = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let mut offset: u64 = 0;
        if address == 0 {
            // `data_ptr` of a tensor without elements is 0, but `data_ptr` of its storage is not.
            let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
            address = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
            offset = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
        }
        let Some((storage, begin)) = storage_at(address) else { return Ok(None) };
        offset += elements(begin, element)?;
        Ok(Some((
            index,
            TensorRef { storage, view: StorageView { dtype, sizes, strides, offset } },
        )))
    }
}

/// Returns the offset in elements of this offset in bytes.
///
/// # Errors
/// ValueError if it is in the middle of an element.
fn elements(offset: u64, element: u64) -> PyResult<u64> {
    if !offset.is_multiple_of(element) {
        return Err(PyValueError::new_err(format!(
            "invalid view of a storage on a ts device: expected an offset that is a multiple of \
             the {element} bytes of an element, got {offset}"
        )));
    }
    Ok(offset / element)
}

fn tuple<'py, T>(tuple: &Bound<'py, PyAny>) -> PyResult<Vec<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    tuple.cast::<PyTuple>()?.iter().map(|number| number.extract()).collect()
}
