// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of loaded tensors.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ts_io::FileMapping;
use ts_orchestrator::TensorBytes;
use ts_pool::{BLOCK_ALIGN, Budget, Buffer, HostPool};

/// Maximum of [`kept_bytes`]. Enough for the weights of a small model, and little
/// beside the libraries of a process that loads one.
const KEPT_BYTES: usize = 64 << 20;

/// How long [`trim`] and [`kept_bytes`] wait for the lock. Other code holds it for microseconds.
const PATIENCE: Duration = Duration::from_millis(20);

/// The memory of loaded tensors that were dropped, up to [`KEPT_BYTES`]. The next tensors that are
/// loaded reuse it.
///
/// A thread of a parent process may have held the lock during a fork. So nothing waits long for it.
static KEPT: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());

/// The bytes of a loaded tensor. Clones share them; they are freed when the last clone is dropped.
/// Clones may be dropped on any thread, and in forked processes. A view keeps the mapping of its
/// file. In a forked process, memory to which an engine has read stays allocated until the process
/// ends.
#[derive(Debug, Clone)]
pub struct LoadedBytes {
    memory: Memory,
    range: Range<usize>,
}

#[derive(Debug, Clone)]
enum Memory {
    /// Memory of an engine that has ended.
    Slot(TensorBytes),
    Recycled(Arc<RecycledBuffer>),
    Mapped(Arc<FileMapping>),
}

impl LoadedBytes {
    pub(super) fn recycled(buffer: Arc<RecycledBuffer>, range: Range<usize>) -> Self {
        Self { memory: Memory::Recycled(buffer), range }
    }

    pub(super) fn mapped(mapping: Arc<FileMapping>, range: Range<usize>) -> Self {
        Self { memory: Memory::Mapped(mapping), range }
    }
}

impl From<TensorBytes> for LoadedBytes {
    fn from(bytes: TensorBytes) -> Self {
        Self { range: 0..bytes.len(), memory: Memory::Slot(bytes) }
    }
}

impl Deref for LoadedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let whole: &[u8] = match &self.memory {
            Memory::Slot(bytes) => bytes,
            Memory::Recycled(buffer) => buffer,
            Memory::Mapped(mapping) => mapping,
        };
        &whole[self.range.clone()]
    }
}

/// Returns memory to the system that loaded tensors had until they were dropped. Returns its size
/// in bytes.
///
/// [`Checkpoint::load`](crate::Checkpoint::load) keeps up to 64 MiB of such memory for the next
/// call, because the system clears new memory more slowly than tensors are read from the page
/// cache.
///
/// ```
/// tensorstream::trim();
/// assert_eq!(tensorstream::kept_bytes(), 0);
/// ```
pub fn trim() -> usize {
    let kept = KEPT.try_lock_for(PATIENCE);
    kept.map_or(0, |mut kept| total(&std::mem::take(&mut *kept)))
}

/// Returns the size in bytes of the memory that [`trim`] would return to the system.
pub fn kept_bytes() -> usize {
    KEPT.try_lock_for(PATIENCE).map_or(0, |kept| total(&kept))
}

fn total(buffers: &[Buffer]) -> usize {
    buffers.iter().map(|buffer| buffer.len()).sum()
}

/// Memory that is kept for reuse when it is dropped.
#[derive(Debug)]
pub(super) struct RecycledBuffer(Option<Buffer>);

impl RecycledBuffer {
    /// Allocates memory of at least `len` bytes. It contains arbitrary bytes.
    ///
    /// # Errors
    /// Returns [`ts_pool::Error::Map`] if the system has no memory.
    pub(super) fn allocate(len: usize) -> Result<Self, ts_pool::Error> {
        // A little more than asked for is not worth new memory.
        let fits = |kept: &Buffer| (len..=len + len / 8 + BLOCK_ALIGN).contains(&kept.len());
        if let Some(mut kept) = KEPT.try_lock()
            && let Some(found) = kept.iter().position(fits)
        {
            return Ok(Self(Some(kept.swap_remove(found))));
        }
        let len = len.next_multiple_of(BLOCK_ALIGN).max(BLOCK_ALIGN);
        let pool = HostPool::new(&Budget::new(len), len)?;
        // A fork during a read copies the pages that it reads to, so the parent gets all bytes.
        // Older kernels copy a page when the parent writes to it, which no thread does during the
        // read.
        pool.keep_in_forks();
        Ok(Self(Some(pool.allocate(len)?)))
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut().expect("the buffer exists until this value is dropped")
    }
}

impl Deref for RecycledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_ref().expect("the buffer exists until this value is dropped")
    }
}

impl Drop for RecycledBuffer {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.take()
            && let Some(mut kept) = KEPT.try_lock()
            && total(&kept) + buffer.len() <= KEPT_BYTES
        {
            kept.push(buffer);
        }
    }
}
