// SPDX-License-Identifier: MIT OR Apache-2.0
//! The constructors of [`Source`], one for each kind of source.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::Error;
use crate::file::{FileHandles, FileOrigin};
use crate::in_memory::InMemoryOrigin;
#[cfg(feature = "object")]
use crate::object::ObjectOrigin;
use crate::remote::{RemoteOrigin, RemoteSource};
use crate::source::{Fingerprint, Source};

impl Source {
    /// Opens a file or a URL and records its fingerprint. Blocks; for a URL at most 60 s.
    ///
    /// With the feature `object`, URLs that begin with `s3://`, `gs://`, `az://`, `http://` or
    /// `https://` are read over the network. An example is `s3://bucket/key`. Credentials come from
    /// the environment variables `AWS_*`, `GOOGLE_*` and `AZURE_*`, or else from the metadata
    /// service of the cloud that runs the program. A `file://` URL is treated as a path.
    ///
    /// # Errors
    /// Returns [`Error::Open`] if the source cannot be opened or is not a regular file.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Self>, Error> {
        let path = path.as_ref();
        let file = match path.to_str() {
            Some(url) if Self::is_url(url) => return open_url(url),
            Some(text) => Path::new(text.strip_prefix("file://").unwrap_or(text)),
            None => path,
        };
        FileOrigin::open(file).map(Self::new)
    }

    /// Creates a source from a file that another process has opened, for example because this
    /// process may not open files. `name` identifies the source in error messages.
    ///
    /// Changes of the file are detected through its handles only.
    ///
    /// # Errors
    /// Returns [`Error::Open`] if the file is not a regular file.
    pub fn from_handles(
        name: impl Into<PathBuf>,
        handles: FileHandles,
    ) -> Result<Arc<Self>, Error> {
        FileOrigin::from_handles(name.into(), handles).map(Self::new)
    }

    /// Returns duplicates of the handles of a local file, for [`from_handles`](Self::from_handles)
    /// in another process. Returns `None` for other sources.
    ///
    /// # Errors
    /// Returns [`Error::Open`] if the process has too many open files.
    pub fn handles(&self) -> Result<Option<FileHandles>, Error> {
        let failed = |source: std::io::Error| Error::Open {
            path: self.path().into(),
            source: source.into(),
        };
        FileOrigin::of(self).map(FileOrigin::handles).transpose().map_err(failed)
    }

    /// Returns a duplicate of the handle of a local file, which is the file that was opened,
    /// whatever its path leads to now. Returns `None` for other sources.
    ///
    /// # Errors
    /// Returns [`Error::Open`] if the process has too many open files.
    pub fn try_clone_file(&self) -> Result<Option<File>, Error> {
        let failed = |source: std::io::Error| Error::Open {
            path: self.path().into(),
            source: source.into(),
        };
        FileOrigin::of(self).map(|origin| origin.file().try_clone()).transpose().map_err(failed)
    }

    /// Creates a source from bytes in memory. `name` identifies the source in error messages.
    ///
    /// [`read_at`](Self::read_at) and [`DirectReader`](crate::DirectReader) can read it. Backends
    /// cannot: they fail with [`Error::Unavailable`] or [`Error::Read`].
    pub fn in_memory(
        name: impl Into<PathBuf>,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::new(InMemoryOrigin::new(name.into(), bytes))
    }

    /// Creates a source that gets its bytes from `reader`, such as a file on another machine.
    /// `name` identifies the source in error messages.
    pub fn remote(
        name: impl Into<PathBuf>,
        fingerprint: Fingerprint,
        reader: Arc<dyn RemoteSource>,
    ) -> Arc<Self> {
        Self::new(RemoteOrigin::new(name.into(), fingerprint, reader))
    }

    /// Returns whether `text` is a URL rather than a path. `file://` URLs count as paths.
    pub fn is_url(text: &str) -> bool {
        text.split_once("://")
            .is_some_and(|(scheme, _)| scheme != "file" && !scheme.contains(['/', '\\']))
    }
}

#[cfg(feature = "object")]
fn open_url(url: &str) -> Result<Arc<Source>, Error> {
    ObjectOrigin::open(url, crate::source::DEFAULT_TIMEOUT).map(Source::new)
}

#[cfg(not(feature = "object"))]
fn open_url(url: &str) -> Result<Arc<Source>, Error> {
    let unsupported = std::io::Error::new(
        std::io::ErrorKind::Unsupported,
        "this build cannot read URLs; enable the feature `object`",
    );
    Err(Error::Open { path: url.into(), source: unsupported.into() })
}
