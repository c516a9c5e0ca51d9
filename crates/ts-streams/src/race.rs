// SPDX-License-Identifier: MIT OR Apache-2.0
//! Detection of unordered memory accesses, by vector clocks (Mattern, 1989).

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::StreamId;
use crate::range::MemoryRange;

/// A vector clock: for each thread, how many of its operations happened before. Each stream is a
/// thread, and so is the host of each device.
pub(crate) type Clock = BTreeMap<StreamId, u64>;

/// An access to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The stream, or `None` for the host.
    pub stream: Option<StreamId>,
    /// The number of the operation on its stream or on the host, from 1.
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

/// Two accesses to the same bytes, at least one of which writes, without an order between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "data race on {len} bytes at {address:#x}: {later} is not ordered after {earlier}; add a wait \
     between them"
)]
pub struct Race {
    /// The access that was submitted first.
    pub earlier: Access,
    /// The access that was submitted second.
    pub later: Access,
    /// The first address that both access.
    pub address: usize,
    /// Number of bytes in the conflicting range.
    pub len: usize,
}

/// The latest accesses to a range of bytes.
#[derive(Debug, Clone, Default)]
struct LatestAccesses {
    end: usize,
    write: Option<(StreamId, Access)>,
    /// The last read of each thread since that write.
    reads: Vec<(StreamId, Access)>,
}

#[derive(Debug)]
pub(crate) struct Detector {
    /// The identifier of the host, which no stream has.
    host: StreamId,
    /// What each thread has seen.
    clocks: HashMap<StreamId, Clock>,
    /// Accesses by the first byte of their range.
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

    /// Registers an operation submitted to a stream, and returns its history, itself included.
    /// Everything the host did before happens before it.
    pub(crate) fn submit(&mut self, stream: StreamId) -> Clock {
        let host = self.clock(self.host).clone();
        self.advance(stream, &host)
    }

    /// Orders a stream after a recorded point.
    pub(crate) fn stream_joins(&mut self, stream: StreamId, history: &Clock) {
        join(self.clock(stream), history);
    }

    /// Orders the host after a point that it has seen reached.
    pub(crate) fn host_joins(&mut self, history: &Clock) {
        join(self.clock(self.host), history);
    }

    /// Registers an action of the host, and returns its history.
    pub(crate) fn host_acts(&mut self) -> Clock {
        self.advance(self.host, &Clock::new())
    }

    /// Records accesses if they race with no earlier one.
    ///
    /// # Errors
    /// Returns the first race. All races are kept; the accesses of a refused operation are not
    /// recorded.
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

    /// Forgets all accesses to memory that was freed or newly allocated.
    pub(crate) fn forget(&mut self, range: MemoryRange) {
        let (begin, end) = (range.address(), range.address() + range.len());
        self.split(begin);
        self.split(end);
        let gone: Vec<usize> = self.accesses.range(begin..end).map(|(&begin, _)| begin).collect();
        for begin in gone {
            self.accesses.remove(&begin);
        }
    }

    /// Records an access if `records` is set; otherwise only looks for races with it.
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

    /// Splits the range that contains `at` in its middle.
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
