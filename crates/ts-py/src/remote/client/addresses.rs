// SPDX-License-Identifier: MIT OR Apache-2.0
//! The addresses that storages of the device `ts` have in PyTorch. No code may dereference them.
//!
//! Each storage has a range of addresses that is at least one byte longer than the storage. So
//! PyTorch can compute the address of a part, also in other packages: DLPack and slices of storages
//! keep only the sum of an address and an offset.
//!
//! The addresses of a small storage contain its number, so that an operator on small tensors looks
//! nothing up. A map has the ranges of the other ones.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use super::forks::is_forked;

/// The bit that is set in the addresses of remote storages. Addresses of memory do not have it.
const REMOTE_BIT: u64 = 1 << 62;
/// The bit that is also set in the addresses of small storages.
const SMALL_BIT: u64 = 1 << 61;
/// The number of addresses of a small storage. Its size in bytes is less.
const SMALL_RANGE: u64 = 1 << 20;
/// Storages with this number and higher ones are not small.
const SMALL_STORAGES: u64 = SMALL_BIT / SMALL_RANGE;
/// The alignment of storages, in bytes, which is that of PyTorch's allocators for GPUs.
const ALIGNMENT: u64 = 512;

/// The first address of the next range in [`RANGES`]. A terabyte a second lasts for 25 days.
static NEXT: AtomicU64 = AtomicU64::new(REMOTE_BIT + ALIGNMENT);
/// The ranges of storages that are not small, by the first address.
static RANGES: RwLock<BTreeMap<u64, Range>> = RwLock::new(BTreeMap::new());

#[derive(Debug)]
struct Range {
    storage: u64,
    /// The length of the storage, in bytes.
    bytes: u64,
    /// The number of [`Addresses`] of the range.
    handles: usize,
}

/// Addresses of a storage, or of a part of it. A range in [`RANGES`] is given back when the last
/// one is dropped.
#[derive(Debug)]
pub(super) struct Addresses {
    /// The first address of the range, unless the storage is small.
    range: Option<u64>,
    begin: u64,
}

impl Addresses {
    /// Reserves addresses for a storage of `bytes` bytes.
    pub(super) fn reserve(storage: u64, bytes: u64) -> Self {
        if bytes < SMALL_RANGE && storage < SMALL_STORAGES {
            let begin = REMOTE_BIT | SMALL_BIT | (storage * SMALL_RANGE);
            return Self { range: None, begin };
        }
        // Machines refuse larger storages.
        let bytes = bytes.min(1 << 48);
        let range = NEXT.fetch_add((bytes + 1).next_multiple_of(ALIGNMENT), Ordering::Relaxed);
        RANGES.write().insert(range, Range { storage, bytes, handles: 1 });
        Self { range: Some(range), begin: range }
    }

    /// Returns the addresses from this one on, which a storage has already. Returns `None` if no
    /// storage can have the address.
    pub(super) fn from(address: u64) -> Option<Self> {
        if small_storage_at(address).is_some() {
            return Some(Self { range: None, begin: address });
        }
        let mut ranges = RANGES.write();
        let (range, found) = ranges.range_mut(..=address).next_back()?;
        if address - range > found.bytes {
            return None;
        }
        found.handles += 1;
        Some(Self { range: Some(*range), begin: address })
    }

    /// The first address.
    pub(super) fn begin(&self) -> u64 {
        self.begin
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        let Some(first) = self.range else { return };
        // In a forked child, the lock may be that of a thread that is gone.
        if is_forked() {
            return;
        }
        let mut ranges = RANGES.write();
        if let Some(range) = ranges.get_mut(&first) {
            range.handles -= 1;
            if range.handles == 0 {
                ranges.remove(&first);
            }
        }
    }
}

/// Returns the storage with this address, and the offset of the address in it, in bytes. Returns
/// `None` for an address of memory, or of no storage. The address of a small storage may be after
/// its end, or that of a storage that was freed: the machine refuses both.
pub(super) fn storage_at(address: u64) -> Option<(u64, u64)> {
    if address & REMOTE_BIT == 0 || address >> 63 != 0 {
        return None;
    }
    if let Some(found) = small_storage_at(address) {
        return Some(found);
    }
    let ranges = if is_forked() { RANGES.try_read()? } else { RANGES.read() };
    let (first, range) = ranges.range(..=address).next_back()?;
    let offset = address - first;
    (offset <= range.bytes).then_some((range.storage, offset))
}

/// Returns the small storage with this address of the device `ts`, and the offset of the address.
fn small_storage_at(address: u64) -> Option<(u64, u64)> {
    let offset = address & (SMALL_BIT - 1);
    (address & SMALL_BIT != 0).then_some((offset / SMALL_RANGE, offset % SMALL_RANGE))
}
