// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects of S3, Google Cloud Storage, Azure and web servers, and the backend `object`, which
//! reads them with ranged GETs. Nothing outside this file uses the async runtime.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
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
    Rejected, Transfer, monotonic_ns, take_matching,
};
use crate::hook::{Interception, ReadHook};
use crate::passwords::hide_passwords;
use crate::provider::{Availability, BackendProvider};
use crate::scatter::copy_to;
use crate::source::{Fingerprint, Origin};
use crate::{Error, Source};

/// The maximum number of consecutive retries without progress. Without a strong ETag, no retry
/// counts as progress, because each one reads from the start.
const MAX_RETRIES: u32 = 5;
/// The pause before the first retry. Each further pause is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// An object, and the store that contains it.
#[derive(Debug, Clone)]
pub(crate) struct ObjectOrigin {
    store: Arc<dyn ObjectStore>,
    object: ObjectPath,
    /// Without a password.
    url: PathBuf,
    fingerprint: Fingerprint,
}

impl ObjectOrigin {
    /// Requests the object's length and version. Blocks for at most `timeout`.
    pub(crate) fn open(url: &str, timeout: Duration) -> Result<Self, Error> {
        let shown = PathBuf::from(&*hide_passwords(url));
        let failed = |e: io::Error| Error::Open { path: shown.clone(), source: e.into() };
        let (store, object) = store_of(url).map_err(failed)?;
        let (head_store, head_object) = (Arc::clone(&store), object.clone());
        let head = async move {
            let options = GetOptions { head: true, ..GetOptions::default() };
            tokio::time::timeout(timeout, head_store.get_opts(&head_object, options)).await
        };
        let meta = match block_on(head).map_err(failed)? {
            Ok(found) => found.map_err(|e| failed(io_error(e)))?.meta,
            Err(_) => {
                return Err(failed(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!(
                        "the request did not succeed within {timeout:?}; check the URL, the \
                         network and the credentials"
                    ),
                )));
            }
        };
        let fingerprint = fingerprint(&meta);
        if fingerprint.etag.is_none() && fingerprint.modified.is_none() {
            return Err(failed(io::Error::other(
                "the server sends neither ETag nor Last-Modified, so changes cannot be detected; \
                 download the object and open the file",
            )));
        }
        Ok(Self { store, object, url: shown, fingerprint })
    }

    /// Returns the object that `source` reads, if it reads an object.
    pub(crate) fn of(source: &Source) -> Option<&Self> {
        source.origin()
    }

    /// Returns the ETag if it is strong. Only a strong ETag identifies the exact bytes.
    fn strong_etag(&self) -> Option<&String> {
        self.fingerprint.etag.as_ref().filter(|etag| !etag.starts_with("W/"))
    }

    /// Describes how a response differs from the version that was opened, or returns `None`. The
    /// ETags of both must be equal. If one of them has no ETag, their Last-Modified must be equal.
    fn difference(&self, now: &Fingerprint) -> Option<String> {
        let opened = &self.fingerprint;
        if opened.len != now.len {
            return Some(format!("it had {} bytes and now has {}", opened.len, now.len));
        }
        if let (Some(then), Some(now)) = (&opened.etag, &now.etag) {
            return (then != now).then(|| {
                format!("the server has another version (expected ETag {then}, got {now})")
            });
        }
        match (opened.modified, now.modified) {
            (Some(then), Some(now)) => (then != now)
                .then(|| "the server has another version (its Last-Modified differs)".into()),
            _ => Some(
                "the response has no ETag or Last-Modified to compare with the opened version"
                    .into(),
            ),
        }
    }

    /// Reads `offset..offset + len`, up to the end of the object. Passes each chunk to `take`, in
    /// order, with its position in the range. Returns the number of bytes.
    ///
    /// After a failure, requests the rest of the same version. Without a strong ETag, nothing
    /// proves that two parts have the same version, so the read starts again at position 0.
    async fn read(
        &self,
        offset: u64,
        len: usize,
        hook: &ReadHook,
        take: &mut (dyn FnMut(usize, &[u8]) + Send),
    ) -> Result<usize, Error> {
        let rest = self.fingerprint.len.saturating_sub(offset);
        let len = usize::try_from(rest).unwrap_or(usize::MAX).min(len);
        if len == 0 {
            return Ok(0);
        }
        let (mut done, mut retries) = (0, 0);
        loop {
            let before = done;
            let mut next = |chunk: &[u8]| {
                take(done, chunk);
                done += chunk.len();
            };
            let failure =
                match self.attempt(offset + before as u64, len - before, hook, &mut next).await {
                    Ok(()) => None,
                    Err(Failure::Transient(error)) => Some(error),
                    Err(Failure::Permanent(error)) => return Err(error),
                };
            let can_resume = self.strong_etag().is_some();
            match failure {
                _ if done >= len => return Ok(done),
                _ if done > before && can_resume => {
                    retries = 0;
                    continue;
                }
                None if retries >= MAX_RETRIES => return Ok(done),
                Some(error) if retries >= MAX_RETRIES => {
                    return Err(self.read_error(offset + done as u64, len - done, error));
                }
                _ => {}
            }
            if !can_resume {
                done = 0;
            }
            tokio::time::sleep(FIRST_PAUSE * 2u32.pow(retries)).await;
            retries += 1;
        }
    }

    /// Sends one GET request. If it fails, `take` has received the bytes before the failure.
    async fn attempt(
        &self,
        offset: u64,
        mut len: usize,
        hook: &ReadHook,
        take: &mut (dyn FnMut(&[u8]) + Send),
    ) -> Result<(), Failure> {
        match hook.intercept(&self.url, offset, len) {
            None => {}
            Some(Interception::Truncate(limit)) => len = len.min(limit),
            Some(Interception::Fail(error)) => return Err(Failure::Transient(error)),
            Some(Interception::Delay(time)) => tokio::time::sleep(time).await,
            Some(Interception::Block(gate)) => {
                while !gate.is_open() {
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
        let found = result.map_err(|error| self.classify(offset, len, error))?;
        if let Some(what) = self.difference(&fingerprint(&found.meta)) {
            return Err(Failure::Permanent(self.changed(offset, what)));
        }
        if found.range != range {
            let what = format!(
                "unexpected range in the server's response (expected bytes {range:?}, got {:?})",
                found.range
            );
            return Err(Failure::Permanent(self.read_error(offset, len, io::Error::other(what))));
        }
        let (mut left, mut stream) = (len, found.into_stream());
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|error| self.classify(offset, len, error))?;
            let wanted = chunk.len().min(left);
            take(&chunk[..wanted]);
            left -= wanted;
        }
        Ok(())
    }

    /// Decides whether a retry of a GET of `len` bytes can succeed after `error`.
    fn classify(&self, offset: u64, len: usize, error: object_store::Error) -> Failure {
        match error {
            object_store::Error::Precondition { .. } => {
                Failure::Permanent(self.changed(offset, "the server has another version".into()))
            }
            object_store::Error::NotFound { .. } => {
                Failure::Permanent(self.changed(offset, "it no longer exists".into()))
            }
            object_store::Error::Generic { .. } => Failure::Transient(io_error(error)),
            other => Failure::Permanent(self.read_error(offset, len, io_error(other))),
        }
    }

    fn changed(&self, offset: u64, what: String) -> Error {
        Error::Changed { path: self.url.clone(), offset, what }
    }

    fn read_error(&self, offset: u64, len: usize, error: io::Error) -> Error {
        Error::read(&self.url, offset, len, error)
    }
}

