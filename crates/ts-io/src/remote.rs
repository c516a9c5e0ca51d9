// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that somebody else reads: the seam for protocols that this crate does not know.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ts_pool::Buffer;

use crate::backend::{Backend, BackendOptions, CompletionSink, ReadPath, ReadRequest};
use crate::provider::{Availability, BackendProvider};
use crate::threads::{BlockingRead, ThreadBackend};
use crate::{Error, Source};

/// A file that is elsewhere, and how it is read. Several threads read it at once.
pub trait RemoteSource: fmt::Debug + Send + Sync {
    /// Fills buffers with what is at `offset` on, one after the other, as far as the file goes, and
    /// gives every one of them back. Blocks, at most so long.
    ///
    /// # Errors
    /// Beside the buffers, as [`Source::read_at`]; [`Error::Changed`] when it is not the file any
    /// more that was opened.
    fn read(
        &self,
        offset: u64,
        buffers: Vec<Buffer>,
        timeout: Duration,
    ) -> (Vec<Buffer>, Result<usize, Error>);

    /// As [`read`](Self::read), to a slice.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_at(&self, offset: u64, bytes: &mut [u8], timeout: Duration) -> Result<usize, Error>;
}

/// `distant`: by whoever reads the file.
pub(crate) struct RemoteProvider;

impl BackendProvider for RemoteProvider {
    fn name(&self) -> &'static str {
        "distant"
    }

    fn priority(&self) -> u8 {
        30
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        match sources.iter().find(|source| source.reader().is_none()) {
            Some(own) => {
                Availability::Unavailable(format!("{} is read here", own.path().display()))
            }
            None => Availability::Available,
        }
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        let reader = RemoteReader { timeout: options.deadline() };
        Ok(Box::new(ThreadBackend::new(reader, options, sink)?))
    }
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
        let Some(reader) = source.reader() else {
            let reason = format!("{} is read here", source.path().display());
            return Err(Error::Unavailable { backend: self.name().into(), reason });
        };
        let buffers = std::mem::take(&mut request.buffers);
        let (buffers, read) = reader.read(request.offset, buffers, self.timeout);
        request.buffers = buffers;
        Ok((read?, ReadPath::Network))
    }
}
