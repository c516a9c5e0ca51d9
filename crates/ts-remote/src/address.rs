// SPDX-License-Identifier: MIT OR Apache-2.0
//! Addresses of peers.

use std::fmt;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::str::FromStr;

use crate::Error;

/// The address of a TCP or Unix socket.
///
/// ```
/// use ts_remote::Address;
///
/// let address: Address = "127.0.0.1:5000".parse()?;
/// assert!(!address.is_public());
/// assert_eq!("unix:/run/ts".parse::<Address>()?, Address::Unix("/run/ts".into()));
/// assert!("localhost".parse::<Address>().is_err());
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// The host and the port of a TCP socket, as `HOST:PORT`.
    Tcp(String),
    /// The path of a Unix socket. The text form is `unix:PATH`. On Windows, it can be parsed, but
    /// neither connected to nor listened on.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Address {
    /// Returns whether other machines may be able to reach the address. This is false for Unix
    /// sockets, and for names that resolve only to loopback addresses.
    ///
    /// Blocks while it resolves a host name.
    pub fn is_public(&self) -> bool {
        match self {
            Self::Unix(_) => false,
            Self::Tcp(name) => {
                let mut found = name.to_socket_addrs().into_iter().flatten().peekable();
                found.peek().is_none() || found.any(|address| !address.ip().is_loopback())
            }
        }
    }
}

#[cfg(windows)]
impl Address {
    /// The error of an operation on the path of a Unix socket.
    pub(crate) fn no_unix_sockets() -> std::io::Error {
        let what = "Unix sockets are not available on Windows; use HOST:PORT";
        std::io::Error::new(std::io::ErrorKind::Unsupported, what)
    }
}

impl FromStr for Address {
    type Err = Error;

    /// Parses `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if `text` has none of these forms.
    fn from_str(text: &str) -> Result<Self, Error> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        match text.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>())) {
            Some((host, Ok(_))) if !host.is_empty() => Ok(Self::Tcp(text.into())),
            _ => Err(Error::Misuse(format!(
                "invalid address {text:?}: expected HOST:PORT or unix:PATH"
            ))),
        }
    }
}
