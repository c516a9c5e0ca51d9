// SPDX-License-Identifier: MIT OR Apache-2.0
//! One stream of a pool, with what the pool knows about its work.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use crate::workload::WorkloadType;
use crate::{Stream, StreamMetrics};

/// No workload, or several at once.
const UNKNOWN: u8 = u8::MAX;
/// No piece of work is expected to take longer, so that sums do not overflow.
const MOST_NS: u64 = 1 << 40;

#[derive(Debug)]
pub(super) struct PooledStream<S> {
    pub(super) stream: S,
    pub(super) level: i32,
    /// Whether the pool returns this stream to callers.
    pub(super) active: AtomicBool,
    pub(super) times: [Average; 4],
    /// The workload of what runs on the stream, or [`UNKNOWN`].
    workload: AtomicU8,
    /// How much completed work was counted, and how long it took.
    pub(super) seen_work: AtomicU64,
    pub(super) seen_ns: AtomicU64,
    batch: Batch,
}

/// What a stream was chosen for since it was last found idle.
#[derive(Debug, Default)]
struct Batch {
    pieces: AtomicU64,
    bytes: AtomicU64,
    /// How long all of it is expected to take.
    expected_ns: AtomicU64,
    /// What the stream had completed when the batch began, and how long that took.
    work_before: AtomicU64,
    ns_before: AtomicU64,
}

/// Pieces of work of one kind that a stream has completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Observation {
    pub(super) workload: WorkloadType,
    pub(super) pieces: u64,
    pub(super) bytes: u64,
    pub(super) took_ns: u64,
}

impl<S: Stream> PooledStream<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            level: stream.level(),
            stream,
            active: AtomicBool::new(true),
            times: Default::default(),
            workload: AtomicU8::new(UNKNOWN),
            seen_work: AtomicU64::new(0),
            seen_ns: AtomicU64::new(0),
            batch: Batch::default(),
        }
    }

    pub(super) fn outstanding(&self) -> u64 {
        self.stream.outstanding()
    }

    /// Returns how far the priority of the stream is from a level.
    pub(super) fn distance(&self, level: i32) -> u32 {
        self.level.abs_diff(level)
    }

    pub(super) fn workload(&self) -> Option<WorkloadType> {
        WorkloadType::ALL.get(usize::from(self.workload.load(Ordering::Relaxed))).copied()
    }

    /// Notes for which workload the stream was chosen.
    pub(super) fn take_for(&self, workload: WorkloadType) {
        let (before, new) = (self.workload.load(Ordering::Relaxed), workload as u8);
        if before != new {
            let is_idle = self.outstanding() == 0;
            self.workload.store(if is_idle { new } else { UNKNOWN }, Ordering::Relaxed);
        }
    }

    /// Adds a piece of work of this length to the batch, and how long it is expected to take.
    pub(super) fn expect(&self, bytes: u64, expected_ns: u64) {
        let Batch { pieces, bytes: all_bytes, expected_ns: all_ns, .. } = &self.batch;
        pieces.fetch_add(1, Ordering::Relaxed);
        all_bytes.fetch_add(bytes, Ordering::Relaxed);
        all_ns.fetch_add(expected_ns.min(MOST_NS), Ordering::Relaxed);
    }

    /// Returns how long the rest of the batch is expected to take, at least 1 ns if there is any.
    pub(super) fn remaining_ns(&self) -> u64 {
        if self.outstanding() == 0 {
            return 0;
        }
        let before = self.batch.ns_before.load(Ordering::Relaxed);
        let ran_ns = busy_ns(&self.stream.metrics()).saturating_sub(before);
        self.batch.expected_ns.load(Ordering::Relaxed).saturating_sub(ran_ns).max(1)
    }

    /// Ends the batch if the stream is idle. Returns what is known about its work, unless it was of
    /// several kinds, or some of it was not submitted yet.
    pub(super) fn end_batch(&self) -> Option<Observation> {
        let metrics = self.stream.metrics();
        if metrics.outstanding() > 0 {
            return None;
        }
        let (completed, busy_ns) = (metrics.completed_work, busy_ns(&metrics));
        let batch = &self.batch;
        let pieces = batch.pieces.swap(0, Ordering::Relaxed);
        let bytes = batch.bytes.swap(0, Ordering::Relaxed);
        batch.expected_ns.store(0, Ordering::Relaxed);
        let work = completed.saturating_sub(batch.work_before.swap(completed, Ordering::Relaxed));
        let took_ns = busy_ns.saturating_sub(batch.ns_before.swap(busy_ns, Ordering::Relaxed));
        let workload = self.workload().filter(|_| pieces > 0 && work >= pieces)?;
        Some(Observation { workload, pieces, bytes, took_ns })
    }
}

pub(super) fn busy_ns(metrics: &StreamMetrics) -> u64 {
    u64::try_from(metrics.busy.as_nanos()).unwrap_or(u64::MAX)
}

#[derive(Debug, Default)]
pub(super) struct Average {
    count: AtomicU64,
    total_ns: AtomicU64,
    /// The average, which is read more often than it changes.
    mean_ns: AtomicU64,
}

impl Average {
    pub(super) fn add(&self, count: u64, total_ns: u64) {
        let total_ns = self.total_ns.fetch_add(total_ns, Ordering::Relaxed) + total_ns;
        let count = self.count.fetch_add(count, Ordering::Relaxed) + count;
        self.mean_ns.store((total_ns / count.max(1)).max(1), Ordering::Relaxed);
    }

    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the average, at least 1 ns.
    pub(super) fn ns(&self) -> Option<u64> {
        Some(self.mean_ns.load(Ordering::Relaxed)).filter(|&ns| ns > 0)
    }
}
