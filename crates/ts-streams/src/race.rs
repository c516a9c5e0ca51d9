// SPDX-License-Identifier: MIT OR Apache-2.0
//! Happens-before, by vector clocks (Mattern, 1989): which accesses to memory nothing orders.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::StreamId;
use crate::memory::MemoryRange;

/// How many operations of each thread came before: of the host, whose number is 0, and of streams.
pub(crate) type Clock = Vec<u64>;

/// Who used memory, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The stream, or `None` for the host.
    pub stream: Option<StreamId>,
    /// Which of its operations it was, from 1 on.
    pub operation: u64,
    /// Whether it writes.
    pub writes: bool,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.writes { "writes" } else { "reads" };
        match self.stream {
            Some(stream) => write!(f, "operation {} of stream {stream} {verb}", self.operation),
            None => write!(f, "the host {verb}"),
        }
    }
}

/// Two accesses to the same bytes, at least one of which writes, that nothing orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("race: {later} {len} bytes at {address:#x}, and nothing orders it after: {earlier} there")]
pub struct Race {
    /// The one that was submitted first.
    pub earlier: Access,
    /// The other.
    pub later: Access,
    /// Where.
    pub address: usize,
    /// How many bytes.
    pub len: usize,
}

/// What was done last to a run of bytes.
#[derive(Debug, Clone, Default)]
struct Uses {
    end: usize,
    write: Option<(usize, Access)>,
    /// Since then, the last of each thread.
    reads: Vec<(usize, Access)>,
}

#[derive(Debug, Default)]
pub(crate) struct Detector {
    /// The number of each stream's thread.
    threads: HashMap<StreamId, usize>,
    /// What each has seen.
    clocks: Vec<Clock>,
    /// By their first byte.
    uses: BTreeMap<usize, Uses>,
    races: Vec<Race>,
}

impl Detector {
    pub(crate) fn races(&self) -> &[Race] {
        &self.races
    }

    /// Something is submitted to a stream: the host had done what it had done. What came before it, itself included.
    pub(crate) fn submit(&mut self, stream: StreamId) -> Clock {
        let thread = self.thread(Some(stream));
        let host = self.clock(0).clone();
        self.tick(thread, &host)
    }

    /// A stream will wait for what came before a point.
    pub(crate) fn stream_joins(&mut self, stream: StreamId, history: &Clock) {
        let thread = self.thread(Some(stream));
        join(self.clock(thread), history);
    }

    /// The host knows that a point was reached.
    pub(crate) fn host_joins(&mut self, history: &Clock) {
        join(self.clock(0), history);
    }

    /// The host does something itself.
    pub(crate) fn host_acts(&mut self) -> Clock {
        self.tick(0, &Clock::new())
    }

    /// # Errors
    /// The first race with what came before; all are noted.
    pub(crate) fn check(
        &mut self,
        stream: Option<StreamId>,
        history: &Clock,
        reads: &[MemoryRange],
        writes: &[MemoryRange],
    ) -> Result<(), Race> {
        let thread = self.thread(stream);
        let before = self.races.len();
        for (ranges, writes) in [(reads, false), (writes, true)] {
            let access = Access { stream, operation: history[thread], writes };
            for range in ranges.iter().filter(|range| !range.is_empty()) {
                self.access(thread, access, history, range.address(), range.address() + range.len());
            }
        }
        self.races.get(before).map_or(Ok(()), |race| Err(*race))
    }

    /// Memory is gone, or new: what was done to it is over.
    pub(crate) fn forget(&mut self, range: MemoryRange) {
        let (begin, end) = (range.address(), range.address() + range.len());
        self.cut(begin);
        self.cut(end);
        let gone: Vec<usize> = self.uses.range(begin..end).map(|(&begin, _)| begin).collect();
        for begin in gone {
            self.uses.remove(&begin);
        }
    }

    fn access(&mut self, thread: usize, access: Access, history: &Clock, begin: usize, end: usize) {
        self.cut(begin);
        self.cut(end);
        let mut at = begin;
        while at < end {
            let next = self.uses.range(at..end).next().map(|(&begin, uses)| (begin, uses.end));
            let stop = match next {
                Some((first, stop)) if first == at => stop,
                Some((first, _)) => first,
                None => end,
            };
            let uses = self.uses.entry(at).or_insert_with(|| Uses { end: stop, ..Uses::default() });
            let conflicts = uses.write.iter().chain(uses.reads.iter().filter(|_| access.writes));
            let unseen = |(thread, access): &&(usize, Access)| {
                history.get(*thread).is_none_or(|&n| n < access.operation)
            };
            let race = conflicts.filter(unseen).map(|(_, earlier)| *earlier).next();
            if access.writes {
                uses.write = Some((thread, access));
                uses.reads.clear();
            } else {
                uses.reads.retain(|(other, _)| *other != thread);
                uses.reads.push((thread, access));
            }
            if let Some(earlier) = race {
                self.races.push(Race { earlier, later: access, address: at, len: stop - at });
            }
            at = stop;
        }
    }

    /// Cuts the run that `at` is in the middle of.
    fn cut(&mut self, at: usize) {
        let Some((_, uses)) = self.uses.range_mut(..at).next_back().filter(|(_, uses)| uses.end > at) else {
            return;
        };
        let tail = uses.clone();
        uses.end = at;
        self.uses.insert(at, tail);
    }

    fn thread(&mut self, stream: Option<StreamId>) -> usize {
        let next = self.threads.len() + 1;
        stream.map_or(0, |stream| *self.threads.entry(stream).or_insert(next))
    }

    fn clock(&mut self, thread: usize) -> &mut Clock {
        if self.clocks.len() <= thread {
            self.clocks.resize(thread + 1, Clock::new());
        }
        &mut self.clocks[thread]
    }

    fn tick(&mut self, thread: usize, seen: &Clock) -> Clock {
        let clock = self.clock(thread);
        join(clock, seen);
        if clock.len() <= thread {
            clock.resize(thread + 1, 0);
        }
        clock[thread] += 1;
        clock.clone()
    }
}

/// Everything that either has seen.
fn join(clock: &mut Clock, other: &Clock) {
    if clock.len() < other.len() {
        clock.resize(other.len(), 0);
    }
    clock.iter_mut().zip(other).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
}
