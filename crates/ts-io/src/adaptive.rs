// SPDX-License-Identifier: MIT OR Apache-2.0
//! `adaptive`: asks the page cache first. What it holds is copied from there; the rest comes straight from the
//! device and leaves the cache as it is. Objects come over the network.

use std::sync::Arc;

use ts_pool::HostPool;

use crate::backend::{Backend, BackendOptions, Capabilities, CompletionSink, ReadRequest, Rejected};
use crate::file::{BufferedProvider, DirectProvider};
#[cfg(feature = "object")]
use crate::object::ObjectProvider;
use crate::provider::{Availability, BackendProvider};
use crate::{Error, Source};

/// `adaptive`: for each request the backend that is best for it.
pub(crate) struct AdaptiveProvider;

impl BackendProvider for AdaptiveProvider {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn priority(&self) -> u8 {
        100
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        let files: Vec<_> = sources.iter().filter(|s| !s.is_remote()).cloned().collect();
        if files.iter().any(|s| s.residency(0, 1).is_none()) {
            return Availability::Unavailable("the system does not tell what its page cache holds".into());
        }
        DirectProvider.probe(&files)
    }

    fn create(&self, options: &BackendOptions, sink: CompletionSink) -> Result<Box<dyn Backend>, Error> {
        let sink = Arc::new(sink);
        let shared = || -> CompletionSink {
            let sink = Arc::clone(&sink);
            Box::new(move |completion| sink(completion))
        };
        let direct = direct(options, &shared)?;
        // Copies are bound by cores and not by the device.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let copies = BackendOptions { in_flight: options.in_flight.clamp(1, cores), ..options.clone() };
        let buffered = BufferedProvider.create(&copies, shared())?;
        #[cfg(feature = "object")]
        let object = ObjectProvider.create(options, shared())?;
        Ok(Box::new(AdaptiveBackend {
            buffered,
            direct,
            #[cfg(feature = "object")]
            object,
        }))
    }
}

/// The better of the backends for direct I/O that the system has.
fn direct(options: &BackendOptions, sink: &dyn Fn() -> CompletionSink) -> Result<Box<dyn Backend>, Error> {
    #[cfg(target_os = "linux")]
    if let Ok(uring) = crate::uring::UringProvider.create(options, sink()) {
        return Ok(uring);
    }
    DirectProvider.create(options, sink())
}

struct AdaptiveBackend {
    buffered: Box<dyn Backend>,
    direct: Box<dyn Backend>,
    #[cfg(feature = "object")]
    object: Box<dyn Backend>,
}

impl AdaptiveBackend {
    fn all(&self) -> Vec<&dyn Backend> {
        vec![
            self.buffered.as_ref(),
            self.direct.as_ref(),
            #[cfg(feature = "object")]
            self.object.as_ref(),
        ]
    }

    /// Whether the page cache has what is wanted, or has to be asked because direct I/O cannot.
    fn is_buffered(&self, request: &ReadRequest) -> bool {
        let share = request.source.residency(request.offset, request.required);
        share.is_some_and(|share| share >= 1.0) || request.check_alignment("direct").is_err()
    }
}

impl Backend for AdaptiveBackend {
    fn name(&self) -> &'static str {
        AdaptiveProvider.name()
    }

    fn capabilities(&self) -> Capabilities {
        let max_in_flight = self.all().iter().map(|b| b.capabilities().max_in_flight).max();
        Capabilities { needs_alignment: false, max_in_flight: max_in_flight.unwrap_or(1) }
    }

    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>> {
        #[cfg(feature = "object")]
        if request.source.is_remote() {
            return self.object.submit(request);
        }
        if self.is_buffered(&request) { self.buffered.submit(request) } else { self.direct.submit(request) }
    }

    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        self.all().iter().map(|backend| backend.cancel(wanted)).sum()
    }

    fn register(&self, pool: &HostPool) -> bool {
        self.direct.register(pool)
    }
}
