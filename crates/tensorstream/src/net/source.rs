// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of a server of weights, as sources: `ts://HOST:PORT/NAME`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use ts_io::{Fingerprint, RemoteSource, Source};
use ts_pool::Buffer;
use ts_remote::{
    Address, ConnectionOptions, Identity, ListedFile, MAX_RANGE, RangeClient, Refusal, RefusalKind,
    RemoteFile, Sink, Socket, TlsClient,
};

/// What a URL of such a file begins with, without TLS and with.
const SCHEMES: [&str; 2] = ["ts://", "tss://"];
/// How often a range is asked for again when the connection was lost.
const ATTEMPTS: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The most files that a connection knows to be open: fewer than a server keeps.
const MAX_KNOWN: usize = 256;
/// Connections that are kept for the next read.
const KEPT: usize = 32;

/// Whether this names a file of a server of weights.
pub(crate) fn is_remote(url: &str) -> bool {
    SCHEMES.iter().any(|scheme| url.starts_with(scheme))
}

/// A server, and a name of its.
pub(crate) struct Location {
    pub(crate) server: Arc<WeightServer>,
    pub(crate) name: String,
}

/// What a URL names: `None` where it is none.
pub(crate) fn locate(url: &str) -> Option<Result<Location, ts_remote::Error>> {
    let scheme = SCHEMES.into_iter().find(|scheme| url.starts_with(scheme))?;
    let (address, name) = url[scheme.len()..].split_once('/')?;
    let server = WeightServer::of(address.parse().ok()?, scheme == SCHEMES[1]);
    Some(server.map(|server| Location { server, name: name.into() }))
}

/// Opens a file of a server. Blocks, at most 60 s.
pub(crate) fn open(url: &str) -> Result<Arc<Source>, ts_io::Error> {
    let refused = |kind, what: String| refused(url, kind, what);
    let scheme = SCHEMES.into_iter().find(|scheme| url.starts_with(scheme)).unwrap_or_default();
    let rest = &url[scheme.len()..];
    let invalid = || {
        refused(
            std::io::ErrorKind::InvalidInput,
            format!("it is not of the form {scheme}HOST:PORT/NAME"),
        )
    };
    let (address, name) =
        rest.split_once('/').filter(|(_, name)| !name.is_empty()).ok_or_else(invalid)?;
    let address: Address = address.parse().map_err(|_| invalid())?;
    let server = WeightServer::of(address, scheme == SCHEMES[1])
        .map_err(|error| refused(kind_of(&error), error.to_string()))?;
    let timeout = ts_io::BackendOptions::default().timeout;
    let opened = server.open(name, timeout).map_err(|failure| unreadable(url, failure))?;
    let fingerprint = Fingerprint {
        identity: (0, 0),
        len: opened.len,
        modified: None,
        changed: None,
        etag: None,
    };
    let file = File { server, name: name.into(), url: url.into(), opened };
    Ok(Source::remote(url, fingerprint, Arc::new(file)))
}

fn refused(url: &str, kind: std::io::ErrorKind, what: String) -> ts_io::Error {
    ts_io::Error::Open { path: url.into(), source: std::io::Error::new(kind, what).into() }
}

/// What cannot be had of a server, and why.
pub(crate) fn unreadable(url: &str, failure: Failure) -> ts_io::Error {
    match failure {
        Failure::Network(error) => refused(url, kind_of(&error), error.to_string()),
        Failure::Refused(Refusal { kind: RefusalKind::NotFound, reason }) => {
            refused(url, std::io::ErrorKind::NotFound, reason)
        }
        Failure::Refused(refusal) => refused(url, std::io::ErrorKind::Other, refusal.reason),
    }
}

fn kind_of(error: &ts_remote::Error) -> std::io::ErrorKind {
    match error {
        ts_remote::Error::Io { source, .. } => source.kind(),
        ts_remote::Error::TimedOut { .. } | ts_remote::Error::Stalled { .. } => {
            std::io::ErrorKind::TimedOut
        }
        _ => std::io::ErrorKind::Other,
    }
}

/// A server, and the connections to it that nobody uses now.
#[derive(Debug)]
pub(crate) struct WeightServer {
    address: Address,
    tls: Option<TlsClient>,
    options: ConnectionOptions,
    idle: Mutex<Vec<Conversation>>,
}

/// A connection, and what was opened on it.
#[derive(Debug)]
struct Conversation {
    client: RangeClient<Room>,
    files: HashMap<String, RemoteFile>,
}

/// Why something was not done.
pub(crate) enum Failure {
    Network(ts_remote::Error),
    Refused(Refusal),
}

impl From<ts_remote::Error> for Failure {
    fn from(error: ts_remote::Error) -> Self {
        Self::Network(error)
    }
}

