// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server of weights: files of a directory, to whoever streams from them.

use std::net::{IpAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use ts_io::Source;
use ts_pool::{Budget, HostPool, SharedBuffer};
use ts_remote::{
    Address, Bytes, Files, Listener, RangeSession, Refusal, RefusalKind, RemoteFile, ServerOptions,
    ServerStats, serve,
};

use crate::Error;
use crate::distant::path_in;

/// The most files that one connection has open.
const MAX_OPEN: usize = 512;

/// How weights are served.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Of the server and its connections. A token, TLS and whom to let in are here.
    pub server: ServerOptions,
    /// Memory for what was read and not sent yet, of all connections, in bytes.
    pub memory_bytes: usize,
    /// Whether an address that others can reach needs neither token nor TLS.
    pub insecure: bool,
}

impl Default for ServeOptions {
    /// 256 MiB of memory.
    fn default() -> Self {
        Self { server: ServerOptions::default(), memory_bytes: 256 << 20, insecure: false }
    }
}

/// Serves the files below a directory, to be read as `ts://HOST:PORT/NAME`, until `stop` says so, which is asked at least every 50 ms.
/// `began` is told the address; `log` hears why connections end. Blocks.
///
/// Symbolic links are followed wherever they lead: only names must stay below the directory.
///
/// # Errors
/// [`Error::Remote`] when it cannot listen there, or when others could reach the address and it asks for neither token nor
/// certificate; [`Error::Io`] when the directory is none.
pub fn serve_weights(
    directory: &Path,
    address: &Address,
    options: &ServeOptions,
    stop: &mut dyn FnMut() -> bool,
    began: impl FnOnce(&Address),
    log: impl FnMut(&str, &ts_remote::Error),
) -> Result<ServerStats, Error> {
    let root = std::fs::canonicalize(directory).map_err(|e| crate::checkpoint::open_error(directory, e))?;
    if !root.is_dir() {
        return Err(crate::checkpoint::open_error(directory, std::io::ErrorKind::NotADirectory.into()));
    }
    let connection = &options.server.connection;
    if connection.token.is_none() && options.server.tls.is_none() && !options.insecure && is_public(address) {
        return Err(ts_remote::Error::Misuse(format!(
            "{address} can be reached from elsewhere: give a token or certificates, or say that everybody may read"
        ))
        .into());
    }
    let budget = Budget::new(options.memory_bytes);
    let pool = HostPool::new(&budget, options.memory_bytes).map_err(ts_io::Error::from)?;
    let listener = Listener::bind(address, connection.timeout)?;
    began(listener.address());
    let session =
        |_: &str| RangeSession::new(Directory { root: root.clone(), pool: pool.clone(), open: Vec::new() });
    Ok(serve(&listener, &options.server, stop, session, log)?)
}

/// Whether others than this machine's own programs may reach an address.
fn is_public(address: &Address) -> bool {
    match address {
        Address::Unix(_) => false,
        Address::Tcp(name) => {
            let local = |ip: IpAddr| ip.is_loopback();
            name.to_socket_addrs().map_or(true, |found| found.into_iter().any(|a| !local(a.ip())))
        }
    }
}

/// The files of a directory that one connection reads.
#[derive(Debug)]
struct Directory {
    root: PathBuf,
    pool: HostPool,
    open: Vec<Arc<Source>>,
}

fn refusal(kind: RefusalKind, reason: impl Into<String>) -> Refusal {
    Refusal { kind, reason: reason.into() }
}

impl Directory {
    /// What a client may know of an error: no paths of this machine.
    fn refused(&self, error: &ts_io::Error) -> Refusal {
        let kind = match error.kind() {
            ts_io::ErrorKind::NotFound => RefusalKind::NotFound,
            ts_io::ErrorKind::Changed => RefusalKind::Changed,
            _ => RefusalKind::Failed,
        };
        let root = format!("{}/", self.root.display());
        refusal(kind, error.to_string().replace(&root, ""))
    }
}

impl Files for Directory {
    fn open(&mut self, name: &str) -> Result<RemoteFile, Refusal> {
        let Some(path) = path_in(&self.root, name) else {
            return Err(refusal(
                RefusalKind::NotFound,
                format!("{name:?} is no name of a file that is served"),
            ));
        };
        if self.open.len() >= MAX_OPEN {
            return Err(refusal(
                RefusalKind::Failed,
                format!("{MAX_OPEN} files are open on this connection"),
            ));
        }
        let source = Source::open(&path).map_err(|error| self.refused(&error))?;
        let print = source.fingerprint();
        let since = print.modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let numbers = [print.identity.0, print.identity.1, since.map_or(0, |since| since.as_nanos() as u64)];
        let version = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
        // The same file again is the one that is open.
        let same = |open: &Arc<Source>| open.path() == source.path() && open.fingerprint() == print;
        let id = self.open.iter().position(same);
        if id.is_none() && self.open.len() >= MAX_OPEN {
            return Err(refusal(
                RefusalKind::Failed,
                format!("{MAX_OPEN} files are open on this connection"),
            ));
        }
        let len = source.len();
        let id = id.unwrap_or_else(|| {
            self.open.push(source);
            self.open.len() - 1
        });
        Ok(RemoteFile { id: id as u64, len, version })
    }

    fn read(&mut self, file: u64, offset: u64, len: usize) -> Result<Option<Bytes>, Refusal> {
        let source = usize::try_from(file).ok().and_then(|file| self.open.get(file));
        let Some(source) = source else {
            return Err(refusal(RefusalKind::Failed, format!("no file {file} is open")));
        };
        let mut buffer = match self.pool.allocate(len) {
            Ok(buffer) => buffer,
            Err(error) if error.kind() == ts_pool::ErrorKind::Full => return Ok(None),
            Err(error) => return Err(refusal(RefusalKind::Failed, error.to_string())),
        };
        let read = source.read_at(offset, &mut buffer).and_then(|read| source.verify(offset).map(|()| read));
        let read = read.map_err(|error| self.refused(&error))?;
        drop(buffer.split_off(read));
        Ok(Some(Bytes::from_owner(Sent(buffer.freeze()))))
    }
}

/// Memory of the pool, until it is sent.
struct Sent(SharedBuffer);

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
