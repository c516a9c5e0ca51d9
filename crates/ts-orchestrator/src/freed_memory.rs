// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counts freed memory of units, without a lock.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the memory of units that was freed, and says when the loader thread must know. Any thread
/// frees memory, without a lock, and usually so little that nothing can be read into it yet.
#[derive(Debug)]
pub(crate) struct FreedMemory {
    bytes: AtomicUsize,
    report_at: AtomicUsize,
}

impl Default for FreedMemory {
    /// Returns a counter that reports any memory.
    fn default() -> Self {
        Self { bytes: AtomicUsize::new(0), report_at: AtomicUsize::new(0) }
    }
}

impl FreedMemory {
    /// Adds freed memory. Returns whether to report it.
    pub(crate) fn add(&self, bytes: usize) -> bool {
        let before = self.bytes.fetch_add(bytes.max(1), Ordering::SeqCst);
        let report_at = self.report_at.load(Ordering::SeqCst);
        before + bytes.max(1) >= report_at && (before < report_at || report_at == 0)
    }

    /// Returns the number of bytes that were freed since the last [`reset`](Self::reset).
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::SeqCst)
    }

    pub(crate) fn reset(&self) {
        self.bytes.store(0, Ordering::SeqCst);
    }

    /// Reports once that this many bytes were freed since the last [`reset`](Self::reset), or with
    /// 0 whenever memory is freed. Returns whether so many were freed already.
    pub(crate) fn report_at(&self, bytes: usize) -> bool {
        let before = self.report_at.swap(bytes, Ordering::SeqCst);
        before != bytes && bytes > 0 && self.bytes() >= bytes
    }
}
