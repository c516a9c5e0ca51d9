// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shares the memory of kept units with other processes of the same user.

use std::sync::Arc;

use ts_io::{Fingerprint, Source};
use ts_pool::{Buffer, NewPages, PageKey, PageStore};
use twox_hash::xxhash3_128::Hasher;

use crate::image::ImagePart;
use crate::layout::{ReadKind, SlotRead};
use crate::plan::UnitDemand;
use crate::prepared::PreparedUnit;
use crate::unit::UnitId;

/// Changes when the content of units changes that have the same description.
const VERSION: u64 = 1;

/// The store that an engine shares its kept units in, and their keys.
#[derive(Debug)]
pub(crate) struct Sharing {
    store: PageStore,
    group: u64,
    /// The description of each unit's slot, and of its image if it has one.
    entries: Vec<(u128, Option<u128>)>,
}

/// Where the pages of a buffer come from.
#[derive(Debug)]
pub(crate) enum Pages {
    /// From the engine alone.
    Own,
    /// From the store, which had the unit already.
    Taken,
    /// These will be in the store when the unit is loaded.
    New(NewPages),
}

/// Returns a number for the content of these files, which is the group of their units in a
/// [`PageStore`]. Returns `None` if one of them is not a local file.
pub fn page_group(sources: &[Arc<Source>]) -> Option<u64> {
    let mut described = Vec::new();
    put(&mut described, [VERSION]);
    for source in sources {
        if !source.is_file() {
            return None;
        }
        put_fingerprint(&mut described, source.fingerprint());
    }
    Some(Hasher::oneshot(&described) as u64)
}

impl Sharing {
    /// Returns `None` if units cannot be shared, because their files are not local.
    pub(crate) fn new(
        store: PageStore,
        units: &[PreparedUnit],
        sources: &[Arc<Source>],
    ) -> Option<Self> {
        let group = page_group(sources)?;
        let entry = |unit: &PreparedUnit| {
            let slot = describe(unit.layout.len, unit.layout.reads.iter().copied());
            let image = unit.image.as_ref().map(|image| {
                let in_image = |part: &ImagePart| SlotRead { slot_offset: part.at, ..part.read };
                describe(image.len, image.parts.iter().map(in_image))
            });
            (slot, image)
        };
        let entries = units.iter().map(entry).collect();
        Some(Self { store, group, entries })
    }

    /// Returns the key of the slot of a unit.
    pub(crate) fn unit(&self, id: UnitId) -> PageKey {
        PageKey { group: self.group, entry: self.entries[id.index()].0 }
    }

    /// Returns the key of the image of a unit that has one.
    pub(crate) fn image(&self, id: UnitId) -> PageKey {
        let entry = self.entries[id.index()].1.expect("only units with an image are kept so");
        PageKey { group: self.group, entry }
    }

    /// Gives a buffer the pages that another process has filled, or new ones to fill.
    pub(crate) fn begin(&self, key: PageKey, buffer: &mut Buffer) -> Pages {
        if self.store.take(key, buffer) {
            return Pages::Taken;
        }
        self.store.start(buffer).map_or(Pages::Own, Pages::New)
    }

    /// Ends the load of a buffer without an error. Returns whether its pages are shared.
    pub(crate) fn end(&self, key: PageKey, pages: Pages, buffer: &mut Buffer) -> bool {
        match pages {
            Pages::Own => false,
            Pages::Taken => true,
            Pages::New(pages) => self.store.publish(key, pages, buffer),
        }
    }

    /// Removes pages that turned out to be damaged.
    pub(crate) fn remove(&self, key: PageKey) {
        self.store.remove(key);
    }

    /// Marks the units that other processes keep.
    pub(crate) fn mark(&self, demands: &mut [UnitDemand]) {
        let kept = self.store.keys(self.group);
        for (demand, (slot, image)) in demands.iter_mut().zip(&self.entries) {
            demand.shared = kept.contains(slot) || image.is_some_and(|image| kept.contains(&image));
        }
    }
}

/// Returns a number for what these reads fill `len` bytes with. It does not depend on the names of
/// tensors. An image differs from a slot in the lengths.
fn describe(len: usize, reads: impl Iterator<Item = SlotRead>) -> u128 {
    let mut described = Vec::new();
    put(&mut described, [len as u64]);
    for read in reads {
        let (file, required) = (u64::from(read.file.0), read.required as u64);
        put(&mut described, [file, read.file_offset, required]);
        put(&mut described, [read.slot_offset as u64, read.len as u64]);
        // How a chunk is decoded follows from the file.
        if let ReadKind::Decoded { chunk, raw_len, skip } = read.kind {
            put(&mut described, [chunk.offset, raw_len as u64, skip as u64]);
        }
    }
    Hasher::oneshot(&described)
}

fn put_fingerprint(described: &mut Vec<u8>, fingerprint: &Fingerprint) {
    let Fingerprint { identity, len, modified, changed, .. } = fingerprint;
    put(described, [identity.0, identity.1, *len]);
    let modified = modified.and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
    let modified = modified.map_or(0, |at| at.as_nanos());
    let (changed, owner) = changed.unwrap_or_default();
    for time in [modified, changed as u128] {
        put(described, [time as u64, (time >> 64) as u64]);
    }
    put(described, owner);
}

fn put(described: &mut Vec<u8>, numbers: impl IntoIterator<Item = u64>) {
    described.extend(numbers.into_iter().flat_map(u64::to_le_bytes));
}
