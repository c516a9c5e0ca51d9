// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backends `buffered`, `direct` and `mmap`: blocking reads, one thread for each read in
//! flight.

use std::sync::Arc;

use crate::backend::{Backend, BackendOptions, CompletionSink, ReadPath, ReadRequest};
use crate::file::{Access, FileOrigin};
use crate::hook::ReadHook;
use crate::provider::{Availability, BackendProvider};
use crate::scatter::Target;
use crate::source::NOT_A_FILE;
use crate::threads::{BlockingRead, ThreadBackend};
use crate::{Error, Source};

/// The provider of the backend for one kind of access.
///
/// `mmap` is used only if it is named, because it is not faster than `buffered`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileProvider(pub(crate) Access);

impl BackendProvider for FileProvider {
    fn name(&self) -> &'static str {
        match self.0 {
            Access::Buffered | Access::Cached => "buffered",
            Access::Direct => "direct",
            #[cfg(target_os = "linux")]
            Access::Mapped => "mmap",
        }
    }

    fn priority(&self) -> u8 {
        match self.0 {
            Access::Direct => 50,
            Access::Buffered => 10,
            _ => 0,
        }
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        let refusal = sources.iter().find_map(|source| {
            let reason = match self.0 {
                Access::Direct => source.direct_alignment().err(),
                _ => source.is_remote().then_some(NOT_A_FILE),
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
        let reader = FileReader { provider: *self, hook: options.hook.clone() };
        Ok(Box::new(ThreadBackend::new(reader, options, sink)?))
    }
}

struct FileReader {
    provider: FileProvider,
    hook: ReadHook,
}

impl BlockingRead for FileReader {
    fn name(&self) -> &'static str {
        self.provider.name()
    }

    fn needs_alignment(&self) -> bool {
        self.provider.0 == Access::Direct
    }

    fn read(&self, request: &mut ReadRequest) -> Result<(usize, ReadPath), Error> {
        let ReadRequest { source, offset, required, buffers, .. } = request;
        let file = FileOrigin::of(source).ok_or_else(|| source.not_a_file(*offset, *required))?;
        let access = self.provider.0;
        let bytes = file.read(access, *offset, &mut Target::Buffers(buffers), &self.hook)?;
        let path = match access {
            Access::Buffered | Access::Cached => ReadPath::Buffered,
            Access::Direct => ReadPath::Direct,
            #[cfg(target_os = "linux")]
            Access::Mapped => ReadPath::Mapped,
        };
        Ok((bytes, path))
    }
}
