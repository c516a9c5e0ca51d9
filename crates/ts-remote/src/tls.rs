// SPDX-License-Identifier: MIT OR Apache-2.0
//! TLS over a socket that never waits.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::sync::Arc;

use rustix::net::RecvFlags;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};

use crate::Error;
use crate::socket::{receive, send};

/// Whom a connecting end trusts, and who it is.
#[derive(Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
}

/// Who an accepting end is, and whom it lets in.
#[derive(Clone)]
pub struct TlsServer {
    config: Arc<ServerConfig>,
    authenticates: bool,
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsClient")
    }
}

impl fmt::Debug for TlsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsServer")
    }
}

/// A certificate, with those that lead to who issued it, and its key: two files in PEM.
#[derive(Debug, Clone, Copy)]
pub struct Identity<'a> {
    /// The certificates.
    pub certificates: &'a Path,
    /// The key.
    pub key: &'a Path,
}

impl TlsClient {
    /// Trusts servers whose certificates come from one of these in PEM, and shows its own to those
    /// that ask.
    ///
    /// # Errors
    /// [`Error::Misuse`] that says which file is wrong. Blocks.
    pub fn new(trusted: &Path, identity: Option<Identity<'_>>) -> Result<Self, Error> {
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Misuse(error.to_string()))?
            .with_root_certificates(roots(trusted)?);
        let config = match identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                let (certificates, key) = identity.read()?;
                let built = builder.with_client_auth_cert(certificates, key);
                built.map_err(|error| unfit(identity.certificates, &error.to_string()))?
            }
        };
        Ok(Self { config: Arc::new(config) })
    }
}

impl TlsServer {
    /// Shows this identity; lets in who shows a certificate that comes from one of `clients`, or
    /// everybody without.
    ///
    /// # Errors
    /// As [`TlsClient::new`].
    pub fn new(identity: Identity<'_>, clients: Option<&Path>) -> Result<Self, Error> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Misuse(error.to_string()))?;
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(roots(path)?.into(), provider());
                builder.with_client_cert_verifier(
                    verifier.build().map_err(|error| unfit(path, &error.to_string()))?,
                )
            }
        };
        let (certificates, key) = identity.read()?;
        let built = builder.with_single_cert(certificates, key);
        let config = built.map_err(|error| unfit(identity.certificates, &error.to_string()))?;
        Ok(Self { config: Arc::new(config), authenticates: clients.is_some() })
    }

    /// Whether clients need a certificate. If not, anyone can connect.
    pub fn authenticates_clients(&self) -> bool {
        self.authenticates
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn unfit(path: &Path, why: &str) -> Error {
    Error::Misuse(format!("{}: {why}", path.display()))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let found: Vec<_> = read.map_err(|error| unfit(path, &error.to_string()))?;
    if found.is_empty() { Err(unfit(path, "no certificate is in it")) } else { Ok(found) }
}

fn roots(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| unfit(path, &error.to_string()))?;
    }
    Ok(roots)
}

impl Identity<'_> {
    fn read(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), Error> {
        let key = PrivateKeyDer::from_pem_file(self.key);
        Ok((
            certificates(self.certificates)?,
            key.map_err(|error| unfit(self.key, &error.to_string()))?,
        ))
    }
}

/// What is read from the socket at a time: rustls itself reads 4 KiB.
const INPUT: usize = 256 << 10;
/// What is encrypted at a time: the other end decrypts it meanwhile. 256 KiB are half as fast.
const OUTPUT: usize = 64 << 10;

/// A socket that takes what it can take at once.
struct AtOnce<'a>(&'a TcpStream);

