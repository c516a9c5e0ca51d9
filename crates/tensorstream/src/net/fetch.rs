// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of a server of weights, fetched to a directory and served on as they come: so many
//! machines have them in about the time of one.

use std::fs::{self, File};
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, ScopedJoinHandle};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use ts_io::RemoteSource;
use ts_pool::{Budget, Buffer, HostPool};
use ts_remote::{
    Address, Bytes, Files, ListedFile, Listener, RangeHandler, Refusal, RefusalKind, RemoteFile,
    ServerStats, serve,
};

use super::serve_weights::{Sent, ServeOptions};
use super::source::{self, Location, WeightServer, path_in};
use crate::atomic::{is_at, partial_of};
use crate::{Error, Progress, Watch};

/// What is asked for, written and passed on at a time, in bytes: who reads from who fetches is
/// behind by no more than a few of these.
const PIECE: u64 = 4 << 20;
/// How many are under way at a time.
const JOBS: usize = 3;
/// The most pieces of a file: 4 TiB.
const MAX_PIECES: usize = 1 << 20;
/// How often one who is to be read from may turn out to be gone, until the server itself is read
/// from for good.
const MAX_LOST: usize = 3;
/// How often the caller is asked whether to go on.
const TICK: Duration = Duration::from_millis(20);

/// How files are fetched.
#[derive(Debug, Clone, Default)]
pub struct FetchOptions {
    /// Where what has come is served to others, and how. Whoever fetches the same from the same
    /// server is told to read from here, the next from them and so on, so that nobody sends more
    /// than once what it has.
    pub serve: Option<(Address, ServeOptions)>,
}

/// What was fetched. What has come is served until this is dropped.
#[derive(Debug)]
pub struct Fetched {
    /// How many files.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// From whom they came, if not all from the server itself.
    pub from: Option<String>,
    serving: Option<Serving>,
}

impl Fetched {
    /// Where it serves what it has, if it does.
    pub fn address(&self) -> Option<&Address> {
        self.serving.as_ref().map(|serving| &serving.address)
    }
}

#[derive(Debug)]
struct Serving {
    address: Address,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<ServerStats, ts_remote::Error>>>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its errors were those of others.
            let _ = thread.join();
        }
    }
}

/// Fetches the file, or all files of the directory, that `url` names (`ts://HOST:PORT/NAME`) to a
/// directory, where they have the names that the server has for them. Each appears when it is
/// whole. Blocks.
///
/// # Errors
/// [`Error::Io`] of what cannot be read, with the server's reason; [`Error::Write`];
/// [`Error::Remote`]; [`Error::Interrupted`].
pub fn fetch(
    url: &str,
    directory: &Path,
    options: &FetchOptions,
    watch: &mut Watch<'_>,
) -> Result<Fetched, Error> {
    let misuse = |what: String| Error::Remote(ts_remote::Error::Misuse(what));
    let location = source::locate(url)
        .ok_or_else(|| misuse(format!("{url} is not of the form ts://HOST:PORT/NAME")))??;
    let timeout = ts_io::BackendOptions::default().timeout;
    let listed = location
        .server
        .list(&location.name, timeout)
        .map_err(|failure| source::unreadable(url, failure))?;
    fs::create_dir_all(directory)
        .map_err(|source| Error::Write { path: directory.into(), source })?;
    let mirror = Arc::new(Mirror::new(&location.server, directory, &listed, timeout, url)?);
    let serving = match &options.serve {
        Some((address, how)) => Some(start(&mirror, address, how)?),
        None => None,
    };
    let own =
        serving.as_ref().map(|serving| reachable(&serving.address, location.server.address()));
    let work = Work {
        url,
        location: &location,
        own: own.as_deref(),
        next: AtomicUsize::new(0),
        from: Mutex::default(),
        lost: AtomicUsize::new(0),
    };
    work.choose(None, timeout);
    let pieces = mirror.pieces();
    let total = mirror.files.iter().map(|file| file.len).sum();
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let gone = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (work, mirror, pieces, failed, gone) = (&work, &mirror, &pieces, &failed, &gone);
        let jobs: Vec<_> = (0..JOBS)
            .map(|_| {
                scope.spawn(move || {
                    if let Err(error) = work.run(mirror, pieces, gone, timeout) {
                        gone.store(true, Ordering::Relaxed);
                        lock(failed).get_or_insert(error);
                    }
                })
            })
            .collect();
        while !jobs.iter().all(ScopedJoinHandle::is_finished) {
            if watch(Progress { done: mirror.done.load(Ordering::Relaxed), total }) {
                gone.store(true, Ordering::Relaxed);
                lock(failed).get_or_insert(Error::Interrupted);
            }
            std::thread::sleep(TICK);
        }
    });
    if let Some(error) = lock(&failed).take() {
        return Err(error);
    }
    watch(Progress { done: total, total });
    let from = lock(&work.from).as_ref().map(|from| from.address.clone());
    Ok(Fetched { files: listed.len(), bytes: total, from, serving })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Where others reach what listens here: the address from which this machine reaches the server, if
