// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of a weight server as sources: `ts://HOST:PORT/NAME`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ts_io::{Fingerprint, RemoteSource, Source};
use ts_pool::Buffer;
use ts_remote::{
    Address, Backoff, ConnectionOptions, Identity, ListedFile, MAX_RANGE, RangeClient, Refusal,
    RefusalKind, RemoteFile, Sink, Socket, TlsClient,
};

/// The schemes of URLs, and whether each of them uses TLS.
const SCHEMES: [(&str, bool); 2] = [("ts://", false), ("tss://", true)];
/// Maximum number of retries of a request after failures of new connections.
const MAX_RETRIES: u32 = 4;
/// Delay before the first retry.
const FIRST_RETRY: Duration = Duration::from_millis(50);
/// Longest delay between retries.
const MAX_RETRY: Duration = Duration::from_secs(1);
/// Maximum number of open files that a client tracks for a connection. A server keeps more files
/// open.
const MAX_OPEN_FILES: usize = 256;
/// Maximum number of idle connections to a server.
const MAX_IDLE: usize = 32;

/// Returns whether this is a URL of a weight server.
pub(crate) fn is_remote(url: &str) -> bool {
    SCHEMES.iter().any(|(scheme, _)| url.starts_with(scheme))
}

/// Parses a URL. Returns whether it uses TLS, the address, and the name of the file.
fn parse_url(url: &str) -> Option<(bool, Address, &str)> {
    let (scheme, tls) = SCHEMES.into_iter().find(|(scheme, _)| url.starts_with(scheme))?;
    let (address, name) = url[scheme.len()..].split_once('/')?;
    Some((tls, address.parse().ok()?, name))
}

/// A file or directory of a weight server.
pub(crate) struct RemotePath {
    pub(crate) server: Arc<WeightServer>,
    pub(crate) name: String,
}

impl RemotePath {
    /// Parses a URL. Returns `None` if it is invalid, and an error if TLS cannot be configured.
    pub(crate) fn parse(url: &str) -> Option<Result<Self, ts_remote::Error>> {
        let (tls, address, name) = parse_url(url)?;
        Some(WeightServer::get(address, tls).map(|server| Self { server, name: name.into() }))
    }
}

/// Opens a file of a server. Blocks. Returns an error if the server does not answer for 60 s.
pub(crate) fn open(url: &str) -> Result<Arc<Source>, ts_io::Error> {
    let invalid = || {
        let reason = "invalid URL (expected ts://HOST:PORT/NAME or tss://HOST:PORT/NAME)";
        open_error(url, std::io::ErrorKind::InvalidInput, reason.into())
    };
    let (tls, address, name) =
        parse_url(url).filter(|(.., name)| !name.is_empty()).ok_or_else(invalid)?;
    let server = WeightServer::get(address, tls)
        .map_err(|error| open_error(url, io_kind(&error), error.to_string()))?;
    let timeout = ts_io::BackendOptions::default().timeout;
    let opened = server.open(name, timeout).map_err(|error| error.into_open_error(url))?;
    let fingerprint = Fingerprint::default().with_len(opened.len);
    let file = WeightFile { server, name: name.into(), url: url.into(), opened };
    Ok(Source::remote(url, fingerprint, Arc::new(file)))
}

fn open_error(url: &str, kind: std::io::ErrorKind, reason: String) -> ts_io::Error {
    ts_io::Error::Open { path: url.into(), source: std::io::Error::new(kind, reason).into() }
}

fn io_kind(error: &ts_remote::Error) -> std::io::ErrorKind {
    match error {
        ts_remote::Error::Io { source, .. } => source.kind(),
        ts_remote::Error::TimedOut { .. } | ts_remote::Error::Stalled { .. } => {
            std::io::ErrorKind::TimedOut
        }
        _ => std::io::ErrorKind::Other,
    }
}

/// The error of a request to a server.
pub(crate) enum RequestError {
    /// The connection failed.
    Network(ts_remote::Error),
    /// The server refused the request.
    Refused(Refusal),
}

impl From<ts_remote::Error> for RequestError {
    fn from(error: ts_remote::Error) -> Self {
        Self::Network(error)
    }
}

