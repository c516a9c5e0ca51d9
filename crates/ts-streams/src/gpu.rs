// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether GPUs can be used.

use std::fmt;

/// Whether CUDA GPUs can be used, and if not, why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuStatus {
    /// The crate was built without the feature `cuda`.
    NotCompiled,
    /// The CUDA driver is missing or does not work, with the reason.
    NoCuda(String),
    /// The driver works but finds no GPU, or `CUDA_VISIBLE_DEVICES` hides all of them.
    NoDevices,
    /// At least one GPU can be used.
    Available {
        /// Number of GPUs.
        device_count: usize,
    },
}

impl GpuStatus {
    /// Returns whether there is at least one GPU.
    pub fn is_available(&self) -> bool {
        self.device_count() > 0
    }

    /// Returns the number of GPUs, 0 if CUDA is not available.
    pub fn device_count(&self) -> usize {
        match self {
            GpuStatus::Available { device_count } => *device_count,
            _ => 0,
        }
    }
}

impl fmt::Display for GpuStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuStatus::NotCompiled => {
                f.write_str("this build has no GPU support: enable the feature `cuda`")
            }
            GpuStatus::NoCuda(reason) => write!(f, "CUDA is not available: {reason}"),
            GpuStatus::NoDevices => f.write_str("CUDA found no device"),
            GpuStatus::Available { device_count } => write!(f, "{device_count} CUDA devices"),
        }
    }
}
