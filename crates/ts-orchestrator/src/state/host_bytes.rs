// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the bytes of a unit come from or go to on the host when it is loaded.

use std::sync::Arc;

use ts_pool::Buffer;
use ts_streams::Device;

use crate::context::EngineContext;
use crate::gpu_reads::{LONGEST_READ, StoredRead};
use crate::host_bytes::HostBytes;
use crate::image::ImageLayout;
use crate::kept_image::KeptImage;
use crate::layout::{ReadKind, SlotRead};
use crate::prepared::PreparedUnit;
use crate::sharing::Pages;
use crate::unit::UnitId;
use crate::unit_load::Image;

use super::UnitState;

impl<D: Device> UnitState<D> {
    /// Returns the bytes of a unit that is kept on the host as it is in its slot, or memory for
    /// them. If `on_device`, also returns those of an encoded unit that the device can decode.
    /// Returns `None` if the unit is not kept, or not so.
    pub(super) fn take_host_bytes(
        &mut self,
        context: &EngineContext<D>,
        prepared: &PreparedUnit,
        on_device: bool,
    ) -> Option<HostBytes> {
        if let Some(KeptImage { bytes, decodable: Some(decodable), .. }) = self.image()
            && on_device
        {
            return Some(HostBytes::Encoded(bytes.clone(), decodable.clone()));
        }
        if let Some(reads) = self.gpu_reads(context, prepared) {
            return Some(HostBytes::Stored(reads));
        }
        let layout = prepared.image.as_ref().filter(|image| image.is_slot)?;
        if let Some(image) = self.image() {
            return Some(HostBytes::Kept(image.bytes.clone()));
        }
        let reserved = self.take_image_memory();
        let mut memory = reserved
            .or_else(|| context.allocate_image(Some(layout.len).filter(|_| self.is_on_host())))?;
        drop(memory.split_off(layout.len)); // what rounding has added
        Some(HostBytes::EmptyToKeep(memory))
    }

    /// Returns the reads of the unit straight to its device. Returns `None` if the host needs its
    /// bytes: to decode, verify or keep them.
    fn gpu_reads(
        &self,
        context: &EngineContext<D>,
        prepared: &PreparedUnit,
    ) -> Option<Vec<StoredRead>> {
        context.gpu_reads?;
        let verifies = !prepared.checks.is_empty() && self.needs_verification(context.verify);
        if self.is_on_host() || verifies {
            return None;
        }
        let is_direct = |read: &SlotRead| {
            read.kind == ReadKind::InPlace && context.sources[read.file.0 as usize].is_file()
        };
        let reads = &prepared.layout.reads;
        if !reads.iter().all(is_direct) {
            return None;
        }
        let stored = reads.iter().flat_map(|read| {
            let source = &context.sources[read.file.0 as usize];
            (0..read.required).step_by(LONGEST_READ).map(|at| StoredRead {
                source: Arc::clone(source),
                offset: read.file_offset + at as u64,
                len: LONGEST_READ.min(read.required - at),
                slot_offset: read.slot_offset + at,
            })
        });
        Some(stored.collect())
    }

    /// Gives the memory for the compressed unit the bytes that another process has read, or
    /// prepares it for the load to fill.
    pub(super) fn empty_image(
        &mut self,
        context: &EngineContext<D>,
        id: UnitId,
        mut memory: Buffer,
        layout: &Arc<ImageLayout>,
    ) -> Image {
        let layout = Arc::clone(layout);
        let pages = match &context.sharing {
            Some(sharing) => sharing.begin(sharing.image(id), &mut memory),
            None => Pages::Own,
        };
        if matches!(pages, Pages::Taken) {
            let image = KeptImage::new(memory.freeze(), layout);
            self.keep_image(image.clone());
            self.set_shared_image(true);
            return Image::Filled(image);
        }
        Image::Empty(memory, layout, pages)
    }
}
