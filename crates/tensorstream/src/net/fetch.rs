// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fetches files from a weight server, and serves them to other machines while they arrive. A
//! broadcast to many machines thus takes about as long as a copy to one machine.

use std::fs::{self, File};
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, ScopedJoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use ts_io::{RemoteSource, read_exact_at, write_all_at};
use ts_pool::{Budget, Buffer, HostPool};
use ts_remote::{
    Address, Bytes, Files, ListedFile, Listener, RangeHandler, Refusal, RefusalKind, RemoteFile,
    ServerStats, serve,
};

use super::serve_weights::{PoolBytes, ServeOptions};
use super::source::{RemotePath, WeightServer, is_private, path_in};
use crate::Error;
use crate::atomic::Claim;
use crate::progress::{Progress, Watch};

/// Length of a piece in bytes. Files are requested, written and served in pieces. Each peer of a
/// broadcast is a few pieces behind the peer that it reads from.
const PIECE: u64 = 4 << 20;
/// Number of pieces that are fetched at a time.
const THREADS: usize = 3;
/// Maximum number of pieces of a file, which limits its size to 4 TiB.
const MAX_PIECES: usize = 1 << 20;
/// Maximum number of peers that may fail before the rest is read from the server.
const MAX_LOST_PEERS: usize = 3;
/// Interval between calls of `watch`.
const POLL: Duration = Duration::from_millis(20);

/// Options for fetching files.
///
/// ```
/// use tensorstream::{FetchOptions, ServeOptions};
///
/// let address = "127.0.0.1:0".parse()?;
/// let options = FetchOptions::default().with_serve(address, ServeOptions::default());
/// # Ok::<(), tensorstream::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct FetchOptions {
    /// The address at which to serve the files to other machines, and the options of the server.
    /// `None` by default, which serves nothing.
    ///
    /// Machines that fetch and serve the same files form a chain: the first reads from the server,
    /// and each other machine from the machine before it. So each machine sends the files to at
    /// most one other machine, unless a machine fails.
    pub serve: Option<(Address, ServeOptions)>,
}

impl FetchOptions {
    /// Sets [`serve`](Self::serve).
    #[must_use]
    pub fn with_serve(self, address: Address, options: ServeOptions) -> Self {
        Self { serve: Some((address, options)) }
    }
}

/// The result of [`fetch`]. Serves the files until it is dropped, if
/// [`FetchOptions::serve`] is set.
///
/// Dropping it then waits for running transfers, for at most
/// [`grace_period`](ts_remote::ServerOptions::grace_period).
#[derive(Debug)]
#[non_exhaustive]
pub struct Fetched {
    /// Number of files.
    pub files: usize,
    /// Total size of the files in bytes.
    pub bytes: u64,
    /// Address of the peer that was read from last, or `None` if that was the server itself.
    pub from: Option<String>,
    server: Option<PeerServer>,
}

impl Fetched {
    /// Returns the address at which the files are served, or `None` if they are not.
    pub fn address(&self) -> Option<&Address> {
        self.server.as_ref().map(|server| &server.address)
    }
}

/// A thread that serves files. Dropping it stops the thread and waits until the thread has ended.
#[derive(Debug)]
struct PeerServer {
    address: Address,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<ServerStats, ts_remote::Error>>>,
}

impl Drop for PeerServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // An error of this server does not affect the fetched files.
            let _ = thread.join();
        }
    }
}

