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

use crate::errors::{misuse, of_pool, of_wire};
use crate::tensor::PyPoolConfig;

/// How connections are made: arguments that `connect` and `listen` have in common.
#[derive(FromPyObject)]
pub(crate) struct Settings {
    #[pyo3(item)]
    token: Option<String>,
    #[pyo3(item)]
    idle_timeout: f64,
    #[pyo3(item)]
    stall_timeout: f64,
    #[pyo3(item)]
    shared_memory: bool,
    #[pyo3(item)]
    pool: Option<Py<PyPoolConfig>>,
    #[pyo3(item)]
    pub(super) limit_bytes: u64,
}

impl Settings {
    pub(crate) fn options(&self, py: Python<'_>) -> PyResult<ConnectionOptions> {
        let time = |name: &str, value: f64| {
            Duration::try_from_secs_f64(value)
                .ok()
                .filter(|time| !time.is_zero())
                .ok_or_else(|| misuse(py, &format!("{name}={value}: more than 0 seconds are")))
        };
        if self.token.as_deref() == Some("") {
            return Err(misuse(
                py,
                "an empty token protects nothing: None says that there is none",
            ));
        }
        let usual = ConnectionOptions::default();
        Ok(ConnectionOptions {
            token: self.token.clone(),
            idle_timeout: time("idle_timeout", self.idle_timeout)?,
            stall_timeout: time("stall_timeout", self.stall_timeout)?,
            shared_bytes: if self.shared_memory { usual.shared_bytes } else { 0 },
            ..usual
        })
    }

    pub(super) fn pool(&self, py: Python<'_>) -> PyResult<Option<PinnedMemoryPool<AnyDevice>>> {
        let Some(config) = &self.pool else { return Ok(None) };
        let made = CpuDevice::new()
            .map_err(pool::Error::from)
            .and_then(|device| PinnedMemoryPool::new(AnyDevice::Cpu(device), config.get().0));
        made.map(Some).map_err(|error| of_pool(py, &error))
    }
}

pub(super) fn address(py: Python<'_>, text: &str) -> PyResult<Address> {
    text.parse().map_err(|error| of_wire(py, &error))
}

/// Certificates and key of this end, if both are given.
fn identity<'a>(
    py: Python<'_>,
    certificates: Option<&'a PathBuf>,
    key: Option<&'a PathBuf>,
) -> PyResult<Option<Identity<'a>>> {
    match (certificates, key) {
        (Some(certificates), Some(key)) => Ok(Some(Identity { certificates, key })),
        (None, None) => Ok(None),
        _ => Err(misuse(py, "a certificate (cert) and its key are given together")),
    }
}

/// TLS of who connects, if there is one to trust.
pub(crate) fn tls_client(
    py: Python<'_>,
    ca: Option<&PathBuf>,
    certificates: Option<&PathBuf>,
    key: Option<&PathBuf>,
) -> PyResult<Option<TlsClient>> {
    let own = identity(py, certificates, key)?;
    match ca {
        Some(ca) => TlsClient::new(ca, own).map(Some).map_err(|error| of_wire(py, &error)),
        None if own.is_none() => Ok(None),
        None => Err(misuse(
            py,
            "TLS needs to know whom to trust: ca names a file of certificates (PEM)",
        )),
    }
}

/// Listens where whoever may reach it must know a secret, or has certificates, or it is said that
/// none is needed. With the address, in which the port is that which was free.
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

/// Listens, where not everybody is let in, and with what certificates.
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
            Some(TlsServer::new(own, ca).map_err(|error| of_wire(py, &error))?)
        }
        None if ca.is_none() => None,
        None => {
            return Err(misuse(
                py,
                "clients' certificates (ca) need one of this end: cert and key",
            ));
        }
    };
    let authenticates = tls.as_ref().is_some_and(TlsServer::authenticates_clients);
    if options.token.is_none() && !authenticates && !insecure && at.is_public() {
        let what = format!(
            "anyone could connect to {at}, a public address: give a token, or ca with cert and key \
             to accept only clients with a certificate, or insecure=True"
        );
        return Err(misuse(py, &what));
    }
    Ok((Listener::bind(&at, options.idle_timeout).map_err(|error| of_wire(py, &error))?, tls))
}
