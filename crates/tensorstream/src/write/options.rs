// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors to write, and options for writing them.

use std::path::Path;

use ts_format::{Compression, TensorMeta};
use ts_io::fault::WriteFaults;

use crate::Error;

/// A tensor to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewTensor {
    /// Name of the tensor.
    pub name: String,
    /// Element type and shape.
    pub meta: TensorMeta,
    /// Offset of the tensor's [range](ts_format::Tensor::range) modulo 64. `None` means 0. Ignored
    /// for safetensors files, because their format determines the offset.
    pub phase: Option<u8>,
}

/// Options for writing files.
///
/// ```
/// use tensorstream::WriteOptions;
/// use tensorstream::format::Compression;
///
/// let options = WriteOptions::default().with_compression(Compression::Auto).with_jobs(4);
/// assert_eq!(options.max_shard_bytes, 5_000_000_000);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WriteOptions {
    /// Compression of tensors, by default none. Only `.ts` files can be compressed.
    pub compression: Compression,
    /// Number of threads that compress. The default is 0, which means the number of cores. At most
    /// 16 threads are used.
    pub jobs: usize,
    /// Minimum number of bytes of complete tensors between two checkpoints of a conversion, 1 GiB
    /// by default. After a crash, [`convert`](crate::convert()) resumes from the last checkpoint.
    pub checkpoint_bytes: u64,
    /// Maximum size of a shard that [`convert`](crate::convert()) writes, in bytes of tensors. A
    /// larger tensor gets its own shard. 5 GB by default.
    pub max_shard_bytes: u64,
    /// Faults to inject, for tests.
    pub faults: WriteFaults,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            compression: Compression::None,
            jobs: 0,
            checkpoint_bytes: 1 << 30,
            max_shard_bytes: 5_000_000_000,
            faults: WriteFaults::default(),
        }
    }
}

impl WriteOptions {
    /// Sets [`compression`](Self::compression).
    #[must_use]
    pub fn with_compression(self, compression: Compression) -> Self {
        Self { compression, ..self }
    }

    /// Sets [`jobs`](Self::jobs).
    #[must_use]
    pub fn with_jobs(self, jobs: usize) -> Self {
        Self { jobs, ..self }
    }

    /// Sets [`checkpoint_bytes`](Self::checkpoint_bytes).
    #[must_use]
    pub fn with_checkpoint_bytes(self, checkpoint_bytes: u64) -> Self {
        Self { checkpoint_bytes, ..self }
    }

    /// Sets [`max_shard_bytes`](Self::max_shard_bytes).
    #[must_use]
    pub fn with_max_shard_bytes(self, max_shard_bytes: u64) -> Self {
        Self { max_shard_bytes, ..self }
    }

    /// Sets [`faults`](Self::faults).
    #[must_use]
    pub fn with_faults(self, faults: WriteFaults) -> Self {
        Self { faults, ..self }
    }
}

/// A file format that can be written.
///
/// ```
/// use tensorstream::Format;
///
/// assert_eq!(Format::from_path("model.ts".as_ref())?, Format::Container);
/// assert!(Format::from_path("model.bin".as_ref()).is_err());
/// # Ok::<(), tensorstream::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// A `.ts` file.
    Container,
    /// A `.safetensors` file.
    Safetensors,
}

impl Format {
    /// Returns the format for the suffix of a path.
    ///
    /// # Errors
    /// Returns [`Error::UnknownSuffix`] if the suffix is not `.ts` or `.safetensors`.
    pub fn from_path(path: &Path) -> Result<Self, Error> {
        match path.extension().and_then(|suffix| suffix.to_str()) {
            Some("ts") => Ok(Self::Container),
            Some("safetensors") => Ok(Self::Safetensors),
            _ => Err(Error::UnknownSuffix { path: path.into() }),
        }
    }
}