/// Fetches a file, or all files of a directory, from a weight server to `directory`. `url` is
/// `ts://HOST:PORT/NAME`. The files have the same names as on the server. Each file appears
/// atomically. Blocks.
///
/// # Errors
/// - [`Error::Io`] if the server offers no files there or refuses one, or a read fails. The error
///   contains the reason that the server gave.
/// - [`Error::Write`] if a file cannot be written.
/// - [`Error::Remote`] if the URL or an address is invalid, the server lists an invalid file name,
///   or the files cannot be served.
/// - [`Error::Interrupted`] if `watch` returns true.
pub fn fetch(
    url: &str,
    directory: &Path,
    options: &FetchOptions,
    watch: &mut Watch<'_>,
) -> Result<Fetched, Error> {
    let path = RemotePath::parse(url).ok_or_else(|| {
        let reason =
            format!("invalid URL {url:?} (expected ts://HOST:PORT/NAME or tss://HOST:PORT/NAME)");
        Error::Remote(ts_remote::Error::Misuse(reason))
    })??;
    let timeout = ts_io::BackendOptions::default().timeout;
    let listed =
        path.server.list(&path.name, timeout).map_err(|error| error.into_open_error(url))?;
    if listed.is_empty() {
        let reason = "the server offers no files there; it leaves out hidden files, unfinished \
                      ones, and links to other directories";
        let source = std::io::Error::new(std::io::ErrorKind::NotFound, reason);
        return Err(Error::open(Path::new(url), source));
    }
    fs::create_dir_all(directory).map_err(|source| Error::write(directory, source))?;
    let download = Arc::new(Download::new(&path.server, directory, &listed, timeout, url)?);
    let server = match &options.serve {
        Some((address, options)) => Some(serve_download(&download, address, options)?),
        None => None,
    };
    let own_address =
        server.as_ref().map(|server| reachable_address(&server.address, path.server.address()));
    let fetcher = Fetcher {
        url,
        path: &path,
        own_address: own_address.as_deref(),
        next: AtomicUsize::new(0),
        peer: Mutex::default(),
        lost_peers: AtomicUsize::new(0),
    };
    fetcher.choose_peer(None, timeout);
    let pieces = download.pieces();
    let total = download.files.iter().map(|file| file.len).sum();
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (fetcher, download, pieces, failed, stop) =
            (&fetcher, &download, &pieces, &failed, &stop);
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(move || {
                    if let Err(error) = fetcher.run(download, pieces, stop, timeout) {
                        stop.store(true, Ordering::Relaxed);
                        failed.lock().get_or_insert(error);
                    }
                })
            })
            .collect();
        while !threads.iter().all(ScopedJoinHandle::is_finished) {
            if watch(Progress { done: download.done.load(Ordering::Relaxed), total }) {
                stop.store(true, Ordering::Relaxed);
                failed.lock().get_or_insert(Error::Interrupted);
            }
            std::thread::sleep(POLL);
        }
    });
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    watch(Progress { done: total, total });
    let from = fetcher.peer.into_inner().map(|peer| peer.address);
    Ok(Fetched { files: listed.len(), bytes: total, from, server })
}

/// Returns the address at which other machines reach a listener. For a listener on all interfaces,
/// this is the local address from which this machine reaches the server.
fn reachable_address(listener: &Address, server: &Address) -> String {
    let (Address::Tcp(listening), Address::Tcp(server)) = (listener, server) else {
        return listener.to_string();
    };
    let Ok(socket) = listening.parse::<SocketAddr>() else { return listener.to_string() };
    if !socket.ip().is_unspecified() {
        return listener.to_string();
    }
    // Connecting a UDP socket sends no packet, but selects the local address.
    let server = server.to_socket_addrs().ok().and_then(|mut found| found.next());
    let local = server.and_then(|server| {
        let any = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let probe = UdpSocket::bind(any).ok()?;
        probe.connect(server).ok()?;
        probe.local_addr().ok()
    });
    local.map_or_else(
        || listener.to_string(),
        |local| SocketAddr::new(local.ip(), socket.port()).to_string(),
    )
}

/// Starts a thread that serves the files of a download.
fn serve_download(
    download: &Arc<Download>,
    address: &Address,
    options: &ServeOptions,
) -> Result<PeerServer, Error> {
    options.check(address)?;
    let pool = options.pool()?;
    let listener = Listener::bind(address, options.server.connection.idle_timeout)?;
    let (address, stop) = (listener.address().clone(), Arc::new(AtomicBool::new(false)));
    let (download, options, stopped) =
        (Arc::clone(download), options.server.clone(), Arc::clone(&stop));
    let thread = std::thread::Builder::new().name("ts-fetch-serve".into());
    let thread = thread.spawn(move || {
        let session = |_: &str| {
            RangeHandler::new(PartialFiles {
                download: Arc::clone(&download),
                pool: pool.clone(),
                open: Vec::new(),
            })
        };
        serve(&listener, &options, &mut |_| stopped.load(Ordering::Relaxed), session, |_, _| {})
    });
    let thread = thread.map_err(|source| ts_remote::Error::Io {
        peer: address.to_string(),
        what: "starting a thread",
        source: source.into(),
    })?;
    Ok(PeerServer { address, stop, thread: Some(thread) })
}

/// Files that are being fetched.
#[derive(Debug)]
struct Download {
    files: Vec<FileDownload>,
    /// Number of bytes that have arrived.
    done: AtomicU64,
}

#[derive(Debug)]
struct FileDownload {
    name: String,
    len: u64,
    /// Identifies the version of the file on the server.
    version: Vec<u8>,
    target: PathBuf,
    /// The partial file. Peers read from it, also when it is complete.
    file: File,
    claim: Mutex<Claim>,
    /// Whether each piece is written to the partial file.
    written: Vec<AtomicBool>,
    /// Number of pieces that are not written.
    missing: AtomicUsize,
}

