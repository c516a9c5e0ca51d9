// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments that several commands share, and parsers of their values.

use std::path::PathBuf;

use crate::{available_bytes, parse_bytes};

/// The path of a checkpoint.
#[derive(Debug, clap::Args)]
pub(super) struct CheckpointPath {
    /// A .safetensors or .ts file, a shard index, or a directory with one of them.
    pub(super) path: PathBuf,
}

/// The number of threads.
#[derive(Debug, clap::Args)]
pub(super) struct Jobs {
    /// Maximum number of threads that decode or compute checksums at a time. By default, one for
    /// each core.
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub(super) jobs: usize,
}

/// Parses a positive number of bytes, or a share of the available memory such as `50%`.
pub(super) fn budget(text: &str) -> Result<usize, String> {
    let bytes = match text.trim().strip_suffix('%') {
        Some(share) => {
            let share: f64 = share.parse().map_err(|_| format!("invalid share {text:?}"))?;
            let available = available_bytes().ok_or("the available memory cannot be detected")?;
            if !(share > 0.0 && share <= 100.0) {
                return Err(format!("invalid share {text:?}: expected above 0% and up to 100%"));
            }
            (available as f64 * share / 100.0) as u64
        }
        None => parse_bytes(text).map_err(|e| e.to_string())?,
    };
    usize::try_from(bytes)
        .ok()
        .filter(|&bytes| bytes > 0)
        .ok_or_else(|| format!("invalid size {text:?}: expected at least 1 byte"))
}

/// Parses a positive count.
pub(super) fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|&count| count > 0)
        .ok_or_else(|| "expected a whole number, at least 1".into())
}
