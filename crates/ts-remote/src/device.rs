// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of devices.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use ts_pool::TensorBuffer;
use ts_pool::ts_streams::Error as DeviceError;

/// Where a tensor is, or was at its sender. [`Display`](fmt::Display) and [`FromStr`] convert to
/// and from the names of PyTorch, such as `cpu` and `cuda:0`. No name is lost or refused.
///
/// ```
/// use ts_remote::Device;
///
/// let device: Device = "cuda:1".parse().unwrap_or_else(|never| match never {});
/// assert_eq!(device, Device::Cuda(1));
/// assert!(device.is_gpu());
/// assert_eq!(Device::from("mps:0").to_string(), "mps:0");
/// assert_eq!(Device::Cpu.allocate_buffer(8)?.as_slice(), Some(&[0; 8][..]));
/// # Ok::<(), ts_remote::ts_pool::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Device {
    /// Host memory: `cpu`.
    #[default]
    Cpu,
    /// The memory of a GPU with this number, from 0: `cuda:N`.
    Cuda(usize),
    /// Any other device, such as `mps:0`. Empty if the sender did not name a device.
    Other(String),
}

impl Device {
    /// Returns whether this is host memory.
    pub fn is_cpu(&self) -> bool {
        matches!(self, Self::Cpu)
    }

    /// Returns whether this is the memory of a CUDA GPU.
    pub fn is_gpu(&self) -> bool {
        matches!(self, Self::Cuda(_))
    }

    /// Allocates `len` bytes on the device: zeros in host memory, undefined contents on a GPU.
    ///
    /// [`TensorBuffer::try_allocate_gpu`] falls back to host memory instead of failing.
    ///
    /// # Errors
    /// Returns the errors of [`TensorBuffer::try_cpu_zeros`] and [`TensorBuffer::allocate_gpu`],
    /// and [`DeviceUnavailable`](DeviceError::DeviceUnavailable) for [`Other`](Self::Other)
    /// devices.
    pub fn allocate_buffer(&self, len: usize) -> Result<TensorBuffer, ts_pool::Error> {
        match self {
            Self::Cpu => TensorBuffer::try_cpu_zeros(len),
            Self::Cuda(ordinal) => TensorBuffer::allocate_gpu(len, *ordinal),
            Self::Other(name) => Err(DeviceError::DeviceUnavailable {
                device: name.clone(),
                reason: "expected cpu or cuda:N".into(),
            }
            .into()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Other(name) => f.write_str(name),
        }
    }
}

impl From<&str> for Device {
    fn from(name: &str) -> Self {
        let ordinal = name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        match ordinal.map(Self::Cuda) {
            None if name == "cpu" => Self::Cpu,
            // `cuda:01` is not how PyTorch writes it, and is kept as it is.
            Some(device) if device.to_string() == name => device,
            _ => Self::Other(name.into()),
        }
    }
}

impl FromStr for Device {
    type Err = Infallible;

    fn from_str(name: &str) -> Result<Self, Infallible> {
        Ok(name.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_select_memory() {
        for name in ["cpu", "cuda:0", "cuda:15", "cuda", "cuda:01", "cuda:x", "cpu:0", "ts:2", ""] {
            let device = Device::from(name);
            assert_eq!(device.to_string(), name);
            assert_eq!(device.is_gpu(), ["cuda:0", "cuda:15"].contains(&name), "{name}");
            assert_eq!(device.is_cpu(), name == "cpu");
            let allocated = device.allocate_buffer(5);
            match device {
                Device::Cpu => assert!(allocated.unwrap().is_cpu()),
                Device::Cuda(_) => assert!(allocated.is_err() || allocated.unwrap().is_gpu()),
                Device::Other(_) => {
                    let error = allocated.unwrap_err();
                    assert_eq!(error.kind(), ts_pool::ErrorKind::Unsupported, "{error}");
                }
            }
        }
        assert!(Device::Cpu.allocate_buffer(usize::MAX).is_err());
    }
}
