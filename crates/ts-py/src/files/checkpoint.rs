// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use tensorstream::format::{ByteRange, FileId, Tensor, TensorEntry};
use tensorstream::io::Source;
use tensorstream::{Error, LoadOptions, Loaded};

use super::progress::watched;
use super::writer::meta;
use crate::dlpack::{self, Lent};
use crate::errors::to_python;

/// One run of bytes: file, offset, length.
pub(crate) type Part = (u32, u64, u64);

/// Name, dtype, shape and capsule of a tensor in memory.
type LoadedSpec<'py> = (String, &'static str, Vec<u64>, Bound<'py, PyAny>);

/// A checkpoint whose headers have been read.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Checkpoint {
    pub(crate) inner: tensorstream::Checkpoint,
}

#[pymethods]
impl Checkpoint {
    #[new]
    #[pyo3(signature = (path, lenient=false))]
    fn new(py: Python<'_>, path: PathBuf, lenient: bool) -> PyResult<Self> {
        let open = || match lenient {
            false => tensorstream::Checkpoint::open(path),
            true => tensorstream::Checkpoint::open_lenient(path),
        };
        let inner = py.detach(open).map_err(|e| to_python(py, &e))?;
        Ok(Self { inner })
    }

    /// A file that is in memory, which is kept there.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: PyBackedBytes) -> PyResult<Self> {
        let inner = py.detach(|| tensorstream::Checkpoint::from_bytes("bytes", data));
        Ok(Self { inner: inner.map_err(|e| to_python(py, &e))? })
    }

    /// This checkpoint and another as one: the other's tensors take the place of those of the same
    /// name, and its files come behind.
    fn overlaid(&self, py: Python<'_>, other: &Self) -> PyResult<Self> {
        let inner =
            self.inner.clone().merge(other.inner.clone()).map_err(|e| to_python(py, &e))?;
        Ok(Self { inner })
    }

    /// Names of all tensors, sorted.
    fn names(&self) -> Vec<&str> {
        self.inner.catalog().tensors().map(|tensor| tensor.name()).collect()
    }

    /// safetensors dtype name, shape and parts (file, offset, length in bytes) of a tensor.
    fn entry(&self, py: Python<'_>, name: &str) -> PyResult<(&'static str, Vec<u64>, Vec<Part>)> {
        let tensor = self.inner.catalog().require(name).map_err(|e| to_python(py, &e.into()))?;
        let range = tensor.range();
        let parts = vec![(range.file.0, range.offset, range.len)];
        Ok((tensor.dtype().name(), tensor.shape().to_vec(), parts))
    }

    /// Reads parts, one behind the other, into a tensor of bytes of their total length, given as a
    /// capsule.
    fn read_into(
        &self,
        py: Python<'_>,
        parts: Vec<Part>,
        target: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let mut target = Lent::from_capsule(target)?;
        let ranges = ranges(&parts);
        let total = ranges.iter().try_fold(0u64, |sum, range| sum.checked_add(range.len));
        let known = ranges.iter().all(|range| (range.file.0 as usize) < self.inner.sources().len());
        if total != Some(target.bytes().len() as u64) || !known {
            return Err(PyValueError::new_err(
                "the parts are not of this checkpoint, or not of the target's size",
            ));
        }
        py.detach(|| self.inner.read(&ranges, target.bytes_mut())).map_err(|e| to_python(py, &e))
    }

    /// Reads of each dimension of a tensor the elements begin..end into a tensor of as many bytes,
    /// given as a capsule.
    fn read_block(
        &self,
        py: Python<'_>,
        name: &str,
        block: Vec<(u64, u64)>,
        target: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let mut target = Lent::from_capsule(target)?;
        let tensor = self.inner.catalog().require(name).map_err(|e| to_python(py, &e.into()))?;
        let shape: Vec<u64> = block.iter().map(|(begin, end)| end.saturating_sub(*begin)).collect();
        if tensor.dtype().byte_len(&shape) != Some(target.bytes().len() as u64) {
            return Err(PyValueError::new_err("the target has not the block's size"));
        }
        let block: Vec<_> = block.into_iter().map(|(begin, end)| begin..end).collect();
        let bytes = target.bytes_mut();
        py.detach(|| self.inner.read_block(name, &block, bytes)).map_err(|e| to_python(py, &e))
    }

    /// Reads all tensors: name, safetensors dtype name, shape, and a DLPack capsule of each. Shows
    /// a bar.
    fn load<'py>(&self, py: Python<'py>, verify: bool) -> PyResult<Vec<LoadedSpec<'py>>> {
        let options = LoadOptions { verify, ..LoadOptions::default() };
        let loaded = watched(py, Some("loading"), |watch| self.inner.load(options, watch))?;
        loaded.into_iter().map(|loaded| spec(py, loaded)).collect()
    }

    /// Reads tensors into tensors of bytes, each given by its name and as a capsule; these have no
    /// memory in common. Shows a bar.
    fn load_into(
        &self,
        py: Python<'_>,
        targets: Vec<(String, Bound<'_, PyAny>)>,
        verify: bool,
    ) -> PyResult<()> {
        let mut lent: Vec<(String, Lent)> = Vec::with_capacity(targets.len());
        for (name, capsule) in &targets {
            lent.push((name.clone(), Lent::from_capsule(capsule)?));
        }
        let targets =
            lent.iter_mut().map(|(name, lent)| (name.as_str(), lent.bytes_mut())).collect();
        let options = LoadOptions { verify, ..LoadOptions::default() };
        watched(py, Some("loading"), |watch| self.inner.load_into(targets, options, watch))
    }

    /// Reads all tensors and calls `take` with each, as `load` gives them, as soon as it is there.
    /// What it keeps must not be more than `budget` bytes.
    fn load_each(
        &self,
        py: Python<'_>,
        verify: bool,
        budget: usize,
        take: Py<PyAny>,
    ) -> PyResult<()> {
        let options = LoadOptions { verify, budget: Some(budget), ..LoadOptions::default() };
        let mut failed = None;
        let mut give = |loaded: Loaded| {
            let taken = Python::attach(|py| take.call1(py, spec(py, loaded)?).map(|_| ()));
            taken.map_err(|error| {
                failed = Some(error);
                Error::Interrupted
            })
        };
        let done =
            watched(py, Some("loading"), |watch| self.inner.load_each(options, &mut give, watch));
        failed.map_or(done, Err)
    }

    /// The tensors' names, in the order in which they lie in the files.
    fn names_by_place(&self) -> Vec<&str> {
        self.inner.catalog().tensors_by_offset().iter().map(Tensor::name).collect()
    }

    /// Whether a file is read over the network.
    fn is_remote(&self, file: usize) -> PyResult<bool> {
        Ok(self.source(file)?.is_remote())
    }

    /// An error if a file is not as it was when it was opened.
    fn require_unchanged(&self, py: Python<'_>, file: usize) -> PyResult<()> {
        self.source(file)?.verify(0).map_err(|e| to_python(py, &e.into()))
    }

    /// Path, length in bytes and metadata of each file.
    fn files(&self) -> Vec<(PathBuf, u64, BTreeMap<String, String>)> {
        let files = self.inner.catalog().files().iter().zip(self.inner.sources());
        files
            .map(|(entry, source)| (source.path().to_path_buf(), entry.len, entry.metadata.clone()))
            .collect()
    }
}

fn spec(py: Python<'_>, Loaded { name, meta, bytes }: Loaded) -> PyResult<LoadedSpec<'_>> {
    let capsule = dlpack::capsule(py, bytes, &meta)?;
    Ok((name, meta.dtype.name(), meta.shape, capsule))
}

impl Checkpoint {
    fn source(&self, file: usize) -> PyResult<&Source> {
        let source = self.inner.sources().get(file).map(AsRef::as_ref);
        source.ok_or_else(|| PyValueError::new_err(format!("there is no file {file}")))
    }

    pub(crate) fn assemble(
        &self,
        py: Python<'_>,
        name: &str,
        dtype: &str,
        shape: Vec<u64>,
        parts: &[Part],
    ) -> PyResult<TensorEntry> {
        let entry = self.inner.catalog().assemble(name, meta(dtype, shape)?, ranges(parts));
        entry.map_err(|e| to_python(py, &e.into()))
    }
}

fn ranges(parts: &[Part]) -> Vec<ByteRange> {
    parts.iter().map(|&(file, offset, len)| ByteRange { file: FileId(file), offset, len }).collect()
}
