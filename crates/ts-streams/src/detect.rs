// SPDX-License-Identifier: MIT OR Apache-2.0
//! Looks for GPUs.

use crate::{Error, GpuStatus};

/// The error type of GPU operations, which is the [`Error`] of all devices.
pub type GpuError = Error;

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
