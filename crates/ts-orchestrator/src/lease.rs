// SPDX-License-Identifier: MIT OR Apache-2.0
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::thread::ThreadId;

use ts_streams::{CpuDevice, Device, MemoryRange};

use crate::Error;
use crate::engine::Shared;
use crate::slot::{Slot, device_error};
use crate::unit::UnitId;

/// The right to use a unit now. Dropping it ends the use; tensors taken from it stay valid.
pub struct Lease<D: Device = CpuDevice> {
    slot: Arc<Slot<D>>,
    shared: Arc<Shared<D>>,
    unit: UnitId,
    /// Who took it, also when another thread drops it.
    user: ThreadId,
    acquired_ns: u64,
}

impl<D: Device> std::fmt::Debug for Lease<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({:?})", self.unit)
    }
}

impl<D: Device> Lease<D> {
    pub(crate) fn new(
        slot: Arc<Slot<D>>,
        shared: Arc<Shared<D>>,
        unit: UnitId,
        acquired_ns: u64,
    ) -> Self {
        Self { slot, shared, unit, user: std::thread::current().id(), acquired_ns }
    }

    /// The unit it is for.
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// Whether the plan keeps this unit, so that holding the lease for long costs no other unit its
    /// memory.
    pub fn is_resident(&self) -> bool {
        self.shared.is_resident(self.unit)
    }

    /// Gives the unit up because foreign code has written to its bytes: the next use reads it anew.
    /// Tensors that others hold keep the bytes as they are.
    pub fn discard(self) {
        self.shared.discard(self.unit);
    }

    /// Whether tensors of the unit live that were taken from this lease or another. Ask when those
    /// that are known of are dropped.
    pub fn is_shared(&self) -> bool {
        let owners = Arc::strong_count(&self.slot);
        owners > 2 && owners > self.shared.owner_count(self.unit)
    }

    /// Has the engine compare the unit's bytes with what they are now whenever it is leased again
    /// from the same memory: for a unit that [is shared](Self::is_shared), whose tensors somebody
    /// may write to. Reads all of the bytes.
    pub fn seal(&self) {
        self.slot.seal();
    }

    /// # Errors
    /// [`Error::Written`]; the next lease reads the unit anew.
    pub(crate) fn check_seal(&self) -> Result<(), Error> {
        if self.slot.is_intact() {
            return Ok(());
        }
        self.shared.discard(self.unit);
        Err(Error::Written { unit: self.shared.unit(self.unit).unit.name.clone() })
    }

    /// As [`discard`](Self::discard), while the lease goes on.
    pub fn spoil(&self) {
        self.shared.discard(self.unit);
    }

    /// Number of tensors of the unit.
    pub fn tensor_count(&self) -> usize {
        self.shared.unit(self.unit).layout.tensors.len()
    }

    /// The bytes of tensor `index`, little-endian and row-major, at the address that its phase asks
    /// for.
    ///
    /// # Panics
    /// If the unit has no such tensor.
    pub fn tensor(&self, index: usize) -> TensorBytes<D> {
        let place = self.shared.unit(self.unit).layout.tensors[index];
        TensorBytes { slot: Arc::clone(&self.slot), range: place.offset..place.offset + place.len }
    }

    /// Says that work on `stream` uses the unit: once the lease and all tensors taken from it are
    /// dropped, the memory is not another unit's before what the stream was given by then is done.
    /// Does not wait, nor needs the stream to: the unit is there. An engine remembers the streams
    /// of a device that it was told of, 65,536 at most.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn use_on(&self, stream: &D::Stream) -> Result<(), Error> {
        self.slot
            .use_on(stream)
            .map_err(|e| device_error(&self.shared.unit(self.unit).unit.name, e))
    }
}

impl<D: Device> Drop for Lease<D> {
    fn drop(&mut self) {
        self.shared.release(self.unit, self.user, self.acquired_ns);
    }
}

/// The bytes of one tensor, in memory of the device. They stay there, unchanged, until the last
/// clone is dropped: on any thread, and also after the lease, the pass and the engine. Those of a
/// [`CpuDevice`] are the host's to read.
#[derive(Debug)]
pub struct TensorBytes<D: Device = CpuDevice> {
    slot: Arc<Slot<D>>,
    range: Range<usize>,
}

impl<D: Device> Clone for TensorBytes<D> {
    fn clone(&self) -> Self {
        Self { slot: Arc::clone(&self.slot), range: self.range.clone() }
    }
}

impl<D: Device> TensorBytes<D> {
    /// Where they are, for work on streams of which [`Lease::use_on`] was told.
    pub fn range(&self) -> MemoryRange {
        self.slot.range().slice(self.range.clone())
    }
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.slot.on_host().expect("memory of this device is the host's")[self.range.clone()]
    }
}
