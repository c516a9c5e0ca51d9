// SPDX-License-Identifier: MIT OR Apache-2.0
//! The statistics of an engine.

use ts_io::ReadPath;
use ts_streams::PooledStreamStats;

use crate::config::ComputeTimes;
use crate::plan::{Bottleneck, Plan, Rates};

/// The statistics of one unit since the engine was created.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnitStats {
    /// The name of the unit.
    pub name: String,
    /// Whether the unit is resident.
    pub resident: bool,
    /// Whether the unit is kept in memory compressed.
    pub compressed: bool,
    /// Whether the unit is kept on the host, and copied to a device with its own memory.
    pub on_host: bool,
    /// Whether the unit is kept, decoded or compressed, in memory that other processes can share.
    pub shared: bool,
    /// Whether data select the unit ([`Access::Routed`](crate::Access::Routed)).
    pub routed: bool,
    /// Whether the unit is in memory now.
    pub present: bool,
    /// How often the unit was expected ([`Engine::expect`](crate::Engine::expect)).
    pub touched: u64,
    /// How often the unit was in memory or being loaded when it was expected.
    pub hits: u64,
    /// The size of the unit's slot, in bytes.
    pub slot_bytes: usize,
    /// The number of loads of the unit from storage that have ended, including failed ones.
    pub loads: u64,
    /// The number of bytes of the unit that were read from storage, over all loads.
    pub read_bytes: u64,
    /// The total duration of the unit's loads, in nanoseconds. A load lasts from the
    /// time its reads are queued until the unit is usable or the load has failed.
    pub load_ns: u64,
    /// The number of leases of the unit that have ended, except those from
    /// [`Engine::acquire_all_resident`](crate::Engine::acquire_all_resident).
    pub uses: u64,
    /// The total duration of the unit's leases, in nanoseconds.
    pub use_ns: u64,
    /// The number of calls that returned a lease of the unit after a wait, for this unit or for
    /// another unit of the same call.
    pub stalls: u64,
    /// The total duration of the calls that `stalls` counts, in nanoseconds.
    pub stall_ns: u64,
}

/// The use of routed units since the engine was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoutedStats {
    /// The number of expected visits.
    pub touched: u64,
    /// The number of bytes that these visits would have read if nothing had been in memory.
    pub touched_bytes: u64,
    /// The number of expected visits to units that were in memory or being loaded.
    pub hits: u64,
    /// The number of routed units that were evicted.
    pub evictions: u64,
    /// The number of loads that [`Engine::guess`](crate::Engine::guess) started.
    pub guesses: u64,
    /// The number of these loads whose unit was then expected. `hits` includes them.
    pub right_guesses: u64,
    /// The number of these loads that were cancelled before all of the unit was read.
    pub cancelled_guesses: u64,
    /// The number of bytes that these loads have read.
    pub guessed_bytes: u64,
}

/// The rows that calls of [`Engine::gather`](crate::Engine::gather) asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableStats {
    /// The number of rows.
    pub rows: u64,
    /// The number of these rows that were in memory from earlier calls.
    pub cached_rows: u64,
    /// The number of bytes to read for the others, which includes the alignment of direct reads.
    pub read_bytes: u64,
}

/// What the time of one pass went into, in nanoseconds. The pass ran alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassTimes {
    /// The number of the kind of the pass. Passes are of the same kind if they visit the same units
    /// in the same order, and compute for about as long. 0 if the pass visited no unit.
    pub kind: u64,
    /// The duration of the pass.
    pub wall_ns: u64,
    /// How long calls waited for units or for rows.
    pub waited_ns: u64,
    /// How long the same calls took besides waiting.
    pub calls_ns: u64,
    /// The time with at least one read in flight.
    pub reading_ns: u64,
    /// The processor time of decoding.
    pub decoding_ns: u64,
    /// The time of copying to a device with its own memory, including waits for the work that used
    /// the same memory before.
    pub copying_ns: u64,
    /// The number of bytes that were read.
    pub read_bytes: u64,
    /// The number of bytes that were decoded.
    pub decoded_bytes: u64,
    /// How many times the plan had changed before the pass.
    pub replans: u64,
}

impl PassTimes {
    /// Returns the time of the computation: all time except that of waiting and of calls.
    pub fn compute_ns(&self) -> u64 {
        self.wall_ns.saturating_sub(self.waited_ns + self.calls_ns)
    }

