// SPDX-License-Identifier: MIT OR Apache-2.0
use crate::{AnyDevice, Device, DeviceRegistry, Error, GpuStatus};

/// A device, or the number of a GPU, from 0. Functions that need a device take either.
///
/// ```
/// use ts_streams::{CpuDevice, Error, OpenDevice};
///
/// assert!(CpuDevice::new()?.open().is_ok());
/// let gpu = 0.open(); // fails if there is no GPU 0
/// assert!(gpu.is_ok() || matches!(gpu, Err(Error::NoGpu { ordinal: 0, .. })));
/// # Ok::<(), Error>(())
/// ```
pub trait OpenDevice {
    /// The type of the device.
    type Device: Device;

    /// Returns the device. Blocks while the driver starts.
    ///
    /// # Errors
    /// For numbers, [`Error::NoGpu`] if there is no such GPU, and the errors of
    /// [`DeviceRegistry::open`] for `cuda:N`.
    fn open(self) -> Result<Self::Device, Error>;
}

impl<D: Device> OpenDevice for D {
    type Device = D;

    fn open(self) -> Result<D, Error> {
        Ok(self)
    }
}

macro_rules! ordinals {
    ($($number:ty),*) => {$(
        impl OpenDevice for $number {
            type Device = AnyDevice;

            fn open(self) -> Result<AnyDevice, Error> {
                let exists = |ordinal| GpuStatus::detect().require(ordinal);
                // Of a negative number, the registry says that it is not valid.
                usize::try_from(self).map_or(Ok(()), exists)?;
                DeviceRegistry::builtin().open(Some(&format!("cuda:{self}")))
            }
        }
    )*};
}

// `i32` is the type of a literal.
ordinals!(usize, u32, i32);
