// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fmt;

use crate::Error;

/// The error type of GPU operations, which is the [`Error`] of all devices.
pub type GpuError = Error;

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
    /// Looks for CUDA GPUs. The first call loads the driver; its result is cached for the life of
    /// the process. Never panics.
    ///
    /// # Examples
    /// ```
    /// use ts_streams::GpuStatus;
    ///
    /// match GpuStatus::detect() {
    ///     GpuStatus::Available { device_count } => println!("{device_count} GPUs"),
    ///     status => println!("running on the CPU: {status}"),
    /// }
    /// ```
    pub fn detect() -> Self {
        #[cfg(feature = "cuda")]
        return crate::cuda::status();
        #[cfg(not(feature = "cuda"))]
        Self::NotCompiled
    }

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

    /// Checks that the GPU `ordinal` exists.
    ///
    /// # Errors
    /// Returns [`Error::NoGpu`] with the reason if it does not.
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
                f.write_str("this build has no GPU support: enable the feature `cuda`")
            }
            GpuStatus::NoCuda(reason) => write!(f, "CUDA is not available: {reason}"),
            GpuStatus::NoDevices => f.write_str("CUDA found no device"),
            GpuStatus::Available { device_count } => write!(f, "{device_count} CUDA devices"),
        }
    }
}