impl RequestError {
    /// Converts the error to a [`ts_io::Error::Open`] for `url`.
    pub(crate) fn into_open_error(self, url: &str) -> ts_io::Error {
        match self {
            Self::Network(error) => open_error(url, io_kind(&error), error.to_string()),
            Self::Refused(Refusal { kind: RefusalKind::NotFound, reason }) => {
                open_error(url, std::io::ErrorKind::NotFound, reason)
            }
            Self::Refused(refusal) => open_error(url, std::io::ErrorKind::Other, refusal.reason),
        }
    }
}

/// A server, and its idle connections.
#[derive(Debug)]
pub(crate) struct WeightServer {
    address: Address,
    tls: Option<TlsClient>,
    options: ConnectionOptions,
    idle: Mutex<Vec<PooledConnection>>,
}

/// A connection, and the files that are open on it, by name.
#[derive(Debug)]
struct PooledConnection {
    client: RangeClient<BufferRange>,
    files: HashMap<String, RemoteFile>,
}

impl WeightServer {
    /// Returns the server at an address. All files of a server share its connections.
    fn get(address: Address, tls: bool) -> Result<Arc<Self>, ts_remote::Error> {
        type Servers = HashMap<(Address, bool), Arc<WeightServer>>;
        static SERVERS: Mutex<Option<Servers>> = Mutex::new(None);
        let mut servers = SERVERS.lock();
        let servers = servers.get_or_insert_default();
        let key = (address.clone(), tls);
        // If the token in the environment has changed, files that are opened later use the new
        // token.
        let token = std::env::var("TENSORSTREAM_TOKEN").ok();
        if let Some(server) = servers.get(&key).filter(|server| server.options.token == token) {
            return Ok(Arc::clone(server));
        }
        let tls = tls.then(tls_from_environment).transpose()?;
        let options = ConnectionOptions::default().with_token(token);
        let server = Arc::new(Self { address, tls, options, idle: Mutex::default() });
        servers.insert(key, Arc::clone(&server));
        Ok(server)
    }

