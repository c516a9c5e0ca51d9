// SPDX-License-Identifier: MIT OR Apache-2.0
//! The layouts of units that are kept in memory compressed, or on the host for a device.

use ts_pool::BLOCK_ALIGN;

use crate::layout::{ReadKind, SlotLayout, SlotRead};
use crate::requests::{RequestSizes, copied_requests};

/// The layout of a unit in memory, as it is on storage or encoded.
#[derive(Debug)]
pub(crate) struct ImageLayout {
    /// The parts, sorted by their position in the slot.
    pub(crate) parts: Vec<ImagePart>,
    /// The length of the image, in bytes: the lengths of all parts, or of the slot.
    pub(crate) len: usize,
    /// Whether the image has the bytes of the slot, which a device copies from there. Then the
    /// parts do not matter.
    pub(crate) is_slot: bool,
}

/// A part of an image, which is copied or decoded into the slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImagePart {
    /// How the part is read from storage, if the image has the bytes that are stored there.
    pub(crate) read: SlotRead,
    /// The position in the image, in bytes.
    pub(crate) at: usize,
}

impl ImageLayout {
    /// Returns the layout of the image of a unit that is compressed on storage, or `None` if the
    /// unit is not smaller there than in memory. Reads in this order fill the image.
    pub(crate) fn new(layout: &SlotLayout, sizes: RequestSizes) -> Option<Self> {
        let decodes = |read: &SlotRead| matches!(read.kind, ReadKind::Decoded { .. });
        layout
            .reads
            .iter()
            .any(decodes)
            .then(|| Self::stored(layout, sizes))
            .filter(|image| image.bytes() < layout.len)
    }

    /// Returns the layout of the image of a unit that is kept on the host for a device: as it is on
    /// storage if it is smaller there, else as it is in the slot.
    pub(crate) fn on_host(layout: &SlotLayout, sizes: RequestSizes) -> Self {
        let slot = Self { parts: Vec::new(), len: layout.len, is_slot: true };
        Self::new(layout, sizes).unwrap_or(slot)
    }

    fn stored(layout: &SlotLayout, sizes: RequestSizes) -> Self {
        let (mut parts, mut len) = (Vec::new(), 0);
        // An empty tensor needs no bytes.
        let reads = layout.reads.iter().filter(|read| read.required > 0);
        for read in reads.flat_map(|read| copied_requests(read, sizes)) {
            parts.push(ImagePart { read, at: len });
            len += read.required;
        }
        Self { parts, len, is_slot: false }
    }

    /// Returns the memory that the image takes in a pool, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.len.next_multiple_of(BLOCK_ALIGN).max(BLOCK_ALIGN)
    }
}