impl Origin for ObjectOrigin {
    fn path(&self) -> &Path {
        &self.url
    }

    fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8], timeout: Duration) -> Result<usize, Error> {
        let (this, len) = (self.clone(), buffer.len());
        let read = async move {
            let mut bytes = Vec::with_capacity(len);
            let hook = ReadHook::default();
            let mut take = |at: usize, chunk: &[u8]| {
                bytes.truncate(at);
                bytes.extend_from_slice(chunk);
            };
            let done =
                tokio::time::timeout(timeout, this.read(offset, len, &hook, &mut take)).await;
            let timed_out = Error::TimedOut { path: this.url.clone(), offset, len, timeout };
            done.map_err(|_| timed_out).flatten().map(|_| bytes)
        };
        let bytes = block_on(read).map_err(|e| self.read_error(offset, len, e))??;
        buffer[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    fn is_remote(&self) -> bool {
        true
    }
}

/// The failure of an attempt.
enum Failure {
    /// The network or the server failed. A retry may succeed.
    Transient(io::Error),
    /// A retry would fail in the same way.
    Permanent(Error),
}

fn fingerprint(meta: &ObjectMeta) -> Fingerprint {
    // If the server sends no Last-Modified, `object_store` reports the Unix epoch.
    let modified = SystemTime::from(meta.last_modified);
    let modified = (modified > SystemTime::UNIX_EPOCH).then_some(modified);
    Fingerprint::default().with_len(meta.size).with_modified(modified).with_etag(meta.e_tag.clone())
}

fn io_error(error: object_store::Error) -> io::Error {
    use object_store::Error as E;
    let kind = match &error {
        E::NotFound { .. } => io::ErrorKind::NotFound,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        E::InvalidPath { .. } => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    let text = error.to_string();
    match hide_passwords(&text) {
        Cow::Owned(shown) if shown != text => io::Error::new(kind, shown),
        _ => io::Error::new(kind, error),
    }
}

/// Returns the store and the object that a URL names. Environment variables configure the store.
fn store_of(text: &str) -> io::Result<(Arc<dyn ObjectStore>, ObjectPath)> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    let url = Url::parse(text).map_err(|e| invalid(format!("invalid URL: {e}")))?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err(invalid(
            "URLs with a query or fragment, such as signed URLs, are not supported".into(),
        ));
    }
    let configures_store =
        |name: &str| ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|prefix| name.starts_with(prefix));
    let mut options: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| configures_store(name))
        .collect();
    let is_http = |name: &str| options.iter().any(|(n, v)| n == name && v.starts_with("http://"));
    if url.scheme() == "http"
        || is_http("AWS_ENDPOINT_URL")
        || is_http("AWS_ENDPOINT")
        || is_http("AWS_ENDPOINT_URL_S3")
    {
        options.push(("allow_http".into(), "true".into()));
    }
    // Reads have their own timeout. The 30 s that `object_store` allows for one response are too
    // short for a slow network.
    options.push(("timeout".into(), "1 day".into()));
    // This call also installs the TLS provider, which must happen before a client is created.
    runtime()?;
    let (store, object) = object_store::parse_url_opts(&url, options).map_err(io_error)?;
    Ok((Arc::from(store), object))
}

