// SPDX-License-Identifier: MIT OR Apache-2.0
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// What a stream was given and has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamMetrics {
    /// Everything that was submitted: copies, fills, functions, records and waits.
    pub operations: u64,
    /// Of these, those that are done or were not run because something before them failed.
    pub completed: u64,
    /// Copies and fills submitted.
    pub transfers: u64,
    /// Their bytes.
    pub transferred_bytes: u64,
    /// Functions submitted.
    pub launches: u64,
    /// The time from submission to completion, of all that is completed.
    pub latency: Duration,
}

impl StreamMetrics {
    /// What is submitted and not completed.
    pub fn outstanding(&self) -> u64 {
        self.operations.saturating_sub(self.completed)
    }

    /// The average time from submission to completion; `None` when nothing is completed.
    pub fn average_latency(&self) -> Option<Duration> {
        let nanos = self.latency.as_nanos().checked_div(u128::from(self.completed))?;
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

/// A stream's metrics as they are counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    operations: AtomicU64,
    completed: AtomicU64,
    transfers: AtomicU64,
    transferred_bytes: AtomicU64,
    launches: AtomicU64,
    latency_ns: AtomicU64,
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

    pub(crate) fn read(&self) -> StreamMetrics {
        let completed = self.completed.load(Ordering::Acquire);
        StreamMetrics {
            operations: self.operations.load(Ordering::Relaxed),
            completed,
            transfers: self.transfers.load(Ordering::Relaxed),
            transferred_bytes: self.transferred_bytes.load(Ordering::Relaxed),
            launches: self.launches.load(Ordering::Relaxed),
            latency: Duration::from_nanos(self.latency_ns.load(Ordering::Relaxed)),
        }
    }
}

/// How much memory of a device is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryMetrics {
    /// Bytes now.
    pub in_use_bytes: usize,
    /// The most at any time.
    pub peak_bytes: usize,
}

#[derive(Debug, Default)]
pub(crate) struct MemoryCounters {
    in_use: AtomicUsize,
    peak: AtomicUsize,
}

impl MemoryCounters {
    pub(crate) fn taken(&self, bytes: usize) {
        let before = self.in_use.fetch_add(bytes, Ordering::Relaxed);
        self.peak.fetch_max(before + bytes, Ordering::Relaxed);
    }

    pub(crate) fn given_back(&self, bytes: usize) {
        self.in_use.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> MemoryMetrics {
        MemoryMetrics {
            in_use_bytes: self.in_use.load(Ordering::Relaxed),
            peak_bytes: self.peak.load(Ordering::Relaxed),
        }
    }
}
