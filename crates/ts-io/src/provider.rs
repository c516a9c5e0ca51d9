// SPDX-License-Identifier: MIT OR Apache-2.0
use std::sync::Arc;

use crate::backend::{Backend, BackendOptions, CompletionSink};
use crate::{Error, Source};

/// Creates backends of one kind, and knows whether they work here.
pub trait BackendProvider: Send + Sync {
    /// The name that selects the backend.
    fn name(&self) -> &'static str;

    /// The order in which providers are tried if no name is given: highest first.
    fn priority(&self) -> u8;

    /// Returns whether the backend can read all of `sources` on this system. Must not panic or read
    /// data; may load a library and open its driver.
    fn probe(&self, sources: &[Arc<Source>]) -> Availability;

    /// Creates a backend that sends its completions to `sink`.
    ///
    /// # Errors
    /// Returns an error if the system refuses a resource that the backend needs, such as threads.
    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error>;
}

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// The backend can read the sources.
    Available,
    /// The backend cannot read them, for this reason.
    Unavailable(String),
}
