// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Checkpoint`, which reads the tensors of an open checkpoint.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyDict;
use tensorstream::format::{ByteRange, FileEntry, FileId, Tensor, TensorEntry};
use tensorstream::io::{FileMapping, Source};
use tensorstream::streams::MemoryRange;
use tensorstream::{Error, LoadOptions, Loaded};

use super::metadata::metadata_dict;
use super::passing::PassedSource;
use super::path::PathArgument;
use super::progress::watched;
use crate::dlpack::{CPU, CapsuleBytes, tensor_capsule};
use crate::dtype::{stored_shape, tensor_meta, torch_shape};
use crate::errors::{model_error, to_python};

/// A range of bytes in a checkpoint: the number of the file, the offset, and the length in bytes.
pub(crate) type Part = (u32, u64, u64);

/// A loaded tensor: name, safetensors dtype name, shape, DLPack capsule.
type LoadedSpec<'py> = (String, &'static str, Vec<u64>, Bound<'py, PyAny>);

/// A file: its path, its length in bytes, and its metadata.
type FileSpec<'py> = (PathBuf, u64, Option<Bound<'py, PyDict>>);

/// A checkpoint whose headers have been read.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Checkpoint {
    pub(crate) inner: tensorstream::Checkpoint,
}

#[pymethods]
impl Checkpoint {
    /// Opens a checkpoint and reads its headers. Blocks.
    ///
    /// Args:
    ///     path: A file, a directory or a URL.
    ///     lenient: Whether to accept every file that the safetensors library accepts.
    #[new]
    #[pyo3(signature = (path, lenient=false))]
    fn new(py: Python<'_>, path: PathArgument, lenient: bool) -> PyResult<Self> {
        let PathArgument(path) = path;
        let open = || match lenient {
            false => tensorstream::Checkpoint::open(path),
            true => tensorstream::Checkpoint::open_lenient(path),
        };
        let inner = py.detach(open).map_err(|e| to_python(py, &e))?;
        Ok(Self { inner })
    }

    /// Opens a .ts or .safetensors file that is in memory. The checkpoint keeps a reference to the
    /// bytes.
    #[staticmethod]
    #[pyo3(signature = (data, lenient=false))]
    fn from_bytes(py: Python<'_>, data: PyBackedBytes, lenient: bool) -> PyResult<Self> {
        let inner = py.detach(|| match lenient {
            false => tensorstream::Checkpoint::from_bytes("bytes", data),
            true => tensorstream::Checkpoint::from_bytes_lenient("bytes", data),
        });
        Ok(Self { inner: inner.map_err(|e| to_python(py, &e))? })
    }

    /// Opens a checkpoint whose files ``open`` opens. Blocks.
    ///
    /// Args:
    ///     name: The name of the file, or of the shard index.
    ///     open: Called with ``name``, or the name of a shard. Returns a ``PassedSource``. May
    ///         raise any exception.
    ///     lenient: Whether to accept every file that the safetensors library accepts.
    #[staticmethod]
    #[pyo3(signature = (name, open, lenient=false))]
    fn opened_by(py: Python<'_>, name: &str, open: Py<PyAny>, lenient: bool) -> PyResult<Self> {
        let mut failure = None;
        let mut open_source = |name: &str| {
            let opened = Python::attach(|py| -> PyResult<_> {
                let passed = open.bind(py).call1((name,))?;
                Ok(Arc::clone(&passed.cast::<PassedSource>()?.get().source))
            });
            opened.map_err(|error| {
                failure = Some(error);
                Error::Interrupted
            })
        };
        let opened = py.detach(|| match lenient {
            false => tensorstream::Checkpoint::open_through(name, &mut open_source),
            true => tensorstream::Checkpoint::open_through_lenient(name, &mut open_source),
        });
        match (opened, failure) {
            (Ok(inner), _) => Ok(Self { inner }),
            (Err(_), Some(failure)) => Err(failure),
            (Err(error), None) => Err(to_python(py, &error)),
        }
    }

    /// Returns a checkpoint with the tensors of this one and of ``other``.
    ///
    /// Tensors of ``other`` replace those of the same name. The files of ``other`` come after the
    /// files of this checkpoint.
    fn overlaid(&self, py: Python<'_>, other: &Self) -> PyResult<Self> {
        let inner = self.inner.clone().merge(other.inner.clone()).map_err(|e| to_python(py, &e))?;
        Ok(Self { inner })
    }

    /// Opens what is at the path of this checkpoint now. Reads its headers. Blocks.
    fn reopened(&self, py: Python<'_>) -> PyResult<Self> {
        let inner = py.detach(|| self.inner.reopen()).map_err(|e| to_python(py, &e))?;
        Ok(Self { inner })
    }

