// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures what the time of passes goes into.

use std::collections::VecDeque;

use crate::pass::PassId;
use crate::plan::Rates;
use crate::stats::PassTimes;

/// How many passes are kept.
const KEPT: usize = 32;
/// A pass is like the others if its duration is within this share of theirs.
const LIKE: f64 = 0.1;
/// How many passes with reads, after the first pass, show the rate of the steady state.
const STEADY: usize = 2;
/// How many passes show a duration that is not chance.
const SHOWS: usize = 3;

/// The latest passes that ran alone.
#[derive(Debug, Default)]
pub(crate) struct PassLog {
    /// The pass that has run alone so far, its beginning in nanoseconds, and the counters then.
    running: Option<(PassId, u64, PassTimes)>,
    /// The beginning of each pass in nanoseconds, and its times.
    passes: VecDeque<(u64, PassTimes)>,
    /// Since the last of them, other passes have ended.
    skipped: bool,
    /// The time between passes of which no other pass is in between, in nanoseconds, oldest first.
    /// As long as `passes`; 0 for the first one.
    gaps: VecDeque<u64>,
    /// The counters of all passes.
    totals: PassTimes,
    /// The kind of passes that the plan was last considered for, and their duration in seconds.
    considered: Option<(u64, f64)>,
}

impl PassLog {
    /// Begins a pass. `totals` are the counters of the engine.
    pub(crate) fn begin(&mut self, id: PassId, alone: bool, totals: PassTimes, now_ns: u64) {
        self.running = alone.then_some((id, now_ns, totals));
    }

    /// Ends a pass. Returns its beginning and its times if it ran alone.
    pub(crate) fn end(
        &mut self,
        id: PassId,
        totals: PassTimes,
        now_ns: u64,
    ) -> Option<(u64, PassTimes)> {
        let (_, begun_ns, before) = self.running.take_if(|(running, ..)| *running == id)?;
        let times = PassTimes {
            kind: 0,
            wall_ns: now_ns.saturating_sub(begun_ns),
            waited_ns: totals.waited_ns - before.waited_ns,
            calls_ns: totals.calls_ns - before.calls_ns,
            // Threads read the clock before they take the lock, so this can be slightly less.
            reading_ns: totals.reading_ns.saturating_sub(before.reading_ns),
            decoding_ns: totals.decoding_ns - before.decoding_ns,
            copying_ns: totals.copying_ns - before.copying_ns,
            read_bytes: totals.read_bytes - before.read_bytes,
            decoded_bytes: totals.decoded_bytes - before.decoded_bytes,
            replans: totals.replans,
        };
        Some((begun_ns, times))
    }

    /// Logs a pass that ran alone.
    pub(crate) fn add(&mut self, begun_ns: u64, times: PassTimes) {
        if self.passes.len() == KEPT {
            self.passes.pop_front();
            self.gaps.pop_front();
        }
        let before = self.passes.back().filter(|_| !self.skipped);
        let gap = before.map_or(0, |(begun, times)| begun_ns - (begun + times.wall_ns));
        self.gaps.push_back(gap);
        self.passes.push_back((begun_ns, times));
        self.skipped = false;
    }

    /// Notes that a pass has ended that is not logged.
    pub(crate) fn skip(&mut self) {
        self.skipped = true;
    }

    /// Returns the number of logged passes with the current plan, which is the one after `replans`
    /// replans.
    pub(crate) fn passes_since(&self, replans: u64) -> usize {
        self.passes.iter().filter(|(_, times)| times.replans == replans).count()
    }

    /// Counts a call that took `call_ns` in all, of which it waited `waited_ns`.
    pub(crate) fn count_call(&mut self, waited_ns: u64, call_ns: u64) {
        self.totals.waited_ns += waited_ns;
        self.totals.calls_ns += call_ns.saturating_sub(waited_ns);
    }

    /// Returns the times of all calls; the other fields are 0.
    pub(crate) fn calls(&self) -> PassTimes {
        self.totals
    }

    /// Returns whether enough passes after the first one have read to know the rate of reading.
    pub(crate) fn is_steady(&self) -> bool {
        self.passes.iter().skip(1).filter(|(_, times)| times.read_bytes > 0).count() >= STEADY
    }

    pub(crate) fn passes(&self) -> Vec<PassTimes> {
        self.passes.iter().map(|(_, times)| *times).collect()
    }

    /// Returns the time of the logged passes and between them, in nanoseconds. The time between two
    /// of them does not count if other passes ended in it.
    pub(crate) fn span_ns(&self) -> u64 {
        let walls: u64 = self.passes.iter().map(|(_, times)| times.wall_ns).sum();
        walls + self.gaps.iter().skip(1).sum::<u64>()
    }

