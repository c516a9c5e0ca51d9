// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fmt;

use crate::Error;

/// What goes wrong with GPUs: the errors of all devices.
pub type GpuError = Error;

/// Whether there are GPUs to be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuStatus {
    /// This was built without the feature `cuda`.
    NotCompiled,
    /// There is no driver, or it does not work: why.
    NoCuda(String),
    /// There is a driver, and nothing for it to drive, or nothing that the environment shows.
    NoDevices,
    /// There are.
    Available {
        /// How many.
        device_count: usize,
    },
}

impl GpuStatus {
    /// Looks, the first time; what it finds stays for as long as the process lives. Never panics.
    pub fn detect() -> Self {
        #[cfg(feature = "cuda")]
        return crate::cuda::status();
        #[cfg(not(feature = "cuda"))]
        Self::NotCompiled
    }

    /// Whether there is at least one.
    pub fn is_available(&self) -> bool {
        self.device_count() > 0
    }

    /// How many there are.
    pub fn device_count(&self) -> usize {
        match self {
            GpuStatus::Available { device_count } => *device_count,
            _ => 0,
        }
    }

    /// # Errors
    /// [`Error::NoGpu`] when there is no device of this number, saying why.
    pub fn require(&self, ordinal: usize) -> Result<(), GpuError> {
        if ordinal < self.device_count() {
            Ok(())
        } else {
            Err(Error::NoGpu { ordinal, status: self.clone() })
        }
    }
}

impl fmt::Display for GpuStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuStatus::NotCompiled => {
                f.write_str("this build has no support for GPUs: it lacks the feature `cuda`")
            }
            GpuStatus::NoCuda(reason) => write!(f, "CUDA is not available: {reason}"),
            GpuStatus::NoDevices => f.write_str("CUDA finds no device"),
            GpuStatus::Available { device_count } => write!(f, "{device_count} devices of CUDA"),
        }
    }
}
