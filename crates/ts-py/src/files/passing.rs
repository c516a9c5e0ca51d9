// SPDX-License-Identifier: MIT OR Apache-2.0
//! Passes open files from one process to another, which may not open them.

use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use tensorstream::io::{FileHandles, Source};

use crate::errors::to_python;

/// The descriptors of an open file: for reads through the page cache, and for direct reads with the
/// alignment in bytes that they require.
type Descriptors = (RawFd, Option<(RawFd, usize)>);

/// Opens a file for ``Checkpoint.opened_by`` in another process. Blocks.
///
/// Returns:
///     A descriptor for reads through the page cache, and, if the file supports direct reads, a
///     descriptor for them and the alignment in bytes that they require. The caller owns them.
///
/// Raises:
///     CheckpointNotFoundError, CheckpointPermissionError, StorageError: The file cannot be opened,
///         or is not a regular file.
#[pyfunction]
pub(crate) fn open_file(py: Python<'_>, path: PathBuf) -> PyResult<Descriptors> {
    let open = || -> Result<_, tensorstream::io::Error> {
        let path = format!("file://{}", path.display());
        Source::open(path)?.handles()
    };
    let handles = py.detach(open).map_err(|e| to_python(py, &e.into()))?;
    let FileHandles { file, direct } = handles.expect("a path names a file");
    Ok((file.into_raw_fd(), direct.map(|(file, alignment)| (file.into_raw_fd(), alignment))))
}

/// Returns the source for a file that ``open`` gets from another process.
pub(super) fn passed_file(
    py: Python<'_>,
    name: &str,
    open: &Bound<'_, PyAny>,
) -> PyResult<Arc<Source>> {
    let (file, direct): Descriptors = open.call1((name,))?.extract()?;
    // SAFETY: `open` passes on the descriptors, which nothing else owns.
    let owned = |descriptor| unsafe { File::from_raw_fd(descriptor) };
    let direct = direct.map(|(descriptor, alignment)| (owned(descriptor), alignment));
    let handles = FileHandles { file: owned(file), direct };
    Source::from_handles(name, handles).map_err(|e| to_python(py, &e.into()))
}

/// Returns the path of the file in a directory that ``Checkpoint(directory)`` opens. Blocks.
///
/// Raises:
///     CheckpointNotFoundError: The directory contains no checkpoint.
#[pyfunction]
pub(crate) fn checkpoint_file(py: Python<'_>, directory: PathBuf) -> PyResult<PathBuf> {
    tensorstream::checkpoint_file(&directory).map_err(|e| to_python(py, &e))
}
