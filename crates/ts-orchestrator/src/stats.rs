// SPDX-License-Identifier: MIT OR Apache-2.0
use ts_io::ReadPath;

use crate::plan::Plan;

/// What happened to one unit since the engine was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnitStats {
    /// Its name.
    pub name: String,
    /// Whether the plan keeps it.
    pub resident: bool,
    /// Its slot in bytes.
    pub slot_bytes: usize,
    /// Times it was read from storage.
    pub loads: u64,
    /// Bytes that those reads delivered.
    pub read_bytes: u64,
    /// Time from the first request of a load to its last completion, summed, in nanoseconds.
    pub load_ns: u64,
    /// Times it was used.
    pub uses: u64,
    /// Time from lease to release, summed, in nanoseconds.
    pub use_ns: u64,
    /// Uses that had to wait for it.
    pub stalls: u64,
    /// Time they waited, summed, in nanoseconds.
    pub stall_ns: u64,
}

/// What an engine holds and has done.
#[derive(Debug, Clone)]
pub struct EngineStats {
    /// The budget, in bytes.
    pub budget_bytes: usize,
    /// The most that was ever reserved of it: arena and bounce buffers. Never more than the budget.
    pub reserved_high_water_bytes: usize,
    /// The most that units and bounce buffers ever occupied of what is reserved.
    pub in_use_high_water_bytes: usize,
    /// Bytes that they occupy now.
    pub in_use_bytes: usize,
    /// Memory of the host by way of which units go to a device, beside the budget; 0 where they are
    /// read to where they stay.
    pub staging_bytes: usize,
    /// The backend that reads, and why those of higher priority were passed over.
    pub backend: &'static str,
    /// Name and reason.
    pub passed_over: Vec<(&'static str, String)>,
    /// Whether writes to units that the plan keeps [are found](crate::Engine::written).
    pub watches_writes: bool,
    /// Passes begun.
    pub passes: u64,
    /// Bytes read by each path.
    pub read_bytes: Vec<(ReadPath, u64)>,
    /// Times a unit was let go that was read but not used.
    pub wasted_loads: u64,
    /// Times the order of visits made a new plan.
    pub replans: u64,
    /// The plan in force.
    pub plan: Plan,
    /// Every unit, in the order of their ids.
    pub units: Vec<UnitStats>,
}

impl EngineStats {
    /// Bytes read in all.
    pub fn total_read_bytes(&self) -> u64 {
        self.read_bytes.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Time that uses waited for units, in nanoseconds.
    pub fn stall_ns(&self) -> u64 {
        self.units.iter().map(|unit| unit.stall_ns).sum()
    }

    /// Uses that waited.
    pub fn stalls(&self) -> u64 {
        self.units.iter().map(|unit| unit.stalls).sum()
    }
}
