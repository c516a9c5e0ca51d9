// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts and compacts checkpoints.

use std::path::Path;

use pyo3::prelude::*;
use tensorstream::io::fault::WriteFaults;
use tensorstream::{Converted, Watch, WriteOptions};

use super::path::PathArgument;
use super::progress::watched;
use super::writer::write_options;

/// Rewrites a .ts file without the space that appends left unused. Blocks, and shows a progress
/// bar.
///
/// Returns:
///     The length of the file before and after, in bytes.
#[pyfunction]
pub(crate) fn compact(py: Python<'_>, path: PathArgument) -> PyResult<(u64, u64)> {
    let PathArgument(path) = path;
    let no_faults = WriteFaults::default();
    let job = |watch: &mut Watch<'_>| tensorstream::compact(&path, &no_faults, watch);
    let compacted = watched(py, Some("compacting"), job)?;
    Ok((compacted.bytes_before, compacted.bytes))
}

/// Returns the options of a conversion. The arguments are those of [`convert`].
pub(super) fn options(
    py: Python<'_>,
    target: &Path,
    codec: &str,
    level: Option<i32>,
    jobs: usize,
    max_shard_bytes: Option<u64>,
) -> PyResult<WriteOptions> {
    let mut options = write_options(py, target, codec, level, jobs)?;
    options.max_shard_bytes = max_shard_bytes.unwrap_or(options.max_shard_bytes);
    Ok(options)
}

/// Converts a checkpoint to the format of the target's suffix. Blocks, and shows a progress bar.
///
/// Args:
///     source: The checkpoint: a file, a directory or a URL.
///     target: The file to write, or the directory for several files.
///     codec: "raw", "auto", or the name of a codec.
///     level: The level of the codec; None for its default.
///     jobs: The number of threads that compress; 0 for one per core.
///     max_shard_bytes: The maximum total size of the tensors in a shard, in bytes; None for 5 GB.
///         A larger tensor gets its own shard.
///
/// Returns:
///     The number of tensors, and their size in bytes before compression.
#[pyfunction]
#[pyo3(signature = (source, target, codec="raw", level=None, jobs=0, max_shard_bytes=None))]
pub(crate) fn convert(
    py: Python<'_>,
    source: PathArgument,
    target: PathArgument,
    codec: &str,
    level: Option<i32>,
    jobs: usize,
    max_shard_bytes: Option<u64>,
) -> PyResult<(usize, u64)> {
    let (source, target) = (source.0, target.0);
    let options = options(py, &target, codec, level, jobs, max_shard_bytes)?;
    let job = |watch: &mut Watch<'_>| tensorstream::convert(&source, &target, options, watch);
    let Converted { tensors, bytes, .. } = watched(py, Some("converting"), job)?;
    Ok((tensors, bytes))
}
