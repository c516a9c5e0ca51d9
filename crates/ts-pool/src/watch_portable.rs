// SPDX-License-Identifier: MIT OR Apache-2.0
//! [`WriteWatch`] where the system has no such thing.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use crate::buffer::SharedBuffer;
use crate::pool::HostPool;

/// Watches buffers of a pool for writes: on Linux alone.
#[derive(Debug)]
pub struct WriteWatch(Infallible);

/// A buffer that is watched until this is dropped.
#[derive(Debug)]
pub struct Watched(Infallible);

impl WriteWatch {
    /// `None`.
    pub fn new(_pool: &HostPool) -> Option<Self> {
        None
    }

    /// Whether any of some buffers may have been written to.
    pub fn any_written<'a>(watched: impl IntoIterator<Item = &'a Watched>) -> bool {
        watched.into_iter().next().is_some()
    }

    /// Watches a buffer of this pool, from now on.
    ///
    /// # Errors
    /// Gives the buffer back when it is not of this pool.
    pub fn watch(self: &Arc<Self>, _buffer: SharedBuffer) -> Result<Watched, SharedBuffer> {
        match self.0 {}
    }
}

impl Watched {
    /// The bytes of the buffer that may have been written to.
    pub fn written(&self) -> Vec<Range<usize>> {
        match self.0 {}
    }

    /// The bytes.
    pub fn buffer(&self) -> &SharedBuffer {
        match self.0 {}
    }
}
