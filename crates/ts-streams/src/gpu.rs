// SPDX-License-Identifier: MIT OR Apache-2.0
//! The status of GPU support.

use std::fmt;

/// The status of GPU support: the number of CUDA GPUs, or the reason why there are none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuStatus {
    /// The crate was built without the feature `cuda`.
    NotCompiled,
    /// The CUDA driver is missing or does not work. Contains the reason.
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

    /// Returns the number of GPUs, or 0 if CUDA is not available.
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
                f.write_str("this build has no GPU support; rebuild with the feature `cuda`")
            }
            GpuStatus::NoCuda(reason) => f.write_str(reason),
            GpuStatus::NoDevices => {
                f.write_str("the CUDA driver found no GPU, or CUDA_VISIBLE_DEVICES hides all GPUs")
            }
            GpuStatus::Available { device_count } => {
                write!(f, "the CUDA driver found {device_count} GPU(s), numbered from 0")
            }
        }
    }
}
