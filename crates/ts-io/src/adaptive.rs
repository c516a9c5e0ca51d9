// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backend `adaptive`. It copies cached ranges from the page cache. It reads other ranges
//! directly from the device, bypassing the cache, if the source supports direct I/O and the buffers
//! are aligned for it. Otherwise it reads them through the page cache. Objects and remote sources
//! are read over the network.
//!
//! A part that a backend cannot read, for another reason than an I/O error of the device, is tried
//! once with the next one: `direct` after `uring`, and `buffered` after `direct`. If io_uring
//! cannot be used any more, `uring` is not used again.
//!
//! A copy from the page cache may still trigger readahead, if an earlier read marked a page for it.

#[cfg(target_os = "linux")]
use std::sync::Weak;
#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use ts_pool::HostPool;

#[cfg(target_os = "linux")]
use crate::backend::Completion;
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
        let cached = FileProvider(Access::Cached);
        let sink = joiner.sink(cached.name());
        let buffered = Arc::from(cached.create(options, sink)?);
        let direct = Arc::new(Direct {
            backend: OnceLock::new(),
            buffered: Arc::clone(&buffered),
            joiner: Arc::clone(&joiner),
            options: options.clone(),
        });
        // If io_uring cannot be used, `direct` replaces it.
        #[cfg(target_os = "linux")]
        let uring = Uring::new(options, &joiner, Arc::downgrade(&direct)).ok();
        Ok(Box::new(AdaptiveBackend {
            #[cfg(target_os = "linux")]
            uring,
            direct,
            buffered,
            remote: OnceLock::new(),
            #[cfg(feature = "object")]
            object: OnceLock::new(),
            joiner,
            options: options.clone(),
        }))
    }
}

/// The backends for the parts of requests. Each field's backend passes what it cannot read to that
/// of the next one, so the fields are dropped in this order. The sinks only have weak references to
/// the next one: a thread of a read that does not end keeps its sink.
struct AdaptiveBackend {
    #[cfg(target_os = "linux")]
    uring: Option<Uring>,
    direct: Arc<Direct>,
    buffered: Arc<dyn Backend>,
    /// The backend for remote sources. Created for the first such request.
    remote: OnceLock<Result<Box<dyn Backend>, Error>>,
    /// The backend for objects. Created for the first such request.
    #[cfg(feature = "object")]
    object: OnceLock<Result<Box<dyn Backend>, Error>>,
    joiner: Arc<Joiner>,
    options: BackendOptions,
}

#[cfg(target_os = "linux")]
struct Uring {
    backend: Box<dyn Backend>,
    /// Whether io_uring cannot be used any more.
    failed: Arc<AtomicBool>,
}

#[cfg(target_os = "linux")]
impl Uring {
    fn new(
        options: &BackendOptions,
        joiner: &Arc<Joiner>,
        next: Weak<Direct>,
    ) -> Result<Self, Error> {
        let failed = Arc::new(AtomicBool::new(false));
        let (has_failed, joiner) = (Arc::clone(&failed), Arc::clone(joiner));
        let name = UringProvider.name();
        let sink = move |completion: Completion| {
            if let Err(Error::Unavailable { .. }) = completion.result {
                has_failed.store(true, Ordering::Relaxed);
            }
            let Some(next) = next.upgrade() else {
                return joiner.on_completion(name, completion);
            };
            match joiner.retry(name, completion) {
                Ok(request) => next.read(request),
                Err(completion) => joiner.on_completion(name, completion),
            }
        };
        Ok(Self { backend: UringProvider.create(options, Box::new(sink))?, failed })
    }
}

/// The backend `direct`, for files that `uring` cannot read. Created for the first such request.
struct Direct {
    backend: OnceLock<Result<Box<dyn Backend>, Error>>,
    buffered: Arc<dyn Backend>,
    joiner: Arc<Joiner>,
    options: BackendOptions,
}

impl Direct {
    fn get(&self) -> Result<&dyn Backend, Error> {
        let provider = FileProvider(Access::Direct);
        let create = || {
            let (joiner, next) = (Arc::clone(&self.joiner), Arc::downgrade(&self.buffered));
            let name = provider.name();
            let sink = move |completion| {
                let Some(buffered) = next.upgrade() else {
                    return joiner.on_completion(name, completion);
                };
                match joiner.retry(name, completion) {
                    Ok(request) => submit_part(buffered.as_ref(), &joiner, request),
                    Err(completion) => joiner.on_completion(name, completion),
                }
            };
            provider.create(&self.options, Box::new(sink))
        };
        self.backend.get_or_init(create).as_deref().map_err(Clone::clone)
    }

    /// Reads a part that `uring` could not read.
    #[cfg(target_os = "linux")]
    fn read(&self, part: ReadRequest) {
        match self.get() {
            Ok(direct) => submit_part(direct, &self.joiner, part),
            Err(error) => {
                let name = FileProvider(Access::Direct).name();
                self.joiner.on_completion(name, part.failed(error));
            }
        }
    }
}

/// Submits a part, or completes it with the reason why the backend does not accept it.
fn submit_part(backend: &dyn Backend, joiner: &Joiner, part: ReadRequest) {
    if let Err(rejected) = backend.submit(part) {
        let Rejected { request, error } = *rejected;
        joiner.on_completion(backend.name(), request.failed(error));
    }
}

/// The parts of a request, in order: the backend and the length in bytes of each part.
type Parts<'a> = Vec<(&'a dyn Backend, usize)>;

impl AdaptiveBackend {
    fn all(&self) -> Vec<&dyn Backend> {
        let mut all = vec![self.buffered.as_ref()];
        #[cfg(target_os = "linux")]
        all.extend(self.uring.as_ref().map(|uring| uring.backend.as_ref()));
        let direct = self.direct.backend.get().and_then(|direct| direct.as_deref().ok());
        all.extend(direct);
        all.extend(self.remote.get().and_then(|remote| remote.as_deref().ok()));
        #[cfg(feature = "object")]
        all.extend(self.object.get().and_then(|object| object.as_deref().ok()));
        all
    }

    /// Returns the backend for direct I/O on `source`: `uring` if it suits the source, or `direct`.
    fn direct(&self, source: &Source) -> Result<&dyn Backend, Error> {
        #[cfg(target_os = "linux")]
        if suits_rings(source)
            && let Some(Uring { backend, failed }) = &self.uring
            && !failed.load(Ordering::Relaxed)
        {
            return Ok(backend.as_ref());
        }
        let _ = source;
        self.direct.get()
    }

    /// Chooses the parts into which a request is split, and the backend of each part.
    fn assign(&self, request: &ReadRequest) -> Result<Parts<'_>, Error> {
        request.check_capacity()?;
        let (source, offset, capacity) = (&request.source, request.offset, request.capacity());
        if RemoteOrigin::of(source).is_some() {
            let create =
                || RemoteProvider.create(&self.options, self.joiner.sink(RemoteProvider.name()));
            let remote = self.remote.get_or_init(create);
            return Ok(vec![(remote.as_deref().map_err(Clone::clone)?, capacity)]);
        }
        #[cfg(feature = "object")]
        if source.is_remote() {
            let create =
                || ObjectProvider.create(&self.options, self.joiner.sink(ObjectProvider.name()));
            let object = self.object.get_or_init(create);
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
            if !is_whole {
                submit_part(backend, &self.joiner, part);
            } else if let Err(mut rejected) = backend.submit(part) {
                rejected.request = self.joiner.withdraw(rejected.request);
                return Err(rejected);
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
