// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs PyTorch operators on remote machines.
//!
//! A *machine* is a computer or process that runs operators. A *session* is the state that a client
//! and a machine share: operators, storages and requests. A *device* `ts:N` of this process
//! stands for one device of a machine.

mod client;
mod server;
mod values;

use pyo3::prelude::*;

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    client::register(m)?;
    server::register(m)
}
