// SPDX-License-Identifier: MIT OR Apache-2.0
//! One stream of a pool, with what the pool knows about its work.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::workload::WorkloadType;
use crate::{Stream, StreamMetrics};

/// No workload, or several at once.
const UNKNOWN: u8 = u8::MAX;
/// No piece of work counts as longer (18 minutes), so that sums do not overflow.
pub(super) const MOST_NS: u64 = 1 << 40;

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
    batch: Mutex<Batch>,
    /// How long the batch is expected to take, and the time of completed work when it began.
    expected_ns: AtomicU64,
    ns_before: AtomicU64,
}

/// What a stream was chosen for since it was last found idle, all of it done.
#[derive(Debug, Default)]
struct Batch {
    pieces: u64,
    bytes: u64,
    /// The workload of all pieces. `None` if there are several, or if the stream was busy with
    /// other work when the batch began.
    workload: Option<WorkloadType>,
    /// What the stream had completed when the batch began, and how long that took.
    work_before: u64,
    ns_before: u64,
    /// What the stream had completed when it was found idle with pieces that were not submitted.
    stalled_at: Option<u64>,
}

impl Batch {
    /// Ends the batch if all its pieces are done. Returns what is known about them.
    fn end(&mut self, metrics: &StreamMetrics) -> Option<Observation> {
        let work = metrics.completed_work.saturating_sub(self.work_before);
        if metrics.outstanding() > 0 || work < self.pieces {
            return None;
        }
        let Self { pieces, bytes, workload, ns_before, .. } = std::mem::take(self);
        let took_ns = busy_ns(metrics).saturating_sub(ns_before);
        let workload = workload.filter(|_| pieces > 0)?;
        Some(Observation { workload, pieces, bytes, took_ns })
    }

    /// Gives the batch up if some of its pieces are never submitted: if the stream is idle for the
    /// second time since it has completed anything.
    fn give_up_stalled(&mut self, metrics: &StreamMetrics) {
        if self.pieces > 0 && metrics.outstanding() == 0 {
            let completed = metrics.completed_work;
            if self.stalled_at.replace(completed) == Some(completed) {
                *self = Self::default();
            }
        }
    }
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
            batch: Mutex::default(),
            expected_ns: AtomicU64::new(0),
            ns_before: AtomicU64::new(0),
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

    /// Adds a piece of work to the batch, with the time that it is expected to take. Returns what
    /// was in the batch before if that is done.
    pub(super) fn begin_piece(
        &self,
        workload: WorkloadType,
        bytes: u64,
        expected_ns: u64,
    ) -> Option<Observation> {
        let mut batch = self.batch.lock().unwrap_or_else(PoisonError::into_inner);
        let metrics = self.stream.metrics();
        let observed = batch.end(&metrics);
        batch.give_up_stalled(&metrics);
        if batch.pieces == 0 {
            let workload = Some(workload).filter(|_| metrics.outstanding() == 0);
            let (work_before, ns_before) = (metrics.completed_work, busy_ns(&metrics));
            *batch = Batch { workload, work_before, ns_before, ..Batch::default() };
            self.ns_before.store(ns_before, Ordering::Relaxed);
            self.expected_ns.store(0, Ordering::Relaxed);
        }
        batch.pieces += 1;
        batch.bytes = batch.bytes.saturating_add(bytes);
        batch.workload = batch.workload.filter(|&all| all == workload);
        self.expected_ns.fetch_add(expected_ns.min(MOST_NS), Ordering::Relaxed);
        observed
    }

    /// Ends the batch if all its pieces are done. Returns what is known about them.
    pub(super) fn end_batch(&self) -> Option<Observation> {
        let mut batch = self.batch.lock().unwrap_or_else(PoisonError::into_inner);
        batch.end(&self.stream.metrics())
    }

    /// Returns how long the rest of the batch is expected to take, at least 1 ns if the stream is
    /// busy.
    pub(super) fn remaining_ns(&self) -> u64 {
        if self.outstanding() == 0 {
            return 0;
        }
        let before = self.ns_before.load(Ordering::Relaxed);
        let ran_ns = busy_ns(&self.stream.metrics()).saturating_sub(before);
        self.expected_ns.load(Ordering::Relaxed).saturating_sub(ran_ns).max(1)
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