/// Returns the runtime of this process. It is never shut down, so connections can be reused.
fn runtime() -> io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<io::Result<Runtime>> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        // This fails if the program has already installed a TLS provider, which is then used.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).thread_name("ts-io-net").enable_all().build()
    });
    runtime.as_ref().map_err(|e| io::Error::new(e.kind(), e.to_string()))
}

/// Runs a future on the runtime's threads and blocks until it finishes. The calling thread may
/// belong to another runtime.
fn block_on<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> io::Result<T> {
    let (done, wait) = std::sync::mpsc::sync_channel(1);
    runtime()?.spawn(async move {
        let _ = done.send(future.await);
    });
    wait.recv().map_err(|_| io::Error::other("the task of the network request panicked"))
}

/// The provider of `object`, which sends ranged GETs to object storage and web servers.
pub(crate) struct ObjectProvider;

impl BackendProvider for ObjectProvider {
    fn name(&self) -> &'static str {
        "object"
    }

    fn priority(&self) -> u8 {
        40
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        match sources.iter().find(|source| ObjectOrigin::of(source).is_none()) {
            Some(other) => Availability::Unavailable(not_an_object(other)),
            None => Availability::Available,
        }
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        let runtime = runtime().map_err(|e| Error::Thread(e.into()))?;
        let inner = ObjectBackendInner {
            runtime,
            sink,
            in_flight: options.clamped_in_flight(),
            timeout: options.clamped_timeout(),
            hook: options.hook.clone(),
            queue: Mutex::default(),
            idle: Condvar::new(),
        };
        Ok(Box::new(ObjectBackend { inner: Arc::new(inner) }))
    }
}

fn not_an_object(source: &Source) -> String {
    format!("{}: not in object storage or on a web server", source.path().display())
}

struct ObjectBackend {
    inner: Arc<ObjectBackendInner>,
}

/// The state that the backend shares with its tasks.
struct ObjectBackendInner {
    runtime: &'static Runtime,
    sink: CompletionSink,
    in_flight: usize,
    timeout: Duration,
    hook: ReadHook,
    queue: Mutex<Queue>,
    /// Notified when a read ends.
    idle: Condvar,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<ReadRequest>,
    /// The reads in progress, by id. Each has its token and the signal that cancels it.
    active: HashMap<u64, (u64, Arc<Notify>)>,
    next_id: u64,
}

