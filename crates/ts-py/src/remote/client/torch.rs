// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is used of PyTorch, and tensors of the device as it sees them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyInt, PyTuple, PyType};
use tensorstream::exec::{Call, Output, ScalarType, StorageView, TensorRef};

use crate::dtype::{Row, TorchDtypes};

/// Of so many functions it is known at most whether they are the user's.
const MAX_KNOWN: usize = 16 << 10;

/// The Python half of the client, `tensorstream/remote/client/_bridge.py`.
#[derive(FromPyObject)]
pub(crate) struct Hooks {
    /// `infer(op, args, kwargs)`: what a call that is not in the cache will return.
    pub(super) infer: Py<PyAny>,
    /// `element(tensor)`: the bytes of a tensor on the host without dimensions.
    pub(super) element: Py<PyAny>,
    /// `to_device(tensor, index)`: a copy, on the device, of a tensor on the host.
    pub(super) to_device: Py<PyAny>,
    /// `current_device()`: the index of the current device.
    pub(super) current_device: Py<PyAny>,
    /// `draw(op, args, kwargs)`: runs an operator that draws from a generator of the host.
    pub(super) draw: Py<PyAny>,
    /// `as_strided(tensor, sizes, strides, offset)`: a view, below autograd.
    pub(super) as_strided: Py<PyAny>,
    /// `source_line(code, instruction)`: file, line and function of the user's program.
    source_line: Py<PyAny>,
    /// `is_logging(level)`: whether the logger writes messages of a level.
    is_logging: Py<PyAny>,
    /// `log(name, inputs, outputs)`: logs an operator and the hashes of its tensors.
    log: Py<PyAny>,
    /// Directories of functions that are not part of the user's program.
    libraries: Vec<String>,
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
    getframe: Py<PyAny>,
    pub(super) hooks: Hooks,
    /// Whether functions are the user's, by the address of their code, which is kept.
    known: Mutex<HashMap<usize, (Py<PyAny>, bool)>>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
static FORKED: AtomicBool = AtomicBool::new(false);

/// Gives the client its Python half. Called once, when the device is set up.
#[pyfunction]
pub(crate) fn remote_setup(py: Python<'_>, hooks: Hooks) -> PyResult<()> {
    let torch = py.import("torch")?;
    let class = |name: &str| Ok::<_, PyErr>(torch.getattr(name)?.cast_into::<PyType>()?.unbind());
    let parameter = torch.getattr("nn")?.getattr("Parameter")?;
    let torch = Torch {
        tensor: class("Tensor")?,
        parameter: parameter.cast_into::<PyType>()?.unbind(),
        device: class("device")?,
        dtype: class("dtype")?,
        named: [class("memory_format")?, class("layout")?],
        dtypes: TorchDtypes::load(&torch)?,
        from_dlpack: torch.getattr("_C")?.getattr("_from_dlpack")?.unbind(),
        get_default_dtype: torch.getattr("get_default_dtype")?.unbind(),
        getframe: py.import("sys")?.getattr("_getframe")?.unbind(),
        hooks,
        known: Mutex::default(),
    };
    let _ = TORCH.set(py, torch);
    Ok(())
}

/// This process is a fork: nothing of the device works here.
#[pyfunction]
pub(crate) fn remote_forked() {
    FORKED.store(true, Ordering::Relaxed);
}

pub(super) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

pub(super) fn torch(py: Python<'_>) -> PyResult<&Torch> {
    TORCH.get(py).ok_or_else(|| {
        PyRuntimeError::new_err("the device is not set up: import tensorstream.remote")
    })
}

/// The bit by which addresses of storages that are elsewhere are told from those of memory.
const MARK: u64 = 1 << 62;
/// Storages' addresses are this far apart, as bits.
const STEP: u32 = 8;

/// What stands for the address of a storage's first byte.
pub(super) fn address_of(storage: u64) -> u64 {
    MARK | storage << STEP
}

/// The storage whose first byte has this address.
pub(super) fn storage_at(address: u64) -> Option<u64> {
    (address & MARK != 0 && address >> 63 == 0).then_some((address & !MARK) >> STEP)
}

/// A line of the user's program: the function's code, and where in it.
pub(super) struct Line {
    pub(super) code: Py<PyAny>,
    pub(super) instruction: i32,
}

impl Line {
    pub(super) fn clone_ref(&self, py: Python<'_>) -> Self {
        Self { code: self.code.clone_ref(py), instruction: self.instruction }
    }

