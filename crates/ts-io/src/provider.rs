// SPDX-License-Identifier: MIT OR Apache-2.0
use std::sync::Arc;

use crate::adaptive::AdaptiveProvider;
use crate::backend::{Backend, BackendOptions, CompletionSink};
use crate::file::Access;
#[cfg(target_os = "linux")]
use crate::gds::GdsProvider;
#[cfg(feature = "object")]
use crate::object::ObjectProvider;
use crate::remote::RemoteProvider;
#[cfg(target_os = "linux")]
use crate::uring::UringProvider;
use crate::{Error, Source};

/// A kind of backend that may or may not work here.
pub trait BackendProvider: Send + Sync {
    /// The name it is asked for by.
    fn name(&self) -> &'static str;

    /// Higher is tried first when the caller names none.
    fn priority(&self) -> u8;

    /// Whether it can read all of `sources` here. Never panics, reads nothing; may load a library
    /// and open its driver.
    fn probe(&self, sources: &[Arc<Source>]) -> Availability;

    /// Makes a backend whose completions go to `sink`.
    ///
    /// # Errors
    /// When the system refuses what it needs, such as threads.
    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error>;
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// It can read the sources.
    Available,
    /// It cannot, for this reason.
    Unavailable(String),
}

/// The backends there are to choose from.
pub struct Registry {
    providers: Vec<Arc<dyn BackendProvider>>,
}

/// A provider, and why those before it in priority were passed over.
#[derive(Clone)]
pub struct Choice {
    /// The one chosen.
    pub provider: Arc<dyn BackendProvider>,
    /// Name and reason of each that was tried first and is not available.
    pub passed_over: Vec<(&'static str, String)>,
}

impl std::fmt::Debug for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (passed over: {:?})", self.provider.name(), self.passed_over)
    }
}

impl Registry {
    /// Those of this crate that this build has: `adaptive`, `uring`, `direct`, `object`, `distant`,
    /// `buffered`, `mmap` and `gds`.
    pub fn builtin() -> Self {
        let mut this = Self { providers: Vec::new() };
        this.register(Arc::new(AdaptiveProvider));
        #[cfg(target_os = "linux")]
        this.register(Arc::new(UringProvider));
        this.register(Arc::new(Access::Direct));
        #[cfg(feature = "object")]
        this.register(Arc::new(ObjectProvider));
        this.register(Arc::new(RemoteProvider));
        this.register(Arc::new(Access::Buffered));
        #[cfg(target_os = "linux")]
        this.register(Arc::new(Access::Mapped));
        #[cfg(target_os = "linux")]
        this.register(Arc::new(GdsProvider));
        this
    }

    /// Adds a provider; one of the same name is replaced.
    pub fn register(&mut self, provider: Arc<dyn BackendProvider>) {
        self.providers.retain(|p| p.name() != provider.name());
        self.providers.push(provider);
        self.providers.sort_by_key(|p| std::cmp::Reverse(p.priority()));
    }

    /// All providers, highest priority first.
    pub fn providers(&self) -> &[Arc<dyn BackendProvider>] {
        &self.providers
    }

    /// The names, highest priority first.
    pub fn names(&self) -> Vec<&'static str> {
        self.providers.iter().map(|p| p.name()).collect()
    }

    /// The provider called `name`, or the first available one when no name is given.
    ///
    /// # Errors
    /// [`Error::UnknownBackend`], or [`Error::Unavailable`] with the reason the named one gave.
    pub fn choose(&self, name: Option<&str>, sources: &[Arc<Source>]) -> Result<Choice, Error> {
        let mut passed_over = Vec::new();
        for provider in self.providers.iter().filter(|p| name.is_none_or(|name| p.name() == name)) {
            match provider.probe(sources) {
                Availability::Available => {
                    return Ok(Choice { provider: Arc::clone(provider), passed_over });
                }
                Availability::Unavailable(reason) => passed_over.push((provider.name(), reason)),
            }
        }
        match passed_over.into_iter().next_back() {
            Some((backend, reason)) => Err(Error::Unavailable { backend: backend.into(), reason }),
            None => Err(Error::UnknownBackend {
                name: name.unwrap_or("").into(),
                known: self.names().join(", "),
            }),
        }
    }
}
