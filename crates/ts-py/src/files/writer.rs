// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes checkpoints.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorstream::format::{Compression, Digest, Dtype, TensorMeta, tensor_fingerprint};
use tensorstream::{Error, NewTensor, Watch, WriteOptions};

use super::progress::{NOTHING, watched};
use crate::dlpack::Lent;
use crate::errors::to_python;

/// Name, safetensors dtype name, shape, and address modulo 64 or None.
type NewTensorSpec = (String, String, Vec<u64>, Option<u8>);

/// Bytes that are written, hashed or read between two looks for a signal.
const PIECE_BYTES: usize = 16 << 20;

/// Names the content of a set of tensors.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Fingerprint {
    tensors: Mutex<Vec<(String, u128)>>,
}

#[pymethods]
impl Fingerprint {
    #[new]
    fn new() -> Self {
        Self { tensors: Mutex::new(Vec::new()) }
    }

    /// Adds a tensor, whose bytes are lent as a capsule.
    fn add(
        &self,
        py: Python<'_>,
        name: String,
        dtype: &str,
        shape: Vec<u64>,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (meta, data) = (meta(dtype, shape)?, Lent::from_capsule(data)?);
        let bytes = data.bytes();
        let fingerprint = py.detach(|| tensor_fingerprint(&meta, &Digest::of(bytes)));
        py.check_signals()?;
        self.tensors.lock().push((name, fingerprint));
        Ok(())
    }

    /// 32 hexadecimal digits.
    fn hex(&self) -> String {
        let tensors = self.tensors.lock();
        let all = tensors.iter().map(|(name, fingerprint)| (name.as_str(), *fingerprint));
        format!("{:032x}", tensorstream::format::fingerprint(all))
    }
}

/// Writes a .ts or .safetensors file that appears whole or not at all.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct FileWriter {
    /// Taken when it ends.
    inner: Mutex<Option<tensorstream::FileWriter>>,
}

