// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `FileWriter`, which writes files and appends to them.

use std::path::Path;

use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorstream::format::Compression;
use tensorstream::{Error, NewTensor, Watch, WriteOptions};

use super::metadata::FileMetadata;
use super::path::PathArgument;
use super::progress::{NO_PROGRESS, watched};
use crate::dlpack::CapsuleBytes;
use crate::dtype::tensor_meta;
use crate::errors::to_python;

/// A tensor to write: name, safetensors dtype name, shape, and offset of its data modulo 64. None
/// stands for offset 0.
type NewTensorSpec = (String, String, Vec<u64>, Option<u8>);

/// The number of bytes that are written between two checks for signals.
const PIECE_BYTES: usize = 16 << 20;

/// Writes a .ts or .safetensors file atomically.
///
/// Args:
///     path: The file. Its suffix determines the format.
///     tensors: Name, safetensors dtype name, shape, and offset modulo 64 of each tensor. None
///         stands for offset 0. .safetensors files ignore the offset.
///     metadata: Text by key, or None.
///     codec: "raw", "auto", or the name of a codec.
///     level: The level of the codec; None for its default.
///     jobs: The number of threads that compress; 0 for one per core.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct FileWriter {
    /// None after the file was committed, abandoned or returned as bytes.
    inner: Mutex<Option<tensorstream::FileWriter>>,
}

