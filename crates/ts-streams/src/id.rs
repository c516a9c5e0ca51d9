// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of streams and of kinds of devices.

use std::fmt;

/// The implementation behind a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// [`CpuDevice`](crate::CpuDevice).
    Cpu,
    /// [`SimDevice`](crate::SimDevice).
    Sim,
    /// `CudaDevice`, with the feature `cuda`.
    Cuda,
}

/// Identifies a stream. Unique within the process, and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
