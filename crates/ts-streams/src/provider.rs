// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which devices there are.

use std::fmt;
use std::sync::Arc;

use crate::{AnyDevice, CpuDevice, Error, GpuStatus, SimDevice, SimOptions};

/// A kind of device that may or may not be here.
pub trait DeviceProvider: fmt::Debug + Send + Sync {
    /// The name it is asked for by.
    fn name(&self) -> &'static str;

    /// Higher is tried first when the caller names none.
    fn priority(&self) -> u8;

    /// Whether there is one. Never panics; may load a driver.
    fn probe(&self) -> DeviceAvailability;

    /// The device of this number, from 0 on.
    ///
    /// # Errors
    /// [`Error::NoGpu`], [`Error::DeviceUnavailable`]; [`Error::Driver`], [`Error::Thread`] when
    /// the system refuses what it needs.
    fn create(&self, ordinal: usize) -> Result<AnyDevice, Error>;
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceAvailability {
    /// So many.
    Available {
        /// At least one.
        device_count: usize,
    },
    /// None, for this reason.
    Unavailable(String),
}

/// The kinds of devices there are to choose from.
#[derive(Debug, Clone)]
pub struct DeviceRegistry {
    providers: Vec<Arc<dyn DeviceProvider>>,
}

/// A provider, and why those before it in priority were passed over.
#[derive(Debug, Clone)]
pub struct DeviceChoice {
    /// The one chosen.
    pub provider: Arc<dyn DeviceProvider>,
    /// Name and reason of each that was tried first and has no device.
    pub passed_over: Vec<(&'static str, String)>,
}

impl DeviceRegistry {
    /// Those of this crate: `cuda`, also where this build has no support for it, which it says
    /// then; `cpu`; and `sim`, which is chosen by name only.
    pub fn builtin() -> Self {
        let mut this = Self { providers: Vec::new() };
        this.register(Arc::new(CudaProvider));
        let cpu = || Ok(CpuDevice::new()?.into());
        this.register(Arc::new(Always { name: "cpu", priority: 100, create: cpu }));
        let sim = || Ok(SimDevice::new(SimOptions::default()).into());
        this.register(Arc::new(Always { name: "sim", priority: 0, create: sim }));
        this
    }

    /// Adds a provider; one of the same name is replaced.
    pub fn register(&mut self, provider: Arc<dyn DeviceProvider>) {
        self.providers.retain(|p| p.name() != provider.name());
        self.providers.push(provider);
        self.providers.sort_by_key(|p| std::cmp::Reverse(p.priority()));
    }

    /// All providers, highest priority first.
    pub fn providers(&self) -> &[Arc<dyn DeviceProvider>] {
        &self.providers
    }

    /// The provider called `name`, or the first that has a device when no name is given.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`]; [`Error::DeviceUnavailable`] with the reason that the named one
    /// gave.
    pub fn choose(&self, name: Option<&str>) -> Result<DeviceChoice, Error> {
        let mut passed_over = Vec::new();
        for provider in self.providers.iter().filter(|p| name.is_none_or(|name| p.name() == name)) {
            match provider.probe() {
                DeviceAvailability::Available { .. } => {
                    return Ok(DeviceChoice { provider: Arc::clone(provider), passed_over });
                }
                DeviceAvailability::Unavailable(reason) => {
                    passed_over.push((provider.name(), reason));
                }
            }
        }
        match passed_over.into_iter().next_back() {
            Some((device, reason)) => {
                Err(Error::DeviceUnavailable { device: device.into(), reason })
            }
            None => Err(self.unknown(name.unwrap_or(""))),
        }
    }

    /// A device by its kind and number as PyTorch names them, `cuda:1` or `cpu`; without a name the
    /// best there is.
    ///
    /// # Errors
    /// As [`choose`](Self::choose) and [`DeviceProvider::create`].
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
        unreachable!("there is no such GPU without the feature `cuda`")
    }
}

/// Of a kind of which there is always one device.
#[derive(Debug)]
struct Always {
    name: &'static str,
    priority: u8,
    create: fn() -> Result<AnyDevice, Error>,
}

impl DeviceProvider for Always {
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
        Err(Error::DeviceUnavailable { device, reason: "there is one".into() })
    }
}
