// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a machine is reached.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;
use tensorstream::exec::{Client, ClientOptions, service_name};
use tensorstream::remote::{Address, Link, Role, Socket};

use crate::errors::wire_error;
use crate::memory::Target;
use crate::wire::{Settings, tls_client};

/// How a machine is reached, wherever it listens.
pub(super) struct Way {
    pub(super) settings: Settings,
    pub(super) retry: Duration,
    /// Whether somebody may come to listen where nobody does now.
    pub(super) returns: bool,
    pub(super) tls: [Option<PathBuf>; 3],
}

impl Way {
    /// Begins a session. Blocks.
    pub(super) fn connect(&self, py: Python<'_>, address: &str) -> PyResult<Client<Target>> {
        let to: Address = address.parse().map_err(|error| wire_error(py, &error))?;
        let session = py.import("os")?.call_method1("urandom", (16,))?.extract::<[u8; 16]>()?;
        let options = self.settings.options(py)?.with_service(service_name(session));
        let [ca, cert, key] = &self.tls;
        let tls = tls_client(py, ca.as_ref(), cert.as_ref(), key.as_ref())?;
        let dial = move || {
            let mut socket = Socket::connect(&to, options.idle_timeout)?;
            if let Some(tls) = &tls {
                socket = socket.into_tls_client(tls)?;
            }
            Link::new(socket, Role::Connector, options.clone())
        };
        let options = ClientOptions::new(dial)
            .with_reconnect_timeout(self.retry)
            .with_retry_refused(self.returns);
        py.detach(|| Client::connect(options, session)).map_err(|error| wire_error(py, &error))
    }
}