impl WeightServer {
    /// Files of one server share its connections.
    fn of(address: Address, secure: bool) -> Result<Arc<Self>, ts_remote::Error> {
        type Servers = HashMap<(Address, bool), Arc<WeightServer>>;
        static SERVERS: Mutex<Option<Servers>> = Mutex::new(None);
        let mut servers = SERVERS.lock();
        let servers = servers.get_or_insert_default();
        let key = (address.clone(), secure);
        // Who changes its environment between two files wants the new one.
        let token = std::env::var("TENSORSTREAM_TOKEN").ok();
        if let Some(server) = servers.get(&key).filter(|server| server.options.token == token) {
            return Ok(Arc::clone(server));
        }
        let tls = secure.then(tls_of_environment).transpose()?;
        let options = ConnectionOptions { token, ..ConnectionOptions::default() };
        let server = Arc::new(Self { address, tls, options, idle: Mutex::default() });
        servers.insert(key, Arc::clone(&server));
        Ok(server)
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Conversation>> {
        self.idle.lock()
    }

    fn connect(&self, left: Duration, timeout: Duration) -> Result<Conversation, ts_remote::Error> {
        let mut socket = Socket::connect(&self.address, left)?;
        if let Some(tls) = &self.tls {
            socket = socket.into_tls_client(tls)?;
        }
        let options = ConnectionOptions { idle_timeout: timeout, ..self.options.clone() };
        Ok(Conversation { client: RangeClient::new(socket, options)?, files: HashMap::new() })
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Another server, which is spoken to as this one.
    pub(crate) fn beside(&self, address: Address) -> Arc<Self> {
        let (tls, options) = (self.tls.clone(), self.options.clone());
        Arc::new(Self { address, tls, options, idle: Mutex::default() })
    }

    /// A file of its, as it was opened there or elsewhere.
    pub(crate) fn file(
        self: &Arc<Self>,
        name: &str,
        url: &str,
        opened: RemoteFile,
    ) -> impl RemoteSource + use<> {
        File { server: Arc::clone(self), name: name.into(), url: url.into(), opened }
    }

    pub(crate) fn list(&self, name: &str, timeout: Duration) -> Result<Vec<ListedFile>, Failure> {
        self.converse(timeout, |conversation| {
            conversation.client.list(name)?.map_err(Failure::Refused)
        })
    }

    pub(crate) fn join(
        &self,
        name: &str,
        own: &str,
        lost: Option<&str>,
        timeout: Duration,
    ) -> Result<Option<String>, Failure> {
        self.converse(timeout, |conversation| Ok(conversation.client.join(name, own, lost)?))
    }

    pub(crate) fn open(&self, name: &str, timeout: Duration) -> Result<RemoteFile, Failure> {
        self.converse(timeout, |conversation| conversation.open(name))
    }

    /// Does something on a connection: again on another when that was lost, as long as there is
    /// time.
    fn converse<T>(
        &self,
        timeout: Duration,
        mut work: impl FnMut(&mut Conversation) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let end = Instant::now() + timeout;
        let mut attempt = 0;
        loop {
            let kept = self.idle().pop();
            let fresh = kept.is_none();
            let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let conversation =
                kept.map_or_else(|| self.connect(left, timeout).map_err(Failure::Network), Ok);
            let done = conversation.and_then(|mut conversation| {
                let done = work(&mut conversation);
                if !matches!(done, Err(Failure::Network(_))) {
                    let mut idle = self.idle();
                    if idle.len() < KEPT {
                        idle.push(conversation);
                    }
                }
                done
            });
            match done {
                Err(Failure::Network(error))
                    if may_help(&error) && attempt < ATTEMPTS && Instant::now() < end =>
                {
                    // One that was kept may long be gone, as may all others of its age.
                    if fresh {
                        std::thread::sleep(FIRST_PAUSE * 2u32.pow(attempt));
                        attempt += 1;
                    } else {
                        self.idle().clear();
                    }
                }
                done => return done,
            }
        }
    }
}

/// Whether another connection may do what this could not.
fn may_help(error: &ts_remote::Error) -> bool {
    matches!(error.kind(), ts_remote::ErrorKind::Network | ts_remote::ErrorKind::Refused)
        && !matches!(error, ts_remote::Error::Closed { reason } if reason.contains("token"))
}

fn tls_of_environment() -> Result<TlsClient, ts_remote::Error> {
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let Some(trusted) = path("TENSORSTREAM_CA") else {
        return Err(ts_remote::Error::Misuse(
            "tss:// needs to know whom to trust: TENSORSTREAM_CA must name a file of certificates \
             (PEM)"
                .into(),
        ));
    };
    let (certificates, key) = (path("TENSORSTREAM_CERT"), path("TENSORSTREAM_KEY"));
    let identity = certificates.as_deref().zip(key.as_deref());
    TlsClient::new(&trusted, identity.map(|(certificates, key)| Identity { certificates, key }))
}

impl Conversation {
    fn open(&mut self, name: &str) -> Result<RemoteFile, Failure> {
        let opened = self.client.open(name)?.map_err(Failure::Refused)?;
        // The server forgets those that were opened longest ago.
        if self.files.len() >= MAX_KNOWN {
            self.files.clear();
        }
        self.files.insert(name.into(), opened.clone());
        Ok(opened)
    }
}

/// A file of a server's.
#[derive(Debug)]
struct File {
    server: Arc<WeightServer>,
    name: String,
    url: PathBuf,
    opened: RemoteFile,
}

impl File {
    /// Reads a range, all of which is in the file, to a part of some memory, and gives the memory
    /// back.
    fn read_part(
        &self,
        offset: u64,
        room: Room,
        timeout: Duration,
    ) -> (Room, Result<(), ts_io::Error>) {
        let (len, at) = (room.len, room.at);
        let mut memory = Some(room);
        let read = self.server.converse(timeout, |conversation| {
            let is_same = |file: &RemoteFile| {
                (file.len, &file.version) == (self.opened.len, &self.opened.version)
            };
            // What this connection has open may be an older file of that name.
            let known = conversation.files.get(&self.name).filter(|file| is_same(file)).cloned();
            let file = known.map_or_else(|| conversation.open(&self.name), Ok)?;
            if !is_same(&file) {
                let reason = "it is another version now".into();
                return Err(Failure::Refused(Refusal { kind: RefusalKind::Changed, reason }));
            }
            let done = conversation.client.read(file.id, offset, &mut memory);
            if memory.is_none() {
                memory = conversation.client.take_sink();
            }
            done?.map_err(Failure::Refused)
        });
        let result = read.map_err(|failure| self.failed(offset, len, timeout, failure));
        debug_assert!(memory.is_some(), "who ends a connection gives its memory back");
        (memory.unwrap_or(Room { pieces: Vec::new(), at, len }), result)
    }

    fn failed(&self, offset: u64, len: usize, timeout: Duration, failure: Failure) -> ts_io::Error {
        let path = self.url.clone();
        match failure {
            Failure::Refused(Refusal { kind: RefusalKind::Changed, reason }) => {
                ts_io::Error::Changed { path, offset, what: reason }
            }
            Failure::Refused(refusal) => ts_io::Error::Read {
                path,
                offset,
                len,
                source: std::io::Error::other(refusal.reason).into(),
            },
            Failure::Network(error) if error.kind() == ts_remote::ErrorKind::TimedOut => {
                ts_io::Error::TimedOut { path, offset, len, timeout }
            }
            Failure::Network(error) => {
                let source = std::io::Error::new(kind_of(&error), error);
                ts_io::Error::Read { path, offset, len, source: source.into() }
            }
        }
    }
}

impl RemoteSource for File {
    fn read(
        &self,
        offset: u64,
        buffers: Vec<Buffer>,
        timeout: Duration,
    ) -> (Vec<Buffer>, Result<usize, ts_io::Error>) {
        let room: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let there =
            usize::try_from(self.opened.len.saturating_sub(offset)).unwrap_or(usize::MAX).min(room);
        let mut memory = Room { pieces: buffers, at: 0, len: 0 };
        while memory.at < there {
            memory.len = (there - memory.at).min(MAX_RANGE as usize);
            let at = offset + memory.at as u64;
            let (back, read) = self.read_part(at, memory, timeout);
            memory = back;
            if let Err(error) = read {
                return (memory.pieces, Err(error));
            }
            memory.at += memory.len;
        }
        (memory.pieces, Ok(there))
    }

    fn read_at(
        &self,
        offset: u64,
        bytes: &mut [u8],
        timeout: Duration,
    ) -> Result<usize, ts_io::Error> {
        let budget =
            ts_pool::Budget::new(bytes.len().next_multiple_of(ts_pool::BLOCK_ALIGN).max(1));
        let failed = |source: ts_pool::Error| ts_io::Error::Read {
            path: self.url.clone(),
            offset,
            len: bytes.len(),
            source: std::io::Error::new(std::io::ErrorKind::OutOfMemory, source).into(),
        };
        let pool = ts_pool::HostPool::new(&budget, budget.limit_bytes()).map_err(failed)?;
        let buffer = pool.allocate(bytes.len()).map_err(failed)?;
        let (buffers, read) = self.read(offset, vec![buffer], timeout);
        let len = read?;
        bytes[..len].copy_from_slice(&buffers[0][..len]);
        Ok(len)
    }
}

/// A part of buffers that stand one behind the other.
#[derive(Debug)]
struct Room {
    pieces: Vec<Buffer>,
    at: usize,
    len: usize,
}

impl Sink for Room {
    type Full = Self;

    fn byte_len(&self) -> u64 {
        self.len as u64
    }

    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], ts_remote::Error> {
        let mut at = self.at + offset as usize;
        for piece in &mut self.pieces {
            if at < piece.len() {
                let end = piece.len().min(at + len);
                return Ok(&mut piece[at..end]);
            }
            at -= piece.len();
        }
        Err(ts_remote::Error::Misuse(format!("{len} bytes at {offset} of a room of {}", self.len)))
    }

    fn finish(self) -> Result<Self, ts_remote::Error> {
        Ok(self)
    }
}

/// The name under which a server knows a file of its directory.
pub(crate) fn path_in(root: &Path, name: &str) -> Option<PathBuf> {
    let inside =
        Path::new(name).components().all(|part| matches!(part, std::path::Component::Normal(_)));
    (inside && !name.is_empty() && !name.contains('\0')).then(|| root.join(name))
}
