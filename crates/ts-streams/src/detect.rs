// SPDX-License-Identifier: MIT OR Apache-2.0
//! Detection of CUDA GPUs.

use crate::{Error, GpuStatus};

/// The error type of GPU operations, which is the [`Error`] of all devices.
pub type GpuError = Error;

impl GpuStatus {
    /// Detects CUDA GPUs. Never panics.
    ///
    /// The first call may block while the CUDA driver loads. Later calls return the result of the
    /// first call.
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
        return crate::accelerator::status();
        #[cfg(not(feature = "cuda"))]
        Self::NotCompiled
    }

    /// Checks that the GPU with index `ordinal`, counted from 0, exists.
    ///
    /// # Errors
    /// Returns [`Error::NoGpu`], with this status as the reason, if the GPU does not exist.
    pub fn require(&self, ordinal: usize) -> Result<(), GpuError> {
        if ordinal < self.device_count() {
            Ok(())
        } else {
            Err(Error::NoGpu { ordinal, status: self.clone() })
        }
    }
}
