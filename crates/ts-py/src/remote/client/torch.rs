// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is used of PyTorch, and tensors of the device as it sees them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyInt, PyTuple, PyType};
use tensorstream::exec::{Call, Output, ScalarType, StorageView, TensorRef};

/// Of so many functions it is known at most whether they are the user's.
const MAX_KNOWN: usize = 16 << 10;

/// Objects of PyTorch's and of the Python side of this package, found once.
pub(crate) struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    pub(super) device: Py<PyType>,
    pub(super) dtype: Py<PyType>,
    /// Memory formats and layouts, which are told by their names.
    pub(super) named: [Py<PyType>; 2],
    /// By PyTorch's number, where there is one.
    dtypes: Vec<Option<Element>>,
    pub(super) from_dlpack: Py<PyAny>,
    /// Python's part of calls that have not been seen before.
    pub(super) infer: Py<PyAny>,
    /// A view of a tensor: of it, sizes, strides and offset.
    pub(super) as_strided: Py<PyAny>,
    /// The frame of the function that calls.
    frame: Py<PyAny>,
    /// What numbers become that have no dtype: a function.
    default_dtype: Py<PyAny>,
    /// Whether there is a log of a level.
    logs: Py<PyAny>,
    /// Directories whose functions are not the user's.
    libraries: Vec<String>,
    /// Whether functions are the user's, by the address of their code, which is kept.
    known: Mutex<HashMap<usize, (Py<PyAny>, bool)>>,
}

/// A dtype.
pub(super) struct Element {
    pub(super) object: Py<PyAny>,
    pub(super) bytes: u64,
    /// DLPack's code and bits.
    pub(super) dlpack: (u8, u8),
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
static FORKED: AtomicBool = AtomicBool::new(false);

/// What is used of PyTorch: called once, when the device is set up.
#[pyfunction]
pub(crate) fn remote_setup(py: Python<'_>, objects: &Bound<'_, PyDict>) -> PyResult<()> {
    let get = |name: &str| {
        let missing = || PyTypeError::new_err(format!("{name} is missing"));
        objects.get_item(name)?.ok_or_else(missing)
    };
    let class = |name: &str| Ok::<_, PyErr>(get(name)?.cast_into::<PyType>()?.unbind());
    let mut dtypes: Vec<Option<Element>> = Vec::new();
    for (object, number, bytes, dlpack) in
        get("dtypes")?.extract::<Vec<(Py<PyAny>, u8, u64, (u8, u8))>>()?
    {
        if dtypes.len() <= usize::from(number) {
            dtypes.resize_with(usize::from(number) + 1, || None);
        }
        dtypes[usize::from(number)] = Some(Element { object, bytes, dlpack });
    }
    let torch = Torch {
        tensor: class("tensor")?,
        parameter: class("parameter")?,
        device: class("device")?,
        dtype: class("dtype")?,
        named: [class("memory_format")?, class("layout")?],
        dtypes,
        from_dlpack: get("from_dlpack")?.unbind(),
        infer: get("infer")?.unbind(),
        as_strided: get("as_strided")?.unbind(),
        frame: get("frame")?.unbind(),
        default_dtype: get("default_dtype")?.unbind(),
        logs: get("logs")?.unbind(),
        libraries: get("libraries")?.extract()?,
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
            torch
                .infer
                .call_method1(py, intern!(py, "place"), (&self.code, self.instruction))?
                .extract(py)
        });
        told.unwrap_or_else(|_| "?".into())
    }
}

impl Torch {
    /// The line of the user's that is under way: the innermost that is neither PyTorch's nor this
    /// package's.
    pub(super) fn line(&self, py: Python<'_>) -> Option<Line> {
        let mut frame = self.frame.bind(py).call0().ok()?;
        loop {
            let code = frame.getattr(intern!(py, "f_code")).ok()?;
            let at = code.as_ptr() as usize;
            let mut known = self.known.lock();
            let users = match known.get(&at) {
                Some((_, users)) => *users,
                None => {
                    let file: String =
                        code.getattr(intern!(py, "co_filename")).ok()?.extract().ok()?;
                    let users = !self.libraries.iter().any(|library| file.starts_with(library));
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
        if !self.logs.bind(py).call1((EVERYTHING,))?.extract::<bool>()? {
            return Ok(());
        }
        let hash = |tensor: &TensorRef| format!("{:016x}", tensor.metadata_hash());
        let given: Vec<String> = call.tensors().map(hash).collect();
        let made = call.outputs.iter().filter_map(|output| match output {
            Output::New { tensor, .. } => Some(hash(tensor)),
            _ => None,
        });
        let made: Vec<String> = made.collect();
        self.infer.bind(py).call_method1(intern!(py, "log"), (name, given, made)).map(drop)
    }

    /// What numbers become that have no dtype.
    pub(super) fn default_dtype(&self, py: Python<'_>) -> PyResult<ScalarType> {
        self.scalar_type(&self.default_dtype.bind(py).call0()?)
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
        let at = self.dtypes.iter().position(|element| {
            element.as_ref().is_some_and(|element| element.object.as_ptr() == object.as_ptr())
        });
        let at = at.ok_or_else(|| {
            PyTypeError::new_err(format!(
                "tensors of {object} cannot be on a device of tensorstream"
            ))
        })?;
        Ok(ScalarType(at as u8))
    }

    pub(super) fn element(&self, dtype: ScalarType) -> PyResult<&Element> {
        let element = self.dtypes.get(usize::from(dtype.0)).and_then(Option::as_ref);
        element.ok_or_else(|| PyTypeError::new_err(format!("there is no dtype {}", dtype.0)))
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
            address.wrapping_sub(offset * self.element(dtype)?.bytes)
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