    /// File, line and function.
    pub(super) fn place(&self, py: Python<'_>) -> String {
        let told = torch(py).and_then(|torch| {
            torch.hooks.source_line.call1(py, (&self.code, self.instruction))?.extract(py)
        });
        told.unwrap_or_else(|_| "?".into())
    }
}

impl Torch {
    /// The line of the user's that is under way: the innermost that is neither PyTorch's nor this
    /// package's.
    pub(super) fn line(&self, py: Python<'_>) -> Option<Line> {
        let mut frame = self.getframe.bind(py).call0().ok()?;
        loop {
            let code = frame.getattr(intern!(py, "f_code")).ok()?;
            let at = code.as_ptr() as usize;
            let mut known = self.known.lock();
            let users = match known.get(&at) {
                Some((_, users)) => *users,
                None => {
                    let file: String =
                        code.getattr(intern!(py, "co_filename")).ok()?.extract().ok()?;
                    let users =
                        !self.hooks.libraries.iter().any(|library| file.starts_with(library));
                    if known.len() >= MAX_KNOWN {
                        known.clear();
                    }
                    known.insert(at, (code.clone().unbind(), users));
                    users
                }
            };
            drop(known);
            if users {
                let instruction = frame.getattr(intern!(py, "f_lasti")).ok()?.extract().ok()?;
                return Some(Line { code: code.unbind(), instruction });
            }
            frame = frame.getattr(intern!(py, "f_back")).ok()?;
            if frame.is_none() {
                return None;
            }
        }
    }

    /// Notes an operator in the log, if there is one of everything: its name, and tensors by their
    /// hashes.
    pub(super) fn log(&self, py: Python<'_>, name: &str, call: &Call) -> PyResult<()> {
        /// `logging.DEBUG`.
        const EVERYTHING: u8 = 10;
        if !self.hooks.is_logging.bind(py).call1((EVERYTHING,))?.extract::<bool>()? {
            return Ok(());
        }
        let hash = |tensor: &TensorRef| format!("{:016x}", tensor.metadata_hash());
        let given: Vec<String> = call.tensors().map(hash).collect();
        let made = call.outputs.iter().filter_map(|output| match output {
            Output::New { tensor, .. } => Some(hash(tensor)),
            _ => None,
        });
        let made: Vec<String> = made.collect();
        self.hooks.log.bind(py).call1((name, given, made)).map(drop)
    }

    /// What numbers become that have no dtype.
    pub(super) fn default_dtype(&self, py: Python<'_>) -> PyResult<ScalarType> {
        self.scalar_type(&self.get_default_dtype.bind(py).call0()?)
    }

    pub(super) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let class = object.get_type_ptr();
        if class == self.tensor.as_ptr().cast() || class == self.parameter.as_ptr().cast() {
            return Ok(true);
        }
        object.is_instance(self.tensor.bind(object.py()))
    }

    /// A dtype by its object.
    pub(super) fn scalar_type(&self, object: &Bound<'_, PyAny>) -> PyResult<ScalarType> {
        self.dtypes.number(object).ok_or_else(|| {
            PyTypeError::new_err(format!(
                "tensors of {object} cannot be on a device of tensorstream"
            ))
        })
    }

    /// The row of a dtype in the table.
    pub(super) fn row(&self, dtype: ScalarType) -> PyResult<&'static Row> {
        self.dtypes
            .get(dtype)
            .map(|dtype| dtype.row)
            .ok_or_else(|| PyTypeError::new_err(format!("there is no dtype {}", dtype.0)))
    }

    /// A tensor of the device: its index there, and what it is a view of. None of a tensor that is
    /// elsewhere.
    pub(super) fn describe(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<(u32, TensorRef)>> {
        let py = tensor.py();
        let index: i64 = tensor.call_method0(intern!(py, "get_device"))?.extract()?;
        let Ok(index) = u32::try_from(index) else { return Ok(None) };
        let dtype = self.scalar_type(&tensor.getattr(intern!(py, "dtype"))?)?;
        let sizes = sizes(&tensor.getattr(intern!(py, "shape"))?)?;
        let strides = numbers(&tensor.call_method0(intern!(py, "stride"))?)?;
        let offset: u64 = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
        let address: u64 = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let address = if address == 0 {
            // A tensor without elements does not say where it is; its storage does.
            let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
            storage.call_method0(intern!(py, "data_ptr"))?.extract()?
        } else {
            address.wrapping_sub(offset * self.row(dtype)?.bytes)
        };
        let Some(storage) = storage_at(address) else { return Ok(None) };
        Ok(Some((
            index,
            TensorRef { storage, view: StorageView { dtype, sizes, strides, offset } },
        )))
    }
}

fn sizes(shape: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    shape.cast::<PyTuple>()?.iter().map(|size| size.extract()).collect()
}

fn numbers(tuple: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    tuple.cast::<PyTuple>()?.iter().map(|number| number.extract()).collect()
}

/// An integer, if that is what it is.
pub(crate) fn integer(object: &Bound<'_, PyAny>) -> Option<i64> {
    object.cast::<PyInt>().ok()?.extract().ok()
}
