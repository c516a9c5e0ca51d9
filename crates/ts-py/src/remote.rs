// SPDX-License-Identifier: MIT OR Apache-2.0
//! PyTorch operators on remote machines.

pub(crate) mod client;
mod server;

use pyo3::prelude::*;

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    client::register(m)?;
    server::register(m)
}
