// SPDX-License-Identifier: MIT OR Apache-2.0
//! Happens-before, by vector clocks (Mattern, 1989): which accesses to memory nothing orders.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::StreamId;
use crate::memory::MemoryRange;

/// How many operations of each thread came before: of streams, and of hosts, each as its devices
/// see it.
pub(crate) type Clock = BTreeMap<StreamId, u64>;

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
    write: Option<(StreamId, Access)>,
    /// Since then, the last of each thread.
    reads: Vec<(StreamId, Access)>,
}

#[derive(Debug)]
pub(crate) struct Detector {
    /// What the host goes by: a name that no stream has.
    host: StreamId,
    /// What each has seen.
    clocks: HashMap<StreamId, Clock>,
    /// By their first byte.
    uses: BTreeMap<usize, Uses>,
    races: Vec<Race>,
}

impl Detector {
    /// `host` is a name that no stream has.
    pub(crate) fn new(host: StreamId) -> Self {
        Self { host, clocks: HashMap::new(), uses: BTreeMap::new(), races: Vec::new() }
    }

    pub(crate) fn races(&self) -> &[Race] {
        &self.races
    }

    /// Something is submitted to a stream: the host had done what it had done. What came before it,
    /// itself included.
    pub(crate) fn submit(&mut self, stream: StreamId) -> Clock {
        let host = self.clock(self.host).clone();
        self.tick(stream, &host)
    }

    /// A stream will wait for what came before a point.
    pub(crate) fn stream_joins(&mut self, stream: StreamId, history: &Clock) {
        join(self.clock(stream), history);
    }

    /// The host knows that a point was reached.
    pub(crate) fn host_joins(&mut self, history: &Clock) {
        join(self.clock(self.host), history);
    }

    /// The host does something itself.
    pub(crate) fn host_acts(&mut self) -> Clock {
        self.tick(self.host, &Clock::new())
    }

    /// Notes what is used, if it may be.
    ///
    /// # Errors
    /// The first race with what came before. All are kept; what is refused has not happened.
    pub(crate) fn check(
        &mut self,
        stream: Option<StreamId>,
        history: &Clock,
        reads: &[MemoryRange],
        writes: &[MemoryRange],
    ) -> Result<(), Race> {
        let thread = stream.unwrap_or(self.host);
        let before = self.races.len();
        for notes in [false, true] {
            for (ranges, writes) in [(reads, false), (writes, true)] {
                let access = Access { stream, operation: history[&thread], writes };
                for range in ranges.iter().filter(|range| !range.is_empty()) {
                    let (begin, end) = (range.address(), range.address() + range.len());
                    self.access(thread, access, history, begin, end, notes);
                }
            }
            if let Some(race) = self.races.get(before) {
                return Err(*race);
            }
        }
        Ok(())
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

    /// Looks for races of an access, or else notes it.
    fn access(
        &mut self,
        thread: StreamId,
        access: Access,
        history: &Clock,
        begin: usize,
        end: usize,
        notes: bool,
    ) {
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
            if notes && access.writes {
                uses.write = Some((thread, access));
                uses.reads.clear();
            } else if notes {
                uses.reads.retain(|(other, _)| *other != thread);
                uses.reads.push((thread, access));
            } else {
                let mut conflicts =
                    uses.write.iter().chain(uses.reads.iter().filter(|_| access.writes));
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

    /// Cuts the run that `at` is in the middle of.
    fn cut(&mut self, at: usize) {
        let Some((_, uses)) =
            self.uses.range_mut(..at).next_back().filter(|(_, uses)| uses.end > at)
        else {
            return;
        };
        let tail = uses.clone();
        uses.end = at;
        self.uses.insert(at, tail);
    }

    fn clock(&mut self, thread: StreamId) -> &mut Clock {
        self.clocks.entry(thread).or_default()
    }

    fn tick(&mut self, thread: StreamId, seen: &Clock) -> Clock {
        let clock = self.clock(thread);
        join(clock, seen);
        *clock.entry(thread).or_default() += 1;
        clock.clone()
    }
}

/// Everything that either has seen.
fn join(clock: &mut Clock, other: &Clock) {
    for (&thread, &seen) in other {
        let mine = clock.entry(thread).or_default();
        *mine = (*mine).max(seen);
    }
}
