// SPDX-License-Identifier: MIT OR Apache-2.0
//! `object`: ranged GETs from S3, Google Cloud Storage, Azure and web servers. The async runtime
//! stays in here.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use object_store::path::Path as ObjectPath;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore};
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use url::Url;

use crate::backend::{
    Backend, BackendOptions, Capabilities, Completion, CompletionSink, ReadPath, ReadRequest,
    Rejected, Transfer, monotonic_ns,
};
use crate::fault::{Fault, Faults};
use crate::memory::copy_to;
use crate::provider::{Availability, BackendProvider};
use crate::source::Fingerprint;
use crate::threads::take_wanted;
use crate::{Error, Source};

/// Attempts in a row that bring no byte before a read is given up.
const FRUITLESS_LIMIT: u32 = 5;
/// The pause after the first of them; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// An object, where it lies.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    store: Arc<dyn ObjectStore>,
    object: ObjectPath,
    url: PathBuf,
    state: Fingerprint,
}

impl Remote {
    /// Asks for the object's length and version. Blocks.
    pub(crate) fn open(url: &str, timeout: Duration) -> Result<Self, Error> {
        let refused = |e: io::Error| Error::Open { path: url.into(), source: e.into() };
        let (store, object) = store_of(url).map_err(refused)?;
        let (asked, at) = (Arc::clone(&store), object.clone());
        let head = async move {
            let options = GetOptions { head: true, ..GetOptions::default() };
            tokio::time::timeout(timeout, asked.get_opts(&at, options)).await
        };
        let meta = match block_on(head).map_err(refused)? {
            Ok(found) => found.map_err(|e| refused(io_error(e)))?.meta,
            Err(_) => {
                return Err(refused(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the server does not answer",
                )));
            }
        };
        let state = fingerprint(&meta);
        if state.etag.is_none() && state.modified.is_none() {
            return Err(refused(io::Error::other(
                "the server gives neither ETag nor Last-Modified, so versions cannot be told apart",
            )));
        }
        Ok(Self { store, object, url: url.into(), state })
    }

    /// The name of this very content, if the server gives one.
    fn strong_etag(&self) -> Option<&String> {
        self.state.etag.as_ref().filter(|etag| !etag.starts_with("W/"))
    }

    /// What tells another version of the object from this one. Answers need not repeat everything
    /// that was said when it was opened, but one of the two things that name a version.
    fn difference(&self, now: &Fingerprint) -> Option<String> {
        if self.state.len != now.len {
            return Some(format!("it had {} bytes and has {}", self.state.len, now.len));
        }
        let another = Some("it is another version now".into());
        if let (Some(then), Some(now)) = (&self.state.etag, &now.etag) {
            return another.filter(|_| then != now);
        }
        match (self.state.modified, now.modified) {
            (Some(then), Some(now)) => another.filter(|_| then != now),
            _ => Some("the server no longer says which version it is".into()),
        }
    }

    pub(crate) fn fingerprint(&self) -> &Fingerprint {
        &self.state
    }

    /// Fills `memory` with what is at `offset` on, as far as the object goes. Blocks.
    pub(crate) fn read_at(
        &self,
        offset: u64,
        memory: &mut [u8],
        timeout: Duration,
    ) -> Result<usize, Error> {
        let (this, len) = (self.clone(), memory.len());
        let read = async move {
            let mut bytes = Vec::with_capacity(len);
            let faults = Faults::default();
            let mut take = |at: usize, chunk: &[u8]| {
                bytes.truncate(at);
                bytes.extend_from_slice(chunk);
            };
            let done =
                tokio::time::timeout(timeout, this.read(offset, len, &faults, &mut take)).await;
            let timed_out = Error::TimedOut { path: this.url.clone(), offset, len, timeout };
            done.map_err(|_| timed_out).flatten().map(|_| bytes)
        };
        let bytes = block_on(read).map_err(|e| self.failed(offset, len, e))??;
        memory[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    /// Gives `take` the bytes of `offset..offset + len` with their place in it, in order, as far as
    /// the object goes. What the network drops is asked for again from the first missing byte on,
    /// of the same version of the object; from the beginning where no strong ETag holds both halves
    /// together.
    async fn read(
        &self,
        offset: u64,
        len: usize,
        faults: &Faults,
        take: &mut (dyn FnMut(usize, &[u8]) + Send),
    ) -> Result<usize, Error> {
        let len =
            usize::try_from(self.state.len.saturating_sub(offset)).unwrap_or(usize::MAX).min(len);
        if len == 0 {
            return Ok(0);
        }
        let (mut done, mut fruitless) = (0, 0);
        loop {
            let before = done;
            let mut next = |chunk: &[u8]| {
                take(done, chunk);
                done += chunk.len();
            };
            let failure =
                match self.attempt(offset + before as u64, len - before, faults, &mut next).await {
                    Ok(()) => None,
                    Err(Failure::Passing(error)) => Some(error),
                    Err(Failure::Final(error)) => return Err(error),
                };
            let goes_on = self.strong_etag().is_some();
            match failure {
                _ if done >= len => return Ok(done),
                _ if done > before && goes_on => {
                    fruitless = 0;
                    continue;
                }
                None if fruitless >= FRUITLESS_LIMIT => return Ok(done),
                Some(error) if fruitless >= FRUITLESS_LIMIT => {
                    return Err(self.failed(offset + done as u64, len - done, error));
                }
                _ => {}
            }
            if !goes_on {
                done = 0;
            }
            tokio::time::sleep(FIRST_PAUSE * 2u32.pow(fruitless)).await;
            fruitless += 1;
        }
    }

    /// One GET; `take` has got what came before it failed.
    async fn attempt(
        &self,
        offset: u64,
        mut len: usize,
        faults: &Faults,
        take: &mut (dyn FnMut(&[u8]) + Send),
    ) -> Result<(), Failure> {
        match self.fault(offset, len, faults) {
            None => {}
            Some(Fault::Short(limit)) => len = len.min(limit.max(1)),
            Some(Fault::Errno(number)) => {
                return Err(Failure::Passing(io::Error::from_raw_os_error(number)));
            }
            Some(Fault::Delay(time)) => tokio::time::sleep(time).await,
            Some(Fault::Stuck) => {
                while faults.gate().is_some_and(|gate| !gate.is_open()) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
        }
        let range = offset..offset + len as u64;
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            if_match: self.strong_etag().cloned(),
            ..GetOptions::default()
        };
        let result = self.store.get_opts(&self.object, options).await;
        let found = result.map_err(|error| self.judge(offset, error))?;
        if let Some(what) = self.difference(&fingerprint(&found.meta)) {
            return Err(Failure::Final(self.changed(offset, what)));
        }
        if found.range != range {
            let what =
                format!("the server answers bytes {:?} when asked for {range:?}", found.range);
            return Err(Failure::Final(self.failed(offset, len, io::Error::other(what))));
        }
        let (mut left, mut stream) = (len, found.into_stream());
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|error| self.judge(offset, error))?;
            let counts = chunk.len().min(left);
            take(&chunk[..counts]);
            left -= counts;
        }
        Ok(())
    }

    fn fault(&self, offset: u64, len: usize, faults: &Faults) -> Option<Fault> {
        faults.decide(&self.url, offset, len)
    }

    /// Whether asking again can help.
    fn judge(&self, offset: u64, error: object_store::Error) -> Failure {
        match error {
            object_store::Error::Precondition { .. } => {
                Failure::Final(self.changed(offset, "it is another version now".into()))
            }
            object_store::Error::NotFound { .. } => {
                Failure::Final(self.changed(offset, "it is gone".into()))
            }
            object_store::Error::Generic { .. } => Failure::Passing(io_error(error)),
            other => Failure::Final(self.failed(offset, 0, io_error(other))),
        }
    }

    fn changed(&self, offset: u64, what: String) -> Error {
        Error::Changed { path: self.url.clone(), offset, what }
    }

    fn failed(&self, offset: u64, len: usize, error: io::Error) -> Error {
        Error::Read { path: self.url.clone(), offset, len, source: error.into() }
    }
}

