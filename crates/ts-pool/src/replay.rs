// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replays allocation logs of RMM's `logging_resource_adaptor` against a pool.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use ts_streams::{Device, StreamPriority};

use crate::{DeviceBuffer, Error, ErrorKind, StreamOrderedAllocator};

/// The allocations and frees of a program, in order.
///
/// ```
/// use ts_pool::ts_streams::CpuDevice;
/// use ts_pool::{AllocationLog, OrderedOptions, StreamOrderedPool};
///
/// let log = AllocationLog::parse(
///     "Thread,Time,Action,Pointer,Size,Stream\n\
///      1,14:21:19.998,allocate,0x30a000000,256,0x2\n\
///      1,14:21:32.661,free,0x30a000000,256,0x2\n",
/// )?;
/// let device = CpuDevice::new()?;
/// let pool = StreamOrderedPool::new(device.clone(), OrderedOptions::default());
/// let replay = log.replay(&device, &pool)?;
/// assert_eq!((replay.allocations, replay.frees, replay.peak_bytes), (1, 1, 256));
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocationLog {
    events: Vec<LogEvent>,
}

/// One allocation or free in an [`AllocationLog`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEvent {
    /// `true` for an allocation, `false` for a free.
    pub allocates: bool,
    /// Address of the memory.
    pub pointer: u64,
    /// Size of the memory.
    pub bytes: usize,
    /// Number of the stream. Stream names that are not numbers are assigned one each.
    pub stream: u64,
}

/// The outcome of [`AllocationLog::replay`]. Byte counts are of requested sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Replay {
    /// Allocations that succeeded.
    pub allocations: usize,
    /// Frees of memory that the replay had allocated.
    pub frees: usize,
    /// Allocations that failed because the pool had too little memory.
    pub refused: usize,
    /// Frees of memory that the log does not allocate, or whose allocation failed.
    pub unmatched: usize,
    /// Number of streams.
    pub streams: usize,
    /// The most bytes that were ever allocated at the same time.
    pub peak_bytes: usize,
    /// Size of the pool at the end, in bytes allocated from the device.
    pub capacity_bytes: usize,
}

impl AllocationLog {
    /// Parses lines of the columns `Thread,Time,Action,Pointer,Size,Stream`, with or without that
    /// header.
    ///
    /// The actions are `allocate`, `free`, `deallocate`, and `allocate failure`, which is skipped.
    /// Pointers and streams are decimal numbers, or hexadecimal numbers with the prefix `0x`. Sizes
    /// are decimal. Streams can also be names.
    ///
    /// # Errors
    /// Returns [`Error::BadLog`] with the number of the first invalid line.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut names = HashMap::new();
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let events = lines.filter_map(|(number, line)| {
            parse_line(line, &mut names)
                .map_err(|reason| Error::BadLog { line: number + 1, reason })
                .transpose()
        });
        Ok(Self { events: events.collect::<Result<_, _>>()? })
    }

    /// Returns the allocations and frees in order.
    pub fn events(&self) -> &[LogEvent] {
        &self.events
    }

    /// Repeats the allocations and frees on `pool`, with one stream of `device` for each stream of
    /// the log.
    ///
    /// A free on a stream other than the one of the allocation first records a use by that stream.
    /// Memory that the log does not free is freed at the end.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the device fails, and [`Error::NeverFits`] if a size exceeds
    /// the address space. Allocations that fail for lack of memory are counted in
    /// [`Replay::refused`].
    pub fn replay<D: Device>(
        &self,
        device: &D,
        pool: &impl StreamOrderedAllocator<D>,
    ) -> Result<Replay, Error> {
        let mut streams: HashMap<u64, D::Stream> = HashMap::new();
        // A pointer can be allocated twice without a free in between if another thread logged the
        // free late.
        let mut live: HashMap<u64, Vec<(DeviceBuffer<D>, u64)>> = HashMap::new();
        let (mut replay, mut bytes) = (Replay::default(), 0);
        for event in &self.events {
            let stream = match streams.entry(event.stream) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(device.create_stream(StreamPriority::Normal)?),
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

/// Parses one line. Returns `None` for the header and for failed allocations.
fn parse_line(line: &str, names: &mut HashMap<String, u64>) -> Result<Option<LogEvent>, String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [_, _, action, pointer, bytes, stream] = fields[..] else {
        return Err(format!("expected 6 columns, got {}", fields.len()));
    };
    let allocates = match action {
        "Action" | "allocate failure" => return Ok(None),
        "allocate" => true,
        "free" | "deallocate" => false,
        other => return Err(format!("unknown action {other:?}")),
    };
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    let pointer = number(pointer).ok_or_else(|| format!("invalid pointer {pointer:?}"))?;
    let bytes = bytes.parse().map_err(|_| format!("invalid size {bytes:?}"))?;
    // Names such as `per-thread default` get numbers from the top, which are not valid pointers.
    let next = u64::MAX - names.len() as u64;
    let stream = number(stream).unwrap_or_else(|| *names.entry(stream.into()).or_insert(next));
    Ok(Some(LogEvent { allocates, pointer, bytes, stream }))
}
