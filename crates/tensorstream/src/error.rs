// SPDX-License-Identifier: MIT OR Apache-2.0
use std::path::PathBuf;

/// Whatever a part of TensorStream reports, as it reported it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A checkpoint is wrong.
    #[error(transparent)]
    Format(#[from] ts_format::Error),
    /// Bytes did not arrive.
    #[error(transparent)]
    Io(#[from] ts_io::Error),
    /// Units could not be held or brought in.
    #[error(transparent)]
    Engine(#[from] ts_orchestrator::Error),
    /// Another machine, or the way to it, failed.
    #[cfg(feature = "remote")]
    #[error(transparent)]
    Remote(#[from] ts_remote::Error),
    /// A file could not be written. What had its name before still has it.
    #[error("{}: cannot write: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file's suffix names no format that is written.
    #[error("{}: the suffix names no format: it must be .ts or .safetensors", path.display())]
    UnknownSuffix {
        /// The file.
        path: PathBuf,
    },
    /// A file cannot be compressed as was asked.
    #[error("{}: {reason}", path.display())]
    Compression {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// Data are not what was written.
    #[error(transparent)]
    Corrupt(#[from] crate::Damage),
    /// No budget was given and none could be found out.
    #[error("the available memory cannot be detected here: give a budget")]
    NoBudget,
    /// The caller wanted no more of it.
    #[error("interrupted")]
    Interrupted,
    /// A file is of a format that is not read.
    #[error(
        "{}: cannot open the checkpoint: it is {found}, expected safetensors or .ts; {remedy}",
        path.display()
    )]
    ForeignFormat {
        /// The file.
        path: PathBuf,
        /// What it is.
        found: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// A directory has no checkpoint in it.
    #[error(
        "{}: no checkpoint: neither model.safetensors nor model.safetensors.index.json nor \
         model.ts, and {found} other .safetensors or .ts files where one would have been taken",
        path.display()
    )]
    NoCheckpoint {
        /// The directory.
        path: PathBuf,
        /// How many .safetensors and .ts files of other names it has; exactly one would have been
        /// taken.
        found: usize,
    },
}
