// SPDX-License-Identifier: MIT OR Apache-2.0
//! Leases of units, and the tensors taken from them.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::thread::ThreadId;

use ts_streams::{CpuDevice, Device, MemoryRange};

use crate::Error;
use crate::engine::Shared;
use crate::layout::Placement;
use crate::unit::UnitId;
use crate::unit_memory::UnitMemory;

/// A lease of a unit, from [`Engine::acquire`](crate::Engine::acquire).
///
/// The unit stays in memory while the lease exists. [`tensor`](Self::tensor) returns its tensors,
/// which stay valid after the lease is dropped.
///
/// A lease may be dropped on any thread.
///
/// # Examples
/// The [crate documentation](crate) acquires a lease and takes a tensor from it.
pub struct Lease<D: Device = CpuDevice> {
    memory: Arc<UnitMemory<D>>,
    shared: Arc<Shared<D>>,
    unit: UnitId,
    /// The thread that acquired the lease.
    user: ThreadId,
    /// The time of the acquisition in nanoseconds, or `None` if the lease itself is no use.
    acquired_ns: Option<u64>,
}

impl<D: Device> std::fmt::Debug for Lease<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({:?})", self.unit)
    }
}

impl<D: Device> Lease<D> {
    pub(crate) fn new(
        memory: Arc<UnitMemory<D>>,
        shared: Arc<Shared<D>>,
        unit: UnitId,
        acquired_ns: Option<u64>,
    ) -> Self {
        Self { memory, shared, unit, user: std::thread::current().id(), acquired_ns }
    }

    /// Returns the id of the unit.
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// Returns whether the unit is resident.
    ///
    /// A long lease of a resident unit takes no memory from other units.
    pub fn is_resident(&self) -> bool {
        self.shared.is_resident(self.unit)
    }

    /// Ends the lease and evicts the unit, whose bytes were modified. The next use reads the unit
    /// again.
    ///
    /// Tensors that are still referenced keep the modified bytes.
    pub fn discard(self) {
        self.shared.discard(self.unit);
    }

    /// Returns whether any tensor of the unit is still referenced, from this lease or another
    /// lease.
    ///
    /// The caller's own references count too, so drop them first. The result is meaningful only
    /// until the unit is evicted.
    pub fn is_shared(&self) -> bool {
        let owners = Arc::strong_count(&self.memory);
        owners > 2 && owners > self.shared.owner_count(self.unit)
    }

    /// Records checksums of the unit's bytes. Acquiring the unit compares the bytes with these
    /// checksums, as long as the unit stays in the same memory and is shared.
    ///
    /// If the bytes differ, the acquiring call returns [`Error::Written`]. Seal a unit that [is
    /// shared](Self::is_shared), because other code may write to its tensors. Sealing reads all
    /// bytes of the unit. Sealing has no effect on a device with its own memory.
    pub fn seal(&self) {
        self.memory.seal();
    }

    /// Returns whether the unit is [sealed](Self::seal).
    pub fn is_sealed(&self) -> bool {
        self.memory.is_sealed()
    }

    /// Compares the unit's bytes with the checksums that [`seal`](Self::seal) recorded.
    ///
    /// # Errors
    /// Returns [`Error::Written`] and evicts the unit if the bytes do not match the recorded
    /// checksums.
    pub(crate) fn check_seal(&self) -> Result<(), Error> {
        if self.memory.is_intact() {
            // Nobody can write to it any more, except through new leases.
            if self.memory.is_sealed() && !self.is_shared() {
                self.memory.unseal();
            }
            return Ok(());
        }
        self.shared.discard(self.unit);
        Err(Error::Written { unit: self.unit_name().into() })
    }

    /// Like [`discard`](Self::discard), but the lease continues.
    pub fn evict_modified(&self) {
        self.shared.discard(self.unit);
    }

    /// Returns the number of tensors in the unit.
    pub fn tensor_count(&self) -> usize {
        self.shared.unit(self.unit).layout.tensors.len()
    }

    /// Returns the bytes of a tensor without copying them. They are little-endian and row-major,
    /// and their address has the tensor's [`Phase`](crate::Phase).
    ///
    /// `index` is the index of the tensor in its [`Unit`](crate::Unit).
    ///
    /// # Panics
    /// Panics if the unit has no such tensor.
    pub fn tensor(&self, index: usize) -> TensorBytes<D> {
        let placement = self.shared.unit(self.unit).layout.tensors[index];
        let range = placement.offset..placement.offset + placement.len;
        TensorBytes { memory: Arc::clone(&self.memory), range }
    }

    /// Declares that work on `stream` uses the unit. Does not block.
    ///
    /// Work that is submitted to the stream from now on sees the unit: on a device with its own
    /// memory, the stream waits for the copy of the unit, which may still be running. Call this
    /// before such work. After the lease and its tensors are dropped, the memory is not reused
    /// until the stream has finished all work that was submitted to it before the drop. If the
    /// device has its own memory, an engine can record at most 65,536 different streams in its
    /// lifetime.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the stream cannot be recorded, for example because the engine
    /// has recorded the maximum number of streams.
    pub fn record_stream(&self, stream: &D::Stream) -> Result<(), Error> {
        self.memory.use_on(stream).map_err(|e| Error::device(self.unit_name(), e))
    }

    fn unit_name(&self) -> &str {
        &self.shared.unit(self.unit).unit.name
    }
}

impl<D: Device> Drop for Lease<D> {
    fn drop(&mut self) {
        self.shared.release(self.unit, self.user, self.acquired_ns);
    }
}

/// The bytes of one tensor, in the memory of the engine's device.
///
/// The bytes stay valid until the last clone is dropped, even if the lease, the pass or the engine
/// ends earlier. Clones may be dropped on any thread. On a [`CpuDevice`], `TensorBytes`
/// dereferences to a slice.
#[derive(Debug)]
pub struct TensorBytes<D: Device = CpuDevice> {
    memory: Arc<UnitMemory<D>>,
    range: Range<usize>,
}

impl<D: Device> Clone for TensorBytes<D> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), range: self.range.clone() }
    }
}

impl<D: Device> TensorBytes<D> {
    pub(crate) fn new(memory: Arc<UnitMemory<D>>, placement: Placement) -> Self {
        let Placement { offset, len } = placement;
        Self { memory, range: offset..offset + len }
    }

    /// Returns the bytes if they are in host memory.
    pub(crate) fn on_host(&self) -> Option<&[u8]> {
        self.memory.on_host().map(|bytes| &bytes[self.range.clone()])
    }

    /// Returns the memory range of the bytes, for work on streams that are declared with
    /// [`Lease::record_stream`].
    pub fn range(&self) -> MemoryRange {
        self.memory.range().slice(self.range.clone())
    }
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.on_host().expect("the memory of a CpuDevice is host memory")
    }
}
