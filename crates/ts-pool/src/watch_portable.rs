// SPDX-License-Identifier: MIT OR Apache-2.0
//! [`WriteWatch`] for systems that do not support it.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use crate::buffer::SharedBuffer;
use crate::pool::HostPool;

/// Detects writes to buffers of a pool. Not available on this system, because only Linux supports
/// it.
#[derive(Debug)]
pub struct WriteWatch(Infallible);

/// A buffer that is watched for writes until this value is dropped.
#[derive(Debug)]
pub struct WatchedBuffer(Infallible);

impl WriteWatch {
    /// Returns `None`, because this system does not support watching.
    pub fn try_new(_pool: &HostPool) -> Option<Self> {
        None
    }

    /// Returns whether any of the buffers may have been written to.
    pub fn any_written<'a>(watched: impl IntoIterator<Item = &'a WatchedBuffer>) -> bool {
        watched.into_iter().next().is_some()
    }

    /// Starts to watch a buffer of the pool that this watch was created for.
    ///
    /// # Errors
    /// Returns the buffer if it is from another pool.
    pub fn watch(self: &Arc<Self>, _buffer: SharedBuffer) -> Result<WatchedBuffer, SharedBuffer> {
        match self.0 {}
    }
}

impl WatchedBuffer {
    /// Returns the byte ranges of the buffer that may have been written to.
    pub fn written(&self) -> Vec<Range<usize>> {
        match self.0 {}
    }

    /// Returns the watched buffer.
    pub fn buffer(&self) -> &SharedBuffer {
        match self.0 {}
    }
}
