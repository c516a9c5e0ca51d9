// SPDX-License-Identifier: MIT OR Apache-2.0
use std::sync::Arc;

use crate::backend::{Backend, BackendOptions, CompletionSink};
use crate::{Error, Source};

/// Creates backends of one kind, and checks whether they can be used on this system.
pub trait BackendProvider: Send + Sync {
    /// Returns the name that selects the backend in a [`Registry`](crate::Registry).
    fn name(&self) -> &'static str;

    /// Returns the priority. If no backend is named, a [`Registry`](crate::Registry) tries the
    /// provider with the highest priority first.
    fn priority(&self) -> u8;

    /// Returns whether the backend can read all of `sources` on this system.
    ///
    /// This method may open files, load a library or open a driver. It must not panic or read data.
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

/// The result of [`BackendProvider::probe`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// The backend can read the sources.
    Available,
    /// The backend cannot read the sources, for this reason.
    Unavailable(String),
}
