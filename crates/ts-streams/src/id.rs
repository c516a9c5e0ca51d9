// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stream identifiers and device kinds.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

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

impl StreamId {
    /// Returns an identifier that no other stream of this process has, for implementers of
    /// [`Device`](crate::Device).
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
