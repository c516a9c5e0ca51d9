// SPDX-License-Identifier: MIT OR Apache-2.0
//! `adaptive`: asks the page cache first. What it holds is copied from there; the rest comes
//! straight from the device past the cache. (Copies can still touch marks that earlier readers left
//! in the cache, at which the system reads ahead.) Objects, and what others read, come over the
//! network.

use std::sync::{Arc, OnceLock};

use ts_pool::HostPool;

use crate::backend::{
    Backend, BackendOptions, Capabilities, CompletionSink, ReadRequest, Rejected,
};
use crate::file::Access;
use crate::join::Joiner;
#[cfg(feature = "object")]
use crate::object::ObjectProvider;
use crate::provider::{Availability, BackendProvider};
use crate::remote::RemoteProvider;
use crate::source::SAMPLES;
use crate::{Error, Source};

/// `adaptive`: for each part of a request the backend that is best for it.
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
        Access::Direct.probe(&files)
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        let joiner = Arc::new(Joiner::new(sink));
        let sink = || sink_of(&joiner);
        // Without a ring, threads do it.
        #[cfg(target_os = "linux")]
        let uring = crate::uring::UringProvider.create(options, sink()).ok();
        let buffered = Access::Cached.create(options, sink())?;
        #[cfg(feature = "object")]
        let object = ObjectProvider.create(options, sink())?;
        Ok(Box::new(AdaptiveBackend {
            buffered,
            #[cfg(target_os = "linux")]
            uring,
            direct: OnceLock::new(),
            distant: OnceLock::new(),
            #[cfg(feature = "object")]
            object,
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
    /// For what the ring does not read; its threads start with the first such request.
    direct: OnceLock<Result<Box<dyn Backend>, Error>>,
    /// For what somebody else reads; its threads start with the first such request.
    distant: OnceLock<Result<Box<dyn Backend>, Error>>,
    #[cfg(feature = "object")]
    object: Box<dyn Backend>,
    joiner: Arc<Joiner>,
    options: BackendOptions,
}

/// Backends and how much of a request each is to read.
type Runs<'a> = Vec<(&'a dyn Backend, usize)>;

impl AdaptiveBackend {
    fn all(&self) -> Vec<&dyn Backend> {
        let mut all = vec![self.buffered.as_ref()];
        #[cfg(target_os = "linux")]
        all.extend(self.uring.as_deref());
        all.extend(self.direct.get().and_then(|direct| direct.as_deref().ok()));
        all.extend(self.distant.get().and_then(|distant| distant.as_deref().ok()));
        #[cfg(feature = "object")]
        all.push(self.object.as_ref());
        all
    }

    /// The better of the backends for direct I/O.
    fn direct(&self, source: &Source) -> Result<&dyn Backend, Error> {
        #[cfg(target_os = "linux")]
        if source.suits_rings()
            && let Some(uring) = &self.uring
        {
            return Ok(uring.as_ref());
        }
        let _ = source;
        let direct =
            self.direct.get_or_init(|| Access::Direct.create(&self.options, sink_of(&self.joiner)));
        direct.as_deref().map_err(Clone::clone)
    }

    /// Which backend is to read how much of a request, from its beginning on.
    fn assign(&self, request: &ReadRequest) -> Result<Runs<'_>, Error> {
        request.check_room()?;
        let (source, offset, room) = (&request.source, request.offset, request.room());
        if source.reader().is_some() {
            let distant = self
                .distant
                .get_or_init(|| RemoteProvider.create(&self.options, sink_of(&self.joiner)));
            return Ok(vec![(distant.as_deref().map_err(Clone::clone)?, room)]);
        }
        #[cfg(feature = "object")]
        if source.is_remote() {
            return Ok(vec![(self.object.as_ref(), room)]);
        }
        let buffered = self.buffered.as_ref();
        let warm = source.warm_samples(offset, request.required);
        if warm == SAMPLES || request.check_alignment("direct").is_err() {
            return Ok(vec![(buffered, room)]);
        }
        let direct = self.direct(source)?;
        if warm == 0 {
            return Ok(vec![(direct, room)]);
        }
        let mut runs: Vec<_> = source
            .resident_runs(offset, request.required)
            .into_iter()
            .map(|(warm, len)| (if warm { buffered } else { direct }, len))
            .collect();
        // The end of the memory, beyond what is wanted, goes with the last run.
        let sum: usize = runs.iter().map(|run| run.1).sum();
        match runs.last_mut() {
            Some(last) => last.1 += room - sum,
            None => runs.push((direct, room)),
        }
        Ok(runs)
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
        let runs = match self.assign(&request) {
            Ok(runs) => runs,
            Err(error) => return Err(Box::new(Rejected { request, error })),
        };
        let lens: Vec<usize> = runs.iter().map(|run| run.1).collect();
        let parts = self.joiner.split(request, &lens);
        let whole = parts.len() == 1;
        for (part, (backend, _)) in parts.into_iter().zip(runs) {
            match backend.submit(part) {
                Ok(()) => {}
                Err(mut rejected) if whole => {
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