    fn connect(
        &self,
        connect_timeout: Duration,
        idle_timeout: Duration,
    ) -> Result<PooledConnection, ts_remote::Error> {
        let mut socket = Socket::connect(&self.address, connect_timeout)?;
        if let Some(tls) = &self.tls {
            socket = socket.into_tls_client(tls)?;
        }
        let options = self.options.clone().with_idle_timeout(idle_timeout);
        Ok(PooledConnection { client: RangeClient::new(socket, options)?, files: HashMap::new() })
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Returns the server at another address, with the same TLS configuration and options.
    pub(crate) fn with_address(&self, address: Address) -> Arc<Self> {
        let (tls, options) = (self.tls.clone(), self.options.clone());
        Arc::new(Self { address, tls, options, idle: Mutex::default() })
    }

    /// Returns a file of this server. `opened` is its length and version, from this server or
    /// another one.
    pub(crate) fn file(
        self: &Arc<Self>,
        name: &str,
        url: &str,
        opened: RemoteFile,
    ) -> impl RemoteSource + use<> {
        WeightFile { server: Arc::clone(self), name: name.into(), url: url.into(), opened }
    }

    /// Lists the file `name`, or all files in the directory `name`.
    pub(crate) fn list(
        &self,
        name: &str,
        timeout: Duration,
    ) -> Result<Vec<ListedFile>, RequestError> {
        self.with_connection(timeout, |connection| {
            connection.client.list(name)?.map_err(RequestError::Refused)
        })
    }

    /// Joins the broadcast of `name`, as a peer that serves `name` at the address `own`. Returns
    /// the address of the peer to read from, or `None` to read from this server. `lost` is the
    /// address of a peer that failed.
    pub(crate) fn join(
        &self,
        name: &str,
        own: &str,
        lost: Option<&str>,
        timeout: Duration,
    ) -> Result<Option<String>, RequestError> {
        self.with_connection(timeout, |connection| Ok(connection.client.join(name, own, lost)?))
    }

    /// Opens a file. Returns its id, length and version.
    pub(crate) fn open(&self, name: &str, timeout: Duration) -> Result<RemoteFile, RequestError> {
        self.with_connection(timeout, |connection| connection.open(name))
    }

    /// Runs a request on an idle connection, or on a new one if none is idle.
    ///
    /// If the connection is lost or refused, runs the request again on another connection, until
    /// `timeout` has passed. Stops after [`MAX_RETRIES`] + 1 failures of new connections. Failures
    /// of idle connections do not count. Does not retry after a timeout or a rejected token.
    fn with_connection<T>(
        &self,
        timeout: Duration,
        mut request: impl FnMut(&mut PooledConnection) -> Result<T, RequestError>,
    ) -> Result<T, RequestError> {
        let deadline = Instant::now() + timeout;
        let mut retries = 0;
        let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
        loop {
            let idle = self.idle.lock().pop();
            let is_new = idle.is_none();
            let left =
                deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let connection =
                idle.map_or_else(|| self.connect(left, timeout).map_err(RequestError::Network), Ok);
            let done = connection.and_then(|mut connection| {
                let done = request(&mut connection);
                if !matches!(done, Err(RequestError::Network(_))) {
                    let mut idle = self.idle.lock();
                    if idle.len() < MAX_IDLE {
                        idle.push(connection);
                    }
                }
                done
            });
            match done {
                Err(RequestError::Network(error))
                    if is_retryable(&error)
                        && retries < MAX_RETRIES
                        && Instant::now() < deadline =>
                {
                    if is_new {
                        std::thread::sleep(backoff.next_delay());
                        retries += 1;
                    } else {
                        // The server may have closed all idle connections.
                        self.idle.lock().clear();
                    }
                }
                done => return done,
            }
        }
    }
}

/// Returns whether a request that failed may succeed on another connection.
fn is_retryable(error: &ts_remote::Error) -> bool {
    matches!(error.kind(), ts_remote::ErrorKind::Network | ts_remote::ErrorKind::Refused)
        && !matches!(error, ts_remote::Error::Closed { reason } if reason.contains("token"))
}

fn tls_from_environment() -> Result<TlsClient, ts_remote::Error> {
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let Some(trusted) = path("TENSORSTREAM_CA") else {
        return Err(ts_remote::Error::Misuse(
            "tss:// requires trusted certificates; set TENSORSTREAM_CA to a PEM file".into(),
        ));
    };
    let (certificates, key) = (path("TENSORSTREAM_CERT"), path("TENSORSTREAM_KEY"));
    let identity = certificates.as_deref().zip(key.as_deref());
    TlsClient::new(&trusted, identity.map(|(certificates, key)| Identity { certificates, key }))
}

impl PooledConnection {
    fn open(&mut self, name: &str) -> Result<RemoteFile, RequestError> {
        let opened = self.client.open(name)?.map_err(RequestError::Refused)?;
        // The server closes the files that were opened least recently, so old ids become invalid.
        if self.files.len() >= MAX_OPEN_FILES {
            self.files.clear();
        }
        self.files.insert(name.into(), opened.clone());
        Ok(opened)
    }
}

/// An open file of a server.
#[derive(Debug)]
struct WeightFile {
    server: Arc<WeightServer>,
    name: String,
    url: PathBuf,
    opened: RemoteFile,
}

impl WeightFile {
    /// Fills `memory` with the bytes of the file from `offset` on. The range must be within the
    /// file. Returns the memory, also after an error.
    fn read_range(
        &self,
        offset: u64,
        memory: BufferRange,
        timeout: Duration,
    ) -> (BufferRange, Result<(), ts_io::Error>) {
        let (len, start) = (memory.len, memory.start);
        let mut memory = Some(memory);
        let read = self.server.with_connection(timeout, |connection| {
            let is_same = |file: &RemoteFile| {
                (file.len, &file.version) == (self.opened.len, &self.opened.version)
            };
            // The connection may have opened an older version of the file.
            let known = connection.files.get(&self.name).filter(|file| is_same(file)).cloned();
            let file = known.map_or_else(|| connection.open(&self.name), Ok)?;
            if !is_same(&file) {
                let reason = "the server has another version of the file".into();
                return Err(RequestError::Refused(Refusal { kind: RefusalKind::Changed, reason }));
            }
            let done = connection.client.read(file.id, offset, &mut memory);
            if memory.is_none() {
                memory = connection.client.take_sink();
            }
            done?.map_err(RequestError::Refused)
        });
        let result = read.map_err(|error| self.read_error(offset, len, timeout, error));
        debug_assert!(memory.is_some(), "a connection returns the memory when it ends");
        (memory.unwrap_or(BufferRange { buffers: Vec::new(), start, len }), result)
    }

