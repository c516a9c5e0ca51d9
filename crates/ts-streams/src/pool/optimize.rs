// SPDX-License-Identifier: MIT OR Apache-2.0
//! The choice of a strategy by what was measured.

use crate::Device;
use crate::workload::WorkloadType;

use super::pooled_stream::{Average, PooledStream};
use super::{AllocationStrategy, StreamPool};

/// A change of strategy by [`StreamPool::optimize`].
#[derive(Debug, Clone, PartialEq)]
pub struct StrategyChange {
    /// The previous strategy.
    pub from: AllocationStrategy,
    /// The new strategy.
    pub to: AllocationStrategy,
    /// The measurement that caused the change, as a sentence.
    pub evidence: String,
}

impl<D: Device> StreamPool<D> {
    /// Changes the strategy if measurements favor another one. Returns the change, or `None` if the
    /// strategy stays the same. Counts what the pool has observed; nothing needs to be recorded.
    ///
    /// - Switches to [`Workload`](AllocationStrategy::Workload) if the average time of a workload
    ///   is more than 1.5 times as long on one stream as on another. Only streams with at least
    ///   [`MIN_SAMPLES`](Self::MIN_SAMPLES) completions count.
    /// - Otherwise switches to [`LoadBalanced`](AllocationStrategy::LoadBalanced) if one stream has
    ///   at least [`MIN_SAMPLES`](Self::MIN_SAMPLES) outstanding operations and more than twice as
    ///   many as another. A pool that uses `Workload` does not switch.
    ///
    /// A pool that uses [`Learned`](AllocationStrategy::Learned) keeps it.
    pub fn optimize(&self) -> Option<StrategyChange> {
        self.created().for_each(|pooled| self.observe(pooled));
        let from = self.strategy();
        if from == AllocationStrategy::Learned {
            return None;
        }
        let (to, evidence) = self.uneven_times().or_else(|| self.uneven_loads())?;
        if to == from
            || (from, to) == (AllocationStrategy::Workload, AllocationStrategy::LoadBalanced)
        {
            return None;
        }
        self.set_strategy(to);
        Some(StrategyChange { from, to, evidence })
    }

    fn uneven_times(&self) -> Option<(AllocationStrategy, String)> {
        WorkloadType::ALL.into_iter().find_map(|workload| {
            let times = self.active().map(|pooled| &pooled.times[workload as usize]);
            let known: Vec<u64> = times
                .filter(|time| time.count() >= Self::MIN_SAMPLES)
                .filter_map(Average::ns)
                .collect();
            let (least, most) = (*known.iter().min()?, *known.iter().max()?);
            (most - least > least / 2).then(|| {
                let evidence = format!(
                    "{workload:?} work takes on average {least} ns on one stream and {most} ns on \
                     another"
                );
                (AllocationStrategy::Workload, evidence)
            })
        })
    }

    fn uneven_loads(&self) -> Option<(AllocationStrategy, String)> {
        let loads: Vec<u64> = self.active().map(PooledStream::outstanding).collect();
        let (least, most) = (*loads.iter().min()?, *loads.iter().max()?);
        (most >= Self::MIN_SAMPLES && most > 2 * least).then(|| {
            let evidence =
                format!("{most} operations are outstanding on one stream and {least} on another");
            (AllocationStrategy::LoadBalanced, evidence)
        })
    }
}