impl Write for AtOnce<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        send(self.0, &[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        send(self.0, from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A TCP connection under TLS.
pub(crate) struct TlsStream {
    tcp: TcpStream,
    tls: Connection,
    /// What came and was not looked at: `input[at..end]`.
    input: Box<[u8]>,
    at: usize,
    end: usize,
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TlsStream").field(&self.tcp).finish()
    }
}

impl TlsStream {
    pub(crate) fn client(tcp: TcpStream, client: &TlsClient, name: &str) -> Result<Self, Error> {
        let of_whom = ServerName::try_from(name.to_string()).map_err(|_| {
            Error::Misuse(format!("`{name}` is no name that a certificate could have"))
        })?;
        let tls = ClientConnection::new(Arc::clone(&client.config), of_whom);
        Ok(Self::new(tcp, tls.map_err(|error| Error::Misuse(error.to_string()))?.into()))
    }

    pub(crate) fn server(tcp: TcpStream, server: &TlsServer) -> Result<Self, Error> {
        let tls = ServerConnection::new(Arc::clone(&server.config));
        Ok(Self::new(tcp, tls.map_err(|error| Error::Misuse(error.to_string()))?.into()))
    }

    fn new(tcp: TcpStream, mut tls: Connection) -> Self {
        tls.set_buffer_limit(Some(2 * OUTPUT));
        Self { tcp, tls, input: vec![0; INPUT].into(), at: 0, end: 0 }
    }

    pub(crate) fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Whether encrypted bytes wait for the socket.
    pub(crate) fn wants_write(&self) -> bool {
        self.tls.wants_write()
    }

    pub(crate) fn read(
        &mut self,
        into: &mut [IoSliceMut<'_>],
        flags: RecvFlags,
    ) -> io::Result<usize> {
        loop {
            let mut len = 0;
            let mut over = false;
            for part in into.iter_mut() {
                let mut at = 0;
                while at < part.len() {
                    match self.tls.reader().read(&mut part[at..]) {
                        Ok(0) => over = true,
                        Ok(n) => at += n,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        // The end without TLS's own end: somebody may have cut the rest off.
                        Err(error) => return Err(error),
                    }
                    if at < part.len() && (over || !self.decrypt_more()?) {
                        break;
                    }
                }
                len += at;
                if at < part.len() {
                    break;
                }
            }
            if len > 0 || over {
                return Ok(len);
            }
            // The other end may wait for what this one has to say to that. If it takes nothing now
            // it may be because nobody here reads.
            match self.flush() {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
            // Nothing is there that is not looked at.
            match receive(&self.tcp, &mut [IoSliceMut::new(&mut self.input)], flags)? {
                0 => {
                    self.tls.read_tls(&mut io::empty())?;
                    self.process()?;
                }
                n => (self.at, self.end) = (0, n),
            }
        }
    }

    /// Decrypts more of what came; whether there was some.
    fn decrypt_more(&mut self) -> io::Result<bool> {
        if self.at == self.end {
            return Ok(false);
        }
        let mut rest = &self.input[self.at..self.end];
        self.at += self.tls.read_tls(&mut rest)?;
        self.process()?;
        Ok(true)
    }

    fn process(&mut self) -> io::Result<()> {
        if let Err(error) = self.tls.process_new_packets() {
            // The other end is told why.
            let _ = self.tls.write_tls(&mut AtOnce(&self.tcp));
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        Ok(())
    }

    /// Encrypts as much as there is room for, and writes what the socket takes of it.
    pub(crate) fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush()?;
        let mut len = 0;
        for part in from {
            let part = &part[..part.len().min(OUTPUT - len)];
            let taken = self.tls.writer().write(part)?;
            len += taken;
            if taken < part.len() || len == OUTPUT {
                break;
            }
        }
        match self.flush() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(len),
        }
    }

    /// Writes what is encrypted.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut AtOnce(&self.tcp))?;
        }
        Ok(())
    }

    /// Says, as far as the socket takes that, that nothing more will be written.
    pub(crate) fn shutdown(&mut self) -> io::Result<()> {
        self.tls.send_close_notify();
        match self.flush() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => self.tcp.shutdown(Shutdown::Write),
        }
    }

    /// Whether bytes came that were not looked at.
    pub(crate) fn has_input(&self) -> bool {
        self.at < self.end
    }
}