    /// Returns whether the checkpoint consists of several, of which later ones replace tensors.
    fn is_overlaid(&self) -> bool {
        self.inner.is_merged()
    }

    /// Returns the parts of ``newer``, a later state of this checkpoint, with the bytes that
    /// ``parts`` have in this one.
    ///
    /// Raises:
    ///     CheckpointError: A tensor has another dtype or shape.
    ///     MissingTensorError: A tensor is missing.
    fn translated(&self, py: Python<'_>, parts: Vec<Part>, newer: &Self) -> PyResult<Vec<Part>> {
        let (catalog, newer) = (self.inner.catalog(), newer.inner.catalog());
        let translated = catalog.translate(&ranges(&parts), newer);
        let translated = translated.map_err(|e| to_python(py, &e.into()))?;
        Ok(translated.into_iter().map(|range| (range.file.0, range.offset, range.len)).collect())
    }

    /// Returns the names of all tensors, sorted.
    fn names(&self) -> Vec<&str> {
        self.inner.catalog().tensors().map(|tensor| tensor.name()).collect()
    }

    /// Returns the dtype name in files, the shape in PyTorch and the parts of a tensor.
    ///
    /// A part is the number of a file, an offset and a length in bytes.
    fn entry(&self, py: Python<'_>, name: &str) -> PyResult<(&'static str, Vec<u64>, Vec<Part>)> {
        let tensor = self.inner.catalog().require(name).map_err(|e| to_python(py, &e.into()))?;
        let range = tensor.range();
        let parts = vec![(range.file.0, range.offset, range.len)];
        Ok((tensor.dtype().name(), self.torch_shape(py, tensor)?, parts))
    }

    /// Returns whether pieces of these parts can be read on their own: the parts are neither
    /// compressed nor have checksums.
    fn can_gather(&self, parts: Vec<Part>) -> bool {
        let catalog = self.inner.catalog();
        ranges(&parts)
            .into_iter()
            .all(|range| !range.is_virtual() && catalog.digest_around(range).is_none())
    }

    /// Reads parts into memory. There, each part directly follows the part before it. Blocks.
    ///
    /// Args:
    ///     parts: The number of a file, an offset and a length in bytes, for each part.
    ///     target: A DLPack capsule of writable memory with the total length of the parts.
    fn read_into(
        &self,
        py: Python<'_>,
        parts: Vec<Part>,
        target: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let mut target = CapsuleBytes::from_capsule(target)?;
        let bytes = target.bytes_mut()?;
        let ranges = ranges(&parts);
        let files = self.inner.sources().len();
        if let Some(range) = ranges.iter().find(|range| range.file.0 as usize >= files) {
            return Err(no_file(range.file.0 as usize, files));
        }
        let total = ranges.iter().try_fold(0u64, |sum, range| sum.checked_add(range.len));
        if total != Some(bytes.len() as u64) {
            let total = total.map_or_else(|| "2^64 or more".into(), |total| total.to_string());
            return Err(PyValueError::new_err(format!(
                "cannot read {} parts: the target has the wrong size (expected {total} bytes, got \
                 {})",
                parts.len(),
                bytes.len()
            )));
        }
        py.detach(|| self.inner.read(&ranges, bytes)).map_err(|e| to_python(py, &e))
    }

    /// Reads a block of a tensor into memory. Blocks.
    ///
    /// Args:
    ///     name: The name of the tensor.
    ///     block: The first index and the end index of each dimension.
    ///     target: A DLPack capsule of writable memory with the length of the block.
    fn read_block(
        &self,
        py: Python<'_>,
        name: &str,
        block: Vec<(u64, u64)>,
        target: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let mut target = CapsuleBytes::from_capsule(target)?;
        let bytes = target.bytes_mut()?;
        let tensor = self.inner.catalog().require(name).map_err(|e| to_python(py, &e.into()))?;
        let begins = stored_shape(tensor.dtype(), block.iter().map(|block| block.0).collect());
        let ends = stored_shape(tensor.dtype(), block.iter().map(|block| block.1).collect());
        let block: Vec<_> = begins.into_iter().zip(ends).map(|(begin, end)| begin..end).collect();
        let shape: Vec<u64> = block.iter().map(|at| at.end.saturating_sub(at.start)).collect();
        let expected = tensor.dtype().byte_len(&shape);
        if expected != Some(bytes.len() as u64) {
            let why = match expected {
                Some(expected) => format!(
                    "the target has the wrong size (expected {expected} bytes, got {})",
                    bytes.len()
                ),
                None => "expected a whole number of bytes below 2^61".into(),
            };
            return Err(PyValueError::new_err(format!(
                "cannot read a block of shape {shape:?} of tensor `{name}`: {why}"
            )));
        }
        py.detach(|| self.inner.read_block(name, &block, bytes)).map_err(|e| to_python(py, &e))
    }

