// SPDX-License-Identifier: MIT OR Apache-2.0
//! TLS over nonblocking TCP sockets.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};

use crate::fd;
use crate::socket::Transport;
use crate::{Error, Socket};

/// The TLS configuration of a client: the authorities it trusts, and optionally its own
/// certificate.
#[derive(Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
}

/// The TLS configuration of a server: its certificate, and optionally the authorities of its
/// clients.
///
/// ```no_run
/// use std::path::Path;
/// use std::time::Duration;
/// use ts_remote::{ConnectionOptions, Identity, Link, Listener, Role, TlsServer};
///
/// let identity =
///     Identity { certificates: Path::new("server.pem"), key: Path::new("server.key") };
/// let tls = TlsServer::new(identity, Some(Path::new("clients-ca.pem")))?;
/// let listener = Listener::bind(&"0.0.0.0:5000".parse()?, Duration::from_secs(30))?;
/// let socket = listener.accept()?.into_tls_server(&tls)?;
/// let link = Link::<Vec<u8>>::new(socket, Role::Acceptor, ConnectionOptions::default())?;
/// # Ok::<(), ts_remote::Error>(())
/// ```
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

/// The PEM files of a certificate chain and its private key.
#[derive(Debug, Clone, Copy)]
pub struct Identity<'a> {
    /// A file with the certificate, followed by the intermediate certificates up to the authority.
    pub certificates: &'a Path,
    /// A file with the private key of the first certificate.
    pub key: &'a Path,
}

impl TlsClient {
    /// Creates a configuration that trusts servers with certificates of the authorities in the PEM
    /// file `trusted`. Sends `identity` to servers that request a certificate. Blocks while it
    /// reads the files.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] with the path of a file that cannot be used.
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
                built.map_err(|error| identity.unusable(&error))?
            }
        };
        Ok(Self { config: Arc::new(config) })
    }
}

impl TlsServer {
    /// Creates a configuration that sends `identity` to clients. `clients` is the path of a PEM
    /// file. If it is given, only clients with a certificate of an authority in that file are
    /// accepted. Blocks while it reads the files.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] with the path of a file that cannot be used.
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
                    verifier.build().map_err(|error| file_error(path, &error.to_string()))?,
                )
            }
        };
        let (certificates, key) = identity.read()?;
        let built = builder.with_single_cert(certificates, key);
        let config = built.map_err(|error| identity.unusable(&error))?;
        Ok(Self { config: Arc::new(config), authenticates: clients.is_some() })
    }

    /// Returns whether clients need a certificate. If not, TLS accepts any client.
    pub fn authenticates_clients(&self) -> bool {
        self.authenticates
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn file_error(path: &Path, reason: &str) -> Error {
    Error::Misuse(format!("{}: {reason}", path.display()))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let found: Vec<_> = read.map_err(|error| file_error(path, &error.to_string()))?;
    if found.is_empty() {
        Err(file_error(path, "the file contains no certificate"))
    } else {
        Ok(found)
    }
}

fn roots(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| file_error(path, &error.to_string()))?;
    }
    Ok(roots)
}

impl Identity<'_> {
    /// Returns the error for a certificate and a key that TLS cannot use together.
    fn unusable(&self, error: &rustls::Error) -> Error {
        let (certificates, key) = (self.certificates.display(), self.key.display());
        Error::Misuse(format!("cannot use certificate {certificates} with key {key}: {error}"))
    }

    fn read(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), Error> {
        let key = PrivateKeyDer::from_pem_file(self.key);
        Ok((
            certificates(self.certificates)?,
            key.map_err(|error| file_error(self.key, &error.to_string()))?,
        ))
    }
}

impl Socket {
    /// Starts TLS as a client. The server's certificate must be valid for the host name or IP
    /// address that the socket is connected to. The first reads and writes perform the TLS
    /// handshake.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if this is not a plain TCP socket, or if the host name is invalid.
    pub fn into_tls_client(self, client: &TlsClient) -> Result<Self, Error> {
        self.layered(|tcp, peer| {
            let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
            TlsStream::client(tcp, client, host.trim_matches(['[', ']']))
        })
    }

    /// Starts TLS as a server. The first reads and writes perform the TLS handshake.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if this is not a plain TCP socket.
    pub fn into_tls_server(self, server: &TlsServer) -> Result<Self, Error> {
        self.layered(|tcp, _| TlsStream::server(tcp, server))
    }

