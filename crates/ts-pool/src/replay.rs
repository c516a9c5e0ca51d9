// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocation logs as RMM's `logging_resource_adaptor` writes them, and what a pool makes of them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use ts_streams::{Device, StreamPriority};

use crate::{DeviceBuffer, Error, ErrorKind, StreamOrderedAllocator};

/// What a program allocated and freed, in the order in which it did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocationLog {
    events: Vec<LogEvent>,
}

/// A line of an [`AllocationLog`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEvent {
    /// Whether it allocates; else it frees.
    pub allocates: bool,
    /// Where the memory was.
    pub pointer: u64,
    /// How many bytes it is.
    pub bytes: usize,
    /// What the stream was called, as a number.
    pub stream: u64,
}

/// What a pool made of a log. Bytes are those that were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Replay {
    /// Allocations that the pool made.
    pub allocations: usize,
    /// Frees of these.
    pub frees: usize,
    /// Allocations that it refused for lack of memory.
    pub refused: usize,
    /// Frees of what the log does not say was allocated, or what was refused.
    pub unmatched: usize,
    /// Streams.
    pub streams: usize,
    /// The most that was allocated at any time.
    pub peak_bytes: usize,
    /// What the pool held when it was over.
    pub capacity_bytes: usize,
}

impl AllocationLog {
    /// Reads the columns `Thread,Time,Action,Pointer,Size,Stream`, with or without that header.
    /// Actions are `allocate`, `free` or `deallocate`, and `allocate failure`, which is passed
    /// over. Numbers are decimal or, behind `0x`, hexadecimal; streams can be words.
    ///
    /// # Errors
    /// [`Error::BadLog`], with the line.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut words = HashMap::new();
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let events = lines.filter_map(|(number, line)| {
            event(line, &mut words)
                .map_err(|reason| Error::BadLog { line: number + 1, reason })
                .transpose()
        });
        Ok(Self { events: events.collect::<Result<_, _>>()? })
    }

    /// Its lines.
    pub fn events(&self) -> &[LogEvent] {
        &self.events
    }

    /// Does the same with a pool, each of the log's streams one of the device's. What is freed on
    /// another stream than it was allocated for is free when that has done what it was given. What
    /// the log leaves allocated is freed in the end.
    ///
    /// # Errors
    /// [`Error::Device`]. Want of memory is none: it is counted.
    pub fn replay<D: Device>(
        &self,
        device: &D,
        pool: &impl StreamOrderedAllocator<D>,
    ) -> Result<Replay, Error> {
        let mut streams: HashMap<u64, D::Stream> = HashMap::new();
        // A pointer that is there twice was freed late by another thread.
        let mut live: HashMap<u64, Vec<(DeviceBuffer<D>, u64)>> = HashMap::new();
        let (mut replay, mut bytes) = (Replay::default(), 0);
        for event in &self.events {
            let stream = match streams.entry(event.stream) {
                Entry::Occupied(there) => there.into_mut(),
                Entry::Vacant(place) => place.insert(device.create_stream(StreamPriority::Normal)?),
            };
            if event.allocates {
                let layout = std::alloc::Layout::from_size_align(event.bytes, 1);
                let layout = layout.map_err(|_| Error::NeverFits {
                    requested_bytes: event.bytes,
                    capacity_bytes: isize::MAX as usize,
                })?;
                match pool.allocate(layout, stream) {
                    Ok(buffer) => {
                        bytes += buffer.len();
                        live.entry(event.pointer).or_default().push((buffer, event.stream));
                        replay.allocations += 1;
                        replay.peak_bytes = replay.peak_bytes.max(bytes);
                    }
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Full | ErrorKind::NeverFits) =>
                    {
                        replay.refused += 1;
                    }
                    Err(error) => return Err(error),
                }
                continue;
            }
            match live.get_mut(&event.pointer).and_then(Vec::pop) {
                Some((buffer, owner)) => {
                    if owner != event.stream {
                        pool.record_use(&buffer, stream)?;
                    }
                    bytes -= buffer.len();
                    replay.frees += 1;
                }
                None => replay.unmatched += 1,
            }
        }
        (replay.streams, replay.capacity_bytes) = (streams.len(), pool.stats().capacity_bytes);
        Ok(replay)
    }
}

/// One line; `None` for the header and for allocations that failed.
fn event(line: &str, words: &mut HashMap<String, u64>) -> Result<Option<LogEvent>, String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [_, _, action, pointer, bytes, stream] = fields[..] else {
        return Err(format!("{} columns, not 6", fields.len()));
    };
    let allocates = match action {
        "Action" | "allocate failure" => return Ok(None),
        "allocate" => true,
        "free" | "deallocate" => false,
        other => return Err(format!("the action `{other}`")),
    };
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    let pointer = number(pointer).ok_or_else(|| format!("the pointer `{pointer}`"))?;
    let bytes = bytes.parse().map_err(|_| format!("the size `{bytes}`"))?;
    // Words such as `per-thread default` are streams of their own, at numbers that are no pointers.
    let next = u64::MAX - words.len() as u64;
    let stream = number(stream).unwrap_or_else(|| *words.entry(stream.into()).or_insert(next));
    Ok(Some(LogEvent { allocates, pointer, bytes, stream }))
}
