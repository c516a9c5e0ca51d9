// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replays allocation logs of RMM's `logging_resource_adaptor` against a pool.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use ts_streams::{Device, StreamPriority};

use crate::{DeviceBuffer, Error, ErrorKind, StreamOrderedAllocator};

/// The allocations and frees of a program, in order.
///
/// # Examples
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
    /// Size of the memory in bytes.
    pub bytes: usize,
    /// Number of the stream. The parser assigns a number to each stream name that is not a number.
    pub stream: u64,
}

/// The outcome of [`AllocationLog::replay`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Replay {
    /// Number of allocations that succeeded.
    pub allocations: usize,
    /// Number of frees of memory that the replay had allocated.
    pub frees: usize,
    /// Number of allocations that failed because the pool had too little memory.
    pub refused: usize,
    /// Number of frees of memory that the log had not allocated, or whose allocation failed in the
    /// replay.
    pub unmatched: usize,
    /// Number of streams that the log uses.
    pub streams: usize,
    /// The most bytes that were ever allocated at the same time, as a sum of requested sizes.
    pub peak_bytes: usize,
    /// Size of the pool at the end, in bytes allocated from the device.
    pub capacity_bytes: usize,
}

impl AllocationLog {
    /// Parses comma-separated lines with the columns `Thread,Time,Action,Pointer,Size,Stream`. The
    /// header line is optional.
    ///
    /// - The actions are `allocate`, `free`, `deallocate`, and `allocate failure`, which is
    ///   skipped.
    /// - Pointers are decimal numbers, or hexadecimal numbers with the prefix `0x`.
    /// - Sizes are decimal numbers, in bytes.
    /// - Streams are numbers like pointers, or names.
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
    /// The log may free memory on a stream other than the one that allocated it. The replay then
    /// records a use by the stream that frees the memory, before the free. Memory that the log does
    /// not free is freed at the end.
    ///
    /// # Errors
    /// - [`Error::Device`]: the device fails.
    /// - [`Error::NeverFits`]: a size exceeds the address space.
    /// - [`Error::TooManyStreams`]: the log uses more streams than the pool supports.
    ///
    /// An allocation that fails for lack of memory is not an error. [`Replay::refused`] counts it.
    pub fn replay<D: Device>(
        &self,
        device: &D,
        pool: &impl StreamOrderedAllocator<D>,
    ) -> Result<Replay, Error> {
        let mut streams: HashMap<u64, D::Stream> = HashMap::new();
        // The log can allocate a pointer twice without a free in between, if another thread logged
        // the free late.
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

/// Parses one line. Returns `None` for the header and for a failed allocation. An error is the
/// description of the problem.
fn parse_line(line: &str, names: &mut HashMap<String, u64>) -> Result<Option<LogEvent>, String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [_, _, action, pointer, bytes, stream] = fields[..] else {
        return Err(format!(
            "expected the 6 columns Thread,Time,Action,Pointer,Size,Stream, got {}",
            fields.len()
        ));
    };
    let allocates = match action {
        "Action" | "allocate failure" => return Ok(None),
        "allocate" => true,
        "free" | "deallocate" => false,
        other => {
            return Err(format!(
                "unknown action {other:?}: expected allocate, \"allocate failure\", free or \
                 deallocate"
            ));
        }
    };
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    let pointer = number(pointer).ok_or_else(|| {
        format!(
            "invalid pointer {pointer:?}: expected a decimal number, or a hexadecimal number after \
             0x, below 2^64"
        )
    })?;
    let bytes = bytes.parse().map_err(|_| {
        format!("invalid size {bytes:?}: expected a decimal 64-bit number of bytes")
    })?;
    // Stream names such as `per-thread default` get numbers downwards from `u64::MAX`. Streams that
    // are pointers never have such numbers.
    let next = u64::MAX - names.len() as u64;
    let stream = number(stream).unwrap_or_else(|| *names.entry(stream.into()).or_insert(next));
    Ok(Some(LogEvent { allocates, pointer, bytes, stream }))
}
