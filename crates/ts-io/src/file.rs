// SPDX-License-Identifier: MIT OR Apache-2.0
//! `buffered`, `mmap` and `direct`: a thread for each read in flight.

use std::sync::Arc;

use crate::backend::{Backend, BackendOptions, CompletionSink, ReadPath, ReadRequest};
use crate::fault::Faults;
use crate::provider::{Availability, BackendProvider};
use crate::threads::{BlockingRead, ThreadBackend};
use crate::{Error, Source};

/// `buffered`: through the page cache, at any alignment.
pub(crate) struct BufferedProvider;
/// `direct`: O_DIRECT, everything aligned.
pub(crate) struct DirectProvider;

impl BackendProvider for BufferedProvider {
    fn name(&self) -> &'static str {
        "buffered"
    }

    fn priority(&self) -> u8 {
        10
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        match sources.iter().find(|source| source.is_remote()) {
            Some(object) => Availability::Unavailable(format!("{} is no file", object.path().display())),
            None => Availability::Available,
        }
    }

    fn create(&self, options: &BackendOptions, sink: CompletionSink) -> Result<Box<dyn Backend>, Error> {
        let reader = FileReader { path: ReadPath::Buffered, quiet: false, faults: options.faults.clone() };
        Ok(Box::new(ThreadBackend::new(reader, options, sink)?))
    }
}

/// As `buffered`, for what the page cache is known to hold: does not have it read ahead.
pub(crate) fn copier(options: &BackendOptions, sink: CompletionSink) -> Result<Box<dyn Backend>, Error> {
    let reader = FileReader { path: ReadPath::Buffered, quiet: true, faults: options.faults.clone() };
    Ok(Box::new(ThreadBackend::new(reader, options, sink)?))
}

impl BackendProvider for DirectProvider {
    fn name(&self) -> &'static str {
        "direct"
    }

    fn priority(&self) -> u8 {
        50
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        let refusal = sources.iter().find_map(|s| Some((s.path(), s.direct_alignment().err()?)));
        match refusal {
            Some((path, reason)) => Availability::Unavailable(format!("{}: {reason}", path.display())),
            None => Availability::Available,
        }
    }

    fn create(&self, options: &BackendOptions, sink: CompletionSink) -> Result<Box<dyn Backend>, Error> {
        let reader = FileReader { path: ReadPath::Direct, quiet: false, faults: options.faults.clone() };
        Ok(Box::new(ThreadBackend::new(reader, options, sink)?))
    }
}

/// `mmap`: copies from mappings of the file. Chosen only by name: a file that another process truncates meanwhile ends
/// this one with SIGBUS.
#[cfg(target_os = "linux")]
pub(crate) struct MmapProvider;

#[cfg(target_os = "linux")]
impl BackendProvider for MmapProvider {
    fn name(&self) -> &'static str {
        "mmap"
    }

    fn priority(&self) -> u8 {
        0
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        BufferedProvider.probe(sources)
    }

    fn create(&self, options: &BackendOptions, sink: CompletionSink) -> Result<Box<dyn Backend>, Error> {
        let reader = FileReader { path: ReadPath::Mapped, quiet: false, faults: options.faults.clone() };
        Ok(Box::new(ThreadBackend::new(reader, options, sink)?))
    }
}

struct FileReader {
    path: ReadPath,
    /// Through a handle whose reads are not continued by the system.
    quiet: bool,
    faults: Faults,
}

impl BlockingRead for FileReader {
    fn name(&self) -> &'static str {
        match self.path {
            ReadPath::Mapped => "mmap",
            path => path.name(),
        }
    }

    fn needs_alignment(&self) -> bool {
        self.path == ReadPath::Direct
    }

    fn read(&self, request: &mut ReadRequest) -> Result<(usize, ReadPath), Error> {
        let ReadRequest { source, offset, buffers, .. } = request;
        Ok((source.read_buffers(self.path, self.quiet, *offset, buffers, &self.faults)?, self.path))
    }
}
