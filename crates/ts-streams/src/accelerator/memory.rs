// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of accelerators.

use std::sync::Arc;

use super::api::Api;
use super::{Deferred, Shared, lock};
use crate::Error;
use crate::device::RawMemory;
use crate::memory::HostBlock;
use crate::queue::check_may_block;
use crate::range::{MemoryKind, MemoryRange};

/// Memory that an [`AcceleratorDevice`](crate::AcceleratorDevice) allocated, of any [`MemoryKind`].
#[derive(Debug)]
pub struct AcceleratorMemory<A: Api> {
    pub(super) allocation: Allocation,
    pub(super) range: MemoryRange,
    pub(super) kind: MemoryKind,
    pub(super) shared: Arc<Shared<A>>,
}

#[derive(Debug)]
pub(super) enum Allocation {
    Driver {
        start: *mut u8,
        pinned: bool,
    },
    /// The allocation was freed, or moved to a [`Deferred`].
    Released,
    Host(#[expect(dead_code, reason = "stored because it owns the memory")] HostBlock),
}

// SAFETY: this value owns memory by its address, and never reads or writes the memory.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl<A: Api> Drop for AcceleratorMemory<A> {
    fn drop(&mut self) {
        self.shared.memory.freed(self.range.len());
        let allocation = std::mem::replace(&mut self.allocation, Allocation::Released);
        if check_may_block().is_err() && matches!(allocation, Allocation::Driver { .. }) {
            lock(&self.shared.deferred).push(Deferred::Memory(allocation, None));
            return;
        }
        // SAFETY: the allocation belongs to this device. `replace` took it from its owner, so it
        // is freed once. The owner guarantees that no stream uses the memory when it drops the
        // value.
        unsafe { self.shared.free(&allocation, None) };
    }
}

// SAFETY: this value alone owns the allocation, which stays valid until the value is dropped. The
// host can access pinned, managed and ordinary host memory.
unsafe impl<A: Api> RawMemory for AcceleratorMemory<A> {
    fn range(&self) -> MemoryRange {
        self.range
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let from = self.range().slice(offset..offset + bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: `slice` checked that `from` lies in the allocation. The caller guarantees that no
        // stream writes to it during the call. `bytes` is exclusively borrowed.
        unsafe { self.shared.api.copy_now(MemoryRange::of(bytes), from) }
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.range().slice(offset..offset + bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: `slice` checked that `to` lies in the allocation. The caller guarantees that no
        // stream accesses it during the call. The copy only reads `bytes`, which is borrowed.
        unsafe { self.shared.api.copy_now(to, from) }
    }
}
