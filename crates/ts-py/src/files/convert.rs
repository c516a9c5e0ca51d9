// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts and compacts checkpoints; the command line.

use std::path::PathBuf;

use pyo3::prelude::*;
use tensorstream::io::fault::WriteFaults;
use tensorstream::{Converted, Watch};

use super::progress::watched;
use super::writer::options;

/// Writes a .ts file anew without what appends left unused; its length before and after.
#[pyfunction]
pub(crate) fn compact(py: Python<'_>, path: PathBuf) -> PyResult<(u64, u64)> {
    let none = WriteFaults::default();
    let done = watched(py, Some("compacting"), |watch| tensorstream::compact(&path, &none, watch))?;
    Ok((done.bytes_before, done.bytes))
}

/// Converts a checkpoint; number of tensors and bytes.
#[pyfunction]
#[pyo3(signature = (source, target, codec="raw", level=None, jobs=0, max_shard_bytes=None))]
pub(crate) fn convert(
    py: Python<'_>,
    source: PathBuf,
    target: PathBuf,
    codec: &str,
    level: Option<i32>,
    jobs: usize,
    max_shard_bytes: Option<u64>,
) -> PyResult<(usize, u64)> {
    let mut options = options(py, &target, codec, level, jobs)?;
    options.max_shard_bytes = max_shard_bytes.unwrap_or(options.max_shard_bytes);
    let job = |watch: &mut Watch<'_>| tensorstream::convert(&source, &target, options, watch);
    let Converted { tensors, bytes, .. } = watched(py, Some("converting"), job)?;
    Ok((tensors, bytes))
}

/// The command line; the exit status.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, arguments: Vec<String>) -> PyResult<u8> {
    let mut signal = None;
    let status = py.detach(|| {
        tensorstream::cli::run(arguments, &mut || {
            // Once a signal came the answer stays: Python reports it once, and the command may ask
            // again. Handlers of later signals run all the same.
            let now = Python::attach(|py| py.check_signals().err());
            signal = signal.take().or(now);
            signal.is_some()
        })
    });
    Ok(status)
}
