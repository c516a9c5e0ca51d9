// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server of the files in a directory.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use ts_io::Source;
use ts_pool::{Budget, HostPool, SharedBuffer};
use ts_remote::{
    Address, Bytes, Files, ListedFile, Listener, RangeHandler, Refusal, RefusalKind, RemoteFile,
    ServerOptions, ServerStats, TlsServer, serve,
};

use super::source::{is_private, path_in};
use crate::Error;

/// Maximum number of open files of a connection.
const MAX_OPEN: usize = 512;
/// Maximum number of files and directories in a listing.
const MAX_LISTED: usize = 10_000;

/// Options for serving files.
///
/// ```
/// let options = tensorstream::ServeOptions::default().with_memory_bytes(64 << 20);
/// assert!(!options.follow_symlinks);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServeOptions {
    /// Options of the server and its connections, such as the token, TLS and limits.
    pub server: ServerOptions,
    /// Memory in bytes for data that is read and not yet sent, shared by all connections. 256 MiB
    /// by default.
    pub memory_bytes: usize,
    /// Whether to accept clients without a token or certificate on a
    /// [public](Address::is_public) address. False by default.
    pub insecure: bool,
    /// Whether to follow symbolic links to targets outside of the directory. False by default.
    pub follow_symlinks: bool,
}

impl Default for ServeOptions {
    fn default() -> Self {
        let server = ServerOptions::default();
        Self { server, memory_bytes: 256 << 20, insecure: false, follow_symlinks: false }
    }
}

impl ServeOptions {
    /// Sets [`server`](Self::server).
    #[must_use]
    pub fn with_server(self, server: ServerOptions) -> Self {
        Self { server, ..self }
    }

    /// Sets [`memory_bytes`](Self::memory_bytes).
    #[must_use]
    pub fn with_memory_bytes(self, memory_bytes: usize) -> Self {
        Self { memory_bytes, ..self }
    }

    /// Sets [`insecure`](Self::insecure).
    #[must_use]
    pub fn with_insecure(self, insecure: bool) -> Self {
        Self { insecure, ..self }
    }

    /// Sets [`follow_symlinks`](Self::follow_symlinks).
    #[must_use]
    pub fn with_follow_symlinks(self, follow_symlinks: bool) -> Self {
        Self { follow_symlinks, ..self }
    }

    /// Returns an error if the address is [public](Address::is_public) and clients need neither a
    /// token nor a certificate, unless [`insecure`](Self::insecure) is set.
    pub(crate) fn check(&self, address: &Address) -> Result<(), Error> {
        let ServerOptions { connection, tls, .. } = &self.server;
        let authenticates = tls.as_ref().is_some_and(TlsServer::authenticates_clients);
        let open = connection.token.is_none() && !authenticates && !self.insecure;
        if open && address.is_public() {
            return Err(ts_remote::Error::Misuse(format!(
                "cannot listen on {address}: other machines can reach this address, and clients \
                 are not authenticated; require a token (--token-file) or client certificates \
                 (--tls-client-ca), or accept everyone (--insecure)"
            ))
            .into());
        }
        Ok(())
    }

    /// Creates a pool for data that is read and not yet sent.
    pub(crate) fn pool(&self) -> Result<HostPool, Error> {
        let budget = Budget::new(self.memory_bytes);
        Ok(HostPool::new(&budget, self.memory_bytes).map_err(ts_io::Error::from)?)
    }
}

/// Serves the files in a directory, as `ts://HOST:PORT/NAME`, until `stop` returns true. Blocks.
///
/// Calls `stop` at least every 50 ms with the statistics so far, and `on_listening` once with the
/// address of the server. When a connection ends with an error, calls `log` with the peer and the
/// error. After `stop` returns true, waits for running transfers for at most
/// [`ServerOptions::grace_period`].
///
/// The server refuses:
/// - names with a component that starts with a dot;
/// - names with a component that ends in `.partial`, which belong to unfinished files;
/// - symbolic links to targets outside of the directory, unless
///   [`ServeOptions::follow_symlinks`] is set.
///
/// # Errors
/// - [`Error::Io`] if `directory` is not a directory or cannot be opened.
/// - [`Error::Remote`] if the address cannot be bound.
/// - [`Error::Remote`] if the address is [public](Address::is_public), and clients need neither a
///   token nor a certificate, unless [`ServeOptions::insecure`] is set.
pub fn serve_weights(
    directory: &Path,
    address: &Address,
    options: &ServeOptions,
    stop: &mut dyn FnMut(&ServerStats) -> bool,
    on_listening: impl FnOnce(&Address),
    log: impl FnMut(&str, &ts_remote::Error),
) -> Result<ServerStats, Error> {
    let root = std::fs::canonicalize(directory).map_err(|e| Error::open(directory, e))?;
    if !root.is_dir() {
        return Err(Error::open(directory, std::io::ErrorKind::NotADirectory.into()));
    }
    options.check(address)?;
    let pool = options.pool()?;
    let listener = Listener::bind(address, options.server.connection.idle_timeout)?;
    on_listening(listener.address());
    let broadcasts = Arc::new(Mutex::new(Broadcasts::default()));
    let session = |_: &str| {
        let (root, pool, broadcasts) = (root.clone(), pool.clone(), Arc::clone(&broadcasts));
        RangeHandler::new(Directory {
            root,
            follow_symlinks: options.follow_symlinks,
            pool,
            open: VecDeque::new(),
            opened: 0,
            broadcasts,
            joined: Vec::new(),
        })
    };
    Ok(serve(&listener, &options.server, stop, session, log)?)
}

