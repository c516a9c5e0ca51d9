// SPDX-License-Identifier: MIT OR Apache-2.0
//! Passes sources from one process to another, which can neither open files nor connect sockets. On
//! Windows, there are no such processes.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use tensorstream::Error;
use tensorstream::io::Source;

use crate::errors::to_python;

#[cfg(unix)]
pub(crate) mod unix;

/// Returns the path of the file in a directory that ``Checkpoint(directory)`` opens. Blocks.
///
/// Raises:
///     CheckpointNotFoundError: The directory contains no checkpoint.
#[pyfunction]
pub(crate) fn checkpoint_file(py: Python<'_>, directory: PathBuf) -> PyResult<PathBuf> {
    tensorstream::checkpoint_file(&directory).map_err(|e| to_python(py, &e))
}

/// A file, or another source of bytes, which this or another process has opened.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct PassedSource {
    pub(super) source: Arc<Source>,
}

#[pymethods]
impl PassedSource {
    /// Returns the source for a file that another process has opened with ``open_file``.
    ///
    /// Args:
    ///     name: The path of the file.
    ///     file: The descriptor. This object takes ownership of all descriptors.
    ///     direct: The descriptor for direct reads, and their alignment in bytes.
    #[cfg(unix)]
    #[staticmethod]
    #[pyo3(signature = (name, file, direct=None))]
    fn of_file(
        py: Python<'_>,
        name: &str,
        file: std::os::fd::RawFd,
        direct: Option<(std::os::fd::RawFd, usize)>,
    ) -> PyResult<Self> {
        unix::source_of(py, name, file, direct)
    }

    /// Opens the file of the checkpoint at a URL, or the file ``beside`` in the same directory.
    /// Blocks.
    ///
    /// Raises:
    ///     CheckpointNotFoundError, CheckpointPermissionError, StorageError: It cannot be opened.
    #[staticmethod]
    fn at_url(py: Python<'_>, url: &str, beside: &str) -> PyResult<Self> {
        let beside = (!beside.is_empty()).then_some(beside);
        let source = py.detach(|| tensorstream::checkpoint_source(url, beside));
        Ok(Self { source: source.map_err(|e| to_python(py, &e))? })
    }

    /// The path or URL.
    #[getter]
    fn name(&self) -> String {
        self.source.path().to_string_lossy().into_owned()
    }

    /// The length in bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.source.len()
    }

    /// Reads all bytes. Blocks.
    ///
    /// Raises:
    ///     StorageError: Reading failed.
    fn read(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        let read = || -> Result<_, Error> {
            let mut bytes = vec![0; self.source.len() as usize];
            let len = self.source.read_at(0, &mut bytes)?;
            bytes.truncate(len);
            Ok(bytes)
        };
        py.detach(read).map_err(|e| to_python(py, &e))
    }
}
