// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registers an own provider of devices, which has two small simulated GPUs. Programs open them by
//! name, like the devices that the crate knows.
#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::Arc;

use ts_streams::{
    AnyDevice, Device, DeviceAvailability, DeviceProvider, DeviceRegistry, SimDevice, SimOptions,
};

#[derive(Debug)]
struct SmallGpus;

impl DeviceProvider for SmallGpus {
    fn name(&self) -> &'static str {
        "small"
    }

    fn priority(&self) -> u8 {
        255 // before GPUs and the CPU
    }

    fn probe(&self) -> DeviceAvailability {
        DeviceAvailability::Available { device_count: 2 }
    }

    fn create(&self, ordinal: usize) -> Result<AnyDevice, ts_streams::Error> {
        if ordinal >= 2 {
            let (device, reason) = (format!("small:{ordinal}"), "there are two devices".into());
            return Err(ts_streams::Error::DeviceUnavailable { device, reason });
        }
        let options = SimOptions::default().with_seed(ordinal as u64).with_total_bytes(1 << 20);
        Ok(SimDevice::new(options).into())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut registry = DeviceRegistry::builtin();
    registry.register(Arc::new(SmallGpus));
    assert_eq!(registry.choose(None)?.provider.name(), "small");
    for name in ["small", "small:1", "cpu"] {
        let total_bytes = registry.open(Some(name))?.info().total_bytes;
        assert_eq!(total_bytes == Some(1 << 20), name != "cpu");
    }
    let error = registry.open(Some("small:2")).expect_err("there are two devices");
    println!("small and small:1 are open; {error}");
    Ok(())
}
