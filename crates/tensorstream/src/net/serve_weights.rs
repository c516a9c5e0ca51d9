// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server of weights: files of a directory, to whoever streams from them.

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

use super::source::path_in;
use crate::Error;

/// The most files that one connection has open.
const MAX_OPEN: usize = 512;
/// The most files that are listed.
const MAX_LISTED: usize = 10_000;

/// How weights are served.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Of the server and its connections. A token, TLS and whom to let in are here.
    pub server: ServerOptions,
    /// Memory for what was read and not sent yet, of all connections, in bytes.
    pub memory_bytes: usize,
    /// Whether an address that others can reach needs neither token nor TLS.
    pub insecure: bool,
    /// Whether files are served that symbolic links lead to outside of the directory.
    pub follow_symlinks: bool,
}

impl Default for ServeOptions {
    /// 256 MiB of memory; an address that only this computer reaches, or a token; no links to
    /// elsewhere.
    fn default() -> Self {
        let server = ServerOptions::default();
        Self { server, memory_bytes: 256 << 20, insecure: false, follow_symlinks: false }
    }
}

impl ServeOptions {
    /// # Errors
    /// [`Error::Remote`] of an address that others could reach who need neither token nor
    /// certificate.
    pub(crate) fn check(&self, address: &Address) -> Result<(), Error> {
        let ServerOptions { connection, tls, .. } = &self.server;
        let authenticates = tls.as_ref().is_some_and(TlsServer::authenticates_clients);
        let open = connection.token.is_none() && !authenticates && !self.insecure;
        if open && address.is_public() {
            return Err(ts_remote::Error::Misuse(format!(
                "anyone could connect to {address}, a public address: give a token, or accept only \
                 clients with a certificate, or allow everybody (insecure)"
            ))
            .into());
        }
        Ok(())
    }

    /// Memory for what was read and not sent yet.
    pub(crate) fn pool(&self) -> Result<HostPool, Error> {
        let budget = Budget::new(self.memory_bytes);
        Ok(HostPool::new(&budget, self.memory_bytes).map_err(ts_io::Error::from)?)
    }
}

/// Serves the files below a directory, to be read as `ts://HOST:PORT/NAME`, until `stop` says so,
/// which is asked at least every 50 ms. `began` is told the address; `log` hears why connections
/// end. Blocks.
///
/// Not served are names with a part that begins with a dot, unfinished files (`.partial`), and what
/// symbolic links lead to outside of the directory, unless [`ServeOptions::follow_symlinks`] says
/// so.
///
/// # Errors
/// [`Error::Remote`] when it cannot listen there, or when others could reach the address and it
/// asks for neither token nor certificate; [`Error::Io`] when the directory is none.
pub fn serve_weights(
    directory: &Path,
    address: &Address,
    options: &ServeOptions,
    stop: &mut dyn FnMut() -> bool,
    began: impl FnOnce(&Address),
    log: impl FnMut(&str, &ts_remote::Error),
) -> Result<ServerStats, Error> {
    let root = std::fs::canonicalize(directory)
        .map_err(|e| crate::checkpoint::open_error(directory, e))?;
    if !root.is_dir() {
        return Err(crate::checkpoint::open_error(
            directory,
            std::io::ErrorKind::NotADirectory.into(),
        ));
    }
    options.check(address)?;
    let pool = options.pool()?;
    let listener = Listener::bind(address, options.server.connection.idle_timeout)?;
    began(listener.address());
    let chain = Arc::new(Mutex::new(Chain::default()));
    let session = |_: &str| {
        let (root, pool, chain) = (root.clone(), pool.clone(), Arc::clone(&chain));
        RangeHandler::new(Directory {
            root,
            follow_symlinks: options.follow_symlinks,
            pool,
            open: VecDeque::new(),
            opened: 0,
            chain,
            joined: Vec::new(),
        })
    };
    Ok(serve(&listener, &options.server, stop, session, log)?)
}

/// The files of a directory that one connection reads.
#[derive(Debug)]
struct Directory {
    /// Without links.
    root: PathBuf,
    follow_symlinks: bool,
    pool: HostPool,
    /// By their numbers; last the one that was opened last.
    open: VecDeque<(u64, Arc<Source>)>,
    opened: u64,
    chain: Arc<Mutex<Chain>>,
    /// What this connection's client fetches, and where it serves that.
    joined: Vec<(String, String)>,
}

/// The most names that are kept of those who fetch, and of those who fetch one thing.
const MAX_FETCHED: usize = 64;
const MAX_FETCHING: usize = 1024;
/// The longest address of one who serves on.
const MAX_ADDRESS: usize = 256;

/// Who fetches what and serves it on: each reads from the one before it, the first from this
/// server.
#[derive(Debug, Default)]
struct Chain(BTreeMap<String, Vec<String>>);

impl Chain {
    fn join(&mut self, name: &str, address: &str, lost: Option<&str>) -> Option<String> {
        if !self.0.contains_key(name) && self.0.len() >= MAX_FETCHED {
            self.0.pop_first();
        }
        let links = self.0.entry(name.into()).or_default();
        links.retain(|link| Some(&link[..]) != lost);
        // Who joined before reads from who was there before it: nobody reads from who reads from
        // it.
        let place = links.iter().position(|link| link == address).unwrap_or_else(|| {
            if links.len() < MAX_FETCHING {
                links.push(address.into());
            }
            links.len().saturating_sub(1)
        });
        place.checked_sub(1).map(|before| links[before].clone())
    }

