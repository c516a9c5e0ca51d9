// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kinds of work.

use crate::StreamPriority;

/// The kind of a piece of work, by the operations that take most of its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkloadType {
    /// Arithmetic.
    Compute,
    /// Copies.
    Memory,
    /// Both arithmetic and copies.
    Mixed,
    /// Waits, records and small host functions.
    Coordination,
}

impl WorkloadType {
    /// All workload types, in the order of their declaration.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Memory, Self::Mixed, Self::Coordination];

    /// How long one piece of work is assumed to take until one has been observed, in nanoseconds.
    /// Only the ratios matter.
    pub(crate) const ASSUMED_NS: [u64; 4] = [100_000, 50_000, 100_000, 1_000];

    /// Returns the priority of streams for such work.
    ///
    /// - [`Coordination`](Self::Coordination) has high priority, because other work waits for it.
    /// - [`Memory`](Self::Memory) has low priority.
    /// - The others have normal priority.
    pub fn priority(self) -> StreamPriority {
        match self {
            Self::Coordination => StreamPriority::High,
            Self::Compute | Self::Mixed => StreamPriority::Normal,
            Self::Memory => StreamPriority::Low,
        }
    }
}
