// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backend `gds`: GPUDirect Storage, through NVIDIA's cuFile library.

use std::sync::Arc;

use crate::backend::{Backend, BackendOptions, CompletionSink, ReadPath, ReadRequest};
use crate::file::{Access, FileOrigin};
use crate::file_backends::FileProvider;
use crate::hook::ReadHook;
use crate::progress::{Progress, Step};
use crate::provider::{Availability, BackendProvider};
use crate::scatter::slices;
use crate::source::NOT_A_FILE;
use crate::sys::CuFile;
use crate::threads::{BlockingRead, ThreadBackend};
use crate::{Error, Source};

/// The path on which GPUDirect Storage transfers data on this system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GdsMode {
    /// Directly between storage and GPU, through nvidia-fs or PCI peer-to-peer.
    Direct,
    /// Through host memory, in the library's compatibility mode.
    Compatibility,
}

/// Returns the path on which GPUDirect Storage transfers data on this system. The first call loads
/// and initializes the library.
///
/// # Errors
/// Returns the reason if GPUDirect Storage cannot be used, for example because the library, the
/// driver or the GPU is missing.
pub fn gds_mode() -> Result<GdsMode, String> {
    CuFile::get()
        .map(|library| if library.is_direct() { GdsMode::Direct } else { GdsMode::Compatibility })
}

/// The provider of `gds`. The backend is used only if it is named, because cuFile has no advantage
/// for buffers in host memory. A
/// [`GpuRead`](crate::GpuRead) reads to memory of a GPU.
pub(crate) struct GdsProvider;

impl BackendProvider for GdsProvider {
    fn name(&self) -> &'static str {
        "gds"
    }

    fn priority(&self) -> u8 {
        0
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        match CuFile::get() {
            Err(reason) => Availability::Unavailable(reason),
            Ok(_) => FileProvider(Access::Direct).probe(sources),
        }
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        CuFile::get()
            .map_err(|reason| Error::Unavailable { backend: self.name().into(), reason })?;
        let reader = GdsReader { hook: options.hook.clone() };
        Ok(Box::new(ThreadBackend::new(reader, options, sink)?))
    }
}

struct GdsReader {
    hook: ReadHook,
}

impl BlockingRead for GdsReader {
    fn name(&self) -> &'static str {
        GdsProvider.name()
    }

    /// Returns `false`, because cuFile handles unaligned ends.
    fn needs_alignment(&self) -> bool {
        false
    }

    fn read(&self, request: &mut ReadRequest) -> Result<(usize, ReadPath), Error> {
        let (source, capacity) = (Arc::clone(&request.source), request.capacity());
        let unavailable = |reason: &str| Error::Unavailable {
            backend: self.name().into(),
            reason: format!("{}: {reason}", source.path().display()),
        };
        let file = FileOrigin::of(&source).ok_or_else(|| unavailable(NOT_A_FILE))?;
        let handle = file.cufile().map_err(unavailable)?;
        let mut progress = Progress::new(request.offset, capacity, source.len(), 1);
        while let Some(Step::InPlace { offset, at, len }) = progress.step() {
            let answer = self.hook.run(source.path(), offset, len, || {
                let slice = slices(&mut request.buffers, at, len).next();
                slice.map_or(Ok(0), |slice| handle.read_at(slice, offset))
            });
            progress.advance(answer).map_err(|e| source.read_error(offset, len, e))?;
        }
        // The buffers are in host memory, so nothing was transferred directly to a GPU.
        Ok((progress.done(), ReadPath::GpuCompat))
    }
}