    /// Reads tensors, by default all. Blocks, and shows a progress bar.
    ///
    /// Args:
    ///     verify: Whether to compare the bytes with their checksums.
    ///     names: The names of the tensors. If they are given, ``mapped`` must be false.
    ///     mapped: Whether to return views of the mapped files where possible. While they exist,
    ///         nothing may write to the files.
    ///
    /// Returns:
    ///     Name, safetensors dtype name, shape and DLPack capsule of each tensor.
    #[pyo3(signature = (verify, mapped, names=None))]
    fn load<'py>(
        &self,
        py: Python<'py>,
        verify: bool,
        mapped: bool,
        names: Option<Vec<String>>,
    ) -> PyResult<Vec<LoadedSpec<'py>>> {
        let options = LoadOptions::default().with_verify(verify);
        let files = if mapped { self.mappings().map_err(|e| to_python(py, &e))? } else { vec![] };
        let loaded = watched(py, Some("loading"), |watch| match names {
            Some(names) => self.inner.load_named(&names, options, watch),
            None if mapped => self.inner.load_mapped(&files, options, watch),
            None => self.inner.load(options, watch),
        })?;
        loaded.into_iter().map(|loaded| self.loaded_spec(py, loaded)).collect()
    }

    /// Reads tensors into existing memory. Blocks, and shows a progress bar.
    ///
    /// Args:
    ///     targets: The name of each tensor, and a DLPack capsule of writable memory with the
    ///         length of the tensor. Targets must not overlap.
    ///     verify: Whether to compare the bytes with their checksums.
    fn load_into(
        &self,
        py: Python<'_>,
        targets: Vec<(String, Bound<'_, PyAny>)>,
        verify: bool,
    ) -> PyResult<()> {
        let mut memory: Vec<(String, CapsuleBytes)> = Vec::with_capacity(targets.len());
        for (name, capsule) in &targets {
            memory.push((name.clone(), CapsuleBytes::from_capsule(capsule)?));
        }
        let mut targets = Vec::with_capacity(memory.len());
        for (name, bytes) in &mut memory {
            targets.push((name.as_str(), bytes.bytes_mut()?));
        }
        let options = LoadOptions::default().with_verify(verify);
        watched(py, Some("loading"), |watch| self.inner.load_into(targets, options, watch))
    }

    /// Reads all tensors and passes each to ``take`` as soon as it is read. Blocks, and shows a
    /// progress bar.
    ///
    /// Args:
    ///     verify: Whether to compare the bytes with their checksums.
    ///     budget: The maximum memory of tensors that were read and are still referenced, in bytes.
    ///         If it is too small, the smallest budget that works is used.
    ///     take: Called with name, safetensors dtype name, shape and DLPack capsule.
    fn load_each(
        &self,
        py: Python<'_>,
        verify: bool,
        budget: usize,
        take: Py<PyAny>,
    ) -> PyResult<()> {
        let options = LoadOptions::default().with_verify(verify).with_budget(budget);
        let mut failure = None;
        let mut take_loaded = |loaded: Loaded| {
            let taken =
                Python::attach(|py| take.call1(py, self.loaded_spec(py, loaded)?).map(|_| ()));
            taken.map_err(|error| {
                failure = Some(error);
                Error::Interrupted
            })
        };
        let done = watched(py, Some("loading"), |watch| {
            self.inner.load_each(options, &mut take_loaded, watch)
        });
        failure.map_or(done, Err)
    }

    /// Returns the names of all tensors, sorted by file and offset.
    fn names_by_place(&self) -> Vec<&str> {
        self.inner.catalog().tensors_by_offset().iter().map(Tensor::name).collect()
    }

    /// Returns whether the file with this number is read over the network.
    fn is_remote(&self, file: usize) -> PyResult<bool> {
        Ok(self.source(file)?.is_remote())
    }

    /// Checks that the file with this number has not changed since it was opened.
    ///
    /// Raises:
    ///     CheckpointChangedError: The file has changed.
    fn require_unchanged(&self, py: Python<'_>, file: usize) -> PyResult<()> {
        self.source(file)?.verify(0).map_err(|e| to_python(py, &e.into()))
    }

    /// Returns a text that differs if the file with this number changes, or None if its source
    /// reports neither an ETag nor a time of modification.
    fn version(&self, file: usize) -> PyResult<Option<String>> {
        let state = self.source(file)?.fingerprint();
        let known = state.modified.is_some() || state.etag.is_some();
        Ok(known.then(|| format!("{state:?}")))
    }

    /// Returns the path, the length in bytes and the metadata of each file. The metadata is None if
    /// the file has none.
    fn files<'py>(&self, py: Python<'py>) -> PyResult<Vec<FileSpec<'py>>> {
        let files = self.inner.catalog().files().iter().zip(self.inner.sources());
        let spec = |(entry, source): (&FileEntry, &Arc<Source>)| {
            let metadata = entry.metadata.is_stated().then(|| metadata_dict(py, &entry.metadata));
            Ok((source.path().to_path_buf(), entry.len, metadata.transpose()?))
        };
        files.map(spec).collect()
    }

    /// Returns a descriptor of the file with this number, which stays the file that was opened. The
    /// caller owns it.
    ///
    /// Raises:
    ///     ValueError: The file is remote.
    #[cfg(unix)]
    fn descriptor(&self, py: Python<'_>, file: usize) -> PyResult<i32> {
        use std::os::fd::IntoRawFd;
        let source = self.source(file)?;
        let handle = source.try_clone_file().map_err(|e| to_python(py, &e.into()))?;
        let remote = || PyValueError::new_err(format!("{}: no file", source.path().display()));
        Ok(handle.ok_or_else(remote)?.into_raw_fd())
    }
}

