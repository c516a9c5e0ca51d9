// SPDX-License-Identifier: MIT OR Apache-2.0

/// How far units are read ahead of their use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Prefetch {
    /// Not at all: a unit is read when it is wanted, and every streamed unit is waited for.
    None,
    /// The next unit alone.
    NextLayer,
    /// As far as memory goes that the plan does not give to units that stay: the plan weighs the
    /// two.
    #[default]
    Adaptive,
    /// As `Adaptive`, with at least half of the budget for reading ahead: steadier where storage is
    /// not.
    Aggressive,
}

impl Prefetch {
    /// How many of the next visits may be read ahead.
    pub(crate) fn reach(self) -> usize {
        match self {
            Prefetch::None => 0,
            Prefetch::NextLayer => 1,
            Prefetch::Adaptive | Prefetch::Aggressive => usize::MAX,
        }
    }

    /// Memory that the plan shall leave for streamed units where it can, in bytes.
    pub(crate) fn least_ring_bytes(self, budget_bytes: usize) -> usize {
        if self == Prefetch::Aggressive { budget_bytes / 2 } else { 0 }
    }
}
