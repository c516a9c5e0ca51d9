// SPDX-License-Identifier: MIT OR Apache-2.0
//! The error of a path that leads to no checkpoint.

use std::path::{Path, PathBuf};

use ts_io::Source;

/// A path that leads to no checkpoint.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum NotACheckpoint {
    /// A file has a format that is not supported.
    #[error(
        "{}: cannot open the checkpoint: it is {found} (expected safetensors or .ts); {remedy}",
        path.display()
    )]
    ForeignFormat {
        /// Path of the file.
        path: PathBuf,
        /// Description of the file's format.
        found: &'static str,
        /// Instruction to convert the file.
        remedy: &'static str,
    },
    /// A directory contains no checkpoint.
    #[error("{}: no checkpoint found: expected {}", path.display(), expected_files(path, *found))]
    Missing {
        /// Path or URL of the directory.
        path: PathBuf,
        /// Number of .safetensors and .ts files with other names. 0 for a URL, because the
        /// files at a URL are not listed.
        found: usize,
    },
}

/// Describes the files that a directory with a checkpoint contains.
fn expected_files(directory: &Path, found: usize) -> String {
    let names = "model.safetensors, model.safetensors.index.json";
    match directory.to_str().is_some_and(Source::is_url) {
        true => format!("{names} or model.ts; for another file, add its name to the URL"),
        false => format!(
            "{names}, model.ts, or exactly one other .safetensors or .ts file (found {found}); for \
             another file, pass its path"
        ),
    }
}