impl Checkpoint {
    fn loaded_spec<'py>(&self, py: Python<'py>, loaded: Loaded) -> PyResult<LoadedSpec<'py>> {
        let Loaded { name, meta, bytes, .. } = loaded;
        let range = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        let capsule = tensor_capsule(py, range, (CPU, 0), &meta, bytes)?;
        let tensor = self.inner.catalog().require(&name).map_err(|e| to_python(py, &e.into()))?;
        let shape = self.torch_shape(py, tensor)?;
        Ok((name, meta.dtype.name(), shape, capsule))
    }

    /// Returns the shape of a tensor in PyTorch.
    ///
    /// # Errors
    /// ModelError if PyTorch cannot have the shape.
    pub(crate) fn torch_shape(&self, py: Python<'_>, tensor: Tensor<'_>) -> PyResult<Vec<u64>> {
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        torch_shape(dtype, shape).ok_or_else(|| {
            model_error(
                py,
                &format!(
                    "tensor `{}` has dtype {dtype} and shape {shape:?}, which torch does not \
                     support: it packs two values in an element, so the last size must be even",
                    tensor.name()
                ),
            )
        })
    }

    fn source(&self, file: usize) -> PyResult<&Source> {
        let sources = self.inner.sources();
        sources.get(file).map(AsRef::as_ref).ok_or_else(|| no_file(file, sources.len()))
    }

    /// Returns the entry of a tensor that consists of these parts.
    ///
    /// # Errors
    /// Returns an exception if the dtype is unknown, a part is not inside its file, or the parts do
    /// not have the size of the tensor.
    pub(crate) fn assemble(
        &self,
        py: Python<'_>,
        name: &str,
        dtype: &str,
        shape: Vec<u64>,
        parts: &[Part],
    ) -> PyResult<TensorEntry> {
        let entry = self.inner.catalog().assemble(name, tensor_meta(dtype, shape)?, ranges(parts));
        entry.map_err(|e| to_python(py, &e.into()))
    }
}

impl Checkpoint {
    /// Maps those files that the system can map. Reads nothing.
    fn mappings(&self) -> Result<Vec<Arc<FileMapping>>, Error> {
        let files = self.inner.sources().iter().filter(|source| source.is_file());
        let map = |source| {
            // SAFETY: the caller of `load` keeps the files as they are. Python code that does not
            // is killed by SIGBUS, or sees other bytes, as with the safetensors library.
            match unsafe { FileMapping::new(source) } {
                Ok(mapping) => Some(Ok(Arc::new(mapping))),
                // For example because the limit of the address space is too low.
                Err(tensorstream::io::Error::Read { .. }) => None,
                Err(error) => Some(Err(error.into())),
            }
        };
        files.filter_map(map).collect()
    }
}

/// Returns memory to the system that loaded tensors had until they were dropped.
///
/// Returns:
///     Its size in bytes.
#[pyfunction]
pub(crate) fn trim() -> usize {
    tensorstream::trim()
}

/// Returns the size in bytes of the memory that ``trim`` would return.
#[pyfunction]
pub(crate) fn kept_bytes() -> usize {
    tensorstream::kept_bytes()
}

fn ranges(parts: &[Part]) -> Vec<ByteRange> {
    parts.iter().map(|&(file, offset, len)| ByteRange { file: FileId(file), offset, len }).collect()
}

fn no_file(file: usize, files: usize) -> PyErr {
    PyValueError::new_err(format!(
        "file {file} does not exist: the checkpoint has {files} files, numbered from 0"
    ))
}
