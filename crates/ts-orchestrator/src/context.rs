// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts of an engine that never change.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use ts_io::{ReadPath, Source};
use ts_pool::{Buffer, HostPool};
use ts_streams::Device;

use crate::config::{Decoding, Prefetch, Verify};
use crate::event::Event;
use crate::prepared::PreparedUnit;
use crate::requests::RequestSizes;
use crate::sharing::Sharing;
use crate::slot_pool::SlotPool;

/// The immutable part of an engine, for the methods of [`EngineState`](crate::state::EngineState).
#[derive(Debug)]
pub(crate) struct EngineContext<D: Device> {
    pub(crate) units: Vec<Arc<PreparedUnit>>,
    pub(crate) sources: Vec<Arc<Source>>,
    pub(crate) slots: SlotPool<D>,
    /// The pool of bounce buffers; `None` if all reads are in place.
    pub(crate) bounces: Option<HostPool>,
    pub(crate) sizes: RequestSizes,
    /// Where resident units are shared with other processes.
    pub(crate) sharing: Option<Sharing>,
    pub(crate) prefetch: Prefetch,
    pub(crate) verify: Verify,
    pub(crate) decoding: Decoding,
    /// The path of reads straight to the device, if units are read so.
    pub(crate) gpu_reads: Option<ReadPath>,
    /// The timeout of a read.
    pub(crate) timeout: Duration,
    pub(crate) events: Sender<Event<D>>,
}

impl<D: Device> EngineContext<D> {
    /// Allocates memory for a unit that is kept compressed, or on the host, of `len` bytes. Returns
    /// `None` if there is too little memory, or if `len` is `None`.
    pub(crate) fn allocate_image(&self, len: Option<usize>) -> Option<Buffer> {
        self.slots.images().allocate(len?).ok()
    }
}
