// SPDX-License-Identifier: MIT OR Apache-2.0
//! Discovery of devices.

use std::fmt;
use std::sync::Arc;

use crate::{AnyDevice, CpuDevice, Error, GpuStatus, SimDevice, SimOptions};

/// A kind of device that may or may not exist on this machine.
pub trait DeviceProvider: fmt::Debug + Send + Sync {
    /// Returns the name by which callers select this kind, for example `cuda`.
    fn name(&self) -> &'static str;

    /// Returns the priority of this kind. If the caller names no device, [`DeviceRegistry`] tries
    /// providers in order of descending priority.
    fn priority(&self) -> u8;

    /// Checks whether a device of this kind exists. May block to load a driver. Implementations
    /// must not panic.
    fn probe(&self) -> DeviceAvailability;

    /// Opens the device with index `ordinal`, counted from 0.
    ///
    /// # Errors
    /// Returns [`Error::NoGpu`] or [`Error::DeviceUnavailable`] if there is no such device, and
    /// [`Error::Driver`] or [`Error::Thread`] if a driver or system call fails.
    fn create(&self, ordinal: usize) -> Result<AnyDevice, Error>;
}

/// The result of [`DeviceProvider::probe`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceAvailability {
    /// At least one device exists.
    Available {
        /// Number of devices, at least one.
        device_count: usize,
    },
    /// No device exists. Contains the reason.
    Unavailable(String),
}

/// A list of [`DeviceProvider`]s from which a program chooses a device by name or priority.
///
/// # Examples
/// ```
/// use ts_streams::{Device, DeviceRegistry};
///
/// let registry = DeviceRegistry::builtin();
/// let choice = registry.choose(None)?; // the best device here: a GPU, else the CPU
/// for (name, reason) in &choice.unavailable {
///     println!("not {name}: {reason}");
/// }
/// let device = choice.provider.create(0)?;
/// println!("using {}", device.info().name);
/// # Ok::<(), ts_streams::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DeviceRegistry {
    providers: Vec<Arc<dyn DeviceProvider>>,
}

/// The result of [`DeviceRegistry::choose`].
#[derive(Debug, Clone)]
pub struct DeviceChoice {
    /// The chosen provider.
    pub provider: Arc<dyn DeviceProvider>,
    /// The providers that were tried before and have no device, each with its name and the reason.
    pub unavailable: Vec<(&'static str, String)>,
}

impl DeviceRegistry {
    /// Creates a registry with the providers of this crate: `cuda`, `cpu` and `sim`.
    ///
    /// Without the feature `cuda`, the provider `cuda` reports that the build has no GPU support.
    /// `cpu` has a higher priority than `sim` and always has a device, so `sim` is used only when
    /// selected by name.
    pub fn builtin() -> Self {
        let mut this = Self { providers: Vec::new() };
        this.register(Arc::new(CudaProvider));
        let cpu = || Ok(CpuDevice::new()?.into());
        this.register(Arc::new(SingleDevice { name: "cpu", priority: 100, create: cpu }));
        let sim = || Ok(SimDevice::new(SimOptions::default()).into());
        this.register(Arc::new(SingleDevice { name: "sim", priority: 0, create: sim }));
        this
    }

    /// Adds a provider, replacing any provider of the same name.
    pub fn register(&mut self, provider: Arc<dyn DeviceProvider>) {
        self.providers.retain(|p| p.name() != provider.name());
        self.providers.push(provider);
        self.providers.sort_by_key(|p| std::cmp::Reverse(p.priority()));
    }

    /// Returns all providers, highest priority first.
    pub fn providers(&self) -> &[Arc<dyn DeviceProvider>] {
        &self.providers
    }

    /// Returns the provider called `name`. If `name` is `None`, returns the provider of the highest
    /// priority that has a device. May block to load a driver.
    ///
    /// # Errors
    /// Returns [`Error::UnknownDevice`] if there is no such provider. Returns
    /// [`Error::DeviceUnavailable`] with the reason if the provider has no device.
    pub fn choose(&self, name: Option<&str>) -> Result<DeviceChoice, Error> {
        let mut unavailable = Vec::new();
        for provider in self.providers.iter().filter(|p| name.is_none_or(|name| p.name() == name)) {
            match provider.probe() {
                DeviceAvailability::Available { .. } => {
                    return Ok(DeviceChoice { provider: Arc::clone(provider), unavailable });
                }
                DeviceAvailability::Unavailable(reason) => {
                    unavailable.push((provider.name(), reason));
                }
            }
        }
        match unavailable.into_iter().next_back() {
            Some((device, reason)) => {
                Err(Error::DeviceUnavailable { device: device.into(), reason })
            }
            None => Err(self.unknown(name.unwrap_or(""))),
        }
    }

    /// Opens a device by its PyTorch-style name, such as `cuda:1` or `cpu`. `None` opens device 0
    /// of the provider that [`choose`](Self::choose) returns.
    ///
    /// # Errors
    /// Returns the same errors as [`choose`](Self::choose) and [`DeviceProvider::create`]. Also
    /// returns [`Error::UnknownDevice`] if the text after the colon is not a number.
    pub fn open(&self, device: Option<&str>) -> Result<AnyDevice, Error> {
        let (kind, ordinal) = match device.map(|device| (device, device.split_once(':'))) {
            None => (None, 0),
            Some((name, None)) => (Some(name), 0),
            Some((name, Some((kind, number)))) => {
                (Some(kind), number.parse().map_err(|_| self.unknown(name))?)
            }
        };
        self.choose(kind)?.provider.create(ordinal)
    }

    fn unknown(&self, name: &str) -> Error {
        let known: Vec<_> = self.providers.iter().map(|p| p.name()).collect();
        Error::UnknownDevice { name: name.into(), known: known.join(", ") }
    }
}

impl Default for DeviceRegistry {
    fn default() -> Self {
        Self::builtin()
    }
}

#[derive(Debug)]
struct CudaProvider;

impl DeviceProvider for CudaProvider {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn priority(&self) -> u8 {
        200
    }

    fn probe(&self) -> DeviceAvailability {
        match GpuStatus::detect() {
            GpuStatus::Available { device_count } => DeviceAvailability::Available { device_count },
            status => DeviceAvailability::Unavailable(status.to_string()),
        }
    }

    fn create(&self, ordinal: usize) -> Result<AnyDevice, Error> {
        GpuStatus::detect().require(ordinal)?;
        #[cfg(feature = "cuda")]
        return Ok(crate::CudaDevice::new(ordinal)?.into());
        #[cfg(not(feature = "cuda"))]
        unreachable!("`require` returns an error without the feature `cuda`")
    }
}

/// A device kind with exactly one device, which always exists.
#[derive(Debug)]
struct SingleDevice {
    name: &'static str,
    priority: u8,
    create: fn() -> Result<AnyDevice, Error>,
}

impl DeviceProvider for SingleDevice {
    fn name(&self) -> &'static str {
        self.name
    }

    fn priority(&self) -> u8 {
        self.priority
    }

    fn probe(&self) -> DeviceAvailability {
        DeviceAvailability::Available { device_count: 1 }
    }

    fn create(&self, ordinal: usize) -> Result<AnyDevice, Error> {
        if ordinal == 0 {
            return (self.create)();
        }
        let device = format!("{}:{ordinal}", self.name);
        Err(Error::DeviceUnavailable { device, reason: "the only valid number is 0".into() })
    }
}