impl Backend for ObjectBackend {
    fn name(&self) -> &'static str {
        ObjectProvider.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { needs_alignment: false, max_in_flight: self.inner.in_flight }
    }

    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>> {
        if let Err(error) = request.check_capacity() {
            return Err(Box::new(Rejected { request, error }));
        }
        if ObjectOrigin::of(&request.source).is_none() {
            let reason = not_an_object(&request.source);
            let error = Error::Unavailable { backend: self.name().into(), reason };
            return Err(Box::new(Rejected { request, error }));
        }
        self.inner.lock().requests.push_back(request);
        ObjectBackendInner::start_reads(&self.inner);
        Ok(())
    }

    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        let mut queue = self.inner.lock();
        let cancelled = take_matching(&mut queue.requests, wanted);
        for (_, cancel) in queue.active.values().filter(|(token, _)| wanted(*token)) {
            cancel.notify_one();
        }
        drop(queue);
        let count = cancelled.len();
        cancelled.into_iter().for_each(|request| (self.inner.sink)(request.cancelled()));
        count
    }
}

impl Drop for ObjectBackend {
    /// Cancels all reads and waits until they have ended.
    fn drop(&mut self) {
        self.cancel(&|_| true);
        let mut queue = self.inner.lock();
        while !queue.active.is_empty() {
            self.inner.idle.wait(&mut queue);
        }
    }
}

/// When dropped, removes a read from the reads in progress and starts queued requests.
struct ActiveGuard {
    inner: Arc<ObjectBackendInner>,
    id: u64,
}

impl Drop for ActiveGuard {
    fn drop(&mut self) {
        self.inner.lock().active.remove(&self.id);
        self.inner.idle.notify_all();
        ObjectBackendInner::start_reads(&self.inner);
    }
}

impl ObjectBackendInner {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Starts as many requests as `in_flight` allows.
    fn start_reads(this: &Arc<Self>) {
        let mut queue = this.lock();
        while queue.active.len() < this.in_flight {
            let Some(request) = queue.requests.pop_front() else { return };
            let (id, cancel) = (queue.next_id, Arc::new(Notify::new()));
            queue.next_id += 1;
            queue.active.insert(id, (request.token, Arc::clone(&cancel)));
            let inner = Arc::clone(this);
            let (token, offset, len) = (request.token, request.offset, request.required);
            let path = request.source.path().to_path_buf();
            let reader = Arc::clone(this);
            // The read runs in a separate task, so that a panic in a library becomes an error of
            // this read.
            let read = this.runtime.spawn(async move { reader.read(request, &cancel).await });
            this.runtime.spawn(async move {
                let guard = ActiveGuard { inner, id };
                let completion = read.await.unwrap_or_else(|panic| {
                    let source = io::Error::other(panic.to_string()).into();
                    let error = Error::Read { path, offset, len, source };
                    Completion { token, buffers: Vec::new(), result: Err(error) }
                });
                (guard.inner.sink)(completion);
            });
        }
    }

    async fn read(&self, mut request: ReadRequest, cancel: &Notify) -> Completion {
        let started_ns = monotonic_ns();
        let source = Arc::clone(&request.source);
        let object = ObjectOrigin::of(&source).expect("`submit` accepts only objects");
        let (offset, len, mut buffers) =
            (request.offset, request.capacity(), std::mem::take(&mut request.buffers));
        let mut take = |at: usize, chunk: &[u8]| copy_to(&mut buffers, at, chunk);
        let read = object.read(offset, len, &self.hook, &mut take);
        let result = tokio::select! {
            read = tokio::time::timeout(self.timeout, read) => match read {
                Ok(result) => result,
                Err(_) => Err(request.timed_out(self.timeout)),
            },
            () = cancel.notified() => Err(Error::Cancelled { path: source.path().into(), offset }),
        };
        request.buffers = buffers;
        let result = result.and_then(|bytes| {
            request.check_delivered(bytes)?;
            Ok(Transfer::new(ReadPath::Network, bytes, started_ns))
        });
        Completion { token: request.token, buffers: request.buffers, result }
    }
}
