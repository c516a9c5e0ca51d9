// SPDX-License-Identifier: MIT OR Apache-2.0
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::ThreadId;

use ts_pool::SharedBuffer;

use crate::engine::Shared;
use crate::load::Event;
use crate::unit::UnitId;

/// A unit's bytes in memory. Whoever holds a clone of its `Arc` keeps them there.
#[derive(Debug)]
pub(crate) struct Slot {
    /// `None` only while dropping.
    buffer: Option<SharedBuffer>,
    /// Told when the memory is free again.
    wake: Sender<Event>,
}

impl Slot {
    pub(crate) fn new(buffer: SharedBuffer, wake: Sender<Event>) -> Self {
        Self { buffer: Some(buffer), wake }
    }

    fn bytes(&self) -> &[u8] {
        self.buffer.as_deref().expect("present until drop")
    }
}

impl Drop for Slot {
    /// Runs on any thread, the deleters of foreign tensors included: it takes no lock of the engine's.
    fn drop(&mut self) {
        drop(self.buffer.take());
        // An engine that is gone has no use for the memory, and nobody to tell.
        let _ = self.wake.send(Event::Freed);
    }
}

/// The right to use a unit now. Dropping it ends the use; tensors taken from it stay valid.
pub struct Lease {
    slot: Arc<Slot>,
    shared: Arc<Shared>,
    unit: UnitId,
    /// Who took it, also when another thread drops it.
    user: ThreadId,
    acquired_ns: u64,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({:?})", self.unit)
    }
}

impl Lease {
    pub(crate) fn new(slot: Arc<Slot>, shared: Arc<Shared>, unit: UnitId, acquired_ns: u64) -> Self {
        Self { slot, shared, unit, user: std::thread::current().id(), acquired_ns }
    }

    /// The unit it is for.
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// Whether the plan keeps this unit, so that holding the lease for long costs no other unit its memory.
    pub fn is_resident(&self) -> bool {
        self.shared.is_resident(self.unit)
    }

    /// Gives the unit up because foreign code has written to its bytes: the next use reads it anew. Tensors
    /// that others hold keep the bytes as they are.
    pub fn discard(self) {
        self.shared.discard(self.unit);
    }

    /// Number of tensors of the unit.
    pub fn tensor_count(&self) -> usize {
        self.shared.unit(self.unit).layout.tensors.len()
    }

    /// The bytes of tensor `index`, little-endian and row-major, at the address that its phase asks for.
    ///
    /// # Panics
    /// If the unit has no such tensor.
    pub fn tensor(&self, index: usize) -> TensorBytes {
        let place = self.shared.unit(self.unit).layout.tensors[index];
        TensorBytes { slot: Arc::clone(&self.slot), range: place.offset..place.offset + place.len }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.shared.release(self.unit, self.user, self.acquired_ns);
    }
}

/// The bytes of one tensor. They stay in memory, unchanged, until the last clone is dropped: on any thread, and
/// also after the lease, the pass and the engine.
#[derive(Debug, Clone)]
pub struct TensorBytes {
    slot: Arc<Slot>,
    range: Range<usize>,
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.slot.bytes()[self.range.clone()]
    }
}
