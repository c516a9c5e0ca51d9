// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments that `connect` and `listen` share.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;
use tensorstream::pool::{self, PinnedMemoryPool};
use tensorstream::remote::{
    Acceptor, Address, ConnectionOptions, Identity, Listener, Sink, TlsClient, TlsServer,
};
use tensorstream::streams::{AnyDevice, CpuDevice};

use crate::errors::{configuration_error, pool_error, wire_error};
use crate::tensors::PyPoolConfig;

/// The settings of a connection, from a dictionary that has all of these keys.
#[derive(FromPyObject)]
pub(crate) struct Settings {
    #[pyo3(item)]
    token: Option<String>,
    /// The longest silence of the peer, in seconds, while this side waits for it. After this time,
    /// the wait fails.
    #[pyo3(item)]
    idle_timeout: f64,
    /// The longest time that a transfer may make no progress while this side waits for it, in
    /// seconds. After this time, the wait fails.
    #[pyo3(item)]
    stall_timeout: f64,
    #[pyo3(item)]
    shared_memory: bool,
    #[pyo3(item)]
    pool: Option<Py<PyPoolConfig>>,
    /// The maximum size of a storage that memory is allocated for, in bytes. Storages that are
    /// received into existing memory may be larger.
    #[pyo3(item)]
    pub(super) limit_bytes: u64,
}

impl Settings {
    /// Returns the options of a connection.
    ///
    /// # Errors
    /// ConfigurationError if a timeout or the token is invalid.
    pub(crate) fn options(&self, py: Python<'_>) -> PyResult<ConnectionOptions> {
        let time = |name: &str, seconds: f64| {
            Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero()).ok_or_else(
                || {
                    configuration_error(
                        py,
                        &format!("{name} must be positive and below 2^64 seconds, got {seconds}"),
                    )
                },
            )
        };
        if self.token.as_deref() == Some("") {
            return Err(configuration_error(
                py,
                "invalid token: an empty token protects nothing; pass None for no token",
            ));
        }
        let default = ConnectionOptions::default();
        let shared_bytes = if self.shared_memory { default.shared_bytes } else { 0 };
        Ok(default
            .with_token(self.token.clone())
            .with_idle_timeout(time("idle_timeout", self.idle_timeout)?)
            .with_stall_timeout(time("stall_timeout", self.stall_timeout)?)
            .with_shared_bytes(shared_bytes))
    }

    /// Creates the pool to receive into, if one is configured.
    pub(super) fn pool(&self, py: Python<'_>) -> PyResult<Option<PinnedMemoryPool<AnyDevice>>> {
        let Some(config) = &self.pool else { return Ok(None) };
        let pool = CpuDevice::new()
            .map_err(pool::Error::from)
            .and_then(|device| PinnedMemoryPool::new(AnyDevice::Cpu(device), config.get().0));
        pool.map(Some).map_err(|error| pool_error(py, &error))
    }
}

/// Parses "HOST:PORT" or "unix:PATH".
///
/// # Errors
/// ConfigurationError if the text is neither.
pub(super) fn address(py: Python<'_>, text: &str) -> PyResult<Address> {
    text.parse().map_err(|error| wire_error(py, &error))
}

/// Returns the certificate and the key of this side, or None if neither is given.
fn identity<'a>(
    py: Python<'_>,
    certificates: Option<&'a PathBuf>,
    key: Option<&'a PathBuf>,
) -> PyResult<Option<Identity<'a>>> {
    match (certificates, key) {
        (Some(certificates), Some(key)) => Ok(Some(Identity { certificates, key })),
        (None, None) => Ok(None),
        (Some(_), None) => Err(configuration_error(
            py,
            "incomplete TLS identity: cert= also requires key=, the private key (PEM)",
        )),
        (None, Some(_)) => Err(configuration_error(
            py,
            "incomplete TLS identity: key= also requires cert=, the certificate (PEM)",
        )),
    }
}

/// Returns the TLS configuration of a client, or None if no files are given.
pub(crate) fn tls_client(
    py: Python<'_>,
    ca: Option<&PathBuf>,
    certificates: Option<&PathBuf>,
    key: Option<&PathBuf>,
) -> PyResult<Option<TlsClient>> {
    let own = identity(py, certificates, key)?;
    match ca {
        Some(ca) => TlsClient::new(ca, own).map(Some).map_err(|error| wire_error(py, &error)),
        None if own.is_none() => Ok(None),
        None => Err(configuration_error(
            py,
            "cannot verify the peer: cert= and key= also require ca=, a file of trusted \
             certificates (PEM)",
        )),
    }
}

/// Listens like [`bind`]. Returns the listener, the acceptor of its connections, and the address
/// with the actual port.
pub(crate) fn acceptor<S: Sink>(
    py: Python<'_>,
    at: &str,
    options: ConnectionOptions,
    tls: [Option<&PathBuf>; 3],
    insecure: bool,
) -> PyResult<(Listener, Acceptor<S>, String)> {
    let (listener, tls) = bind(py, at, &options, tls, insecure)?;
    let address = listener.address().to_string();
    let acceptor = Acceptor::new(options);
    Ok((listener, if let Some(tls) = tls { acceptor.with_tls(tls) } else { acceptor }, address))
}

/// Listens at an address. Returns the listener, and a TLS configuration if there is a certificate.
///
/// `tls` contains the paths of three files: the certificates of the clients' authorities, the
/// certificate of this side, and its key. Blocks while the system resolves a host name.
///
/// # Errors
/// ConfigurationError if other machines can reach the address and clients need neither a token nor
/// a certificate, unless `insecure` allows it. Also if the address or the combination of files is
/// invalid. Other errors if a file cannot be read, or if the system cannot listen at the address.
pub(crate) fn bind(
    py: Python<'_>,
    at: &str,
    options: &ConnectionOptions,
    tls: [Option<&PathBuf>; 3],
    insecure: bool,
) -> PyResult<(Listener, Option<TlsServer>)> {
    let (at, [ca, certificates, key]) = (address(py, at)?, tls);
    let tls = match identity(py, certificates, key)? {
        Some(own) => {
            let ca = ca.map(PathBuf::as_path);
            Some(TlsServer::new(own, ca).map_err(|error| wire_error(py, &error))?)
        }
        None if ca.is_none() => None,
        None => {
            return Err(configuration_error(
                py,
                "cannot listen with TLS: ca= requires a certificate of this side; pass cert= and \
                 key=, or omit ca=",
            ));
        }
    };
    let authenticates = tls.as_ref().is_some_and(TlsServer::authenticates_clients);
    if options.token.is_none() && !authenticates && !insecure && at.is_public() {
        return Err(configuration_error(
            py,
            &format!(
                "cannot listen on {at}: other machines can reach this address, and clients are not \
                 authenticated; pass token=, or ca=, cert= and key= to require client \
                 certificates, or insecure=True to accept everyone"
            ),
        ));
    }
    Ok((Listener::bind(&at, options.idle_timeout).map_err(|error| wire_error(py, &error))?, tls))
}