/// The state of a connection that reads files of the directory.
#[derive(Debug)]
struct Directory {
    /// The canonical path of the directory.
    root: PathBuf,
    follow_symlinks: bool,
    pool: HostPool,
    /// Open files and their ids. The most recently opened one is last.
    open: VecDeque<(u64, Arc<Source>)>,
    /// Number of files opened so far.
    opened: u64,
    broadcasts: Arc<Mutex<Broadcasts>>,
    /// The names that the client of this connection fetches, each with the address at which the
    /// client serves it.
    joined: Vec<(String, String)>,
}

/// Maximum number of names that are broadcast at a time, and maximum number of joins that a
/// connection records. When a connection ends, it leaves the broadcasts of its recorded joins.
const MAX_BROADCASTS: usize = 64;
/// Maximum number of peers of a broadcast.
const MAX_PEERS: usize = 1024;
/// Maximum length of the address of a peer in bytes.
const MAX_ADDRESS_LEN: usize = 256;

/// The peers that fetch and serve each name. They form a chain: the first peer reads from this
/// server, and each other peer from the peer before it.
#[derive(Debug, Default)]
struct Broadcasts(BTreeMap<String, Vec<String>>);

impl Broadcasts {
    /// Adds a peer to the chain of `name`, and removes `lost`. Returns the address of the peer to
    /// read from, or `None` to read from this server.
    fn join(&mut self, name: &str, address: &str, lost: Option<&str>) -> Option<String> {
        if !self.0.contains_key(name) && self.0.len() >= MAX_BROADCASTS {
            self.0.pop_first();
        }
        let peers = self.0.entry(name.into()).or_default();
        peers.retain(|peer| Some(&peer[..]) != lost);
        // If a peer joins again, it keeps its position, so that no two peers read from each other.
        let position = peers.iter().position(|peer| peer == address).unwrap_or_else(|| {
            if peers.len() < MAX_PEERS {
                peers.push(address.into());
            }
            peers.len().saturating_sub(1)
        });
        position.checked_sub(1).map(|previous| peers[previous].clone())
    }

    fn leave(&mut self, name: &str, address: &str) {
        if let Some(peers) = self.0.get_mut(name) {
            peers.retain(|peer| peer != address);
            if peers.is_empty() {
                self.0.remove(name);
            }
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let mut broadcasts = self.broadcasts.lock();
        self.joined.iter().for_each(|(name, address)| broadcasts.leave(name, address));
    }
}

fn refusal(kind: RefusalKind, reason: impl Into<String>) -> Refusal {
    Refusal { kind, reason: reason.into() }
}

impl Directory {
    /// Returns the path of a file or directory that may be served. The empty name is the whole
    /// directory.
    fn resolve(&self, name: &str) -> Result<PathBuf, Refusal> {
        let unknown =
            || refusal(RefusalKind::NotFound, format!("{name:?} is not a file of this server"));
        if name.is_empty() {
            return Ok(self.root.clone());
        }
        if name.split('/').any(is_private) {
            return Err(unknown());
        }
        let path = path_in(&self.root, name).ok_or_else(unknown)?;
        if self.leaves_root(&path) {
            let reason = format!(
                "{name:?} is a symbolic link to a target outside of the served directory; to allow \
                 this, start the server with --follow-symlinks"
            );
            return Err(refusal(RefusalKind::NotFound, reason));
        }
        Ok(path)
    }

    /// Returns whether symbolic links lead from `path` to a file that must not be served. False if
    /// the file does not exist.
    fn leaves_root(&self, path: &Path) -> bool {
        !self.follow_symlinks
            && std::fs::canonicalize(path).is_ok_and(|real| !real.starts_with(&self.root))
    }

