// SPDX-License-Identifier: MIT OR Apache-2.0
//! The reads of an engine: those that wait, and those that the backend has.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use ts_io::{ReadRequest, Source};
use ts_pool::Buffer;

use crate::joint::{self, JointRead, JointRequest};
use crate::layout::ReadKind;
use crate::unit_load::QueuedRead;

/// The reads that wait to be submitted, and the submitted reads with the memory that they fill.
#[derive(Debug, Default)]
pub(super) struct Reads {
    /// The reads that a call waits for or that belong to expected units, most urgent first.
    urgent: VecDeque<QueuedRead>,
    /// All other reads, in order.
    others: VecDeque<QueuedRead>,
    /// The parts of slots that wait for a read into a bounce buffer, by token.
    targets: HashMap<u64, Target>,
    /// The joint reads that were submitted, by token.
    joints: HashMap<u64, JointRead>,
    /// The number of submitted reads that have not ended.
    in_flight: usize,
    /// The time at which the current period with reads in flight began, in nanoseconds.
    busy_since_ns: u64,
}

/// A part of a slot that waits for a read into a bounce buffer.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) buffer: Buffer,
    /// The part of the compressed unit in memory that is filled too.
    pub(super) kept: Option<Buffer>,
    /// The part of the bounce buffer to copy or decode.
    pub(super) stored: Range<usize>,
    pub(super) kind: ReadKind,
}

/// A read that was taken from its queue.
#[derive(Debug)]
pub(super) struct NextRead {
    pub(super) read: QueuedRead,
    pub(super) is_urgent: bool,
}

impl Reads {
    /// Returns whether no read waits.
    pub(super) fn is_empty(&self) -> bool {
        self.urgent.is_empty() && self.others.is_empty()
    }

    /// Puts reads before all others, in their order.
    pub(super) fn push_first(&mut self, reads: Vec<QueuedRead>) {
        reads.into_iter().rev().for_each(|read| self.urgent.push_front(read));
    }

    /// Adds reads that come before those of units that are needed later.
    pub(super) fn push_urgent(&mut self, reads: Vec<QueuedRead>) {
        self.urgent.extend(reads);
    }

    /// Adds reads that come after all others.
    pub(super) fn push(&mut self, reads: Vec<QueuedRead>) {
        self.others.extend(reads);
    }

    /// Takes the read to submit next.
    pub(super) fn pop(&mut self) -> Option<NextRead> {
        let urgent = self.urgent.pop_front();
        let is_urgent = urgent.is_some();
        let read = urgent.or_else(|| self.others.pop_front())?;
        Some(NextRead { read, is_urgent })
    }

    /// Returns the request for a read into its own memory, joined with those after it in its queue
    /// that continue it, up to `joint_bytes` bytes.
    pub(super) fn join(
        &mut self,
        source: Arc<Source>,
        NextRead { read, is_urgent }: NextRead,
        joint_bytes: usize,
        alignment: usize,
    ) -> ReadRequest {
        let queue = if is_urgent { &mut self.urgent } else { &mut self.others };
        let mut reads = joint::take(read, queue, joint_bytes, alignment);
        if reads.len() == 1
            && let Some(read) = reads.pop()
        {
            return ReadRequest::new(read.token, source, read.offset, read.required, read.target);
        }
        let (joint, request) = JointRead::new(reads, alignment);
        let JointRequest { token, offset, required, buffers } = request;
        self.joints.insert(token, joint);
        ReadRequest { token, source, offset, required, buffers }
    }

    /// Remembers what to fill at the end of a read into a bounce buffer.
    pub(super) fn bounces_to(&mut self, token: u64, target: Target) {
        self.targets.insert(token, target);
    }

    /// Takes what a read fills from its bounce buffer, if it has one.
    pub(super) fn take_target(&mut self, token: u64) -> Option<Target> {
        self.targets.remove(&token)
    }

    /// Returns the joint read that was submitted with this token.
    pub(super) fn joint(&self, token: u64) -> Option<&JointRead> {
        self.joints.get(&token)
    }

    /// Takes the joint read with this token.
    pub(super) fn take_joint(&mut self, token: u64) -> Option<JointRead> {
        self.joints.remove(&token)
    }

    /// The number of submitted reads that have not ended.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Counts a read that is submitted at this time.
    pub(super) fn begin(&mut self, now_ns: u64) {
        if self.in_flight == 0 {
            self.busy_since_ns = now_ns;
        }
        self.in_flight += 1;
    }

    /// Counts a read that has ended. Returns how long reads were in flight, if it was the last one,
    /// in nanoseconds.
    pub(super) fn end(&mut self, now_ns: u64) -> u64 {
        let busy_ns = self.busy_ns(now_ns);
        self.in_flight -= 1;
        if self.in_flight == 0 { busy_ns } else { 0 }
    }

    /// How long reads have been in flight without a pause until now, in nanoseconds.
    pub(super) fn busy_ns(&self, now_ns: u64) -> u64 {
        if self.in_flight > 0 { now_ns.saturating_sub(self.busy_since_ns) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use ts_format::FileId;
    use ts_pool::{Budget, HostPool};

    use super::*;

    fn read(pool: &HostPool, token: u64) -> QueuedRead {
        QueuedRead {
            token,
            file: FileId(0),
            offset: token * 4096,
            required: 4096,
            target: pool.allocate(4096).unwrap(),
            kind: ReadKind::InPlace,
            kept: None,
            alone: false,
        }
    }

    #[test]
    fn urgent_reads_come_first_and_keep_their_order() {
        let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20).unwrap();
        let mut reads = Reads::default();
        let all = |tokens: &[u64]| tokens.iter().map(|&token| read(&pool, token)).collect();
        reads.push(all(&[1, 2]));
        reads.push_urgent(all(&[3, 4]));
        reads.push_first(all(&[5, 6]));
        let next = std::iter::from_fn(|| reads.pop()).map(|next| (next.read.token, next.is_urgent));
        let urgent = [5, 6, 3, 4].map(|token| (token, true));
        assert_eq!(next.collect::<Vec<_>>(), [&urgent[..], &[(1, false), (2, false)]].concat());
        assert!(reads.is_empty());
    }

    #[test]
    fn time_with_reads_in_flight_counts_once() {
        let mut reads = Reads::default();
        reads.begin(10);
        reads.begin(15);
        assert_eq!((reads.busy_ns(17), reads.in_flight()), (7, 2));
        assert_eq!((reads.end(20), reads.end(30)), (0, 20));
        assert_eq!((reads.busy_ns(40), reads.in_flight()), (0, 0));
        reads.begin(50);
        assert_eq!(reads.end(51), 1);
    }
}
