// SPDX-License-Identifier: MIT OR Apache-2.0
//! Units that are kept in memory compressed: the bytes of their chunks as they are on storage.

use ts_pool::BLOCK_ALIGN;

use crate::layout::{ReadKind, SlotLayout, SlotRead};
use crate::requests::{RequestSizes, copied_requests};

/// The layout of a compressed unit in memory.
#[derive(Debug)]
pub(crate) struct ImageLayout {
    /// The reads that fill the image. Each is also copied or decoded into the slot.
    pub(crate) reads: Vec<SlotRead>,
    /// The length of the image, in bytes: the lengths of all reads.
    pub(crate) len: usize,
}

impl ImageLayout {
    /// Returns the layout of the image of a unit, or `None` if the unit is not smaller on storage
    /// than in memory.
    pub(crate) fn new(layout: &SlotLayout, sizes: RequestSizes) -> Option<Self> {
        let decodes = |read: &SlotRead| matches!(read.kind, ReadKind::Decoded { .. });
        if !layout.reads.iter().any(decodes) {
            return None;
        }
        let reads: Vec<SlotRead> =
            layout.reads.iter().flat_map(|read| copied_requests(read, sizes)).collect();
        let len = reads.iter().map(|read| read.required).sum();
        let image = Self { reads, len };
        (image.bytes() < layout.len).then_some(image)
    }

    /// Returns the memory that the image takes in a pool, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.len.next_multiple_of(BLOCK_ALIGN).max(BLOCK_ALIGN)
    }
}
