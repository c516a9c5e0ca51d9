// SPDX-License-Identifier: MIT OR Apache-2.0
//! Detection of unordered memory accesses with vector clocks (Mattern, 1989).

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::StreamId;
use crate::range::MemoryRange;

/// A vector clock: the number of operations of each thread that happened before a point. Each
/// stream counts as a thread. The host also counts as a thread, a separate one for each device.
pub(crate) type Clock = BTreeMap<StreamId, u64>;

/// An access to memory by a stream or by the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The stream, or `None` for the host.
    pub stream: Option<StreamId>,
    /// The number of the operation on its stream or on the host, counted from 1.
    pub operation: u64,
    /// Whether the access writes.
    pub writes: bool,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.writes { "write" } else { "read" };
        match self.stream {
            Some(stream) => write!(f, "operation {} of stream {stream} ({kind})", self.operation),
            None => write!(f, "the host ({kind})"),
        }
    }
}

/// Two unordered accesses to the same bytes, at least one of which writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "data race on {len} bytes at {address:#x}: {later} is not ordered after {earlier}; add a wait \
     between them"
)]
pub struct Race {
    /// The access that was made or submitted first.
    pub earlier: Access,
    /// The access that was made or submitted second.
    pub later: Access,
    /// The first address of the conflicting range.
    pub address: usize,
    /// Number of bytes in the conflicting range.
    pub len: usize,
}

/// The latest accesses to a range of bytes.
#[derive(Debug, Clone, Default)]
struct LatestAccesses {
    end: usize,
    write: Option<(StreamId, Access)>,
    /// The latest read of each thread since `write`.
    reads: Vec<(StreamId, Access)>,
}

#[derive(Debug)]
pub(crate) struct Detector {
    /// The identifier that stands for the host. No stream has this identifier.
    host: StreamId,
    /// The vector clock of each thread.
    clocks: HashMap<StreamId, Clock>,
    /// The latest accesses to each range, by the first address of the range. Ranges do not overlap.
    accesses: BTreeMap<usize, LatestAccesses>,
    races: Vec<Race>,
}

impl Detector {
    /// Creates a detector. `host` must be an identifier that no stream has.
    pub(crate) fn new(host: StreamId) -> Self {
        Self { host, clocks: HashMap::new(), accesses: BTreeMap::new(), races: Vec::new() }
    }

    pub(crate) fn races(&self) -> &[Race] {
        &self.races
    }

    /// Registers an operation submitted to a stream, and orders it after all earlier actions of the
    /// host. Returns the clock of the operation, which includes the operation itself.
    pub(crate) fn submit(&mut self, stream: StreamId) -> Clock {
        let host = self.clock(self.host).clone();
        self.advance(stream, &host)
    }

    /// Orders later operations of a stream after a recorded point with the clock `history`.
    pub(crate) fn stream_joins(&mut self, stream: StreamId, history: &Clock) {
        join(self.clock(stream), history);
    }

    /// Orders later actions of the host after a reached point with the clock `history`.
    pub(crate) fn host_joins(&mut self, history: &Clock) {
        join(self.clock(self.host), history);
    }

    /// Registers an action of the host, and returns the clock of the action.
    pub(crate) fn host_acts(&mut self) -> Clock {
        self.advance(self.host, &Clock::new())
    }

    /// Checks the accesses of an operation with the clock `history`, and records them if none races
    /// with an earlier access.
    ///
    /// # Errors
    /// Returns the first race, and records no access. [`races`](Self::races) then contains one race
    /// for each conflicting range of the operation.
    pub(crate) fn check(
        &mut self,
        stream: Option<StreamId>,
        history: &Clock,
        reads: &[MemoryRange],
        writes: &[MemoryRange],
    ) -> Result<(), Race> {
        let thread = stream.unwrap_or(self.host);
        let before = self.races.len();
        for records in [false, true] {
            for (ranges, writes) in [(reads, false), (writes, true)] {
                let access = Access { stream, operation: history[&thread], writes };
                for range in ranges.iter().filter(|range| !range.is_empty()) {
                    let (begin, end) = (range.address(), range.address() + range.len());
                    self.access(thread, access, history, begin, end, records);
                }
            }
            if let Some(race) = self.races.get(before) {
                return Err(*race);
            }
        }
        Ok(())
    }

    /// Removes all accesses to a range that was freed or newly allocated.
    pub(crate) fn forget(&mut self, range: MemoryRange) {
        let (begin, end) = (range.address(), range.address() + range.len());
        self.split(begin);
        self.split(end);
        let gone: Vec<usize> = self.accesses.range(begin..end).map(|(&begin, _)| begin).collect();
        for begin in gone {
            self.accesses.remove(&begin);
        }
    }

    /// Records an access if `records` is true. Otherwise only searches for earlier accesses that
    /// race with it.
    fn access(
        &mut self,
        thread: StreamId,
        access: Access,
        history: &Clock,
        begin: usize,
        end: usize,
        records: bool,
    ) {
        self.split(begin);
        self.split(end);
        let mut at = begin;
        while at < end {
            let next =
                self.accesses.range(at..end).next().map(|(&begin, accesses)| (begin, accesses.end));
            let stop = match next {
                Some((first, stop)) if first == at => stop,
                Some((first, _)) => first,
                None => end,
            };
            let accesses = self
                .accesses
                .entry(at)
                .or_insert_with(|| LatestAccesses { end: stop, ..LatestAccesses::default() });
            if records && access.writes {
                accesses.write = Some((thread, access));
                accesses.reads.clear();
            } else if records {
                accesses.reads.retain(|(other, _)| *other != thread);
                accesses.reads.push((thread, access));
            } else {
                let mut conflicts =
                    accesses.write.iter().chain(accesses.reads.iter().filter(|_| access.writes));
                let unseen = |(thread, access): &&(StreamId, Access)| {
                    history.get(thread).is_none_or(|&seen| seen < access.operation)
                };
                if let Some((_, earlier)) = conflicts.find(unseen).copied() {
                    self.races.push(Race { earlier, later: access, address: at, len: stop - at });
                }
            }
            at = stop;
        }
    }

    /// Splits the recorded range that contains `at` into two that meet at `at`.
    fn split(&mut self, at: usize) {
        let Some((_, accesses)) =
            self.accesses.range_mut(..at).next_back().filter(|(_, accesses)| accesses.end > at)
        else {
            return;
        };
        let tail = accesses.clone();
        accesses.end = at;
        self.accesses.insert(at, tail);
    }

    fn clock(&mut self, thread: StreamId) -> &mut Clock {
        self.clocks.entry(thread).or_default()
    }

    fn advance(&mut self, thread: StreamId, seen: &Clock) -> Clock {
        let clock = self.clock(thread);
        join(clock, seen);
        *clock.entry(thread).or_default() += 1;
        clock.clone()
    }
}

/// Sets `clock` to the element-wise maximum of both clocks.
fn join(clock: &mut Clock, other: &Clock) {
    for (&thread, &seen) in other {
        let mine = clock.entry(thread).or_default();
        *mine = (*mine).max(seen);
    }
}
