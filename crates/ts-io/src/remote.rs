// SPDX-License-Identifier: MIT OR Apache-2.0
//! Remote sources, and the backend `remote`, which reads them. Another crate provides their bytes
//! by implementing [`RemoteSource`].

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ts_pool::Buffer;

use crate::backend::{Backend, BackendOptions, CompletionSink, ReadPath, ReadRequest};
use crate::provider::{Availability, BackendProvider};
use crate::source::{Fingerprint, Origin};
use crate::threads::{BlockingRead, ThreadBackend};
use crate::{Error, Source};

/// Reads a file on another machine, for [`Source::remote`]. Several threads may call the methods at
/// the same time.
pub trait RemoteSource: fmt::Debug + Send + Sync {
    /// Fills buffers, one after the other, with the bytes from `offset` on, up to the end of the
    /// file. Returns all buffers and the number of bytes read. Blocks for at most `timeout`.
    ///
    /// # Errors
    /// Returns the errors of [`Source::read_at`], among them [`Error::Changed`] if the file is no
    /// longer the one that was opened. With an error, all buffers are returned too.
    fn read(
        &self,
        offset: u64,
        buffers: Vec<Buffer>,
        timeout: Duration,
    ) -> (Vec<Buffer>, Result<usize, Error>);

    /// Fills a slice with the bytes from `offset` on, up to the end of the file. Returns the number
    /// of bytes read. Blocks for at most `timeout`.
    ///
    /// # Errors
    /// Returns the same errors as [`read`](Self::read).
    fn read_at(&self, offset: u64, bytes: &mut [u8], timeout: Duration) -> Result<usize, Error>;
}

#[derive(Debug)]
pub(crate) struct RemoteOrigin {
    name: PathBuf,
    fingerprint: Fingerprint,
    reader: Arc<dyn RemoteSource>,
}

impl RemoteOrigin {
    pub(crate) fn new(
        name: PathBuf,
        fingerprint: Fingerprint,
        reader: Arc<dyn RemoteSource>,
    ) -> Self {
        Self { name, fingerprint, reader }
    }

    /// Returns the origin of `source`, if `source` is a remote source.
    pub(crate) fn of(source: &Source) -> Option<&Self> {
        source.origin()
    }
}

impl Origin for RemoteOrigin {
    fn path(&self) -> &Path {
        &self.name
    }

    fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8], timeout: Duration) -> Result<usize, Error> {
        self.reader.read_at(offset, buffer, timeout)
    }

    fn is_remote(&self) -> bool {
        true
    }
}

/// The provider of `remote`, which performs blocking reads with a [`RemoteSource`].
pub(crate) struct RemoteProvider;

impl BackendProvider for RemoteProvider {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn priority(&self) -> u8 {
        30
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        match sources.iter().find(|source| RemoteOrigin::of(source).is_none()) {
            Some(other) => Availability::Unavailable(not_remote(other)),
            None => Availability::Available,
        }
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        let reader = RemoteReader { timeout: options.clamped_timeout() };
        Ok(Box::new(ThreadBackend::new(reader, options, sink)?))
    }
}

fn not_remote(source: &Source) -> String {
    format!("{}: not a remote source", source.path().display())
}

struct RemoteReader {
    timeout: Duration,
}

impl BlockingRead for RemoteReader {
    fn name(&self) -> &'static str {
        RemoteProvider.name()
    }

    fn needs_alignment(&self) -> bool {
        false
    }

    fn read(&self, request: &mut ReadRequest) -> Result<(usize, ReadPath), Error> {
        let source = Arc::clone(&request.source);
        let Some(RemoteOrigin { reader, .. }) = RemoteOrigin::of(&source) else {
            let reason = not_remote(&source);
            return Err(Error::Unavailable { backend: self.name().into(), reason });
        };
        let buffers = std::mem::take(&mut request.buffers);
        let (buffers, read) = reader.read(request.offset, buffers, self.timeout);
        request.buffers = buffers;
        Ok((read?, ReadPath::Network))
    }
}