    /// Starts TLS as a server on a TCP socket, if `server` is given. Returns Unix sockets
    /// unchanged, because they connect processes of one host.
    pub(crate) fn into_tls_if_tcp(self, server: Option<&TlsServer>) -> Result<Self, Error> {
        match server {
            Some(server) if self.is_plain_tcp() => self.into_tls_server(server),
            _ => Ok(self),
        }
    }
}

/// The maximum number of bytes per read from the socket. The default of rustls is 4 KiB.
const INPUT_LEN: usize = 256 << 10;
/// The maximum number of bytes that are encrypted per write, so that the peer decrypts one piece
/// while the next one is encrypted. With 256 KiB, the throughput is half as high.
const OUTPUT_LEN: usize = 64 << 10;

/// Writes to a socket without blocking.
struct NonBlocking<'a>(&'a TcpStream);

impl Write for NonBlocking<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        fd::send(self.0, &[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        fd::send(self.0, from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A TCP connection under TLS.
struct TlsStream {
    tcp: TcpStream,
    tls: Connection,
    /// Encrypted bytes that were received and not yet decrypted: `input[at..end]`.
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
    fn client(tcp: TcpStream, client: &TlsClient, name: &str) -> Result<Self, Error> {
        let server_name = ServerName::try_from(name.to_string()).map_err(|_| {
            Error::Misuse(format!(
                "invalid server name {name:?}: expected a DNS name or IP address"
            ))
        })?;
        let tls = ClientConnection::new(Arc::clone(&client.config), server_name);
        Ok(Self::new(tcp, tls.map_err(|error| Error::Misuse(error.to_string()))?.into()))
    }

    fn server(tcp: TcpStream, server: &TlsServer) -> Result<Self, Error> {
        let tls = ServerConnection::new(Arc::clone(&server.config));
        Ok(Self::new(tcp, tls.map_err(|error| Error::Misuse(error.to_string()))?.into()))
    }

    fn new(tcp: TcpStream, mut tls: Connection) -> Self {
        tls.set_buffer_limit(Some(2 * OUTPUT_LEN));
        Self { tcp, tls, input: vec![0; INPUT_LEN].into(), at: 0, end: 0 }
    }

    /// Decrypts more of the received bytes. Returns false if all of them were already decrypted.
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
            // Sends the alert that tells the peer the reason.
            let _ = self.tls.write_tls(&mut NonBlocking(&self.tcp));
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        Ok(())
    }
}

impl Transport for TlsStream {
    fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    fn read(&mut self, into: &mut [IoSliceMut<'_>], wait: bool) -> io::Result<usize> {
        loop {
            let mut len = 0;
            let mut closed = false;
            for part in into.iter_mut() {
                let mut at = 0;
                while at < part.len() {
                    match self.tls.reader().read(&mut part[at..]) {
                        Ok(0) => closed = true,
                        Ok(n) => at += n,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        // The TCP connection ended without close_notify of TLS. An attacker may
                        // have cut the rest off.
                        Err(error) => return Err(error),
                    }
                    if at < part.len() && (closed || !self.decrypt_more()?) {
                        break;
                    }
                }
                len += at;
                if at < part.len() {
                    break;
                }
            }
            if len > 0 || closed {
                return Ok(len);
            }
            // The peer may wait for a TLS response. If the send buffer is full, this end must still
            // read, because the peer may read only after its own data has been read.
            match self.flush() {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
            // All received bytes are decrypted, so more must be read.
            match fd::receive(&self.tcp, &mut [IoSliceMut::new(&mut self.input)], wait)? {
                0 => {
                    self.tls.read_tls(&mut io::empty())?;
                    self.process()?;
                }
                n => (self.at, self.end) = (0, n),
            }
        }
    }

    fn has_input(&self) -> bool {
        self.at < self.end
    }

    /// Encrypts as many bytes as fit into the buffer, and writes as much of the result as the
    /// socket takes.
    fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush()?;
        let mut len = 0;
        for part in from {
            let part = &part[..part.len().min(OUTPUT_LEN - len)];
            let taken = self.tls.writer().write(part)?;
            len += taken;
            if taken < part.len() || len == OUTPUT_LEN {
                break;
            }
        }
        match self.flush() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(len),
        }
    }

    fn wants_write(&self) -> bool {
        self.tls.wants_write()
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut NonBlocking(&self.tcp))?;
        }
        Ok(())
    }

    /// Sends close_notify, as far as the socket takes it, and closes the sending direction.
    fn shutdown(&mut self) -> io::Result<()> {
        self.tls.send_close_notify();
        match self.flush() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => self.tcp.shutdown(Shutdown::Write),
        }
    }
}
