// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of the devices `ts:N` of this process.

use std::sync::Arc;

use parking_lot::RwLock;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::forks::is_forked;
use super::session::Session;
use crate::errors::configuration_error;

/// The largest number of devices. PyTorch stores the number of devices in a signed byte.
pub(super) const MAX_DEVICES: usize = 127;

static DEVICES: RwLock<Vec<Option<DeviceEntry>>> = RwLock::new(Vec::new());

/// A device of a machine.
#[derive(Clone)]
pub(super) struct DeviceEntry {
    pub(super) session: Arc<Session>,
    /// The index in this process: N of `ts:N`.
    pub(super) index: u32,
    /// The index on the machine.
    pub(super) ordinal: u32,
}

impl DeviceEntry {
    /// Returns whether both devices are of the same session, and so of the same machine.
    pub(super) fn shares_session_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.session, &other.session)
    }
}

/// Returns the device `ts:index`.
///
/// # Errors
/// RuntimeError in a forked process, ConfigurationError if the device does not exist.
pub(super) fn device(py: Python<'_>, index: u32) -> PyResult<DeviceEntry> {
    if is_forked() {
        return Err(PyRuntimeError::new_err(format!(
            "cannot use device ts:{index} in a forked process: its session belongs to the parent; \
             start processes with spawn or forkserver"
        )));
    }
    let devices = DEVICES.read();
    devices.get(index as usize).cloned().flatten().ok_or_else(|| {
        configuration_error(
            py,
            &format!(
                "device ts:{index} does not exist: its machine was stopped or never started; use \
                 the result of RemoteMachine(...).device()"
            ),
        )
    })
}

/// Adds `count` devices of a session, with consecutive indices.
///
/// The indices begin at `wanted` if that is possible, otherwise at the lowest possible index.
/// Returns the first index, or `None` if there are not enough consecutive free indices.
pub(super) fn add_devices(session: &Arc<Session>, count: u32, wanted: Option<u32>) -> Option<u32> {
    let mut devices = DEVICES.write();
    let first = free_indices(&devices, count as usize, wanted)?;
    let end = first + count as usize;
    if devices.len() < end {
        devices.resize(end, None);
    }
    for (ordinal, entry) in devices[first..end].iter_mut().enumerate() {
        *entry = Some(DeviceEntry {
            session: session.clone(),
            index: (first + ordinal) as u32,
            ordinal: ordinal as u32,
        });
    }
    Some(first as u32)
}

/// Removes the `count` devices that begin at index `first`. Their indices are then free.
pub(super) fn remove_devices(first: u32, count: u32) {
    let mut devices = DEVICES.write();
    for index in first..first + count {
        devices[index as usize] = None;
    }
}

fn free_indices(
    devices: &[Option<DeviceEntry>],
    count: usize,
    wanted: Option<u32>,
) -> Option<usize> {
    let are_free = |first: &usize| {
        (*first..first + count).all(|at| devices.get(at).is_none_or(Option::is_none))
    };
    let last = MAX_DEVICES.checked_sub(count)?;
    let wanted = wanted.map(|wanted| wanted as usize).filter(|&wanted| wanted <= last);
    wanted.into_iter().chain(0..=last).find(are_free)
}
