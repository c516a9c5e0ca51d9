// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gds`: GPUDirect Storage, by NVIDIA's cuFile.

use std::sync::Arc;

use crate::backend::{Backend, BackendOptions, CompletionSink, ReadPath, ReadRequest};
use crate::fault::Faults;
use crate::file::Access;
use crate::memory::pieces;
use crate::progress::{Progress, Step};
use crate::provider::{Availability, BackendProvider};
use crate::sys::CuFile;
use crate::threads::{BlockingRead, ThreadBackend};
use crate::{Error, Source};

/// How GPUDirect Storage works here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GdsMode {
    /// Storage and GPU talk to each other, by nvidia-fs or PCI peer-to-peer.
    Direct,
    /// The library reads through the host and copies: its compatibility mode.
    Compatibility,
}

/// How GPUDirect Storage works here, or why it does not. The first call loads and starts the
/// library.
///
/// # Errors
/// The reason: no library, no driver, no GPU.
pub fn gds_mode() -> Result<GdsMode, String> {
    CuFile::get()
        .map(|library| if library.is_direct() { GdsMode::Direct } else { GdsMode::Compatibility })
}

/// `gds`: through cuFile. Buffers are of the host's memory as yet, for which there is nothing to
/// gain, so it is chosen by name alone.
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
            Ok(_) => Access::Direct.probe(sources),
        }
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        CuFile::get()
            .map_err(|reason| Error::Unavailable { backend: self.name().into(), reason })?;
        let reader = GdsReader { faults: options.faults.clone() };
        Ok(Box::new(ThreadBackend::new(reader, options, sink)?))
    }
}

struct GdsReader {
    faults: Faults,
}

impl BlockingRead for GdsReader {
    fn name(&self) -> &'static str {
        GdsProvider.name()
    }

    /// The library splits ends off by itself.
    fn needs_alignment(&self) -> bool {
        false
    }

    fn read(&self, request: &mut ReadRequest) -> Result<(usize, ReadPath), Error> {
        let (source, room) = (Arc::clone(&request.source), request.room());
        let unavailable = |reason: &str| Error::Unavailable {
            backend: self.name().into(),
            reason: reason.into(),
        };
        let handle = source.gds().map_err(unavailable)?;
        let mut progress = Progress::new(request.offset, room, source.len(), 1);
        while let Some(Step::Into { offset, at, len }) = progress.step() {
            let answer = self.faults.suffer(source.path(), offset, len, || {
                let piece = pieces(&mut request.buffers, at, len).next();
                piece.map_or(Ok(0), |piece| handle.read_at(piece, offset))
            });
            progress.answer(answer).map_err(|e| source.failed(offset, len, e))?;
        }
        // The memory is the host's.
        Ok((progress.done(), ReadPath::GpuCompat))
    }
}
