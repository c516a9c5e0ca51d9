// SPDX-License-Identifier: MIT OR Apache-2.0
//! `buffered`, `direct` and `mmap`: a thread for each read in flight.

use std::sync::Arc;

use crate::backend::{Backend, BackendOptions, CompletionSink, ReadPath, ReadRequest};
use crate::fault::Faults;
use crate::memory::Memory;
use crate::provider::{Availability, BackendProvider};
use crate::source::NO_FILE;
use crate::threads::{BlockingRead, ThreadBackend};
use crate::{Error, Source};

/// How a file is read by a call that blocks. Each is a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// `buffered`: through the page cache, at any alignment.
    Buffered,
    /// As `buffered`, by a handle that has nothing read ahead: for what the page cache is known to
    /// hold. Part of `adaptive`.
    Cached,
    /// `direct`: O_DIRECT, everything aligned.
    Direct,
    /// `mmap`: copied from mappings of the file. Chosen only by name: a file that another process
    /// truncates meanwhile ends this one with SIGBUS.
    #[cfg(target_os = "linux")]
    Mapped,
}

impl Access {
    fn path(self) -> ReadPath {
        match self {
            Access::Buffered | Access::Cached => ReadPath::Buffered,
            Access::Direct => ReadPath::Direct,
            #[cfg(target_os = "linux")]
            Access::Mapped => ReadPath::Mapped,
        }
    }
}

impl BackendProvider for Access {
    fn name(&self) -> &'static str {
        match self {
            Access::Buffered | Access::Cached => "buffered",
            Access::Direct => "direct",
            #[cfg(target_os = "linux")]
            Access::Mapped => "mmap",
        }
    }

    fn priority(&self) -> u8 {
        match self {
            Access::Direct => 50,
            Access::Buffered => 10,
            _ => 0,
        }
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        let refusal = sources.iter().find_map(|source| {
            let reason = match self {
                Access::Direct => source.direct_alignment().err(),
                _ => source.is_remote().then_some(NO_FILE),
            };
            reason.map(|reason| format!("{}: {reason}", source.path().display()))
        });
        refusal.map_or(Availability::Available, Availability::Unavailable)
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        let reader = FileReader { access: *self, faults: options.faults.clone() };
        Ok(Box::new(ThreadBackend::new(reader, options, sink)?))
    }
}

struct FileReader {
    access: Access,
    faults: Faults,
}

impl BlockingRead for FileReader {
    fn name(&self) -> &'static str {
        self.access.name()
    }

    fn needs_alignment(&self) -> bool {
        self.access == Access::Direct
    }

    fn read(&self, request: &mut ReadRequest) -> Result<(usize, ReadPath), Error> {
        let ReadRequest { source, offset, buffers, .. } = request;
        let bytes =
            source.read(self.access, *offset, &mut Memory::Buffers(buffers), &self.faults)?;
        Ok((bytes, self.access.path()))
    }
}
