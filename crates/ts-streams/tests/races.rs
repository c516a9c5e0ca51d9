// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares the race detector with a naive oracle, which searches paths in the graph of all
//! operations.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::alloc::Layout;

use proptest::prelude::*;
use ts_streams::{
    Device, Error, MemoryKind, MemoryRange, RawMemory, SimDevice, SimOptions, Stream,
    StreamPriority,
};

const BLOCK: usize = 64;
const BLOCKS: usize = 4;
const STREAMS: usize = 3;

/// An operation on a stream: a copy between blocks, or a fill if `from` is `None`.
#[derive(Debug, Clone)]
struct Operation {
    stream: usize,
    to: usize,
    from: Option<usize>,
    /// Number of blocks that the operation copies or fills.
    len: usize,
}

fn operation() -> impl Strategy<Value = Operation> {
    let from = prop_oneof![Just(None), (0..BLOCKS).prop_map(Some)];
    (0..STREAMS, 0..BLOCKS, from, 1..=2usize).prop_map(|(stream, to, from, len)| {
        let len = len.min(BLOCKS - to).min(BLOCKS - from.unwrap_or(0));
        let overlaps = |from: &usize| *from < to + len && to < from + len;
        Operation { stream, to, from: from.filter(|from| !overlaps(from)), len }
    })
}

impl Operation {
    fn conflicts(&self, other: &Self) -> bool {
        let overlap = |a: usize, alen: usize, b: usize, blen: usize| a < b + blen && b < a + alen;
        let touches = |writer: &Self, user: &Self| {
            overlap(writer.to, writer.len, user.to, user.len)
                || user.from.is_some_and(|from| overlap(writer.to, writer.len, from, user.len))
        };
        touches(self, other) || touches(other, self)
    }
}

/// Returns whether the operation `later` is ordered after `earlier`, by stream order or by waits.
fn is_ordered(program: &[Operation], waits: &[Vec<usize>], earlier: usize, later: usize) -> bool {
    let mut reached = vec![false; program.len()];
    reached[later] = true;
    for i in (earlier..=later).rev().filter(|&i| i > 0) {
        if reached[i] {
            let same = (0..i).rev().find(|&before| program[before].stream == program[i].stream);
            waits[i].iter().chain(&same).for_each(|&before| reached[before] = true);
        }
    }
    reached[earlier]
}

/// Runs a program in which each operation waits for those in `waits`. Returns the number of races.
fn run(program: &[Operation], waits: &[Vec<usize>], seed: u64) -> usize {
    let device = SimDevice::new(SimOptions::default().with_seed(seed));
    let memory = device
        .allocate(Layout::from_size_align(BLOCK * BLOCKS, 64).unwrap(), MemoryKind::Device)
        .unwrap();
    let streams = [0; STREAMS].map(|_| device.create_stream(StreamPriority::Normal).unwrap());
    let blocks = |at: usize, len: usize| -> MemoryRange {
        memory.range().slice(at * BLOCK..(at + len) * BLOCK)
    };
    let mut events = Vec::new();
    for (i, operation) in program.iter().enumerate() {
        let (stream, to) = (&streams[operation.stream], blocks(operation.to, operation.len));
        waits[i].iter().for_each(|&before| stream.wait(&events[before]).unwrap());
        // SAFETY: a simulated device runs one operation at a time, ordered or not; the memory
        // outlives the work.
        let submitted = unsafe {
            match operation.from {
                Some(from) => stream.copy(to, blocks(from, operation.len)),
                None => stream.fill(to, i as u8),
            }
        };
        assert!(matches!(submitted, Ok(()) | Err(Error::Race(_))), "{submitted:?}");
        let event = device.create_event().unwrap();
        stream.record(&event).unwrap();
        events.push(event);
    }
    device.synchronize().unwrap();
    device.races().len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_missing_dependency_is_found_and_nothing_else(
        program in prop::collection::vec(operation(), 2..30),
        missing in any::<prop::sample::Index>(),
        seed: u64,
    ) {
        // Each operation waits for all earlier operations that it conflicts with.
        let all: Vec<Vec<usize>> = (0..program.len())
            .map(|i| (0..i).filter(|&before| program[before].conflicts(&program[i])).collect())
            .collect();
        prop_assert_eq!(run(&program, &all, seed), 0);
        let edges: Vec<(usize, usize)> = all
            .iter()
            .enumerate()
            .flat_map(|(i, waits)| waits.iter().map(move |&before| (before, i)))
            .collect();
        prop_assume!(!edges.is_empty());
        let (before, after) = edges[missing.index(edges.len())];
        let mut seeded = all.clone();
        seeded[after].retain(|&wait| wait != before);
        // Without this wait, other waits or the stream order may still order the two operations.
        let needed = !is_ordered(&program, &seeded, before, after);
        prop_assert_eq!(run(&program, &seeded, seed) > 0, needed);
    }
}
