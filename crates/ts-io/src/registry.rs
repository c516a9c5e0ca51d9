// SPDX-License-Identifier: MIT OR Apache-2.0
use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;

use crate::adaptive::AdaptiveProvider;
use crate::file::Access;
use crate::file_backends::FileProvider;
#[cfg(target_os = "linux")]
use crate::gds::GdsProvider;
#[cfg(feature = "object")]
use crate::object::ObjectProvider;
use crate::provider::{Availability, BackendProvider};
use crate::remote::RemoteProvider;
#[cfg(target_os = "linux")]
use crate::uring::UringProvider;
use crate::{Error, Source};

/// The set of backends from which a program chooses one for its sources.
///
/// ```
/// use ts_io::{Registry, Source};
///
/// let registry = Registry::builtin();
/// assert!(registry.names().contains(&"buffered"));
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("data");
/// std::fs::write(&path, [1, 2, 3])?;
/// let sources = [Source::open(&path)?];
/// // Chooses the backend with the highest priority that can read all sources.
/// let choice = registry.choose(None, &sources)?;
/// for (name, reason) in &choice.passed_over {
///     println!("{name} cannot be used: {reason}");
/// }
/// // Chooses `buffered`, or fails with the reason why it cannot be used.
/// let choice = registry.choose(Some("buffered"), &sources)?;
/// assert_eq!(choice.provider.name(), "buffered");
/// assert!(registry.choose(Some("floppy"), &sources).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Registry {
    providers: Vec<Arc<dyn BackendProvider>>,
}

/// The result of [`Registry::choose`]: a provider, and the reasons why providers with a higher
/// priority were not chosen.
#[derive(Clone)]
#[non_exhaustive]
pub struct Choice {
    /// The provider that was chosen.
    pub provider: Arc<dyn BackendProvider>,
    /// Each provider that was tried before and is not available: its name and the reason.
    pub passed_over: Vec<(&'static str, String)>,
}

impl fmt::Debug for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (passed over: {:?})", self.provider.name(), self.passed_over)
    }
}

impl Registry {
    /// Creates a registry of the built-in backends: `adaptive`, `uring`, `direct`, `object`,
    /// `remote`, `buffered`, `mmap` and `gds`.
    ///
    /// `uring`, `mmap` and `gds` need Linux, and `object` needs the feature of the same name.
    pub fn builtin() -> Self {
        let mut this = Self { providers: Vec::new() };
        this.register(Arc::new(AdaptiveProvider));
        #[cfg(target_os = "linux")]
        this.register(Arc::new(UringProvider));
        this.register(Arc::new(FileProvider(Access::Direct)));
        #[cfg(feature = "object")]
        this.register(Arc::new(ObjectProvider));
        this.register(Arc::new(RemoteProvider));
        this.register(Arc::new(FileProvider(Access::Buffered)));
        #[cfg(target_os = "linux")]
        this.register(Arc::new(FileProvider(Access::Mapped)));
        #[cfg(target_os = "linux")]
        this.register(Arc::new(GdsProvider));
        this
    }

    /// Adds a provider. An existing provider with the same name is replaced.
    pub fn register(&mut self, provider: Arc<dyn BackendProvider>) {
        self.providers.retain(|p| p.name() != provider.name());
        self.providers.push(provider);
        self.providers.sort_by_key(|p| Reverse(p.priority()));
    }

    /// Returns all providers, highest priority first.
    pub fn providers(&self) -> &[Arc<dyn BackendProvider>] {
        &self.providers
    }

    /// Returns the names of all providers, highest priority first.
    pub fn names(&self) -> Vec<&'static str> {
        self.providers.iter().map(|p| p.name()).collect()
    }

    /// Chooses the provider called `name`, or the first available one if `name` is `None`.
    ///
    /// # Errors
    /// - [`Error::UnknownBackend`] if no provider has that name.
    /// - [`Error::Changed`] if the provider cannot read all sources, and one has changed since it
    ///   was opened.
    /// - [`Error::Unavailable`], with the reason, if the provider cannot read all sources
    ///   otherwise. If `name` is `None` and no provider can read them, the error names the provider
    ///   with the lowest priority.
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
            Some((backend, reason)) => {
                sources.iter().try_for_each(|source| source.verify(0))?;
                Err(Error::Unavailable { backend: backend.into(), reason })
            }
            None => Err(Error::UnknownBackend {
                name: name.unwrap_or("").into(),
                known: self.names().join(", "),
            }),
        }
    }
}
