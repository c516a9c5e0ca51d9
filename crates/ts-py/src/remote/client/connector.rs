// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connects to a machine.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;
use tensorstream::exec::{Client, ClientOptions, service_name};
use tensorstream::remote::{Address, Link, Role, Sink, Socket};

use crate::errors::wire_error;
use crate::wire::{Settings, tls_client};

/// The parameters of connections to a machine, except for the address.
pub(super) struct Connector {
    pub(super) settings: Settings,
    /// How long a session tries to reconnect after its connection is lost.
    pub(super) reconnect_timeout: Duration,
    /// Whether a session keeps trying when the address refuses connections.
    pub(super) retry_refused: bool,
    /// Paths of PEM files: the certificates to trust, the client's certificate, and its key.
    pub(super) tls: [Option<PathBuf>; 3],
}

impl Connector {
    /// Connects to the machine at `address` and begins a session. Blocks.
    pub(super) fn connect<S: Sink + Send + 'static>(
        &self,
        py: Python<'_>,
        address: &str,
    ) -> PyResult<Client<S>> {
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
            .with_reconnect_timeout(self.reconnect_timeout)
            .with_retry_refused(self.retry_refused);
        py.detach(|| Client::connect(options, session)).map_err(|error| wire_error(py, &error))
    }
}