/// Why an attempt failed.
enum Failure {
    /// The network or the server, for now.
    Passing(io::Error),
    /// Another attempt would find the same.
    Final(Error),
}

fn fingerprint(meta: &ObjectMeta) -> Fingerprint {
    // Servers that do not say when it was written are given the time of the epoch by the library.
    let modified = SystemTime::from(meta.last_modified);
    let modified = (modified > SystemTime::UNIX_EPOCH).then_some(modified);
    Fingerprint {
        identity: (0, 0),
        len: meta.size,
        modified,
        changed: None,
        etag: meta.e_tag.clone(),
    }
}

fn io_error(error: object_store::Error) -> io::Error {
    use object_store::Error as E;
    let kind = match &error {
        E::NotFound { .. } => io::ErrorKind::NotFound,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        E::InvalidPath { .. } => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

/// The store that a URL names and the object in it, with the credentials that its environment
/// variables give.
fn store_of(text: &str) -> io::Result<(Arc<dyn ObjectStore>, ObjectPath)> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    let url = Url::parse(text).map_err(|e| invalid(format!("it is no URL: {e}")))?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err(invalid(
            "URLs with a query, such as signed ones, cannot be read in ranges by their name".into(),
        ));
    }
    let of_stores =
        |name: &str| ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|prefix| name.starts_with(prefix));
    let mut options: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| of_stores(name))
        .collect();
    let plain = |name: &str| options.iter().any(|(n, v)| n == name && v.starts_with("http://"));
    if url.scheme() == "http"
        || plain("AWS_ENDPOINT_URL")
        || plain("AWS_ENDPOINT")
        || plain("AWS_ENDPOINT_URL_S3")
    {
        options.push(("allow_http".into(), "true".into()));
    }
    // A read has its own deadline; a slow network may take longer than the library's 30 s for one
    // answer.
    options.push(("timeout".into(), "1 day".into()));
    // It sets TLS up, which clients want when they are made.
    runtime()?;
    let (store, object) = object_store::parse_url_opts(&url, options).map_err(io_error)?;
    Ok((Arc::from(store), object))
}

