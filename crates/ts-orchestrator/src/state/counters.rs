// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an engine counts.

use std::time::Duration;

use ts_io::ReadPath;

/// The counters of an engine, except for the counters of single units.
#[derive(Debug, Default)]
pub(crate) struct EngineCounters {
    pub(crate) passes: u64,
    pub(crate) read_bytes: Vec<(ReadPath, u64)>,
    pub(crate) wasted_loads: u64,
    pub(crate) gathered_rows: u64,
    pub(crate) cached_rows: u64,
    pub(crate) gathered_bytes: u64,
    pub(crate) replans: u64,
    /// The time during which at least one read was in flight.
    pub(crate) busy_ns: u64,
    /// The bytes that were decoded, and the processor time that this took.
    pub(crate) decoded_bytes: u64,
    pub(crate) decode_ns: u64,
    /// The time of copying to a device.
    pub(crate) copy_ns: u64,
    /// The best rate of a copy to a device, in bytes per second; 0 if none is known.
    pub(crate) copy_bytes_per_s: f64,
    /// What the device decoded.
    pub(crate) device_decoded: DeviceDecoded,
    /// The bytes that were encoded, and the processor time that this took.
    pub(crate) encoded_bytes: u64,
    pub(crate) encode_ns: u64,
}

/// What a device decoded.
#[derive(Debug, Default)]
pub(crate) struct DeviceDecoded {
    units: u64,
    /// The length of the units after decoding, in bytes.
    pub(crate) bytes: u64,
    pub(crate) has_failed: bool,
    /// The best rate of copying and decoding a unit, in decoded bytes per second.
    pub(crate) bytes_per_s: f64,
}

impl DeviceDecoded {
    /// The number of units after which the rate is known. The best rate counts, because a copy also
    /// waits for the work that used its slot before.
    const TRIES: u64 = 4;

    pub(crate) fn add(&mut self, bytes: u64, took: Duration) {
        self.units += 1;
        self.bytes += bytes;
        if !took.is_zero() {
            self.bytes_per_s = self.bytes_per_s.max(bytes as f64 / took.as_secs_f64());
        }
    }

    /// Returns whether the device is at least as fast as the slowest of these rates, or not known
    /// to be slower.
    pub(crate) fn is_faster_than(&self, rates: [Option<f64>; 2]) -> bool {
        let slowest = rates.into_iter().flatten().fold(f64::INFINITY, f64::min);
        self.units < Self::TRIES || slowest.is_infinite() || self.bytes_per_s >= slowest
    }
}
