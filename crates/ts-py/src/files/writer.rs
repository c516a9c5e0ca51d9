// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `FileWriter`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorstream::format::Compression;
use tensorstream::{Error, NewTensor, Watch, WriteOptions};

use super::progress::{NO_PROGRESS, watched};
use crate::dlpack::CapsuleBytes;
use crate::dtype::tensor_meta;
use crate::errors::to_python;

/// A tensor to write: name, safetensors dtype name, shape, and address modulo 64 or None.
type NewTensorSpec = (String, String, Vec<u64>, Option<u8>);

/// How many bytes are written between two checks for signals.
const PIECE_BYTES: usize = 16 << 20;

/// Writes a .ts or .safetensors file atomically.
///
/// Args:
///     tensors: Name, safetensors dtype name, shape, and address modulo 64 or None of each tensor.
///     codec: "raw", "auto", or the name of a codec.
///     level: The level of the codec; None for its default.
///     jobs: The number of threads that compress; 0 for one per core.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct FileWriter {
    /// None after the end.
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
        let options = write_options(py, &path, codec, level, jobs)?;
        let create = |watch: &mut Watch<'_>| {
            tensorstream::FileWriter::create(&path, tensors, metadata, options, &mut || {
                watch(NO_PROGRESS)
            })
        };
        Ok(Self { inner: Mutex::new(Some(watched(py, None, create)?)) })
    }

    /// Creates a file in memory, which ``to_bytes`` returns.
    ///
    /// Args:
    ///     name: The name in errors. Its suffix determines the format.
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
        let options = write_options(py, name.as_ref(), codec, level, 0)?;
        let inner =
            tensorstream::FileWriter::in_memory(name, new_tensors(tensors)?, metadata, options);
        Ok(Self { inner: Mutex::new(Some(inner.map_err(|e| to_python(py, &e))?)) })
    }

    /// Appends to a .ts file.
    ///
    /// Args:
    ///     tensors: Tensors to add, which replace those of the same name.
    ///     remove: Names of tensors to remove.
    ///     metadata: Keys to set.
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
        let options = write_options(py, &path, codec, level, 0)?;
        let append = |watch: &mut Watch<'_>| {
            let interrupt = &mut || watch(NO_PROGRESS);
            tensorstream::FileWriter::append(&path, tensors, &remove, metadata, options, interrupt)
        };
        Ok(Self { inner: Mutex::new(Some(watched(py, None, append)?)) })
    }

    /// Like the constructor, but returns None if the file already has these tensors and metadata.
    ///
    /// Args:
    ///     fingerprint: The fingerprint that its content must also have, in hexadecimal.
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
        let options = write_options(py, &path, codec, level, 0)?;
        let fingerprint = fingerprint.as_deref().map(parse_fingerprint).transpose()?;
        let create = |watch: &mut Watch<'_>| {
            let interrupt = &mut || watch(NO_PROGRESS);
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

    /// Returns the indices of the tensors, in the order in which their bytes are expected.
    fn order(&self) -> PyResult<Vec<usize>> {
        Ok(open(&mut self.inner.lock())?.order().to_vec())
    }

    /// Writes the next bytes. Blocks.
    ///
    /// Args:
    ///     data: A DLPack capsule of the bytes.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let data = CapsuleBytes::from_capsule(data)?;
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

    /// Makes the file durable and publishes it at its path. Blocks.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.lock().take().ok_or_else(ended)?;
        py.detach(|| inner.commit()).map_err(|e| to_python(py, &e))
    }

    /// Ends a file in memory and returns its bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let inner = self.inner.lock().take().ok_or_else(ended)?;
        let bytes = py.detach(|| inner.into_bytes()).map_err(|e| to_python(py, &e))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Discards what was written. An existing file at the path is unchanged. Does nothing after the
    /// end.
    fn abandon(&self, py: Python<'_>) {
        let inner = self.inner.lock().take();
        py.detach(|| drop(inner));
    }
}

/// Parses the compression of a file to write.
pub(super) fn write_options(
    py: Python<'_>,
    path: &Path,
    codec: &str,
    level: Option<i32>,
    jobs: usize,
) -> PyResult<WriteOptions> {
    let compression = Compression::parse(codec, level)
        .map_err(|reason| to_python(py, &Error::Compression { path: path.into(), reason }))?;
    Ok(WriteOptions::default().with_compression(compression).with_jobs(jobs))
}

fn open<'a>(
    inner: &'a mut MutexGuard<'_, Option<tensorstream::FileWriter>>,
) -> PyResult<&'a mut tensorstream::FileWriter> {
    inner.as_mut().ok_or_else(ended)
}

fn ended() -> PyErr {
    PyRuntimeError::new_err("the file was already committed or abandoned")
}

fn parse_fingerprint(hex: &str) -> PyResult<u128> {
    u128::from_str_radix(hex, 16)
        .map_err(|error| PyValueError::new_err(format!("invalid fingerprint {hex:?}: {error}")))
}

fn new_tensors(specs: Vec<NewTensorSpec>) -> PyResult<Vec<NewTensor>> {
    let new = |(name, dtype, shape, phase): NewTensorSpec| {
        Ok(NewTensor { name, meta: tensor_meta(&dtype, shape)?, phase })
    };
    specs.into_iter().map(new).collect()
}
