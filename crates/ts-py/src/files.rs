// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorstream::format::{Compression, Digest, Dtype, TensorMeta, tensor_fingerprint};
use tensorstream::io::fault::WriteFaults;
use tensorstream::{Bar, Converted, Error, NewTensor, Progress as Done, Watch, WriteOptions};

use crate::dlpack::Lent;
use crate::errors::to_python;

/// Name, safetensors dtype name, shape, and address modulo 64 or None.
type NewTensorSpec = (String, String, Vec<u64>, Option<u8>);

/// Bytes that are written, hashed or read between two looks for a signal.
const PIECE_BYTES: usize = 16 << 20;

/// A progress bar on standard error; nothing where that is no terminal.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Progress {
    bar: Mutex<(Option<Bar>, Done)>,
}

#[pymethods]
impl Progress {
    #[new]
    fn new(label: String, total_bytes: u64) -> Self {
        Self { bar: Mutex::new((Some(Bar::new(label)), Done { done: 0, total: total_bytes })) }
    }

    /// Adds to what is done.
    pub(crate) fn advance(&self, bytes: u64) {
        let (bar, done) = &mut *lock(&self.bar);
        done.done += bytes;
        if let Some(bar) = bar {
            bar.show(*done);
        }
    }

    /// Takes the bar away. Does nothing the second time.
    fn close(&self) {
        lock(&self.bar).0 = None;
    }
}

/// Names the content of a set of tensors.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Fingerprint {
    tensors: Mutex<Vec<(String, u128)>>,
}

#[pymethods]
impl Fingerprint {
    #[new]
    fn new() -> Self {
        Self { tensors: Mutex::new(Vec::new()) }
    }

    /// Adds a tensor, whose bytes are lent as a capsule.
    fn add(
        &self,
        py: Python<'_>,
        name: String,
        dtype: &str,
        shape: Vec<u64>,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (meta, data) = (meta(dtype, shape)?, Lent::from_capsule(data)?);
        let bytes = data.bytes();
        let fingerprint = py.detach(|| tensor_fingerprint(&meta, &Digest::of(bytes)));
        py.check_signals()?;
        lock(&self.tensors).push((name, fingerprint));
        Ok(())
    }

    /// 32 hexadecimal digits.
    fn hex(&self) -> String {
        let tensors = lock(&self.tensors);
        let all = tensors.iter().map(|(name, fingerprint)| (name.as_str(), *fingerprint));
        format!("{:032x}", tensorstream::format::fingerprint(all))
    }
}

/// Writes a .ts or .safetensors file that appears whole or not at all.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct FileWriter {
    /// Taken when it ends.
    inner: Mutex<Option<tensorstream::FileWriter>>,
}

#[pymethods]
impl FileWriter {
    #[new]
    #[pyo3(signature = (path, tensors, metadata, codec="raw", level=None, jobs=0))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        tensors: Vec<NewTensorSpec>,
        metadata: BTreeMap<String, String>,
        codec: &str,
        level: Option<i32>,
        jobs: usize,
    ) -> PyResult<Self> {
        let tensors = new_tensors(tensors)?;
        let options = options(py, &path, codec, level, jobs)?;
        let create = |watch: &mut Watch<'_>| {
            tensorstream::FileWriter::create(&path, tensors, metadata, options, &mut || {
                watch(NOTHING)
            })
        };
        Ok(Self { inner: Mutex::new(Some(watched(py, None, create)?)) })
    }

    /// A file in memory, which errors call `name` and whose suffix says the format.
    #[staticmethod]
    #[pyo3(signature = (name, tensors, metadata, codec="raw", level=None))]
    fn in_memory(
        py: Python<'_>,
        name: &str,
        tensors: Vec<NewTensorSpec>,
        metadata: BTreeMap<String, String>,
        codec: &str,
        level: Option<i32>,
    ) -> PyResult<Self> {
        let options = options(py, name.as_ref(), codec, level, 0)?;
        let inner =
            tensorstream::FileWriter::in_memory(name, new_tensors(tensors)?, metadata, options);
        Ok(Self { inner: Mutex::new(Some(inner.map_err(|e| to_python(py, &e))?)) })
    }

    /// Goes on with a .ts file: adds tensors, in the place of those of the same name, removes some,
    /// sets metadata.
    #[staticmethod]
    #[pyo3(signature = (path, tensors, remove, metadata, codec="raw", level=None))]
    fn append(
        py: Python<'_>,
        path: PathBuf,
        tensors: Vec<NewTensorSpec>,
        remove: Vec<String>,
        metadata: BTreeMap<String, String>,
        codec: &str,
        level: Option<i32>,
    ) -> PyResult<Self> {
        let tensors = new_tensors(tensors)?;
        let options = options(py, &path, codec, level, 0)?;
        let append = |watch: &mut Watch<'_>| {
            let interrupt = &mut || watch(NOTHING);
            tensorstream::FileWriter::append(&path, tensors, &remove, metadata, options, interrupt)
        };
        Ok(Self { inner: Mutex::new(Some(watched(py, None, append)?)) })
    }

    /// As the constructor, but None when the file is there and holds just such tensors and
    /// metadata.
    #[staticmethod]
    #[pyo3(signature = (path, tensors, metadata, fingerprint, codec="raw", level=None))]
    fn unless_written(
        py: Python<'_>,
        path: PathBuf,
        tensors: Vec<NewTensorSpec>,
        metadata: BTreeMap<String, String>,
        fingerprint: Option<String>,
        codec: &str,
        level: Option<i32>,
    ) -> PyResult<Option<Self>> {
        let tensors = new_tensors(tensors)?;
        let options = options(py, &path, codec, level, 0)?;
        let fingerprint = fingerprint.map(|hex| u128::from_str_radix(&hex, 16)).transpose()?;
        let create = |watch: &mut Watch<'_>| {
            let interrupt = &mut || watch(NOTHING);
            tensorstream::FileWriter::unless_written(
                &path,
                tensors,
                &metadata,
                options,
                fingerprint,
                interrupt,
            )
        };
        let inner = watched(py, None, create)?;
        Ok(inner.map(|inner| Self { inner: Mutex::new(Some(inner)) }))
    }

    /// Indices of the tensors in the order in which their bytes are expected.
    fn order(&self) -> PyResult<Vec<usize>> {
        Ok(open(&mut lock(&self.inner))?.order().to_vec())
    }

    /// Takes the next bytes, lent as a capsule.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let data = Lent::from_capsule(data)?;
        for piece in data.bytes().chunks(PIECE_BYTES) {
            let written = py.detach(|| match lock(&self.inner).as_mut() {
                Some(inner) => inner.write(piece).map(|()| true),
                None => Ok(false),
            });
            if !written.map_err(|e| to_python(py, &e))? {
                return Err(ended());
            }
            py.check_signals()?;
        }
        Ok(())
    }

    /// Makes the file durable and gives it its name.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let inner = lock(&self.inner).take().ok_or_else(ended)?;
        py.detach(|| inner.commit()).map_err(|e| to_python(py, &e))
    }

    /// Ends a file in memory, and gives it.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let inner = lock(&self.inner).take().ok_or_else(ended)?;
        let bytes = py.detach(|| inner.into_bytes()).map_err(|e| to_python(py, &e))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Gives up; what had the name before still has it. Does nothing after the end.
    fn abandon(&self, py: Python<'_>) {
        let inner = lock(&self.inner).take();
        py.detach(|| drop(inner));
    }
}