/// The one runtime of this process: connections live as long as it does.
fn runtime() -> io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<io::Result<Runtime>> = OnceLock::new();
    let made = RUNTIME.get_or_init(|| {
        // Whoever has chosen another provider of TLS keeps it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).thread_name("ts-io-net").enable_all().build()
    });
    made.as_ref().map_err(|e| io::Error::new(e.kind(), e.to_string()))
}

/// Runs a future to its end, on threads of our own: the caller's may belong to another runtime.
fn block_on<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> io::Result<T> {
    let (done, wait) = std::sync::mpsc::sync_channel(1);
    runtime()?.spawn(async move {
        let _ = done.send(future.await);
    });
    wait.recv().map_err(|_| io::Error::other("the network's thread has ended"))
}

/// `object`: from object storage and web servers.
pub(crate) struct ObjectProvider;

impl BackendProvider for ObjectProvider {
    fn name(&self) -> &'static str {
        "object"
    }

    fn priority(&self) -> u8 {
        40
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        match sources.iter().find(|source| source.object().is_none()) {
            Some(file) => Availability::Unavailable(format!("{} is a file", file.path().display())),
            None => Availability::Available,
        }
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        let runtime = runtime().map_err(|e| Error::Thread(e.into()))?;
        let shared = Shared {
            runtime,
            sink,
            in_flight: options.depth(),
            timeout: options.deadline(),
            faults: options.faults.clone(),
            queue: Mutex::default(),
            idle: Condvar::new(),
        };
        Ok(Box::new(ObjectBackend { shared: Arc::new(shared) }))
    }
}

struct ObjectBackend {
    shared: Arc<Shared>,
}

