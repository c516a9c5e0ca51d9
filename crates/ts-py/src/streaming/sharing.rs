// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that the processes of one user share.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use tensorstream::orchestrator::page_group;
use tensorstream::pool::PageStore;

use crate::errors::configuration_error;
use crate::files::checkpoint::Checkpoint;

/// Opens the memory that processes share.
///
/// # Errors
/// ConfigurationError if the directory cannot be used.
pub(super) fn page_store(directory: &Path) -> PyResult<PageStore> {
    PageStore::open(directory).map_err(|e| {
        let message = format!("invalid Config.shared_cache: {e}");
        Python::attach(|py| configuration_error(py, &message))
    })
}

/// Returns the directory in which the processes of this user share memory by default.
#[pyfunction]
pub(crate) fn shared_directory() -> PathBuf {
    PageStore::default_dir()
}

/// Removes shared memory that only this process uses. Call this when the interpreter ends, because
/// it does not end models.
#[pyfunction]
pub(crate) fn leave_shared(py: Python<'_>) {
    py.detach(PageStore::leave_all);
}

/// Returns how much memory other processes keep that a model can share.
///
/// Args:
///     checkpoint: The checkpoint of the model.
///     directory: The directory in which the processes share memory.
///
/// Returns:
///     The number of bytes.
///
/// Raises:
///     ConfigurationError: The directory cannot be used.
#[pyfunction]
pub(crate) fn shared_bytes(checkpoint: &Checkpoint, directory: PathBuf) -> PyResult<u64> {
    let group = page_group(checkpoint.inner.sources());
    let store = page_store(&directory)?;
    Ok(group.map_or(0, |group| store.group_bytes(group)))
}
