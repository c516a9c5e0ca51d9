// SPDX-License-Identifier: MIT OR Apache-2.0
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::workload::WorkloadType;

/// Counters of the work that was submitted to a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StreamMetrics {
    /// Number of operations submitted: copies, fills, host functions, records, waits, prefetches
    /// and frees.
    ///
    /// On a [`CpuDevice`](crate::CpuDevice) or [`SimDevice`](crate::SimDevice), each call of
    /// `synchronize` on the stream or on its device counts as one operation too. Waits for events
    /// that were never recorded do not count there.
    pub operations: u64,
    /// Number of operations that completed or were skipped after a failure.
    pub completed: u64,
    /// Number of copies and fills submitted.
    pub transfers: u64,
    /// Total length of the submitted copies and fills, in bytes.
    pub transferred_bytes: u64,
    /// Number of host functions submitted.
    pub launches: u64,
    /// Sum of the times from submission to completion, over all completed operations.
    pub latency: Duration,
    /// Number of copies, fills, host functions and kernels that ran to their end.
    pub completed_work: u64,
    /// Sum of the times that these took, without waits for earlier work. On accelerators an upper
    /// bound, because the driver does not report when work ends.
    pub busy: Duration,
}

impl StreamMetrics {
    /// Returns the number of operations submitted but not completed.
    pub fn outstanding(&self) -> u64 {
        self.operations.saturating_sub(self.completed)
    }

    /// Returns the kind of work of which most was submitted: [`Memory`](WorkloadType::Memory) or
    /// [`Compute`](WorkloadType::Compute) if at least three quarters are transfers or launches,
    /// [`Coordination`](WorkloadType::Coordination) if there is neither, and otherwise
    /// [`Mixed`](WorkloadType::Mixed). Returns `None` if nothing was submitted.
    pub fn workload(&self) -> Option<WorkloadType> {
        let work = self.transfers + self.launches;
        let most = |count: u64| count * 4 >= work * 3;
        match () {
            () if self.operations == 0 => None,
            () if work == 0 => Some(WorkloadType::Coordination),
            () if most(self.transfers) => Some(WorkloadType::Memory),
            () if most(self.launches) => Some(WorkloadType::Compute),
            () => Some(WorkloadType::Mixed),
        }
    }

    /// Returns the average time from submission to completion, or `None` before the first
    /// completion.
    pub fn average_latency(&self) -> Option<Duration> {
        let nanos = self.latency.as_nanos().checked_div(u128::from(self.completed))?;
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

/// The live counters from which [`StreamMetrics`] are read.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    operations: AtomicU64,
    completed: AtomicU64,
    transfers: AtomicU64,
    transferred_bytes: AtomicU64,
    launches: AtomicU64,
    latency_ns: AtomicU64,
    completed_work: AtomicU64,
    busy_ns: AtomicU64,
}

impl Counters {
    pub(crate) fn submitted(&self) {
        self.operations.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn transfer(&self, bytes: usize) {
        self.transfers.fetch_add(1, Ordering::Relaxed);
        self.transferred_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn launch(&self) {
        self.launches.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn completed(&self, latency_ns: u64) {
        self.latency_ns.fetch_add(latency_ns, Ordering::Relaxed);
        self.completed.fetch_add(1, Ordering::Release);
    }

    /// Counts work that ran for this long. Call this before [`completed`](Self::completed).
    pub(crate) fn worked(&self, busy_ns: u64) {
        self.busy_ns.fetch_add(busy_ns, Ordering::Relaxed);
        self.completed_work.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of operations submitted but not completed.
    pub(crate) fn outstanding(&self) -> u64 {
        let completed = self.completed.load(Ordering::Acquire);
        self.operations.load(Ordering::Relaxed).saturating_sub(completed)
    }

    pub(crate) fn read(&self) -> StreamMetrics {
        let completed = self.completed.load(Ordering::Acquire);
        StreamMetrics {
            operations: self.operations.load(Ordering::Relaxed),
            completed,
            transfers: self.transfers.load(Ordering::Relaxed),
            transferred_bytes: self.transferred_bytes.load(Ordering::Relaxed),
            launches: self.launches.load(Ordering::Relaxed),
            latency: Duration::from_nanos(self.latency_ns.load(Ordering::Relaxed)),
            completed_work: self.completed_work.load(Ordering::Relaxed),
            busy: Duration::from_nanos(self.busy_ns.load(Ordering::Relaxed)),
        }
    }
}

/// Counters of the memory allocated from a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemoryMetrics {
    /// Number of bytes currently allocated.
    pub in_use_bytes: usize,
    /// Maximum number of bytes allocated at the same time.
    pub peak_bytes: usize,
}

#[derive(Debug, Default)]
pub(crate) struct MemoryCounters {
    in_use: AtomicUsize,
    peak: AtomicUsize,
}

impl MemoryCounters {
    pub(crate) fn allocated(&self, bytes: usize) {
        let before = self.in_use.fetch_add(bytes, Ordering::Relaxed);
        self.peak.fetch_max(before + bytes, Ordering::Relaxed);
    }

    pub(crate) fn freed(&self, bytes: usize) {
        self.in_use.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> MemoryMetrics {
        MemoryMetrics {
            in_use_bytes: self.in_use.load(Ordering::Relaxed),
            peak_bytes: self.peak.load(Ordering::Relaxed),
        }
    }
}