impl Download {
    /// Opens the files on the server and creates the partial files. Empty files are completed at
    /// once.
    fn new(
        server: &WeightServer,
        directory: &Path,
        listed: &[ListedFile],
        timeout: Duration,
        url: &str,
    ) -> Result<Self, Error> {
        let files = listed
            .iter()
            .map(|listed| FileDownload::new(server, directory, listed, timeout, url))
            .collect::<Result<_, Error>>()?;
        let this = Self { files, done: AtomicU64::new(0) };
        for file in this.files.iter().filter(|file| file.len == 0) {
            file.commit()?;
        }
        Ok(this)
    }

    /// Returns all pieces of all files, in order, as pairs of file index and piece index.
    fn pieces(&self) -> Vec<(usize, usize)> {
        let of = |(index, file): (usize, &FileDownload)| {
            (0..file.written.len()).map(move |piece| (index, piece))
        };
        self.files.iter().enumerate().flat_map(of).collect()
    }
}

impl FileDownload {
    fn new(
        server: &WeightServer,
        directory: &Path,
        listed: &ListedFile,
        timeout: Duration,
        url: &str,
    ) -> Result<Self, Error> {
        let is_offered = !listed.name.split('/').any(is_private);
        let target = path_in(directory, &listed.name).filter(|_| is_offered);
        let target = target.ok_or_else(|| {
            let reason = format!("the server listed an invalid file name {:?}", listed.name);
            Error::Remote(ts_remote::Error::Misuse(reason))
        })?;
        let opened =
            server.open(&listed.name, timeout).map_err(|error| error.into_open_error(url))?;
        let failed = |source| Error::write(&target, source);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        let claim = Claim::of_entry(&target)?.ok_or_else(|| {
            let reason = "another process is writing this file";
            failed(std::io::Error::new(std::io::ErrorKind::WouldBlock, reason))
        })?;
        let file = claim.file().try_clone().map_err(failed)?;
        file.set_len(opened.len).map_err(failed)?;
        let pieces = usize::try_from(opened.len.div_ceil(PIECE)).unwrap_or(usize::MAX);
        if pieces > MAX_PIECES {
            let reason = format!("it has {} bytes, but fetch supports at most 4 TiB", opened.len);
            return Err(failed(std::io::Error::new(std::io::ErrorKind::FileTooLarge, reason)));
        }
        Ok(Self {
            name: listed.name.clone(),
            len: opened.len,
            version: opened.version,
            target,
            file,
            claim: Mutex::new(claim),
            written: (0..pieces).map(|_| AtomicBool::new(false)).collect(),
            missing: AtomicUsize::new(pieces),
        })
    }

    fn write_error(&self, source: std::io::Error) -> Error {
        Error::write(&self.target, source)
    }

    /// Makes the complete file durable, and renames it to its target.
    fn commit(&self) -> Result<(), Error> {
        self.claim.lock().commit()
    }
}

/// A machine that serves the files that this machine fetches.
#[derive(Debug, Clone)]
struct Peer {
    address: String,
    server: Arc<WeightServer>,
}

/// The state that the threads of a fetch share.
struct Fetcher<'a> {
    url: &'a str,
    path: &'a RemotePath,
    /// The address at which this machine serves the files, or `None` if it does not serve them.
    own_address: Option<&'a str>,
    /// Number of pieces that threads have taken.
    next: AtomicUsize,
    /// The peer to read from, or `None` to read from the server itself.
    peer: Mutex<Option<Peer>>,
    /// Number of peers that have failed.
    lost_peers: AtomicUsize,
}

