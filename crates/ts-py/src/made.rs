// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files that this process made from a checkpoint, and that it can make again.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use pyo3::prelude::*;

static MADE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Notes that a file was made from a checkpoint. If it turns out to be damaged, it is removed, so
/// that the next load makes it again.
#[pyfunction]
pub(crate) fn note_made(path: PathBuf) {
    MADE.lock().insert(path);
}

/// Removes a damaged file if it was made from a checkpoint. Returns whether it was removed.
pub(crate) fn remove_if_made(path: &Path) -> bool {
    MADE.lock().contains(path) && std::fs::remove_file(path).is_ok()
}