    fn read_error(
        &self,
        offset: u64,
        len: usize,
        timeout: Duration,
        error: RequestError,
    ) -> ts_io::Error {
        let path = self.url.clone();
        match error {
            RequestError::Refused(Refusal { kind: RefusalKind::Changed, reason }) => {
                ts_io::Error::Changed { path, offset, what: reason }
            }
            RequestError::Refused(refusal) => ts_io::Error::Read {
                path,
                offset,
                len,
                source: std::io::Error::other(refusal.reason).into(),
            },
            RequestError::Network(error) if error.kind() == ts_remote::ErrorKind::TimedOut => {
                ts_io::Error::TimedOut { path, offset, len, timeout }
            }
            RequestError::Network(error) => {
                let source = std::io::Error::new(io_kind(&error), error);
                ts_io::Error::Read { path, offset, len, source: source.into() }
            }
        }
    }
}

impl RemoteSource for WeightFile {
    fn read(
        &self,
        offset: u64,
        buffers: Vec<Buffer>,
        timeout: Duration,
    ) -> (Vec<Buffer>, Result<usize, ts_io::Error>) {
        let capacity: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let available = usize::try_from(self.opened.len.saturating_sub(offset));
        let total = available.unwrap_or(usize::MAX).min(capacity);
        let mut memory = BufferRange { buffers, start: 0, len: 0 };
        while memory.start < total {
            memory.len = (total - memory.start).min(MAX_RANGE as usize);
            let range_offset = offset + memory.start as u64;
            let (returned, read) = self.read_range(range_offset, memory, timeout);
            memory = returned;
            if let Err(error) = read {
                return (memory.buffers, Err(error));
            }
            memory.start += memory.len;
        }
        (memory.buffers, Ok(total))
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

/// A range of the concatenation of several buffers.
#[derive(Debug)]
struct BufferRange {
    buffers: Vec<Buffer>,
    start: usize,
    len: usize,
}

impl Sink for BufferRange {
    type Full = Self;

    fn byte_len(&self) -> u64 {
        self.len as u64
    }

    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], ts_remote::Error> {
        let mut at = self.start + offset as usize;
        for buffer in &mut self.buffers {
            if at < buffer.len() {
                let end = buffer.len().min(at + len);
                return Ok(&mut buffer[at..end]);
            }
            at -= buffer.len();
        }
        let reason = format!(
            "cannot store {len} bytes at offset {offset}: the memory has {} bytes",
            self.len
        );
        Err(ts_remote::Error::Misuse(reason))
    }

    fn finish(self) -> Result<Self, ts_remote::Error> {
        Ok(self)
    }
}

/// Returns the path in the directory `root` for the name of a file on a server. Returns `None` if
/// the name is not a relative path without `..`.
pub(crate) fn path_in(root: &Path, name: &str) -> Option<PathBuf> {
    let inside =
        Path::new(name).components().all(|part| matches!(part, std::path::Component::Normal(_)));
    let plain = !cfg!(windows) || name.split('/').all(is_plain_on_windows);
    (inside && plain && !name.is_empty() && !name.contains('\0')).then(|| root.join(name))
}

/// Returns whether a component is the name of a file on Windows. Otherwise, it may be two
/// components (`a\b`), a stream of a file (`a:b`), or another spelling of a name (`a.`), which a
/// check like [`is_private`] misses.
fn is_plain_on_windows(component: &str) -> bool {
    !component.contains(['\\', ':']) && !component.ends_with(['.', ' '])
}

/// Returns whether a component of a name belongs to a hidden or unfinished file. Servers do not
/// offer them, and clients do not accept them.
pub(crate) fn is_private(component: &str) -> bool {
    component.starts_with('.') || component.ends_with(".partial")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_files_inside_of_the_directory() {
        let root = Path::new("root");
        assert_eq!(path_in(root, "sub/a.ts"), Some(root.join("sub/a.ts")));
        for name in ["", "/a.ts", "../a.ts", "sub/../../a.ts", "a\0.ts"] {
            assert_eq!(path_in(root, name), None, "{name:?}");
        }
        for name in ["sub\\.hidden", "C:a.ts", "a.ts:stream", "a.partial.", "sub /a.ts"] {
            assert!(!name.split('/').all(is_plain_on_windows), "{name:?}");
            assert_eq!(path_in(root, name).is_none(), cfg!(windows), "{name:?}");
        }
    }
}