fn options(
    py: Python<'_>,
    path: &Path,
    codec: &str,
    level: Option<i32>,
    jobs: usize,
) -> PyResult<WriteOptions> {
    let compression = Compression::named(codec, level)
        .map_err(|reason| to_python(py, &Error::Compression { path: path.into(), reason }))?;
    Ok(WriteOptions { compression, jobs, ..WriteOptions::default() })
}

/// Writes a .ts file anew without what appends left unused; its length before and after.
#[pyfunction]
pub(crate) fn compact(py: Python<'_>, path: PathBuf) -> PyResult<(u64, u64)> {
    let none = WriteFaults::default();
    let done = watched(py, Some("compacting"), |watch| tensorstream::compact(&path, &none, watch))?;
    Ok((done.bytes_before, done.bytes))
}

/// Converts a checkpoint; number of tensors and bytes.
#[pyfunction]
#[pyo3(signature = (source, target, codec="raw", level=None, jobs=0, max_shard_bytes=None))]
pub(crate) fn convert(
    py: Python<'_>,
    source: PathBuf,
    target: PathBuf,
    codec: &str,
    level: Option<i32>,
    jobs: usize,
    max_shard_bytes: Option<u64>,
) -> PyResult<(usize, u64)> {
    let mut options = options(py, &target, codec, level, jobs)?;
    options.max_shard_bytes = max_shard_bytes.unwrap_or(options.max_shard_bytes);
    let job = |watch: &mut Watch<'_>| tensorstream::convert(&source, &target, options, watch);
    let Converted { tensors, bytes, .. } = watched(py, Some("converting"), job)?;
    Ok((tensors, bytes))
}

/// The command line; the exit status.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, arguments: Vec<String>) -> PyResult<u8> {
    let mut signal = None;
    let status = py.detach(|| {
        tensorstream::cli::run(arguments, &mut || {
            // Once a signal came the answer stays: Python reports it once, and the command may ask
            // again. Handlers of later signals run all the same.
            let now = Python::attach(|py| py.check_signals().err());
            signal = signal.take().or(now);
            signal.is_some()
        })
    });
    Ok(status)
}

const NOTHING: Done = Done { done: 0, total: 0 };

/// Runs a long job with the interpreter let go, under a bar if it has a label; a signal's exception
/// ends it and is raised.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    label: Option<&str>,
    job: impl FnOnce(&mut Watch<'_>) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let mut signal = None;
    let result = py.detach(|| {
        let bar = label.map(Bar::new);
        job(&mut |progress| {
            if let Some(bar) = &bar {
                bar.show(progress);
            }
            signal = signal.take().or_else(|| Python::attach(|py| py.check_signals().err()));
            signal.is_some()
        })
    });
    match (result, signal) {
        // A signal is reported once: one that was seen must not be lost, also where the job was
        // done by then.
        (_, Some(signal)) => Err(signal),
        (result, None) => result.map_err(|error| to_python(py, &error)),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

fn open<'a>(
    inner: &'a mut MutexGuard<'_, Option<tensorstream::FileWriter>>,
) -> PyResult<&'a mut tensorstream::FileWriter> {
    inner.as_mut().ok_or_else(ended)
}

fn ended() -> PyErr {
    PyRuntimeError::new_err("the file was committed or abandoned")
}

fn new_tensors(specs: Vec<NewTensorSpec>) -> PyResult<Vec<NewTensor>> {
    let new = |(name, dtype, shape, phase): NewTensorSpec| {
        Ok(NewTensor { name, meta: meta(&dtype, shape)?, phase })
    };
    specs.into_iter().map(new).collect()
}

/// A tensor's type by safetensors' name of its dtype.
pub(crate) fn meta(dtype: &str, shape: Vec<u64>) -> PyResult<TensorMeta> {
    let known = Dtype::from_name(dtype);
    let dtype = known.ok_or_else(|| PyValueError::new_err(format!("unknown dtype {dtype}")))?;
    Ok(TensorMeta { dtype, shape })
}
