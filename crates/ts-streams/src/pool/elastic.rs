// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pools that choose their number of streams.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::workload::WorkloadType;
use crate::{Device, Stream};

use super::{AllocationStrategy, StreamPool};

/// The outstanding operations of a chosen stream that make an elastic pool grow.
const DEEP: u64 = 2;
/// An elastic pool looks at its number of streams once in this many choices.
const CHOICES: usize = 8;

/// The state of a pool that chooses its number of streams.
#[derive(Debug)]
pub(super) struct Elastic {
    pub(super) bounds: RangeInclusive<usize>,
    choices: AtomicUsize,
    /// Whether a thread is changing the number.
    resizing: AtomicBool,
}

impl Elastic {
    pub(super) fn new(bounds: RangeInclusive<usize>) -> Self {
        Self { bounds, choices: AtomicUsize::new(0), resizing: AtomicBool::new(false) }
    }
}

impl<D: Device> StreamPool<D> {
    /// Changes the number of streams by one if the queued work asks for it. `load` is that of the
    /// stream that was chosen. Returns whether the number has changed.
    pub(super) fn follow_load(
        &self,
        Elastic { bounds, choices, resizing }: &Elastic,
        load: u64,
        workload: WorkloadType,
    ) -> bool {
        let turn = choices.fetch_add(1, Ordering::Relaxed) + 1;
        if !turn.is_multiple_of(CHOICES) || resizing.swap(true, Ordering::Acquire) {
            return false;
        }
        let active: Vec<_> = self.active().collect();
        let idle: Vec<_> = active.iter().filter(|pooled| pooled.outstanding() == 0).collect();
        let has_changed = if load >= DEEP && active.len() < *bounds.end() {
            self.grow(*bounds.end(), workload)
        } else if 2 * idle.len() > active.len() && active.len() > *bounds.start() {
            idle.last().is_some_and(|last| last.active.swap(false, Ordering::Release))
        } else {
            false
        };
        resizing.store(false, Ordering::Release);
        has_changed
    }

    /// Makes one more stream active. Returns whether there is one.
    fn grow(&self, most: usize, workload: WorkloadType) -> bool {
        let priority = match self.strategy() {
            AllocationStrategy::RoundRobin | AllocationStrategy::LoadBalanced => {
                self.next_priority()
            }
            _ => workload.priority(),
        };
        let level = self.device.info().priorities.level(priority);
        let inactive = || self.created().filter(|pooled| !pooled.active.load(Ordering::Relaxed));
        let fitting = inactive().find(|pooled| pooled.stream.level() == level);
        let again = match fitting {
            None if self.created.load(Ordering::Acquire) < most => None,
            None => inactive().next(),
            fitting => fitting,
        };
        match again {
            Some(pooled) => !pooled.active.swap(true, Ordering::Release),
            // The pool also works without another stream.
            None => self.add_stream(priority).is_ok(),
        }
    }
}