/// it listens on all.
fn reachable(own: &Address, server: &Address) -> String {
    let (Address::Tcp(listening), Address::Tcp(server)) = (own, server) else {
        return own.to_string();
    };
    let Ok(socket) = listening.parse::<SocketAddr>() else { return own.to_string() };
    if !socket.ip().is_unspecified() {
        return own.to_string();
    }
    // No packet is sent: the system only says which way it would go.
    let towards = server.to_socket_addrs().ok().and_then(|mut found| found.next());
    let from = towards.and_then(|towards| {
        let any = if towards.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let probe = UdpSocket::bind(any).ok()?;
        probe.connect(towards).ok()?;
        probe.local_addr().ok()
    });
    from.map_or_else(
        || own.to_string(),
        |from| SocketAddr::new(from.ip(), socket.port()).to_string(),
    )
}

fn start(
    mirror: &Arc<Mirror>,
    address: &Address,
    options: &ServeOptions,
) -> Result<Serving, Error> {
    options.check(address)?;
    let pool = options.pool()?;
    let listener = Listener::bind(address, options.server.connection.idle_timeout)?;
    let (address, stop) = (listener.address().clone(), Arc::new(AtomicBool::new(false)));
    let (mirror, server, asked) = (Arc::clone(mirror), options.server.clone(), Arc::clone(&stop));
    let thread = std::thread::Builder::new().name("ts-fetch-serve".into());
    let thread = thread.spawn(move || {
        let session = |_: &str| {
            RangeHandler::new(Passing {
                mirror: Arc::clone(&mirror),
                pool: pool.clone(),
                open: Vec::new(),
            })
        };
        serve(&listener, &server, &mut || asked.load(Ordering::Relaxed), session, |_, _| {})
    });
    let thread = thread.map_err(|source| Error::Write { path: "a thread".into(), source })?;
    Ok(Serving { address, stop, thread: Some(thread) })
}

/// Files as they are fetched.
#[derive(Debug)]
struct Mirror {
    files: Vec<Fetching>,
    /// Bytes that have come.
    done: AtomicU64,
}

#[derive(Debug)]
struct Fetching {
    name: String,
    len: u64,
    /// What the server says to tell it from other files of its name.
    version: Vec<u8>,
    target: PathBuf,
    partial: PathBuf,
    file: File,
    /// Which pieces are there.
    there: Vec<AtomicBool>,
    left: AtomicUsize,
}