    /// Returns the part that limited the speed of the pass, if `workers` threads decode.
    pub fn bottleneck(&self, workers: usize) -> Bottleneck {
        let share = |ns: u64| ns as f64 / self.wall_ns.max(1) as f64;
        let decoding = share(self.decoding_ns) / workers.max(1) as f64;
        let (reading, copying) = (share(self.reading_ns), share(self.copying_ns));
        if share(self.waited_ns) < 0.05 {
            Bottleneck::Compute
        } else if decoding > reading.max(copying) {
            Bottleneck::Decoding
        } else if copying > reading {
            Bottleneck::Copying
        } else {
            Bottleneck::Storage
        }
    }
}

/// The memory use and the statistics of an engine.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EngineStats {
    /// The budget, in bytes.
    pub budget_bytes: usize,
    /// The part of the budget that may be used, in bytes: all of it, unless
    /// [`Engine::set_limit`](crate::Engine::set_limit) was called.
    pub limit_bytes: usize,
    /// The most memory that was reserved from the budget, in bytes. Never more than the budget.
    pub reserved_high_water_bytes: usize,
    /// The most memory that units and buffers occupied, in bytes.
    pub in_use_high_water_bytes: usize,
    /// The memory that units and buffers occupy now, in bytes.
    pub in_use_bytes: usize,
    /// The size of the staging memory on the host, in bytes; 0 if units live in host memory. The
    /// budget does not include this memory.
    pub staging_bytes: usize,
    /// The name of the I/O backend.
    pub backend: &'static str,
    /// The name of each backend that has a higher priority but is not available, and the reason.
    pub passed_over: Vec<(&'static str, String)>,
    /// Whether [`Engine::modified_units`](crate::Engine::modified_units) detects writes to resident
    /// units.
    pub watches_writes: bool,
    /// The number of passes that have begun.
    pub passes: u64,
    /// The number of bytes that were read on each path from storage to memory.
    pub read_bytes: Vec<(ReadPath, u64)>,
    /// How many bytes the device decoded, counted after decoding. 0 if the host decodes.
    pub device_decoded_bytes: u64,
    /// The best rate at which the device got and decoded a unit, in decoded bytes per second; 0 if
    /// it decoded none.
    pub device_decode_bytes_per_s: f64,
    /// The number of times that a unit was read and evicted without being used.
    pub wasted_loads: u64,
    /// The number of times that the engine switched to a new plan.
    pub replans: u64,
    /// The current plan.
    pub plan: Plan,
    /// The latest passes that ran alone and leased units, the latest last; at most 32.
    pub recent_passes: Vec<PassTimes>,
    /// The time of these passes and between them, in nanoseconds. The time between two of them does
    /// not count if other passes ended in it.
    pub recent_ns: u64,
    /// The number of threads that copy, decode, encode and verify.
    pub workers: usize,
    /// The number of bytes that were encoded to keep units compressed, before encoding.
    pub encoded_bytes: u64,
    /// The processor time of encoding, in nanoseconds.
    pub encode_ns: u64,
    /// The number of reads that the backend has in flight at most.
    pub in_flight: usize,
    /// The measured speed of storage and of the processors. What was not measured is as configured.
    pub rates: Rates,
    /// The measured duration of computations.
    pub compute: ComputeTimes,
    /// The engine's streams of a device with its own memory, with their workloads: `Memory` copies
    /// units, `Compute` decodes them, and `Mixed` is
    /// [`Engine::compute_stream`](crate::Engine::compute_stream). Empty if units live in host
    /// memory.
    pub streams: Vec<PooledStreamStats>,
    /// The use of routed units.
    pub routed: RoutedStats,
    /// The use of tables.
    pub tables: TableStats,
    /// The statistics of all units, indexed by [`UnitId`](crate::UnitId).
    pub units: Vec<UnitStats>,
}

impl EngineStats {
    /// Returns the number of bytes that were read from storage.
    pub fn total_read_bytes(&self) -> u64 {
        self.read_bytes.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the total time that calls have waited for units, in nanoseconds. The time of a call
    /// counts once for each of its units.
    pub fn stall_ns(&self) -> u64 {
        self.units.iter().map(|unit| unit.stall_ns).sum()
    }

    /// Returns how many times calls had to wait for units. Each unit of a call counts.
    pub fn stalls(&self) -> u64 {
        self.units.iter().map(|unit| unit.stalls).sum()
    }
}

/// Adds `bytes` to the count of a read path.
pub(crate) fn add_bytes(counts: &mut Vec<(ReadPath, u64)>, path: ReadPath, bytes: u64) {
    match counts.iter_mut().find(|(p, _)| *p == path) {
        Some((_, count)) => *count += bytes,
        None => counts.push((path, bytes)),
    }
}
