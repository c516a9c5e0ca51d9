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
    /// A directory has no checkpoint in it.
    #[error(
        "{}: no checkpoint: neither model.safetensors nor model.safetensors.index.json, and {found} other \
         .safetensors files", path.display()
    )]
    NoCheckpoint {
        /// The directory.
        path: PathBuf,
        /// How many .safetensors files of other names it has; exactly one would have been taken.
        found: usize,
    },
}
