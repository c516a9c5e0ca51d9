// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `PoolConfig`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorstream::pool::PoolConfig;

/// The configuration of a memory pool. Sizes are in bytes. An argument that is omitted or None has
/// the value of ``PoolConfig.default()``.
///
/// Args:
///     pool_bytes: The maximum size of the pool, including blocks in use.
///     min_block_bytes: The size of the smallest block.
///     max_block_bytes: The size of the largest block that is recycled.
///     classes: The number of block sizes, from ``min_block_bytes`` to ``max_block_bytes``. The
///         value 1 counts as 2.
///     preallocate: Whether to allocate up to half of the pool when it is created.
///
/// Raises:
///     ValueError: The block sizes are invalid.
///
/// Examples:
///     >>> import tensorstream as ts
///     >>> config = ts.PoolConfig(pool_bytes=128 << 20, preallocate=True)
///     >>> config.min_block_bytes
///     65536
#[pyclass(frozen, eq, module = "tensorstream", name = "PoolConfig")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PyPoolConfig(pub(crate) PoolConfig);

#[pymethods]
impl PyPoolConfig {
    #[new]
    #[pyo3(signature = (*, pool_bytes=None, min_block_bytes=None, max_block_bytes=None,
        classes=None, preallocate=None))]
    fn new(
        pool_bytes: Option<usize>,
        min_block_bytes: Option<usize>,
        max_block_bytes: Option<usize>,
        classes: Option<usize>,
        preallocate: Option<bool>,
    ) -> PyResult<Self> {
        let default = PoolConfig::default();
        let config = default
            .with_pool_bytes(pool_bytes.unwrap_or(default.pool_bytes))
            .with_min_block_bytes(min_block_bytes.unwrap_or(default.min_block_bytes))
            .with_max_block_bytes(max_block_bytes.unwrap_or(default.max_block_bytes))
            .with_classes(classes.unwrap_or(default.classes))
            .with_preallocate(preallocate.unwrap_or(default.preallocate));
        if config.min_block_bytes == 0
            || config.min_block_bytes > config.max_block_bytes
            || config.classes == 0
        {
            return Err(PyValueError::new_err(format!(
                "invalid block sizes: expected 0 < min_block_bytes <= max_block_bytes and \
                 classes > 0, got {config:?}"
            )));
        }
        Ok(Self(config))
    }

    /// Returns the default configuration: 256 MiB, in blocks of 64 KiB to 64 MiB.
    #[staticmethod]
    fn default() -> Self {
        Self(PoolConfig::default())
    }

    /// Returns a configuration for large transfers: 512 MiB, in blocks of 1 MiB to 64 MiB.
    ///
    /// Up to half of the pool is allocated when it is created.
    #[staticmethod]
    fn high_throughput() -> Self {
        Self(PoolConfig::high_throughput())
    }

    /// Returns a configuration for machines with little memory: 64 MiB, in blocks of 16 KiB to
    /// 16 MiB.
    #[staticmethod]
    fn low_memory() -> Self {
        Self(PoolConfig::low_memory())
    }

    /// The maximum size of the pool, including blocks in use.
    #[getter]
    fn pool_bytes(&self) -> usize {
        self.0.pool_bytes
    }

    /// The size of the smallest block.
    #[getter]
    fn min_block_bytes(&self) -> usize {
        self.0.min_block_bytes
    }

    /// The size of the largest block that is recycled.
    #[getter]
    fn max_block_bytes(&self) -> usize {
        self.0.max_block_bytes
    }

    /// The number of block sizes.
    #[getter]
    fn classes(&self) -> usize {
        self.0.classes
    }

    /// Whether up to half of the pool is allocated when it is created.
    #[getter]
    fn preallocate(&self) -> bool {
        self.0.preallocate
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