    fn leave(&mut self, name: &str, address: &str) {
        if let Some(links) = self.0.get_mut(name) {
            links.retain(|link| link != address);
            if links.is_empty() {
                self.0.remove(name);
            }
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let mut chain = self.chain.lock();
        self.joined.iter().for_each(|(name, address)| chain.leave(name, address));
    }
}

fn refusal(kind: RefusalKind, reason: impl Into<String>) -> Refusal {
    Refusal { kind, reason: reason.into() }
}

/// Whether a name in the directory is nobody's business: of a hidden or unfinished file.
fn is_private(name: &str) -> bool {
    name.starts_with('.') || name.ends_with(".partial")
}

impl Directory {
    /// Where the file or directory of a name is. No name is the whole directory's.
    fn served(&self, name: &str) -> Result<PathBuf, Refusal> {
        let unknown = || {
            refusal(RefusalKind::NotFound, format!("{name:?} is no name of a file that is served"))
        };
        if name.is_empty() {
            return Ok(self.root.clone());
        }
        if name.split('/').any(is_private) {
            return Err(unknown());
        }
        let path = path_in(&self.root, name).ok_or_else(unknown)?;
        if self.leads_out(&path) {
            let why =
                "a link that leads out of the directory; serve-weights --follow-symlinks serves it";
            return Err(refusal(RefusalKind::NotFound, format!("{name:?}: {why}")));
        }
        Ok(path)
    }

    /// Whether links on the way to a file lead to where nothing is to be served from. What is not
    /// there leads nowhere.
    fn leads_out(&self, path: &Path) -> bool {
        !self.follow_symlinks
            && std::fs::canonicalize(path).is_ok_and(|real| !real.starts_with(&self.root))
    }

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
        let path = self.served(name)?;
        let source = Source::open(&path).map_err(|error| self.refused(&error))?;
        let print = source.fingerprint();
        let since =
            print.modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let numbers =
            [print.identity.0, print.identity.1, since.map_or(0, |since| since.as_nanos() as u64)];
        let version = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
        // The same file again is the one that is open.
        let same = |open: &Arc<Source>| open.path() == source.path() && open.fingerprint() == print;
        let len = source.len();
        let known =
            self.open.iter().position(|(_, open)| same(open)).and_then(|at| self.open.remove(at));
        let (id, source) = known.unwrap_or_else(|| {
            self.opened += 1;
            (self.opened, source)
        });
        // The one that was asked for longest ago makes room: a client opens it again.
        if self.open.len() >= MAX_OPEN {
            self.open.pop_front();
        }
        self.open.push_back((id, source));
        Ok(RemoteFile { id, len, version })
    }

    fn read(&mut self, file: u64, offset: u64, len: usize) -> Result<Option<Bytes>, Refusal> {
        let source = self.open.iter().rev().find(|(id, _)| *id == file).map(|(_, source)| source);
        let Some(source) = source else {
            return Err(refusal(RefusalKind::Failed, format!("no file {file} is open")));
        };
        let mut buffer = match self.pool.allocate(len) {
            Ok(buffer) => buffer,
            Err(error) if error.kind() == ts_pool::ErrorKind::Full => return Ok(None),
            Err(error) => return Err(refusal(RefusalKind::Failed, error.to_string())),
        };
        let read = source
            .read_at(offset, &mut buffer)
            .and_then(|read| source.verify(offset).map(|()| read));
        let read = read.map_err(|error| self.refused(&error))?;
        drop(buffer.split_off(read));
        Ok(Some(Bytes::from_owner(Sent(buffer.freeze()))))
    }

    fn list(&mut self, name: &str) -> Result<Vec<ListedFile>, Refusal> {
        let path = self.served(name)?;
        if !path.exists() {
            return Err(refusal(RefusalKind::NotFound, format!("{name:?} is not there")));
        }
        let mut files = Vec::new();
        let mut left = vec![(path, name.trim_end_matches('/').to_string())];
        while let Some((path, name)) = left.pop() {
            // What a link names, or was removed meanwhile, may not be there.
            let Ok(meta) = std::fs::metadata(&path) else { continue };
            if meta.is_file() {
                files.push(ListedFile { name, len: meta.len() });
                continue;
            }
            let Ok(entries) = std::fs::read_dir(&path) else { continue };
            for entry in entries.flatten() {
                let is_link =
                    entry.file_type().is_ok_and(|kind| kind.is_symlink() && entry.path().is_dir());
                // Links to directories may go in circles.
                let listed =
                    |own: &&str| !is_private(own) && !is_link && !self.leads_out(&entry.path());
                if let Some(own) = entry.file_name().to_str().filter(listed) {
                    let below =
                        if name.is_empty() { own.to_string() } else { format!("{name}/{own}") };
                    left.push((entry.path(), below));
                }
                if files.len() + left.len() > MAX_LISTED {
                    return Err(refusal(
                        RefusalKind::Failed,
                        format!("more than {MAX_LISTED} files in {name:?}"),
                    ));
                }
            }
        }
        files.sort();
        Ok(files)
    }

    fn join(&mut self, name: &str, address: &str, lost: Option<&str>) -> Option<String> {
        // Only what is served, by whom others can reach: it is kept until the connection ends.
        let path = self.served(name).ok();
        let sound = address.len() <= MAX_ADDRESS && matches!(address.parse(), Ok(Address::Tcp(_)));
        if !sound || !path.is_some_and(|path| path.exists()) {
            return None;
        }
        let own = (name.to_string(), address.to_string());
        if !self.joined.contains(&own) && self.joined.len() < MAX_FETCHED {
            self.joined.push(own);
        }
        self.chain.lock().join(name, address, lost)
    }
}

/// Memory of the pool, until it is sent.
pub(crate) struct Sent(pub(crate) SharedBuffer);

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
