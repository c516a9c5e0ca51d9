// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is under way between storage, memory and the device.

use ts_io::Backend;
use ts_streams::Device;

use crate::worker::Workers;

use super::fills::Fills;
use super::gathers::Gathers;
use super::loads::Loads;
use super::reads::Reads;

/// The loads of units and rows, with the reads and the jobs that they consist of, and what runs
/// these.
pub(crate) struct Transfers<D: Device> {
    pub(super) loads: Loads<D>,
    pub(crate) gathers: Gathers<D>,
    pub(super) reads: Reads,
    pub(super) fills: Fills,
    /// `None` once the engine is dropped.
    pub(crate) backend: Option<Box<dyn Backend>>,
    pub(crate) workers: Option<Workers<D>>,
}

impl<D: Device> Transfers<D> {
    pub(super) fn new(backend: Box<dyn Backend>, workers: Option<Workers<D>>) -> Self {
        Self {
            loads: Loads::new(),
            gathers: Gathers::new(),
            reads: Reads::default(),
            fills: Fills::default(),
            backend: Some(backend),
            workers,
        }
    }
}
