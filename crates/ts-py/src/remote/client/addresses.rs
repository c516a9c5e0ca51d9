// SPDX-License-Identifier: MIT OR Apache-2.0
//! The addresses that storages of the device `ts` have in PyTorch. No code may dereference them.
//!
//! Each storage has a range of addresses that is one byte longer than the storage. So PyTorch can
//! compute the address of a part, also in other packages: DLPack and slices of storages keep only
//! the sum of an address and an offset.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use super::forks::is_forked;

/// The bit that is set in the addresses of remote storages. Addresses of memory do not have it.
const REMOTE_BIT: u64 = 1 << 62;
/// The alignment of storages, in bytes, which is that of PyTorch's allocators for GPUs.
const ALIGNMENT: u64 = 512;

/// The first address that was never used. A terabyte a second lasts for 50 days.
static NEXT: AtomicU64 = AtomicU64::new(REMOTE_BIT + ALIGNMENT);
/// Each range, by its first address.
static RANGES: RwLock<BTreeMap<u64, Range>> = RwLock::new(BTreeMap::new());

#[derive(Debug)]
struct Range {
    storage: u64,
    /// The length of the storage, in bytes.
    bytes: u64,
    /// The number of [`Addresses`] of the range.
    handles: usize,
}

/// Addresses of a storage, or of a part of it. Its range is given back when the last one is
/// dropped.
#[derive(Debug)]
pub(super) struct Addresses {
    /// The first address of the range.
    range: u64,
    begin: u64,
}

impl Addresses {
    /// Reserves addresses for a storage of `bytes` bytes.
    pub(super) fn reserve(storage: u64, bytes: u64) -> Self {
        // Machines refuse larger storages.
        let bytes = bytes.min(1 << 56);
        let range = NEXT.fetch_add((bytes + 1).next_multiple_of(ALIGNMENT), Ordering::Relaxed);
        RANGES.write().insert(range, Range { storage, bytes, handles: 1 });
        Self { range, begin: range }
    }

    /// Returns the addresses from this one on, which a storage has already. Returns `None` if no
    /// storage has the address.
    pub(super) fn from(address: u64) -> Option<Self> {
        let mut ranges = RANGES.write();
        let (range, found) = ranges.range_mut(..=address).next_back()?;
        if address - range > found.bytes {
            return None;
        }
        found.handles += 1;
        Some(Self { range: *range, begin: address })
    }

    /// The first address.
    pub(super) fn begin(&self) -> u64 {
        self.begin
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        // In a forked child, the lock may be that of a thread that is gone.
        if is_forked() {
            return;
        }
        let mut ranges = RANGES.write();
        if let Some(range) = ranges.get_mut(&self.range) {
            range.handles -= 1;
            if range.handles == 0 {
                ranges.remove(&self.range);
            }
        }
    }
}

/// Returns the storage with this address, and the offset of the address in it, in bytes. Returns
/// `None` for an address of memory, or of no storage.
pub(super) fn storage_at(address: u64) -> Option<(u64, u64)> {
    if address & REMOTE_BIT == 0 || address >> 63 != 0 {
        return None;
    }
    let ranges = if is_forked() { RANGES.try_read()? } else { RANGES.read() };
    let (first, range) = ranges.range(..=address).next_back()?;
    let offset = address - first;
    (offset <= range.bytes).then_some((range.storage, offset))
}