impl Mirror {
    fn new(
        server: &WeightServer,
        directory: &Path,
        listed: &[ListedFile],
        timeout: Duration,
        url: &str,
    ) -> Result<Self, Error> {
        let file = |listed: &ListedFile| {
            let unfinished = listed.name.ends_with(".partial");
            let target =
                path_in(directory, &listed.name).filter(|_| !unfinished).ok_or_else(|| {
                    Error::Remote(ts_remote::Error::Misuse(format!(
                        "the server names a file {:?}",
                        listed.name
                    )))
                })?;
            let opened = server
                .open(&listed.name, timeout)
                .map_err(|failure| source::unreadable(url, failure))?;
            let written = |source| Error::Write { path: target.clone(), source };
            if let Some(parent) = target.parent() {
                fs::create_dir_all(parent).map_err(written)?;
            }
            let partial = partial_of(&target).expect("it has a name");
            let file =
                File::options().read(true).write(true).create(true).truncate(false).open(&partial);
            let file = file.map_err(written)?;
            let busy = || {
                written(std::io::Error::new(
                    std::io::ErrorKind::WouldBlock,
                    "another process writes it now",
                ))
            };
            file.try_lock().map_err(|_| busy())?;
            // It may have got its name between the two.
            if !is_at(&file, &partial) {
                return Err(busy());
            }
            file.set_len(opened.len).map_err(written)?;
            let pieces = usize::try_from(opened.len.div_ceil(PIECE)).unwrap_or(usize::MAX);
            if pieces > MAX_PIECES {
                return Err(written(std::io::ErrorKind::FileTooLarge.into()));
            }
            Ok(Fetching {
                name: listed.name.clone(),
                len: opened.len,
                version: opened.version,
                target,
                partial,
                file,
                there: (0..pieces).map(|_| AtomicBool::new(false)).collect(),
                left: AtomicUsize::new(pieces),
            })
        };
        let files = listed.iter().map(file).collect::<Result<_, Error>>()?;
        let this = Self { files, done: AtomicU64::new(0) };
        for file in this.files.iter().filter(|file| file.len == 0) {
            file.commit()?;
        }
        Ok(this)
    }

    /// All pieces of all files, in their order: file and number.
    fn pieces(&self) -> Vec<(usize, usize)> {
        let of =
            |(at, file): (usize, &Fetching)| (0..file.there.len()).map(move |piece| (at, piece));
        self.files.iter().enumerate().flat_map(of).collect()
    }
}

impl Fetching {
    fn written(&self, source: std::io::Error) -> Error {
        Error::Write { path: self.target.clone(), source }
    }

    /// It is whole: it gets its name.
    fn commit(&self) -> Result<(), Error> {
        self.file.sync_all().map_err(|error| self.written(error))?;
        fs::rename(&self.partial, &self.target).map_err(|error| self.written(error))?;
        let parent = self.target.parent().map(File::open).transpose();
        parent
            .and_then(|parent| parent.map_or(Ok(()), |parent| parent.sync_all()))
            .map_err(|error| self.written(error))
    }

    fn is_whole(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        if !self.is_whole() {
            // What others read of it they have from somebody else.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// Who has what is fetched.
#[derive(Debug, Clone)]
struct From {
    address: String,
    server: Arc<WeightServer>,
}

struct Work<'a> {
    url: &'a str,
    location: &'a Location,
    own: Option<&'a str>,
    next: AtomicUsize,
    /// From whom to read; the server itself if from nobody else.
    from: Mutex<Option<From>>,
    /// How many were gone.
    lost: AtomicUsize,
}

impl Work<'_> {
    /// Asks the server from whom to read, now that `lost` is gone.
    fn choose(&self, lost: Option<&str>, timeout: Duration) {
        let Some(own) = self.own else { return };
        let mut from = lock(&self.from);
        // Another thread may have asked.
        if lost.is_some() && from.as_ref().map(|from| &from.address[..]) != lost {
            return;
        }
        if lost.is_some() && self.lost.fetch_add(1, Ordering::Relaxed) >= MAX_LOST {
            *from = None;
            return;
        }
        let told = self.location.server.join(&self.location.name, own, lost, timeout);
        // Who cannot be asked, or names nobody that can be understood, is read from itself.
        let address =
            told.ok().flatten().filter(|address| address != own && Some(&address[..]) != lost);
        *from = address.and_then(|address| {
            let server = self.location.server.beside(address.parse().ok()?);
            Some(From { address, server })
        });
    }

    fn run(
        &self,
        mirror: &Mirror,
        pieces: &[(usize, usize)],
        gone: &AtomicBool,
        timeout: Duration,
    ) -> Result<(), Error> {
        let budget = Budget::new(PIECE as usize);
        let pool = HostPool::new(&budget, PIECE as usize).map_err(ts_io::Error::from)?;
        while let Some(&(at, piece)) = pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if gone.load(Ordering::Relaxed) {
                return Ok(());
            }
            let (file, offset) = (&mirror.files[at], piece as u64 * PIECE);
            let len = PIECE.min(file.len - offset) as usize;
            let buffer = pool.allocate(len).map_err(ts_io::Error::from)?;
            let Some(buffer) = self.read(file, offset, buffer, gone, timeout)? else {
                return Ok(());
            };
            file.file.write_all_at(&buffer, offset).map_err(|error| file.written(error))?;
            file.there[piece].store(true, Ordering::Release);
            mirror.done.fetch_add(len as u64, Ordering::Relaxed);
            if file.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                file.commit()?;
            }
        }
        Ok(())
    }

    /// Reads from whoever is to be read from; when that one is gone from the next, and from the
    /// server at last.
    fn read(
        &self,
        file: &Fetching,
        offset: u64,
        buffer: Buffer,
        gone: &AtomicBool,
        timeout: Duration,
    ) -> Result<Option<Buffer>, Error> {
        let mut buffers = vec![buffer];
        loop {
            let from = lock(&self.from).clone();
            let server = from.as_ref().map_or(&self.location.server, |from| &from.server);
            let opened = RemoteFile { id: 0, len: file.len, version: file.version.clone() };
            let remote = server.file(&file.name, self.url, opened);
            let (back, read) = remote.read(offset, buffers, timeout);
            buffers = back;
            match (read, from) {
                (Ok(_), _) => return Ok(buffers.pop()),
                _ if gone.load(Ordering::Relaxed) => return Ok(None),
                (Err(_), Some(from)) => self.choose(Some(&from.address), timeout),
                (Err(error), None) => return Err(error.into()),
            }
        }
    }
}

