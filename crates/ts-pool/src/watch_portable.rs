// SPDX-License-Identifier: MIT OR Apache-2.0
//! [`WriteWatch`] for systems that do not support it.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use crate::buffer::SharedBuffer;
use crate::pool::HostPool;

/// Detects writes to buffers of a pool. Supported only on Linux.
#[derive(Debug)]
pub struct WriteWatch(Infallible);

/// A buffer that is watched for writes until this value is dropped.
#[derive(Debug)]
pub struct WatchedBuffer(Infallible);

impl WriteWatch {
    /// Returns `None`, because this system is not supported.
    pub fn new(_pool: &HostPool) -> Option<Self> {
        None
    }

    /// Returns whether any of the buffers may have been written to.
    pub fn any_written<'a>(watched: impl IntoIterator<Item = &'a WatchedBuffer>) -> bool {
        watched.into_iter().next().is_some()
    }

    /// Starts to watch a buffer of this pool.
    ///
    /// # Errors
    /// Returns the buffer if it is not from this pool.
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
