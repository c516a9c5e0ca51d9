// SPDX-License-Identifier: MIT OR Apache-2.0
//! Announcements of the routed units that a pass is about to use.

use std::sync::Arc;

use ts_streams::{CpuDevice, Device};

use crate::engine::Shared;

/// An announcement of routed units, from [`Engine::expect`](crate::Engine::expect).
///
/// While it exists, its units are read as far as memory allows. Those that were not acquired yet
/// are evicted only if nothing else can be. May be dropped on any thread.
#[must_use = "units are no longer expected when this value is dropped"]
pub struct Expectation<D: Device = CpuDevice> {
    shared: Arc<Shared<D>>,
    number: u64,
}

impl<D: Device> std::fmt::Debug for Expectation<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Expectation({})", self.number)
    }
}

impl<D: Device> Expectation<D> {
    pub(crate) fn new(shared: Arc<Shared<D>>, number: u64) -> Self {
        Self { shared, number }
    }
}

impl<D: Device> Drop for Expectation<D> {
    fn drop(&mut self) {
        self.shared.end_expectation(self.number);
    }
}
