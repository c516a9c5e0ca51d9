// SPDX-License-Identifier: MIT OR Apache-2.0
use crate::{AnyDevice, Device, DeviceRegistry, Error};

/// A device, or the number of a GPU, from 0. Functions that need a device take either.
///
/// ```
/// use ts_streams::{CpuDevice, Error, OpenDevice};
///
/// assert!(CpuDevice::new()?.open().is_ok());
/// let gpu = 0.open(); // fails if there is no GPU 0
/// assert!(gpu.is_ok() || matches!(gpu, Err(Error::DeviceUnavailable { .. })));
/// # Ok::<(), Error>(())
/// ```
pub trait OpenDevice {
    /// The type of the device.
    type Device: Device;

    /// Returns the device. Blocks while the driver starts.
    ///
    /// # Errors
    /// For numbers, the same as [`DeviceRegistry::open`] for `cuda:N`.
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
                DeviceRegistry::builtin().open(Some(&format!("cuda:{self}")))
            }
        }
    )*};
}

// `i32` is the type of a literal.
ordinals!(usize, u32, i32);
