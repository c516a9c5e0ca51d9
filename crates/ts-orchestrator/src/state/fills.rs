// SPDX-License-Identifier: MIT OR Apache-2.0
//! The work of the workers for loads: parts to copy or decode, and units to compare with their
//! checksums.

use std::collections::VecDeque;

use crate::joint::JOINT_BYTES;
use crate::unit_load::QueuedDecode;
use crate::worker::UnitCheck;

/// The parts that wait to be decoded, the units that wait to be checked, and how many parts workers
/// are filling.
#[derive(Debug, Default)]
pub(super) struct Fills {
    /// The parts of compressed units to decode that a call waits for, most urgent first.
    urgent: VecDeque<QueuedDecode>,
    /// All other parts of compressed units to decode, in order.
    others: VecDeque<QueuedDecode>,
    /// The units to compare with their checksums, for which no job was submitted yet.
    checks: Vec<UnitCheck>,
    /// The number of parts that workers are copying or decoding.
    running: usize,
}

impl Fills {
    /// Puts parts before all others, in their order.
    pub(super) fn push_first(&mut self, decodes: Vec<QueuedDecode>) {
        decodes.into_iter().rev().for_each(|decode| self.urgent.push_front(decode));
    }

    /// Adds parts that come after all others.
    pub(super) fn push(&mut self, decodes: Vec<QueuedDecode>) {
        self.others.extend(decodes);
    }

    /// Takes the part to decode next, unless so many parts are being filled. Returns whether a call
    /// waits for it, too.
    pub(super) fn pop(&mut self, most_running: usize) -> Option<(QueuedDecode, bool)> {
        if self.running >= most_running {
            return None;
        }
        let urgent = self.urgent.pop_front();
        let is_urgent = urgent.is_some();
        Some((urgent.or_else(|| self.others.pop_front())?, is_urgent))
    }

    /// Adds a unit to compare with its checksums.
    pub(super) fn push_check(&mut self, check: UnitCheck) {
        self.checks.push(check);
    }

    /// Takes the units to compare with their checksums, in jobs: small units are checked together.
    pub(super) fn take_checks(&mut self) -> Vec<Vec<UnitCheck>> {
        let (mut jobs, mut bytes) = (Vec::<Vec<UnitCheck>>::new(), 0);
        for check in self.checks.drain(..) {
            bytes += check.slot.len();
            match jobs.last_mut().filter(|_| bytes <= JOINT_BYTES) {
                Some(job) => job.push(check),
                None => {
                    bytes = check.slot.len();
                    jobs.push(vec![check]);
                }
            }
        }
        jobs
    }

    /// Whether workers are copying or decoding parts.
    pub(super) fn is_running(&self) -> bool {
        self.running > 0
    }

    /// Counts a part that a worker begins to fill.
    pub(super) fn begin(&mut self) {
        self.running += 1;
    }

    /// Counts a part that a worker has filled, or failed to.
    pub(super) fn end(&mut self) {
        self.running -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ts_pool::{Budget, HostPool};

    use super::*;

    #[test]
    fn small_units_are_checked_together() {
        let pool = HostPool::new(&Budget::new(8 << 20), 8 << 20).unwrap();
        let mut fills = Fills::default();
        assert!(fills.take_checks().is_empty());
        for (load, len) in [400 << 10, 500 << 10, 300 << 10, 2 << 20, 4096].into_iter().enumerate()
        {
            let slot = pool.allocate(len).unwrap();
            let (load, checks) = (load as u32, Arc::default());
            fills.push_check(UnitCheck { load, slot, checks, urgent: false });
        }
        let jobs = fills.take_checks();
        let loads = |job: &Vec<UnitCheck>| job.iter().map(|check| check.load).collect();
        assert_eq!(
            jobs.iter().map(loads).collect::<Vec<Vec<u32>>>(),
            [vec![0, 1], vec![2], vec![3], vec![4]]
        );
        assert!(fills.take_checks().is_empty());
    }
}
