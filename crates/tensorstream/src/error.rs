// SPDX-License-Identifier: MIT OR Apache-2.0
//! The errors of this crate.

use std::path::{Path, PathBuf};

use ts_orchestrator::files::NotACheckpoint;

use crate::damage::Damage;

/// An error of this crate or of a crate that it uses.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A checkpoint is malformed, a request does not match it, or a tensor cannot be written.
    #[error(transparent)]
    Format(#[from] ts_format::Error),
    /// A file or URL could not be opened, read or written.
    #[error(transparent)]
    Io(#[from] ts_io::Error),
    /// An engine could not be created, or could not load a unit.
    #[error(transparent)]
    Engine(#[from] ts_orchestrator::Error),
    /// A connection or its peer failed.
    #[cfg(feature = "remote")]
    #[error(transparent)]
    Remote(#[from] ts_remote::Error),
    /// A file could not be written. The path keeps its previous content, except as described at
    /// [`FileWriter::commit`](crate::FileWriter::commit).
    #[error("{}: cannot write: {source}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The suffix of a path does not belong to a format that can be written.
    #[error(
        "{}: unknown file suffix (expected .ts or .safetensors, or for conversions \
         .safetensors.index.json)",
        path.display()
    )]
    UnknownSuffix {
        /// Path of the file.
        path: PathBuf,
    },
    /// The requested compression is not possible.
    #[error("{}: {reason}", path.display())]
    Compression {
        /// Path of the file.
        path: PathBuf,
        /// The reason.
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
    /// A path leads to no checkpoint, or to one in a format that is not supported.
    #[error(transparent)]
    NotACheckpoint(#[from] NotACheckpoint),
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
