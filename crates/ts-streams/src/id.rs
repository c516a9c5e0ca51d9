// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stream identifiers and device kinds.

use std::fmt;

/// The implementation that a device uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The host, as a [`CpuDevice`](crate::CpuDevice).
    Cpu,
    /// A simulated GPU, as a [`SimDevice`](crate::SimDevice).
    Sim,
    /// An NVIDIA GPU, as a `CudaDevice`. Requires the feature `cuda`.
    Cuda,
    /// An accelerator behind a library like CUDA's runtime, as a `RuntimeDevice`. Requires the
    /// feature `runtime`.
    Runtime,
}

/// Identifies a stream. Each identifier is unique within the process and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
