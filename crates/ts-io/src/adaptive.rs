// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backend `adaptive`. It copies cached ranges from the page cache. It reads other ranges
//! directly from the device, bypassing the cache, if the source supports direct I/O and the buffers
//! are aligned for it. Otherwise it reads them through the page cache. Objects and remote sources
//! are read over the network.
//!
//! A copy from the page cache may still trigger readahead, if an earlier read marked a page for it.

use std::sync::{Arc, OnceLock};

use ts_pool::HostPool;

use crate::backend::{
    Backend, BackendOptions, Capabilities, CompletionSink, ReadRequest, Rejected,
};
use crate::file::Access;
use crate::file_backends::FileProvider;
use crate::join::Joiner;
#[cfg(feature = "object")]
use crate::object::ObjectProvider;
use crate::page_cache::{Residency, resident_runs};
use crate::provider::{Availability, BackendProvider};
use crate::remote::{RemoteOrigin, RemoteProvider};
#[cfg(target_os = "linux")]
use crate::uring::{UringProvider, suits_rings};
use crate::{Error, Source};

/// The provider of `adaptive`, the default backend.
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
        FileProvider(Access::Direct).probe(&files)
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        let joiner = Arc::new(Joiner::new(sink));
        let sink = || sink_of(&joiner);
        // If io_uring cannot be used, `direct` replaces it.
        #[cfg(target_os = "linux")]
        let uring = UringProvider.create(options, sink()).ok();
        let buffered = FileProvider(Access::Cached).create(options, sink())?;
        Ok(Box::new(AdaptiveBackend {
            buffered,
            #[cfg(target_os = "linux")]
            uring,
            direct: OnceLock::new(),
            remote: OnceLock::new(),
            #[cfg(feature = "object")]
            object: OnceLock::new(),
            joiner,
            options: options.clone(),
        }))
    }
}

fn sink_of(joiner: &Arc<Joiner>) -> CompletionSink {
    let joiner = Arc::clone(joiner);
    Box::new(move |completion| joiner.on_completion(completion))
}

struct AdaptiveBackend {
    buffered: Box<dyn Backend>,
    #[cfg(target_os = "linux")]
    uring: Option<Box<dyn Backend>>,
    /// The backend for files that `uring` cannot read. Created for the first such request.
    direct: OnceLock<Result<Box<dyn Backend>, Error>>,
    /// The backend for remote sources. Created for the first such request.
    remote: OnceLock<Result<Box<dyn Backend>, Error>>,
    /// The backend for objects. Created for the first such request.
    #[cfg(feature = "object")]
    object: OnceLock<Result<Box<dyn Backend>, Error>>,
    joiner: Arc<Joiner>,
    options: BackendOptions,
}

/// The parts of a request, in order: the backend and the length in bytes of each part.
type Parts<'a> = Vec<(&'a dyn Backend, usize)>;

impl AdaptiveBackend {
    fn all(&self) -> Vec<&dyn Backend> {
        let mut all = vec![self.buffered.as_ref()];
        #[cfg(target_os = "linux")]
        all.extend(self.uring.as_deref());
        all.extend(self.direct.get().and_then(|direct| direct.as_deref().ok()));
        all.extend(self.remote.get().and_then(|remote| remote.as_deref().ok()));
        #[cfg(feature = "object")]
        all.extend(self.object.get().and_then(|object| object.as_deref().ok()));
        all
    }

    /// Returns the backend for direct I/O on `source`: `uring` if it suits the source, or `direct`.
    fn direct(&self, source: &Source) -> Result<&dyn Backend, Error> {
        #[cfg(target_os = "linux")]
        if suits_rings(source)
            && let Some(uring) = &self.uring
        {
            return Ok(uring.as_ref());
        }
        let _ = source;
        let provider = FileProvider(Access::Direct);
        let direct =
            self.direct.get_or_init(|| provider.create(&self.options, sink_of(&self.joiner)));
        direct.as_deref().map_err(Clone::clone)
    }

    /// Chooses the parts into which a request is split, and the backend of each part.
    fn assign(&self, request: &ReadRequest) -> Result<Parts<'_>, Error> {
        request.check_capacity()?;
        let (source, offset, capacity) = (&request.source, request.offset, request.capacity());
        if RemoteOrigin::of(source).is_some() {
            let remote = self
                .remote
                .get_or_init(|| RemoteProvider.create(&self.options, sink_of(&self.joiner)));
            return Ok(vec![(remote.as_deref().map_err(Clone::clone)?, capacity)]);
        }
        #[cfg(feature = "object")]
        if source.is_remote() {
            let object = self
                .object
                .get_or_init(|| ObjectProvider.create(&self.options, sink_of(&self.joiner)));
            return Ok(vec![(object.as_deref().map_err(Clone::clone)?, capacity)]);
        }
        let buffered = self.buffered.as_ref();
        let residency = Residency::sample(source, offset, request.required);
        if residency == Residency::Warm || request.check_alignment("direct").is_err() {
            return Ok(vec![(buffered, capacity)]);
        }
        let direct = self.direct(source)?;
        if residency == Residency::Cold {
            return Ok(vec![(direct, capacity)]);
        }
        let mut parts: Vec<_> = resident_runs(source, offset, request.required)
            .into_iter()
            .map(|(warm, len)| (if warm { buffered } else { direct }, len))
            .collect();
        // The rest of the buffers, past the required bytes, belongs to the last part.
        let sum: usize = parts.iter().map(|part| part.1).sum();
        match parts.last_mut() {
            Some(last) => last.1 += capacity - sum,
            None => parts.push((direct, capacity)),
        }
        Ok(parts)
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
        let assigned = match self.assign(&request) {
            Ok(assigned) => assigned,
            Err(error) => return Err(Box::new(Rejected { request, error })),
        };
        let lens: Vec<usize> = assigned.iter().map(|part| part.1).collect();
        let parts = self.joiner.split(request, &lens);
        let is_whole = parts.len() == 1;
        for (part, (backend, _)) in parts.into_iter().zip(assigned) {
            match backend.submit(part) {
                Ok(()) => {}
                Err(mut rejected) if is_whole => {
                    rejected.request = self.joiner.withdraw(rejected.request);
                    return Err(rejected);
                }
                Err(rejected) => {
                    let Rejected { request, error } = *rejected;
                    self.joiner.on_completion(request.failed(error));
                }
            }
        }
        Ok(())
    }

    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        self.joiner.cancel(wanted, |parts| {
            for backend in self.all() {
                backend.cancel(parts);
            }
        })
    }

    fn register(&self, pool: &HostPool) {
        self.all().iter().for_each(|backend| backend.register(pool));
    }
}
