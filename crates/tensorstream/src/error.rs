// SPDX-License-Identifier: MIT OR Apache-2.0
//! The errors of this crate.

use std::path::{Path, PathBuf};

use crate::damage::Damage;

/// An error of this crate or of a crate below it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A checkpoint is malformed, or a request does not fit it.
    #[error(transparent)]
    Format(#[from] ts_format::Error),
    /// A read or write failed.
    #[error(transparent)]
    Io(#[from] ts_io::Error),
    /// An engine could not be created, or could not load a unit.
    #[error(transparent)]
    Engine(#[from] ts_orchestrator::Error),
    /// A connection or its peer failed.
    #[cfg(feature = "remote")]
    #[error(transparent)]
    Remote(#[from] ts_remote::Error),
    /// A file could not be written. The previous content of the path is unchanged.
    #[error("{}: cannot write: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The suffix of a path is not that of a format that can be written.
    #[error("{}: unknown file suffix (expected .ts or .safetensors)", path.display())]
    UnknownSuffix {
        /// The file.
        path: PathBuf,
    },
    /// The requested compression is not possible.
    #[error("{}: {reason}", path.display())]
    Compression {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// Bytes of a file do not match their checksum, or cannot be decoded.
    #[error(transparent)]
    Corrupt(#[from] Damage),
    /// No budget was specified, and the available memory is unknown.
    #[error("cannot detect the available memory on this system; specify a budget")]
    NoBudget,
    /// The caller interrupted the operation.
    #[error("interrupted")]
    Interrupted,
    /// A file has a format that is not supported.
    #[error(
        "{}: cannot open the checkpoint: it is {found}, expected safetensors or .ts; {remedy}",
        path.display()
    )]
    ForeignFormat {
        /// The file.
        path: PathBuf,
        /// The format of the file.
        found: &'static str,
        /// How to convert it.
        remedy: &'static str,
    },
    /// A directory contains no checkpoint.
    #[error(
        "{}: no checkpoint found: expected model.safetensors, model.safetensors.index.json, \
         model.ts, or exactly one other .safetensors or .ts file (found {found})",
        path.display()
    )]
    NoCheckpoint {
        /// The directory.
        path: PathBuf,
        /// Number of .safetensors and .ts files with other names.
        found: usize,
    },
}

impl Error {
    /// Returns the error for a file or directory that cannot be opened.
    pub(crate) fn open(path: &Path, source: std::io::Error) -> Self {
        Error::Io(ts_io::Error::Open { path: path.into(), source: source.into() })
    }

    /// Returns the error for a file that cannot be written.
    pub(crate) fn write(path: &Path, source: std::io::Error) -> Self {
        Error::Write { path: path.into(), source }
    }
}