/// Passes on what has come.
struct Passing {
    mirror: Arc<Mirror>,
    pool: HostPool,
    open: Vec<usize>,
}

impl Files for Passing {
    fn open(&mut self, name: &str) -> Result<RemoteFile, Refusal> {
        let found = self.mirror.files.iter().position(|file| file.name == name);
        let at = found.ok_or_else(|| Refusal {
            kind: RefusalKind::NotFound,
            reason: format!("{name:?} is not fetched here"),
        })?;
        let id = self.open.iter().position(|&open| open == at).unwrap_or_else(|| {
            self.open.push(at);
            self.open.len() - 1
        });
        let file = &self.mirror.files[at];
        Ok(RemoteFile { id: id as u64, len: file.len, version: file.version.clone() })
    }

    fn read(&mut self, file: u64, offset: u64, len: usize) -> Result<Option<Bytes>, Refusal> {
        let failed = |reason: String| Refusal { kind: RefusalKind::Failed, reason };
        let open = usize::try_from(file).ok().and_then(|file| self.open.get(file));
        let file =
            &self.mirror.files[*open.ok_or_else(|| failed(format!("no file {file} is open")))?];
        let end = offset.saturating_add(len as u64).min(file.len);
        let pieces = (offset / PIECE) as usize
            ..(end.div_ceil(PIECE) as usize).max((offset / PIECE) as usize);
        // What has not come yet is waited for, as memory is.
        if offset < end && !file.there[pieces].iter().all(|piece| piece.load(Ordering::Acquire)) {
            return Ok(None);
        }
        let mut buffer = match self.pool.allocate(end.saturating_sub(offset) as usize) {
            Ok(buffer) => buffer,
            Err(error) if error.kind() == ts_pool::ErrorKind::Full => return Ok(None),
            Err(error) => return Err(failed(error.to_string())),
        };
        file.file.read_exact_at(&mut buffer, offset).map_err(|error| failed(error.to_string()))?;
        Ok(Some(Bytes::from_owner(Sent(buffer.freeze()))))
    }

    fn list(&mut self, name: &str) -> Result<Vec<ListedFile>, Refusal> {
        let below = format!("{}/", name.trim_end_matches('/'));
        let is_asked = |file: &&Fetching| {
            name.is_empty() || file.name == name || file.name.starts_with(&below)
        };
        let listed = |file: &Fetching| ListedFile { name: file.name.clone(), len: file.len };
        Ok(self.mirror.files.iter().filter(is_asked).map(listed).collect())
    }
}
