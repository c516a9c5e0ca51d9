// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records what an engine does and when.

use std::collections::HashMap;
use std::thread::ThreadId;

use ts_io::ReadPath;

use crate::unit::UnitId;

/// The most events that a trace contains.
const MOST_EVENTS: usize = 1 << 18;

/// What an event of a trace is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TraceKind {
    /// A pass that ran alone. `bytes` is the number of the pass.
    Pass,
    /// A call that waited for units.
    Wait,
    /// A lease of a unit.
    Use,
    /// A read of a part of a unit.
    Read(ReadPath),
    /// A part of a unit was decoded by a worker.
    Decode,
    /// A part of a unit was copied by a worker.
    Copy,
    /// A unit was compared with its checksums by a worker.
    Check,
    /// A part of a unit was encoded by a worker.
    Encode,
    /// A unit was evicted, after the event before. `bytes` is the memory of its slot.
    Evict,
    /// The memory that units and buffers occupy has changed to `bytes`.
    Memory,
    /// The engine switched to another plan.
    Replan,
}

/// An event of a trace. Moments have no duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceEvent {
    /// What the event is about.
    pub kind: TraceKind,
    /// The unit. A wait for several units has the first one. `None` for events without a unit, and
    /// for rows of tables.
    pub unit: Option<UnitId>,
    /// The beginning, in nanoseconds of the engine's clock.
    pub begin_ns: u64,
    /// The end, in nanoseconds of the engine's clock.
    pub end_ns: u64,
    /// The bytes that were read, decoded or copied, or that are occupied.
    pub bytes: u64,
    /// The number of the thread that waited for the unit or used it, from 0; 0 for other events.
    pub thread: u32,
}

impl TraceEvent {
    /// Returns an event of thread 0, without a unit and without bytes.
    pub(crate) fn new(kind: TraceKind, begin_ns: u64, end_ns: u64) -> Self {
        Self { kind, unit: None, begin_ns, end_ns, bytes: 0, thread: 0 }
    }

    pub(crate) fn of(self, unit: Option<UnitId>) -> Self {
        Self { unit, ..self }
    }

    pub(crate) fn bytes(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }
}

/// What an engine did in a period.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trace {
    /// The beginning of the period, in nanoseconds of the engine's clock.
    pub begin_ns: u64,
    /// The end of the period.
    pub end_ns: u64,
    /// The events, in the order in which the engine noticed their ends. An event may have begun
    /// before the trace.
    pub events: Vec<TraceEvent>,
    /// The number of events that are missing, because the trace was full.
    pub dropped: u64,
    /// The budget of the engine, in bytes.
    pub budget_bytes: usize,
    /// The names of the units, indexed by [`UnitId`].
    pub units: Vec<String>,
}

/// The events of a running trace.
#[derive(Debug, Default)]
pub(crate) struct TraceLog {
    begin_ns: u64,
    events: Vec<TraceEvent>,
    dropped: u64,
    /// When each read in flight was submitted, by token, in nanoseconds.
    submitted: HashMap<u64, u64>,
    threads: Vec<ThreadId>,
    memory_bytes: Option<usize>,
}

impl TraceLog {
    pub(crate) fn new(begin_ns: u64) -> Self {
        Self { begin_ns, ..Self::default() }
    }

    pub(crate) fn add(&mut self, event: TraceEvent) {
        if self.events.len() < MOST_EVENTS {
            self.events.push(event);
        } else {
            self.dropped += 1;
        }
    }

    /// Returns the latest end of an event, in nanoseconds.
    pub(crate) fn latest_ns(&self) -> u64 {
        self.events.last().map_or(self.begin_ns, |event| event.end_ns)
    }

    /// Adds an event of a thread.
    pub(crate) fn add_on(&mut self, thread: ThreadId, event: TraceEvent) {
        let known = self.threads.iter().position(|&known| known == thread);
        let number = known.unwrap_or_else(|| {
            self.threads.push(thread);
            self.threads.len() - 1
        });
        self.add(TraceEvent { thread: number as u32, ..event });
    }

    pub(crate) fn submitted(&mut self, token: u64, now_ns: u64) {
        self.submitted.insert(token, now_ns);
    }

    /// Adds a read that has ended. A read that was submitted before the trace began is left out.
    pub(crate) fn read(
        &mut self,
        token: u64,
        unit: Option<UnitId>,
        paths: &[(ReadPath, usize)],
        now_ns: u64,
    ) {
        let Some(begin_ns) = self.submitted.remove(&token) else { return };
        for &(path, bytes) in paths {
            self.add(
                TraceEvent::new(TraceKind::Read(path), begin_ns, now_ns)
                    .of(unit)
                    .bytes(bytes as u64),
            );
        }
    }

    pub(crate) fn memory(&mut self, bytes: usize, now_ns: u64) {
        if self.memory_bytes.replace(bytes) != Some(bytes) {
            self.add(TraceEvent::new(TraceKind::Memory, now_ns, now_ns).bytes(bytes as u64));
        }
    }

    pub(crate) fn end(self, end_ns: u64, budget_bytes: usize, units: Vec<String>) -> Trace {
        let Self { begin_ns, events, dropped, .. } = self;
        Trace { begin_ns, end_ns, events, dropped, budget_bytes, units }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_trace_counts_what_is_missing() {
        let mut log = TraceLog::new(5);
        for i in 0..MOST_EVENTS as u64 + 3 {
            log.add(TraceEvent::new(TraceKind::Pass, i, i + 1));
        }
        let trace = log.end(9, 100, Vec::new());
        assert_eq!((trace.events.len(), trace.dropped), (MOST_EVENTS, 3));
        assert_eq!((trace.begin_ns, trace.end_ns), (5, 9));
    }

    #[test]
    fn reads_from_before_the_trace_are_left_out() {
        let mut log = TraceLog::new(5);
        log.read(1, None, &[(ReadPath::Direct, 10)], 6);
        log.submitted(2, 7);
        log.read(2, Some(UnitId(3)), &[(ReadPath::Direct, 10), (ReadPath::Buffered, 5)], 9);
        log.memory(4, 9);
        log.memory(4, 10);
        let events = log.end(11, 100, Vec::new()).events;
        let read = TraceEvent::new(TraceKind::Read(ReadPath::Direct), 7, 9).of(Some(UnitId(3)));
        assert_eq!(events[0], read.bytes(10));
        assert_eq!(events.len(), 3, "two paths, and one size of memory");
    }
}
