// SPDX-License-Identifier: MIT OR Apache-2.0
//! The statistics of an engine.

use ts_io::ReadPath;

use crate::plan::Plan;

/// The statistics of one unit since the engine was created.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnitStats {
    /// The name of the unit.
    pub name: String,
    /// Whether the unit is resident.
    pub resident: bool,
    /// The size of its slot, in bytes.
    pub slot_bytes: usize,
    /// The number of times it was read from storage.
    pub loads: u64,
    /// The number of bytes that these reads delivered.
    pub read_bytes: u64,
    /// The total duration of its loads, from the first request to the end, in nanoseconds.
    pub load_ns: u64,
    /// The number of times it was used.
    pub uses: u64,
    /// The total time that it was leased, in nanoseconds.
    pub use_ns: u64,
    /// The number of uses that had to wait for it.
    pub stalls: u64,
    /// The total time that these uses waited, in nanoseconds.
    pub stall_ns: u64,
}

/// The memory and the statistics of an engine.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EngineStats {
    /// The budget, in bytes.
    pub budget_bytes: usize,
    /// The most memory that was reserved from the budget, in bytes. Never more than the budget.
    pub reserved_high_water_bytes: usize,
    /// The most memory that units and buffers occupied, in bytes.
    pub in_use_high_water_bytes: usize,
    /// The memory that units and buffers occupy now, in bytes.
    pub in_use_bytes: usize,
    /// The staging memory on the host, which the budget does not include, in bytes; 0 if units live
    /// in host memory.
    pub staging_bytes: usize,
    /// The name of the I/O backend.
    pub backend: &'static str,
    /// The backends with a higher priority that are not used, with the reasons.
    pub passed_over: Vec<(&'static str, String)>,
    /// Whether [`Engine::modified_units`](crate::Engine::modified_units) detects writes to resident
    /// units.
    pub watches_writes: bool,
    /// The number of passes that have begun.
    pub passes: u64,
    /// The number of bytes read by each path.
    pub read_bytes: Vec<(ReadPath, u64)>,
    /// The number of times that a unit was evicted unused.
    pub wasted_loads: u64,
    /// The number of times that the engine switched to a new plan.
    pub replans: u64,
    /// The current plan.
    pub plan: Plan,
    /// The statistics of all units, indexed by [`UnitId`](crate::UnitId).
    pub units: Vec<UnitStats>,
}

impl EngineStats {
    /// Returns the number of bytes read.
    pub fn total_read_bytes(&self) -> u64 {
        self.read_bytes.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the total time that uses waited for units, in nanoseconds.
    pub fn stall_ns(&self) -> u64 {
        self.units.iter().map(|unit| unit.stall_ns).sum()
    }

    /// Returns the number of uses that waited for a unit.
    pub fn stalls(&self) -> u64 {
        self.units.iter().map(|unit| unit.stalls).sum()
    }
}

/// Adds to the bytes of a path.
pub(crate) fn add_bytes(counts: &mut Vec<(ReadPath, u64)>, path: ReadPath, bytes: u64) {
    match counts.iter_mut().find(|(p, _)| *p == path) {
        Some((_, count)) => *count += bytes,
        None => counts.push((path, bytes)),
    }
}