    /// Converts an error to a refusal for the client, without the path of the served directory.
    fn to_refusal(&self, error: &ts_io::Error) -> Refusal {
        // The client adds the name of the file and the offset.
        if let ts_io::Error::Changed { what, .. } = error {
            return refusal(RefusalKind::Changed, what.clone());
        }
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
        let path = self.resolve(name)?;
        let source = Source::open(&path).map_err(|error| self.to_refusal(&error))?;
        let fingerprint = source.fingerprint();
        let modified =
            fingerprint.modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let modified_ns = modified.map_or(0, |since| since.as_nanos() as u64);
        let version = [fingerprint.identity.0, fingerprint.identity.1, modified_ns];
        let version = version.into_iter().flat_map(u64::to_le_bytes).collect();
        // If the same file is open already, it keeps its id.
        let same =
            |open: &Arc<Source>| open.path() == source.path() && open.fingerprint() == fingerprint;
        let len = source.len();
        let known =
            self.open.iter().position(|(_, open)| same(open)).and_then(|at| self.open.remove(at));
        let (id, source) = known.unwrap_or_else(|| {
            self.opened += 1;
            (self.opened, source)
        });
        // Closes the file that was opened least recently. A client that needs it opens it again.
        if self.open.len() >= MAX_OPEN {
            self.open.pop_front();
        }
        self.open.push_back((id, source));
        Ok(RemoteFile { id, len, version })
    }

    fn read(&mut self, file: u64, offset: u64, len: usize) -> Result<Option<Bytes>, Refusal> {
        let source = self.open.iter().rev().find(|(id, _)| *id == file).map(|(_, source)| source);
        let Some(source) = source else {
            let reason = format!("this connection has no open file with id {file}");
            return Err(refusal(RefusalKind::Failed, reason));
        };
        let mut buffer = match self.pool.allocate(len) {
            Ok(buffer) => buffer,
            Err(error) if error.kind() == ts_pool::ErrorKind::Full => return Ok(None),
            Err(error) => return Err(refusal(RefusalKind::Failed, error.to_string())),
        };
        let read = source
            .read_at(offset, &mut buffer)
            .and_then(|read| source.verify(offset).map(|()| read));
        let read = read.map_err(|error| self.to_refusal(&error))?;
        drop(buffer.split_off(read));
        Ok(Some(Bytes::from_owner(PoolBytes(buffer.freeze()))))
    }

    fn list(&mut self, name: &str) -> Result<Vec<ListedFile>, Refusal> {
        let path = self.resolve(name)?;
        if !path.exists() {
            return Err(refusal(RefusalKind::NotFound, format!("{name:?} does not exist")));
        }
        let mut files = Vec::new();
        let requested = name;
        let mut pending = vec![(path, name.trim_end_matches('/').to_string())];
        while let Some((path, name)) = pending.pop() {
            // The file may have been removed, or be a link without a target.
            let Ok(meta) = std::fs::metadata(&path) else { continue };
            if meta.is_file() {
                files.push(ListedFile { name, len: meta.len() });
                continue;
            }
            if !meta.is_dir() {
                if name == requested {
                    let reason = format!("{name:?} is not a regular file or directory");
                    return Err(refusal(RefusalKind::NotFound, reason));
                }
                continue;
            }
            let Ok(entries) = std::fs::read_dir(&path) else { continue };
            for entry in entries.flatten() {
                // Links to directories could form a cycle.
                let is_directory_link =
                    entry.file_type().is_ok_and(|kind| kind.is_symlink() && entry.path().is_dir());
                let is_listed = |component: &&str| {
                    !is_private(component) && !is_directory_link && !self.leaves_root(&entry.path())
                };
                if let Some(component) = entry.file_name().to_str().filter(is_listed) {
                    let name = if name.is_empty() {
                        component.to_string()
                    } else {
                        format!("{name}/{component}")
                    };
                    pending.push((entry.path(), name));
                }
                if files.len() + pending.len() > MAX_LISTED {
                    let reason = format!(
                        "cannot list {requested:?}: it has more than {MAX_LISTED} files and \
                         directories"
                    );
                    return Err(refusal(RefusalKind::Failed, reason));
                }
            }
        }
        files.sort();
        Ok(files)
    }

    fn join(&mut self, name: &str, address: &str, lost: Option<&str>) -> Option<String> {
        // A join takes memory until the connection ends, so names that do not exist are ignored.
        // Other machines cannot reach Unix sockets, so only TCP addresses are accepted.
        let path = self.resolve(name).ok();
        let is_reachable =
            address.len() <= MAX_ADDRESS_LEN && matches!(address.parse(), Ok(Address::Tcp(_)));
        if !is_reachable || !path.is_some_and(|path| path.exists()) {
            return None;
        }
        let joined = (name.to_string(), address.to_string());
        if !self.joined.contains(&joined) && self.joined.len() < MAX_BROADCASTS {
            self.joined.push(joined);
        }
        self.broadcasts.lock().join(name, address, lost)
    }
}

/// A buffer of a pool, as bytes to send.
pub(crate) struct PoolBytes(pub(crate) SharedBuffer);

impl AsRef<[u8]> for PoolBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