#[pymethods]
impl FileWriter {
    #[new]
    #[pyo3(signature = (path, tensors, metadata, codec="raw", level=None, jobs=0))]
    fn new(
        py: Python<'_>,
        path: PathArgument,
        tensors: Vec<NewTensorSpec>,
        metadata: FileMetadata,
        codec: &str,
        level: Option<i32>,
        jobs: usize,
    ) -> PyResult<Self> {
        let (path, tensors) = (path.0, new_tensors(tensors)?);
        let options = write_options(py, &path, codec, level, jobs)?;
        let create = |watch: &mut Watch<'_>| {
            tensorstream::FileWriter::create(&path, tensors, metadata.0, options, &mut || {
                watch(NO_PROGRESS)
            })
        };
        Ok(Self { inner: Mutex::new(Some(watched(py, None, create)?)) })
    }

    /// Creates a file in memory, which ``to_bytes`` returns.
    ///
    /// Args:
    ///     name: The name of the file in error messages. Its suffix determines the format.
    ///
    /// The other arguments are those of the class.
    #[staticmethod]
    #[pyo3(signature = (name, tensors, metadata, codec="raw", level=None))]
    fn in_memory(
        py: Python<'_>,
        name: &str,
        tensors: Vec<NewTensorSpec>,
        metadata: FileMetadata,
        codec: &str,
        level: Option<i32>,
    ) -> PyResult<Self> {
        let options = write_options(py, name.as_ref(), codec, level, 0)?;
        let inner =
            tensorstream::FileWriter::in_memory(name, new_tensors(tensors)?, metadata.0, options);
        Ok(Self { inner: Mutex::new(Some(inner.map_err(|e| to_python(py, &e))?)) })
    }

    /// Appends to a .ts file.
    ///
    /// Args:
    ///     tensors: Tensors to add, which replace those of the same name.
    ///     remove: Names of tensors to remove.
    ///     metadata: Text by key, which is added to the existing metadata. Replaces the text of
    ///         existing keys.
    ///
    /// The other arguments are those of the class.
    #[staticmethod]
    #[pyo3(signature = (path, tensors, remove, metadata, codec="raw", level=None))]
    fn append(
        py: Python<'_>,
        path: PathArgument,
        tensors: Vec<NewTensorSpec>,
        remove: Vec<String>,
        metadata: FileMetadata,
        codec: &str,
        level: Option<i32>,
    ) -> PyResult<Self> {
        let (path, tensors) = (path.0, new_tensors(tensors)?);
        let options = write_options(py, &path, codec, level, 0)?;
        let append = |watch: &mut Watch<'_>| {
            let interrupt = &mut || watch(NO_PROGRESS);
            tensorstream::FileWriter::append(
                &path, tensors, &remove, metadata.0, options, interrupt,
            )
        };
        Ok(Self { inner: Mutex::new(Some(watched(py, None, append)?)) })
    }

    /// Creates a file, or returns None if the file already has these tensors and this metadata.
    ///
    /// Args:
    ///     fingerprint: The fingerprint that an existing file must also have, in hexadecimal; None
    ///         for any.
    ///
    /// The other arguments are those of the class.
    #[staticmethod]
    #[pyo3(signature = (path, tensors, metadata, fingerprint, codec="raw", level=None))]
    fn unless_written(
        py: Python<'_>,
        path: PathArgument,
        tensors: Vec<NewTensorSpec>,
        metadata: FileMetadata,
        fingerprint: Option<String>,
        codec: &str,
        level: Option<i32>,
    ) -> PyResult<Option<Self>> {
        let (path, tensors) = (path.0, new_tensors(tensors)?);
        let options = write_options(py, &path, codec, level, 0)?;
        let fingerprint = fingerprint.as_deref().map(parse_fingerprint).transpose()?;
        let create = |watch: &mut Watch<'_>| {
            let interrupt = &mut || watch(NO_PROGRESS);
            tensorstream::FileWriter::unless_written(
                &path,
                tensors,
                &metadata.0,
                options,
                fingerprint,
                interrupt,
            )
        };
        let inner = watched(py, None, create)?;
        Ok(inner.map(|inner| Self { inner: Mutex::new(Some(inner)) }))
    }

    /// Creates a file, or continues an unfinished one after the tensors that are complete.
    ///
    /// Args:
    ///     origin: Text that identifies the source of the bytes. An unfinished file with another
    ///     one
    ///         is discarded.
    ///
    /// The other arguments are those of the class.
    #[staticmethod]
    #[pyo3(signature = (path, tensors, metadata, origin, codec="raw", level=None))]
    fn resume(
        py: Python<'_>,
        path: PathArgument,
        tensors: Vec<NewTensorSpec>,
        metadata: FileMetadata,
        origin: &str,
        codec: &str,
        level: Option<i32>,
    ) -> PyResult<Self> {
        let (path, tensors, metadata) = (path.0, new_tensors(tensors)?, metadata.0);
        let options = write_options(py, &path, codec, level, 0)?;
        let resume = |watch: &mut Watch<'_>| {
            let interrupt = &mut || watch(NO_PROGRESS);
            tensorstream::FileWriter::resume(&path, tensors, metadata, origin, options, interrupt)
        };
        Ok(Self { inner: Mutex::new(Some(watched(py, None, resume)?)) })
    }

    /// Returns the number of complete tensors, in the order of ``order``.
    fn complete(&self) -> PyResult<usize> {
        Ok(open(&mut self.inner.lock())?.complete())
    }

    /// Makes the complete tensors durable, and keeps them if the writer is abandoned, for
    /// ``resume``. Blocks.
    ///
    /// Args:
    ///     origin: The argument of ``resume``.
    fn checkpoint(&self, py: Python<'_>, origin: &str) -> PyResult<()> {
        let written = py.detach(|| match self.inner.lock().as_mut() {
            Some(inner) => inner.checkpoint(origin).map(|()| true),
            None => Ok(false),
        });
        if written.map_err(|e| to_python(py, &e))? { Ok(()) } else { Err(ended()) }
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

    /// Completes a file in memory, and returns its bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let inner = self.inner.lock().take().ok_or_else(ended)?;
        let bytes = py.detach(|| inner.into_bytes()).map_err(|e| to_python(py, &e))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Discards the new data. An existing file at the path is unchanged. Does nothing if the writer
    /// has already ended.
    fn abandon(&self, py: Python<'_>) {
        let inner = self.inner.lock().take();
        py.detach(|| drop(inner));
    }
}

/// Returns the options for writing a file. `path` is used only in the error.
///
/// # Errors
/// ConfigurationError if the codec is unknown, or if there is a level for "raw" or "auto".
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
    PyRuntimeError::new_err(
        "cannot use the writer: its file was already committed, abandoned or returned as bytes",
    )
}

fn parse_fingerprint(hex: &str) -> PyResult<u128> {
    u128::from_str_radix(hex, 16).map_err(|error| {
        PyValueError::new_err(format!(
            "invalid fingerprint {hex:?}: {error}; expected 32 hexadecimal digits"
        ))
    })
}

fn new_tensors(specs: Vec<NewTensorSpec>) -> PyResult<Vec<NewTensor>> {
    let new = |(name, dtype, shape, phase): NewTensorSpec| {
        Ok(NewTensor { name, meta: tensor_meta(&dtype, shape)?, phase })
    };
    specs.into_iter().map(new).collect()
}