#[pymethods]
impl FileWriter {
    #[new]
    #[pyo3(signature = (path, tensors, metadata, codec="raw", level=None, jobs=0))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        tensors: Vec<NewTensorSpec>,
        metadata: BTreeMap<String, String>,
        codec: &str,
        level: Option<i32>,
        jobs: usize,
    ) -> PyResult<Self> {
        let tensors = new_tensors(tensors)?;
        let options = options(py, &path, codec, level, jobs)?;
        let create = |watch: &mut Watch<'_>| {
            tensorstream::FileWriter::create(&path, tensors, metadata, options, &mut || {
                watch(NOTHING)
            })
        };
        Ok(Self { inner: Mutex::new(Some(watched(py, None, create)?)) })
    }

    /// A file in memory, which errors call `name` and whose suffix says the format.
    #[staticmethod]
    #[pyo3(signature = (name, tensors, metadata, codec="raw", level=None))]
    fn in_memory(
        py: Python<'_>,
        name: &str,
        tensors: Vec<NewTensorSpec>,
        metadata: BTreeMap<String, String>,
        codec: &str,
        level: Option<i32>,
    ) -> PyResult<Self> {
        let options = options(py, name.as_ref(), codec, level, 0)?;
        let inner =
            tensorstream::FileWriter::in_memory(name, new_tensors(tensors)?, metadata, options);
        Ok(Self { inner: Mutex::new(Some(inner.map_err(|e| to_python(py, &e))?)) })
    }

    /// Goes on with a .ts file: adds tensors, in the place of those of the same name, removes some,
    /// sets metadata.
    #[staticmethod]
    #[pyo3(signature = (path, tensors, remove, metadata, codec="raw", level=None))]
    fn append(
        py: Python<'_>,
        path: PathBuf,
        tensors: Vec<NewTensorSpec>,
        remove: Vec<String>,
        metadata: BTreeMap<String, String>,
        codec: &str,
        level: Option<i32>,
    ) -> PyResult<Self> {
        let tensors = new_tensors(tensors)?;
        let options = options(py, &path, codec, level, 0)?;
        let append = |watch: &mut Watch<'_>| {
            let interrupt = &mut || watch(NOTHING);
            tensorstream::FileWriter::append(&path, tensors, &remove, metadata, options, interrupt)
        };
        Ok(Self { inner: Mutex::new(Some(watched(py, None, append)?)) })
    }

    /// As the constructor, but None when the file is there and holds just such tensors and
    /// metadata.
    #[staticmethod]
    #[pyo3(signature = (path, tensors, metadata, fingerprint, codec="raw", level=None))]
    fn unless_written(
        py: Python<'_>,
        path: PathBuf,
        tensors: Vec<NewTensorSpec>,
        metadata: BTreeMap<String, String>,
        fingerprint: Option<String>,
        codec: &str,
        level: Option<i32>,
    ) -> PyResult<Option<Self>> {
        let tensors = new_tensors(tensors)?;
        let options = options(py, &path, codec, level, 0)?;
        let fingerprint = fingerprint.map(|hex| u128::from_str_radix(&hex, 16)).transpose()?;
        let create = |watch: &mut Watch<'_>| {
            let interrupt = &mut || watch(NOTHING);
            tensorstream::FileWriter::unless_written(
                &path,
                tensors,
                &metadata,
                options,
                fingerprint,
                interrupt,
            )
        };
        let inner = watched(py, None, create)?;
        Ok(inner.map(|inner| Self { inner: Mutex::new(Some(inner)) }))
    }

    /// Indices of the tensors in the order in which their bytes are expected.
    fn order(&self) -> PyResult<Vec<usize>> {
        Ok(open(&mut self.inner.lock())?.order().to_vec())
    }

    /// Takes the next bytes, lent as a capsule.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let data = Lent::from_capsule(data)?;
        for piece in data.bytes().chunks(PIECE_BYTES) {
            let written = py.detach(|| match self.inner.lock().as_mut() {
                Some(inner) => inner.write(piece).map(|()| true),
                None => Ok(false),
            });
            if !written.map_err(|e| to_python(py, &e))? {
                return Err(ended());
            }
            py.check_signals()?;
        }
        Ok(())
    }

    /// Makes the file durable and gives it its name.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.lock().take().ok_or_else(ended)?;
        py.detach(|| inner.commit()).map_err(|e| to_python(py, &e))
    }

    /// Ends a file in memory, and gives it.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let inner = self.inner.lock().take().ok_or_else(ended)?;
        let bytes = py.detach(|| inner.into_bytes()).map_err(|e| to_python(py, &e))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Gives up; what had the name before still has it. Does nothing after the end.
    fn abandon(&self, py: Python<'_>) {
        let inner = self.inner.lock().take();
        py.detach(|| drop(inner));
    }
}

pub(super) fn options(
    py: Python<'_>,
    path: &Path,
    codec: &str,
    level: Option<i32>,
    jobs: usize,
) -> PyResult<WriteOptions> {
    let compression = Compression::parse(codec, level)
        .map_err(|reason| to_python(py, &Error::Compression { path: path.into(), reason }))?;
    Ok(WriteOptions { compression, jobs, ..WriteOptions::default() })
}

fn open<'a>(
    inner: &'a mut MutexGuard<'_, Option<tensorstream::FileWriter>>,
) -> PyResult<&'a mut tensorstream::FileWriter> {
    inner.as_mut().ok_or_else(ended)
}

fn ended() -> PyErr {
    PyRuntimeError::new_err("the file was committed or abandoned")
}

fn new_tensors(specs: Vec<NewTensorSpec>) -> PyResult<Vec<NewTensor>> {
    let new = |(name, dtype, shape, phase): NewTensorSpec| {
        Ok(NewTensor { name, meta: meta(&dtype, shape)?, phase })
    };
    specs.into_iter().map(new).collect()
}

/// A tensor's type by safetensors' name of its dtype.
pub(crate) fn meta(dtype: &str, shape: Vec<u64>) -> PyResult<TensorMeta> {
    let known = Dtype::from_name(dtype);
    let dtype = known.ok_or_else(|| PyValueError::new_err(format!("unknown dtype {dtype}")))?;
    Ok(TensorMeta { dtype, shape })
}
