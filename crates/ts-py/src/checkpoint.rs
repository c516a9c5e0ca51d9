// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::prelude::*;
use tensorstream::format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};

use crate::errors::to_python;

/// One run of bytes: file, offset, length.
pub(crate) type Part = (u32, u64, u64);

/// A checkpoint whose headers have been read.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Checkpoint {
    pub(crate) inner: tensorstream::Checkpoint,
}

#[pymethods]
impl Checkpoint {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let inner = py.detach(|| tensorstream::Checkpoint::open(path)).map_err(|e| to_python(py, &e))?;
        Ok(Self { inner })
    }

    /// Names of all tensors, sorted.
    fn names(&self) -> Vec<&str> {
        self.inner.catalog().tensors().map(|(name, _)| name).collect()
    }

    /// safetensors dtype name, shape and parts (file, offset, length in bytes) of a tensor.
    fn entry(&self, py: Python<'_>, name: &str) -> PyResult<(&'static str, Vec<u64>, Vec<Part>)> {
        let entry = self.inner.catalog().require(name).map_err(|e| to_python(py, &e.into()))?;
        let parts = entry.parts.iter().map(|p| (p.file.0, p.offset, p.len)).collect();
        Ok((entry.meta.dtype.name(), entry.meta.shape.clone(), parts))
    }

    /// Path, length in bytes and metadata of each file.
    fn files(&self) -> Vec<(PathBuf, u64, BTreeMap<String, String>)> {
        let files = self.inner.catalog().files().iter().zip(self.inner.sources());
        files
            .map(|(entry, source)| (source.path().to_path_buf(), entry.len, entry.metadata.clone()))
            .collect()
    }
}

impl Checkpoint {
    pub(crate) fn assemble(
        &self,
        py: Python<'_>,
        name: &str,
        dtype: &str,
        shape: Vec<u64>,
        parts: &[Part],
    ) -> PyResult<TensorEntry> {
        let dtype = Dtype::from_name(dtype)
            .ok_or_else(|| pyo3::exceptions::PyValueError::new_err(format!("unknown dtype {dtype}")))?;
        let parts =
            parts.iter().map(|&(file, offset, len)| ByteRange { file: FileId(file), offset, len }).collect();
        let entry = self.inner.catalog().assemble(name, TensorMeta { dtype, shape }, parts);
        entry.map_err(|e| to_python(py, &e.into()))
    }
}