struct Shared {
    runtime: &'static Runtime,
    sink: CompletionSink,
    in_flight: usize,
    timeout: Duration,
    faults: Faults,
    queue: Mutex<Queue>,
    /// No read is under way any more.
    idle: Condvar,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<ReadRequest>,
    /// Tokens of the reads under way, and what gives them up, by ticket.
    active: HashMap<u64, (u64, Arc<Notify>)>,
    next_ticket: u64,
}

impl Backend for ObjectBackend {
    fn name(&self) -> &'static str {
        ObjectProvider.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { needs_alignment: false, max_in_flight: self.shared.in_flight }
    }

    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>> {
        if let Err(error) = request.check_room() {
            return Err(Box::new(Rejected { request, error }));
        }
        if request.source.object().is_none() {
            let reason = format!("{} is a file", request.source.path().display());
            let error = Error::Unavailable { backend: self.name().into(), reason };
            return Err(Box::new(Rejected { request, error }));
        }
        self.shared.lock().requests.push_back(request);
        Shared::pump(&self.shared);
        Ok(())
    }

    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        let mut queue = self.shared.lock();
        let cancelled = take_wanted(&mut queue.requests, wanted);
        for (_, end) in queue.active.values().filter(|(token, _)| wanted(*token)) {
            end.notify_one();
        }
        drop(queue);
        let count = cancelled.len();
        cancelled.into_iter().for_each(|request| (self.shared.sink)(request.cancelled()));
        count
    }
}

impl Drop for ObjectBackend {
    /// Gives up what is under way.
    fn drop(&mut self) {
        self.cancel(&|_| true);
        let mut queue = self.shared.lock();
        while !queue.active.is_empty() {
            self.shared.idle.wait(&mut queue);
        }
    }
}

/// A read that has ended, however it did, makes room for another.
struct Ended {
    shared: Arc<Shared>,
    ticket: u64,
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.shared.lock().active.remove(&self.ticket);
        self.shared.idle.notify_all();
        Shared::pump(&self.shared);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Begins as many reads as there is room for.
    fn pump(this: &Arc<Self>) {
        let mut queue = this.lock();
        while queue.active.len() < this.in_flight {
            let Some(request) = queue.requests.pop_front() else { return };
            let (ticket, end) = (queue.next_ticket, Arc::new(Notify::new()));
            queue.next_ticket += 1;
            queue.active.insert(ticket, (request.token, Arc::clone(&end)));
            let shared = Arc::clone(this);
            let (token, path, offset) =
                (request.token, request.source.path().to_path_buf(), request.offset);
            let reading = Arc::clone(this);
            // A task of its own: should a library panic on what a server says, it is this read's
            // error.
            let read = this.runtime.spawn(async move { reading.read(request, &end).await });
            this.runtime.spawn(async move {
                let ended = Ended { shared, ticket };
                let completion = read.await.unwrap_or_else(|panic| {
                    let source = io::Error::other(panic.to_string()).into();
                    let error = Error::Read { path, offset, len: 0, source };
                    Completion { token, buffers: Vec::new(), result: Err(error) }
                });
                (ended.shared.sink)(completion);
            });
        }
    }

    async fn read(&self, mut request: ReadRequest, end: &Notify) -> Completion {
        let started_ns = monotonic_ns();
        let source = Arc::clone(&request.source);
        let remote = source.object().expect("it was checked when it came");
        let (offset, len, mut buffers) =
            (request.offset, request.room(), std::mem::take(&mut request.buffers));
        let mut take = |at: usize, chunk: &[u8]| copy_to(&mut buffers, at, chunk);
        let read = remote.read(offset, len, &self.faults, &mut take);
        let result = tokio::select! {
            read = tokio::time::timeout(self.timeout, read) => match read {
                Ok(result) => result,
                Err(_) => Err(request.timed_out(self.timeout)),
            },
            () = end.notified() => Err(Error::Cancelled { path: source.path().into(), offset }),
        };
        request.buffers = buffers;
        let result = result.and_then(|bytes| {
            request.judged(bytes)?;
            Ok(Transfer::by(ReadPath::Network, bytes, started_ns))
        });
        Completion { token: request.token, buffers: request.buffers, result }
    }
}
