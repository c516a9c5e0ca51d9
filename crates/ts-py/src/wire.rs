// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connections that carry tensors and messages between processes.

mod connection;
mod credit;
mod incoming;
mod listener;
mod place;
mod settings;
mod wait;

use pyo3::prelude::*;

#[cfg(unix)]
pub(crate) use settings::bind;
pub(crate) use settings::{Settings, acceptor, tls_client};

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<connection::PyConnection>()?;
    m.add_class::<credit::PyCreditTracker>()?;
    m.add_class::<listener::PyListener>()?;
    m.add_function(wrap_pyfunction!(connection::connect, m)?)?;
    m.add_function(wrap_pyfunction!(listener::listen, m)?)?;
    Ok(())
}