impl Fetcher<'_> {
    /// Sets `peer` to the peer that the server names, or to `None` to read from the server itself.
    /// `lost` is the address of the peer that failed, or `None` for the first choice. Does nothing
    /// if this machine does not serve the files, or another thread has replaced the failed peer.
    fn choose_peer(&self, lost: Option<&str>, timeout: Duration) {
        let Some(own_address) = self.own_address else { return };
        let mut peer = self.peer.lock();
        // Another thread may have chosen a new peer already.
        if lost.is_some() && peer.as_ref().map(|peer| &peer.address[..]) != lost {
            return;
        }
        if lost.is_some() && self.lost_peers.fetch_add(1, Ordering::Relaxed) >= MAX_LOST_PEERS {
            *peer = None;
            return;
        }
        let reply = self.path.server.join(&self.path.name, own_address, lost, timeout);
        // If the request fails or the reply is unusable, pieces are read from the server itself.
        let address = reply
            .ok()
            .flatten()
            .filter(|address| address != own_address && Some(&address[..]) != lost);
        *peer = address.and_then(|address| {
            let server = self.path.server.with_address(address.parse().ok()?);
            Some(Peer { address, server })
        });
    }

    /// Fetches pieces until there are none left or `stop` is set.
    fn run(
        &self,
        download: &Download,
        pieces: &[(usize, usize)],
        stop: &AtomicBool,
        timeout: Duration,
    ) -> Result<(), Error> {
        let budget = Budget::new(PIECE as usize);
        let pool = HostPool::new(&budget, PIECE as usize).map_err(ts_io::Error::from)?;
        while let Some(&(index, piece)) = pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let (file, offset) = (&download.files[index], piece as u64 * PIECE);
            let len = PIECE.min(file.len - offset) as usize;
            let buffer = pool.allocate(len).map_err(ts_io::Error::from)?;
            let Some(buffer) = self.read(file, offset, buffer, stop, timeout)? else {
                return Ok(());
            };
            write_all_at(&file.file, &buffer, offset).map_err(|error| file.write_error(error))?;
            file.written[piece].store(true, Ordering::Release);
            download.done.fetch_add(len as u64, Ordering::Relaxed);
            if file.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
                file.commit()?;
            }
        }
        Ok(())
    }

    /// Reads a piece from the current peer. If that fails, tries the next peer, and finally the
    /// server. Returns `None` if a read fails after `stop` was set.
    fn read(
        &self,
        file: &FileDownload,
        offset: u64,
        buffer: Buffer,
        stop: &AtomicBool,
        timeout: Duration,
    ) -> Result<Option<Buffer>, Error> {
        let mut buffers = vec![buffer];
        loop {
            let peer = self.peer.lock().clone();
            let server = peer.as_ref().map_or(&self.path.server, |peer| &peer.server);
            let opened = RemoteFile { id: 0, len: file.len, version: file.version.clone() };
            let remote = server.file(&file.name, self.url, opened);
            let (returned, read) = remote.read(offset, buffers, timeout);
            buffers = returned;
            match (read, peer) {
                (Ok(_), _) => return Ok(buffers.pop()),
                _ if stop.load(Ordering::Relaxed) => return Ok(None),
                (Err(_), Some(peer)) => self.choose_peer(Some(&peer.address), timeout),
                (Err(error), None) => return Err(error.into()),
            }
        }
    }
}

/// The state of a connection that reads the files of a download.
struct PartialFiles {
    download: Arc<Download>,
    pool: HostPool,
    /// The open files, as indices into [`Download::files`]. The position of a file is its id.
    open: Vec<usize>,
}

impl Files for PartialFiles {
    fn open(&mut self, name: &str) -> Result<RemoteFile, Refusal> {
        let found = self.download.files.iter().position(|file| file.name == name);
        let index = found.ok_or_else(|| Refusal {
            kind: RefusalKind::NotFound,
            reason: format!("{name:?} is not among the files that this peer fetches"),
        })?;
        let id = self.open.iter().position(|&open| open == index).unwrap_or_else(|| {
            self.open.push(index);
            self.open.len() - 1
        });
        let file = &self.download.files[index];
        Ok(RemoteFile { id: id as u64, len: file.len, version: file.version.clone() })
    }

    fn read(&mut self, file: u64, offset: u64, len: usize) -> Result<Option<Bytes>, Refusal> {
        let failed = |reason: String| Refusal { kind: RefusalKind::Failed, reason };
        let open = usize::try_from(file).ok().and_then(|file| self.open.get(file));
        let file = &self.download.files[*open
            .ok_or_else(|| failed(format!("this connection has no open file with id {file}")))?];
        let end = offset.saturating_add(len as u64).min(file.len);
        let first = (offset / PIECE) as usize;
        let pieces = first..(end.div_ceil(PIECE) as usize).max(first);
        // `None` makes the handler try again, as it does when the pool is full.
        if offset < end && !file.written[pieces].iter().all(|piece| piece.load(Ordering::Acquire)) {
            return Ok(None);
        }
        let mut buffer = match self.pool.allocate(end.saturating_sub(offset) as usize) {
            Ok(buffer) => buffer,
            Err(error) if error.kind() == ts_pool::ErrorKind::Full => return Ok(None),
            Err(error) => return Err(failed(error.to_string())),
        };
        let read = read_exact_at(&file.file, &mut buffer, offset);
        read.map_err(|error| failed(error.to_string()))?;
        Ok(Some(Bytes::from_owner(PoolBytes(buffer.freeze()))))
    }

    fn list(&mut self, name: &str) -> Result<Vec<ListedFile>, Refusal> {
        let prefix = format!("{}/", name.trim_end_matches('/'));
        let matches = |file: &&FileDownload| {
            name.is_empty() || file.name == name || file.name.starts_with(&prefix)
        };
        let listed = |file: &FileDownload| ListedFile { name: file.name.clone(), len: file.len };
        Ok(self.download.files.iter().filter(matches).map(listed).collect())
    }
}