    /// Returns what the logged passes read and decoded together, and how long they took. The first
    /// pass does not count, because it also warms up caches.
    pub(crate) fn sum(&self) -> PassTimes {
        let add = |sum: PassTimes, (_, times): &(u64, PassTimes)| PassTimes {
            reading_ns: sum.reading_ns + times.reading_ns,
            decoding_ns: sum.decoding_ns + times.decoding_ns,
            read_bytes: sum.read_bytes + times.read_bytes,
            decoded_bytes: sum.decoded_bytes + times.decoded_bytes,
            ..sum
        };
        self.passes.iter().skip(1).fold(PassTimes::default(), add)
    }

    /// Returns the shortest time that a pass of this kind computed, in seconds. The first pass does
    /// not count, because it also warms up caches.
    ///
    /// The work for streaming takes time of the processors too, and so lengthens the computation.
    /// This part does not count. It is estimated as if the work were spread evenly over the pass.
    pub(crate) fn compute_s(&self, kind: u64, rates: Rates) -> Option<f64> {
        let compute_s = |times: &PassTimes| {
            let reading_s = times.read_bytes as f64 / rates.read_bytes_per_processor_s;
            let streaming_s = times.decoding_ns as f64 / 1e9 + reading_s;
            let share = streaming_s / rates.processors.max(1) as f64 * 1e9 / times.wall_ns as f64;
            times.compute_ns() as f64 / 1e9 * (1.0 - share.min(0.5))
        };
        let is_one = |times: &PassTimes| times.kind == kind && times.wall_ns > 0;
        let passes = self.passes.iter().skip(1).filter(|(_, times)| is_one(times));
        passes.map(|(_, times)| compute_s(times)).min_by(f64::total_cmp)
    }

    /// Returns whether the latest passes of this kind all took another time than predicted, and
    /// another than when the plan was last considered. Then considers the plan as of now.
    pub(crate) fn differs(&mut self, kind: u64, predicted_s: f64, replans: u64) -> bool {
        let latest = self.passes.iter().rev().filter(|(_, times)| times.kind == kind).take(SHOWS);
        let latest = latest.filter(|(_, times)| times.replans == replans);
        let mut walls: Vec<f64> = latest.map(|(_, times)| times.wall_ns as f64 / 1e9).collect();
        if walls.len() < SHOWS {
            return false;
        }
        walls.sort_by(f64::total_cmp);
        let median = walls[SHOWS / 2];
        let differs_from = |expected: f64| {
            walls.iter().all(|wall| *wall > expected * (1.0 + LIKE))
                || walls.iter().all(|wall| *wall < expected * (1.0 - LIKE))
        };
        let considered = self.considered.filter(|(of, _)| *of == kind);
        if !differs_from(predicted_s) || considered.is_some_and(|(_, at)| !differs_from(at)) {
            return false;
        }
        self.considered = Some((kind, median));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a pass alone.
    fn pass(log: &mut PassLog, id: u64, wall_ms: u64) {
        log.begin(PassId(id), true, PassTimes::default(), id * 1_000_000_000);
        let now_ns = id * 1_000_000_000 + wall_ms * 1_000_000;
        let (begun_ns, times) = log.end(PassId(id), PassTimes::default(), now_ns).unwrap();
        log.add(begun_ns, times);
    }

    #[test]
    fn only_a_lasting_difference_counts() {
        let mut log = PassLog::default();
        for (id, wall_ms) in [100, 150, 100, 150, 95, 109].into_iter().enumerate() {
            pass(&mut log, id as u64, wall_ms);
            assert!(!log.differs(0, 0.1, 0), "after pass {id}");
        }
        for id in 6..8 {
            pass(&mut log, id, 150);
            assert!(!log.differs(0, 0.1, 0), "two passes can be chance");
        }
        pass(&mut log, 8, 150);
        assert!(log.differs(0, 0.1, 0));
        pass(&mut log, 9, 150);
        assert!(!log.differs(0, 0.1, 0), "the plan was considered at this speed");
        for id in 10..13 {
            pass(&mut log, id, 60);
        }
        assert!(log.differs(0, 0.1, 0));
        assert!(!log.differs(0, 0.1, 1), "no pass ran with the second plan");
    }

    #[test]
    fn a_pass_with_company_is_not_logged() {
        let mut log = PassLog::default();
        log.begin(PassId(1), true, PassTimes::default(), 0);
        log.begin(PassId(2), false, PassTimes::default(), 5);
        assert_eq!(log.end(PassId(1), PassTimes::default(), 10), None);
        assert_eq!(log.end(PassId(2), PassTimes::default(), 12), None);
        pass(&mut log, 3, 1);
        assert_eq!(log.passes()[0].wall_ns, 1_000_000);
        assert_eq!(log.span_ns(), 1_000_000);
    }
}
