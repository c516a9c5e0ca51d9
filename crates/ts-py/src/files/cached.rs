// SPDX-License-Identifier: MIT OR Apache-2.0
//! Small files that save time in later runs, and unfinished files of processes that were killed.

use std::path::PathBuf;

use pyo3::prelude::*;
use tensorstream::io;

/// Returns the directory for files that make later runs faster. None if the user has no home
/// directory.
#[pyfunction]
pub(crate) fn cache_directory() -> Option<PathBuf> {
    io::cache_directory()
}

/// Reads a file that ``write_cached`` has written. Returns None if that is not possible.
#[pyfunction]
pub(crate) fn read_cached(path: PathBuf) -> Option<String> {
    io::read_cached(&path)
}

/// Writes a small file atomically, and creates its directory. Does nothing if that fails, because
/// the file only saves time.
#[pyfunction]
pub(crate) fn write_cached(path: PathBuf, text: &str) {
    let _ = io::write_cached(&path, text);
}

/// Removes the unfinished files of weights in a directory that no process is writing. The names of
/// such files are keys of their content, so other files stay.
#[pyfunction]
pub(crate) fn remove_unfinished(directory: PathBuf) {
    let is_key = |name: &str| {
        let key = name.strip_prefix("converted-").unwrap_or(name);
        let digits = key.bytes().take_while(u8::is_ascii_hexdigit).count();
        digits == 32 && name.ends_with(".ts")
    };
    tensorstream::remove_unfinished(&directory, &is_key);
}
