// SPDX-License-Identifier: MIT OR Apache-2.0
//! Descriptors of files, and sockets over which another process requests ranges.

use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorstream::io::{self, FileHandles, Source};

use super::PassedSource;
use crate::errors::to_python;

/// The descriptors of an open file: for reads through the page cache, and for direct reads with the
/// alignment in bytes that they require.
type Descriptors = (RawFd, Option<(RawFd, usize)>);

/// The most sources at a time that a ``Relay`` reads.
const MAX_RELAYED: usize = 512;

/// Opens a file for ``PassedSource.of_file`` in another process. Blocks.
///
/// Returns:
///     A descriptor for reads through the page cache, and, if the file supports direct reads, a
///     descriptor for them and the alignment in bytes that they require. The caller owns them.
///
/// Raises:
///     CheckpointNotFoundError, CheckpointPermissionError, StorageError: The file cannot be opened,
///         or is not a regular file.
#[pyfunction]
pub(crate) fn open_file(py: Python<'_>, path: PathBuf) -> PyResult<Descriptors> {
    let open = || -> Result<_, io::Error> {
        let path = path.to_str().map(|path| format!("file://{path}").into()).unwrap_or(path);
        Source::open(path)?.handles()
    };
    let handles = py.detach(open).map_err(|e| to_python(py, &e.into()))?;
    let FileHandles { file, direct } = handles.expect("a path names a file");
    Ok((file.into_raw_fd(), direct.map(|(file, alignment)| (file.into_raw_fd(), alignment))))
}

/// Takes ownership of the descriptors of a file that another process has opened.
pub(super) fn source_of(
    py: Python<'_>,
    name: &str,
    file: RawFd,
    direct: Option<(RawFd, usize)>,
) -> PyResult<PassedSource> {
    // SAFETY: the caller passes on the descriptors, which nothing else owns.
    let owned = |descriptor| unsafe { File::from_raw_fd(descriptor) };
    let direct = direct.map(|(descriptor, alignment)| (owned(descriptor), alignment));
    let handles = FileHandles { file: owned(file), direct };
    let source = Source::from_handles(name, handles).map_err(|e| to_python(py, &e.into()))?;
    Ok(PassedSource { source })
}

/// Reads sources, such as objects on a network, for one other process.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Relay {
    inner: Arc<io::Relay>,
}

#[pymethods]
impl Relay {
    #[new]
    fn new() -> Self {
        Self { inner: Arc::new(io::Relay::new(MAX_RELAYED)) }
    }

    /// Adds a source. Returns the number for ``RelayClient.source``.
    ///
    /// Raises:
    ///     StorageError: The other process has too many sources open.
    fn add(&self, py: Python<'_>, source: &PassedSource) -> PyResult<u32> {
        let added = self.inner.add(Arc::clone(&source.source));
        added.map_err(|e| to_python(py, &e.into()))
    }

    /// Starts a thread that reads for the other process.
    ///
    /// Returns:
    ///     A descriptor for ``RelayClient`` in the other process, which the caller owns. The thread
    ///     ends when all its copies are closed.
    ///
    /// Raises:
    ///     OSError: The process has too many open files or threads.
    fn channel(&self) -> PyResult<RawFd> {
        let (here, there) = UnixStream::pair()?;
        let relay = Arc::clone(&self.inner);
        let serve = move || {
            // An invalid request only ends this channel, and the other process gets an error.
            let _ = relay.serve(here);
        };
        std::thread::Builder::new().name("ts-relay".into()).spawn(serve)?;
        Ok(OwnedFd::from(there).into_raw_fd())
    }
}

/// Reads the sources of a ``Relay`` in another process.
///
/// Args:
///     channels: Descriptors that ``Relay.channel`` has returned. This object takes ownership.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct RelayClient {
    inner: Arc<io::RelayClient>,
}

#[pymethods]
impl RelayClient {
    #[new]
    fn new(channels: Vec<RawFd>) -> PyResult<Self> {
        if channels.is_empty() {
            return Err(PyValueError::new_err("expected at least one channel"));
        }
        // SAFETY: the caller passes on the descriptors, which nothing else owns.
        let owned = |descriptor| UnixStream::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
        let channels = channels.into_iter().map(owned).collect();
        Ok(Self { inner: Arc::new(io::RelayClient::new(channels)) })
    }

    /// Returns the source with this number, name and length in bytes.
    fn source(&self, number: u32, name: &str, length: u64) -> PassedSource {
        PassedSource { source: self.inner.source(number, name, length) }
    }
}
