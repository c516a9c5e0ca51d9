// SPDX-License-Identifier: MIT OR Apache-2.0
//! Leases of units, and the tensors taken from them.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::thread::ThreadId;

use ts_streams::{CpuDevice, Device, MemoryRange};

use crate::Error;
use crate::inner::EngineInner;
use crate::unit::UnitId;
use crate::unit_memory::UnitMemory;

/// A unit in use.
///
/// [`Engine::acquire`](crate::Engine::acquire) returns it. While the lease exists, the unit stays
/// in memory. [`tensor`](Self::tensor) returns the tensors, which stay valid after the lease.
///
/// A lease may be dropped on any thread.
///
/// # Examples
/// The [crate documentation](crate) acquires a lease and takes a tensor from it.
pub struct Lease<D: Device = CpuDevice> {
    memory: Arc<UnitMemory<D>>,
    inner: Arc<EngineInner<D>>,
    unit: UnitId,
    /// The thread that acquired the lease.
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
        memory: Arc<UnitMemory<D>>,
        inner: Arc<EngineInner<D>>,
        unit: UnitId,
        acquired_ns: u64,
    ) -> Self {
        Self { memory, inner, unit, user: std::thread::current().id(), acquired_ns }
    }

    /// Returns the id of the unit.
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// Returns whether the unit is resident.
    ///
    /// A long lease of a resident unit takes no memory from other units.
    pub fn is_resident(&self) -> bool {
        self.inner.is_resident(self.unit)
    }

    /// Ends the lease and evicts the unit, because its bytes were modified. The next use reads it
    /// again.
    ///
    /// Tensors that are still referenced keep the modified bytes.
    pub fn discard(self) {
        self.inner.discard(self.unit);
    }

    /// Returns whether tensors of the unit are still referenced, from this lease or another one.
    ///
    /// Drop your own references first.
    pub fn is_shared(&self) -> bool {
        let owners = Arc::strong_count(&self.memory);
        owners > 2 && owners > self.inner.owner_count(self.unit)
    }

    /// Records checksums of the unit's bytes, which later leases of the same memory compare.
    ///
    /// If the bytes differ then, the acquiring call returns [`Error::Written`]. Use it for a unit
    /// that [is shared](Self::is_shared), whose tensors other code may write to. Reads all bytes of
    /// the unit. Has no effect on a device with its own memory.
    pub fn seal(&self) {
        self.memory.seal();
    }

    /// # Errors
    /// Returns [`Error::Written`] if the bytes differ from the sealed ones, and evicts the unit.
    pub(crate) fn check_seal(&self) -> Result<(), Error> {
        if self.memory.is_intact() {
            return Ok(());
        }
        self.inner.discard(self.unit);
        Err(Error::Written { unit: self.unit_name().into() })
    }

    /// Like [`discard`](Self::discard), but the lease continues.
    pub fn evict_modified(&self) {
        self.inner.discard(self.unit);
    }

    /// Returns the number of tensors in the unit.
    pub fn tensor_count(&self) -> usize {
        self.inner.unit(self.unit).layout.tensors.len()
    }

    /// Returns the bytes of a tensor, little-endian and row-major, at an address with its
    /// [`Phase`](crate::Phase).
    ///
    /// `index` is the index of the tensor in its [`Unit`](crate::Unit).
    ///
    /// # Panics
    /// Panics if the unit has no such tensor.
    pub fn tensor(&self, index: usize) -> TensorBytes<D> {
        let placement = self.inner.unit(self.unit).layout.tensors[index];
        let range = placement.offset..placement.offset + placement.len;
        TensorBytes { memory: Arc::clone(&self.memory), range }
    }

    /// Declares that work on `stream` uses the unit.
    ///
    /// Once the lease and its tensors are dropped, the memory is not reused before the work that
    /// was submitted to the stream by then has finished. Neither this call nor the stream waits,
    /// because the unit is already in memory. An engine remembers at most 65,536 streams of a
    /// device with its own memory.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the stream cannot be recorded.
    pub fn record_stream(&self, stream: &D::Stream) -> Result<(), Error> {
        self.memory.use_on(stream).map_err(|e| Error::device(self.unit_name(), e))
    }

    fn unit_name(&self) -> &str {
        &self.inner.unit(self.unit).unit.name
    }
}

impl<D: Device> Drop for Lease<D> {
    fn drop(&mut self) {
        self.inner.release(self.unit, self.user, self.acquired_ns);
    }
}

/// The bytes of one tensor, in memory of the engine's device.
///
/// The bytes stay valid until the last clone is dropped, on any thread, even after the lease, the
/// pass and the engine. If the device is a [`CpuDevice`], it dereferences to a slice.
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
    /// Returns the memory range of the bytes, for work on streams that were declared with
    /// [`Lease::record_stream`].
    pub fn range(&self) -> MemoryRange {
        self.memory.range().slice(self.range.clone())
    }
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory.on_host().expect("the memory of a CpuDevice is host memory")
            [self.range.clone()]
    }
}
