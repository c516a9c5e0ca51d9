// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backend `uring`: direct I/O through io_uring. One thread submits all reads to the kernel and
//! receives their results.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use ts_pool::HostPool;

use crate::backend::{
    Backend, BackendOptions, Capabilities, Completion, CompletionSink, ReadPath, ReadRequest,
    Rejected, Transfer, monotonic_ns, take_matching,
};
use crate::file::{Access, DirectFile, FileOrigin};
use crate::file_backends::FileProvider;
use crate::hook::{Interception, ReadHook};
use crate::progress::{Progress, Step};
use crate::provider::{Availability, BackendProvider};
use crate::sys::{Gate, Op, Ring};
use crate::{Error, Source, sys};

/// After the kernel has rejected all calls for this long, the ring is not used again.
const REJECTION_LIMIT: Duration = Duration::from_millis(300);

/// The provider of `uring`, which reads with direct I/O through io_uring.
pub(crate) struct UringProvider;

impl BackendProvider for UringProvider {
    fn name(&self) -> &'static str {
        "uring"
    }

    fn priority(&self) -> u8 {
        60
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        if let Err(error) = sys::probe_ring() {
            return Availability::Unavailable(format!("cannot set up io_uring: {error}"));
        }
        match sources.iter().find(|s| s.direct_alignment().is_ok() && !suits_rings(s)) {
            Some(source) => Availability::Unavailable(unsuited(source)),
            None => FileProvider(Access::Direct).probe(sources),
        }
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        Ok(Box::new(UringBackend::new(options, sink)?))
    }
}

/// Returns whether `source` is on a file system whose reads never block the thread that submits
/// them.
pub(crate) fn suits_rings(source: &Source) -> bool {
    direct_file(source).is_some_and(|direct| direct.suits_rings)
}

fn direct_file(source: &Source) -> Option<&DirectFile> {
    FileOrigin::of(source)?.direct().ok()
}

fn unsuited(source: &Source) -> String {
    format!(
        "{}: reads on its file system can block the io_uring thread; use the backend \"direct\"",
        source.path().display()
    )
}

struct UringBackend {
    inner: Arc<UringInner>,
    in_flight: usize,
    thread: Option<JoinHandle<()>>,
}

/// The state that the backend shares with its thread.
struct UringInner {
    sink: CompletionSink,
    /// Opened to wake the thread, which then processes the inbox.
    wake: Arc<Gate>,
    inbox: Mutex<Inbox>,
    /// Notified when the inbox's `exit` is set.
    exited: Condvar,
}

/// The work for the ring's thread, and the state of the thread.
#[derive(Default)]
struct Inbox {
    requests: VecDeque<ReadRequest>,
    /// The reads in the ring, as (id, token). Ids are not reused.
    started: Vec<(u64, u64)>,
    next_id: u64,
    /// The ids of reads to abort.
    cancelled: Vec<u64>,
    /// Pools to register.
    pools: Vec<HostPool>,
    closed: bool,
    exit: Option<Exit>,
}

/// The state of the ring's thread when the backend is closed and all reads have been reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exit {
    /// No read is in flight, and the thread ends.
    Idle,
    /// Reads that have timed out are still in flight. The thread runs detached until they end.
    Stuck,
}

/// A read in the ring.
struct RingRead {
    id: u64,
    /// The request without its buffers, which are in the ring.
    request: ReadRequest,
    progress: Progress,
    alignment: usize,
    started_ns: u64,
    deadline: Instant,
    /// The limit for the result of the next operation, in bytes, if the hook truncates it.
    truncate: Option<usize>,
    /// Whether the operation in flight is only a wait that the hook requested.
    delayed: bool,
    /// The gate for which the operation in flight waits, if the hook requested this.
    blocked: Option<Arc<Gate>>,
    cancelled: bool,
    /// Whether the read has been reported as timed out.
    timed_out: bool,
}

impl UringBackend {
    fn new(options: &BackendOptions, sink: CompletionSink) -> Result<Self, Error> {
        let in_flight = options.clamped_in_flight();
        let wake = Arc::new(Gate::new().map_err(|e| Error::Thread(e.into()))?);
        let inner =
            Arc::new(UringInner { sink, wake, inbox: Mutex::default(), exited: Condvar::new() });
        let (shared, timeout) = (Arc::clone(&inner), options.clamped_timeout());
        let hook = options.hook.clone();
        let (ready, created) = channel();
        let thread = std::thread::Builder::new().name("ts-io-ring".into()).stack_size(256 << 10);
        let thread = thread.spawn(move || {
            // With IORING_SETUP_SINGLE_ISSUER, only the thread that created the ring may use it.
            match Ring::new(in_flight, Arc::clone(&shared.wake)) {
                Ok(ring) => {
                    let _ = ready.send(Ok(()));
                    let _exit = ExitGuard(Arc::clone(&shared));
                    Driver { ring, inner: shared, in_flight, live: 0, timeout, hook }.run();
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        });
        let thread = Some(thread.map_err(|e| Error::Thread(e.into()))?);
        match created.recv() {
            Ok(Ok(())) => Ok(Self { inner, in_flight, thread }),
            Ok(Err(error)) => Err(Error::Unavailable {
                backend: "uring".into(),
                reason: format!("cannot set up io_uring: {error}"),
            }),
            Err(_) => {
                Err(Error::Thread(io::Error::other("the thread ended during its start").into()))
            }
        }
    }
}

/// Reports the exit of the thread even if the thread panics. Otherwise, dropping the backend would
/// wait forever.
struct ExitGuard(Arc<UringInner>);

impl Drop for ExitGuard {
    fn drop(&mut self) {
        let mut inbox = self.0.lock();
        inbox.exit = inbox.exit.or(Some(Exit::Idle));
        drop(inbox);
        self.0.exited.notify_all();
    }
}

impl UringInner {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock()
    }
}

impl Backend for UringBackend {
    fn name(&self) -> &'static str {
        UringProvider.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { needs_alignment: true, max_in_flight: self.in_flight }
    }

    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>> {
        let check_file_system = || match suits_rings(&request.source) {
            true => Ok(()),
            false => Err(Error::Unavailable {
                backend: self.name().into(),
                reason: unsuited(&request.source),
            }),
        };
        let checked = request
            .check_capacity()
            .and_then(|()| request.check_alignment(self.name()))
            .and_then(|()| check_file_system());
        if let Err(error) = checked {
            return Err(Box::new(Rejected { request, error }));
        }
        self.inner.lock().requests.push_back(request);
        self.inner.wake.open();
        Ok(())
    }

    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        let mut inbox = self.inner.lock();
        let cancelled = take_matching(&mut inbox.requests, wanted);
        let started: Vec<_> =
            inbox.started.iter().filter(|(_, token)| wanted(*token)).map(|read| read.0).collect();
        inbox.cancelled.extend(started);
        drop(inbox);
        self.inner.wake.open();
        let count = cancelled.len();
        cancelled.into_iter().for_each(|request| (self.inner.sink)(request.cancelled()));
        count
    }

    fn register(&self, pool: &HostPool) {
        self.inner.lock().pools.push(pool.clone());
        self.inner.wake.open();
    }
}

impl Drop for UringBackend {
    /// Cancels queued requests, and waits until each read in flight has finished or timed out.
    fn drop(&mut self) {
        let cancelled = {
            let mut inbox = self.inner.lock();
            inbox.closed = true;
            std::mem::take(&mut inbox.requests)
        };
        self.inner.wake.open();
        cancelled.into_iter().for_each(|request| (self.inner.sink)(request.cancelled()));
        let mut inbox = self.inner.lock();
        let exit = loop {
            if let Some(exit) = inbox.exit {
                break exit;
            }
            self.inner.exited.wait(&mut inbox);
        };
        drop(inbox);
        if exit == Exit::Idle {
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }
}

/// The state of the ring's thread.
struct Driver {
    ring: Ring<RingRead>,
    inner: Arc<UringInner>,
    /// The maximum value of `live`.
    in_flight: usize,
    /// The number of reads in the ring whose completions have not been sent.
    live: usize,
    timeout: Duration,
    hook: ReadHook,
}

impl Driver {
    fn run(mut self) {
        let mut rejected_since: Option<Instant> = None;
        loop {
            self.process_inbox();
            let now = Instant::now();
            let next = self
                .ring
                .iter()
                .filter(|(_, read)| !read.timed_out)
                .map(|(_, read)| read.deadline)
                .min();
            let live = self.live;
            if live == 0 {
                self.ring.forget_files();
            }
            let mut inbox = self.inner.lock();
            if inbox.closed && inbox.requests.is_empty() && live == 0 {
                let exit = if self.ring.len() == 0 { Exit::Idle } else { Exit::Stuck };
                inbox.exit = inbox.exit.or(Some(exit));
                drop(inbox);
                self.inner.exited.notify_all();
                if exit == Exit::Idle {
                    return;
                }
            } else {
                drop(inbox);
            }
            match self
                .ring
                .wait(next.map(|deadline: Instant| deadline.saturating_duration_since(now)))
            {
                Ok(answers) => {
                    rejected_since = None;
                    answers.into_iter().for_each(|(key, answer)| self.on_answer(key, answer));
                }
                // The kernel rejected the call, perhaps because memory is short. The loop retries.
                // Meanwhile, reads still time out at their deadlines.
                Err(error) => {
                    let since = *rejected_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= REJECTION_LIMIT {
                        return self.run_without_ring(&error);
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            self.expire();
        }
    }

    /// Completes all reads, and those that follow, with [`Error::Unavailable`], because calls of
    /// io_uring keep failing with `error`. A read that the kernel has taken is completed when its
    /// result is there, or at its deadline.
    fn run_without_ring(mut self, error: &io::Error) {
        let unavailable = || Error::Unavailable {
            backend: "uring".into(),
            reason: format!("calls of io_uring keep failing: {error}"),
        };
        let mut ended = self.ring.give_up();
        loop {
            for key in std::mem::take(&mut ended) {
                self.finish(key, Err(unavailable()));
            }
            self.expire();
            let mut inbox = self.inner.lock();
            let requests = std::mem::take(&mut inbox.requests);
            (inbox.pools, inbox.cancelled) = Default::default();
            let closed = inbox.closed;
            drop(inbox);
            requests.into_iter().for_each(|r| (self.inner.sink)(r.failed(unavailable())));
            if closed && self.live == 0 {
                // `ExitGuard` reports the exit.
                return;
            }
            match (self.live, self.ring.len()) {
                (0, 0) => self.inner.wake.wait(),
                (0, _) => self.inner.wake.wait_for(Duration::from_secs(1)),
                _ => self.inner.wake.wait_for(Duration::from_millis(10)),
            }
            self.inner.wake.close();
            ended = self.ring.ended();
        }
    }

    /// Registers memory, aborts cancelled reads, and starts as many requests as `in_flight` allows.
    fn process_inbox(&mut self) {
        let mut inbox = self.inner.lock();
        let (pools, cancelled) =
            (std::mem::take(&mut inbox.pools), std::mem::take(&mut inbox.cancelled));
        drop(inbox);
        for pool in pools {
            self.ring.register(&pool);
        }
        for id in cancelled {
            let found = self.ring.iter().find(|(_, read)| read.id == id);
            if let Some((key, read)) = found {
                read.cancelled = true;
                self.abort(key);
            }
        }
        while self.live < self.in_flight {
            let mut inbox = self.inner.lock();
            let Some(mut request) = inbox.requests.pop_front() else { return };
            let id = inbox.next_id;
            inbox.next_id += 1;
            inbox.started.push((id, request.token));
            drop(inbox);
            let (len, buffers) = (request.capacity(), std::mem::take(&mut request.buffers));
            let direct = direct_file(&request.source)
                .expect("`submit` has checked that the file supports direct I/O");
            let (file, alignment) = (Arc::clone(&direct.file), direct.alignment);
            let read = RingRead {
                id,
                progress: Progress::new(request.offset, len, request.source.len(), alignment),
                request,
                alignment,
                started_ns: monotonic_ns(),
                deadline: Instant::now() + self.timeout,
                truncate: None,
                delayed: false,
                blocked: None,
                cancelled: false,
                timed_out: false,
            };
            let key = self.ring.insert(read, file, buffers);
            self.live += 1;
            self.advance(key);
        }
    }

    /// Asks the kernel to abort a read. Does nothing while the hook blocks the read, to simulate a
    /// device that does not respond to an abort either.
    fn abort(&mut self, key: usize) {
        if self.ring.data(key).blocked.is_none() {
            self.ring.cancel(key);
        }
    }

    /// Starts the next operation of a read, or finishes the read.
    fn advance(&mut self, key: usize) {
        loop {
            let read = self.ring.data(key);
            read.blocked = None;
            let step = match read.progress.step() {
                Some(_) if read.cancelled => return self.finish(key, Ok(0)),
                Some(step) => step,
                None => {
                    let bytes = read.progress.done();
                    return self.finish(key, Ok(bytes));
                }
            };
            let (offset, len) = match step {
                Step::InPlace { offset, len, .. } => (offset, len),
                Step::Bounce { offset, .. } => (offset, read.alignment),
            };
            // After a delay, the hook has already decided about this operation.
            let interception = match std::mem::take(&mut read.delayed) {
                true => None,
                false => self.hook.intercept(read.request.source.path(), offset, len),
            };
            match interception {
                None => {}
                Some(Interception::Truncate(limit)) => read.truncate = Some(limit),
                Some(Interception::Fail(error)) => {
                    if self.apply_answer(key, Err(error)) {
                        continue;
                    }
                    return;
                }
                Some(Interception::Delay(time)) => {
                    read.delayed = true;
                    return self.ring.start(key, &Op::Delay(time));
                }
                Some(Interception::Block(gate)) => {
                    (read.delayed, read.blocked) = (true, Some(Arc::clone(&gate)));
                    return self.ring.start(key, &Op::Gate(&gate));
                }
            }
            return match step {
                Step::InPlace { at, .. } => self.ring.start(key, &Op::Read { offset, at, len }),
                Step::Bounce { .. } => self.ring.start(key, &Op::ReadBlock { offset, len }),
            };
        }
    }

    fn on_answer(&mut self, key: usize, answer: io::Result<usize>) {
        let read = self.ring.data(key);
        if read.timed_out || (read.cancelled && answer.is_err()) {
            return self.finish(key, Ok(0));
        }
        if read.delayed || self.apply_answer(key, answer) {
            self.advance(key);
        }
    }

    /// Records the result of a read's current step. Returns whether the read continues. If it does
    /// not, this method has finished it.
    fn apply_answer(&mut self, key: usize, answer: io::Result<usize>) -> bool {
        let read = self.ring.data(key);
        let step = read.progress.step().expect("an unfinished read has a current step");
        let offset = read.request.offset + read.progress.done() as u64;
        let limit = read.truncate.take().unwrap_or(usize::MAX);
        match read.progress.advance(answer.map(|bytes| bytes.min(limit))) {
            Ok(wanted) => {
                if let Step::Bounce { skip, at, .. } = step
                    && wanted > 0
                {
                    self.ring.copy_from_block(key, skip, at, wanted);
                }
                true
            }
            Err(error) => {
                let error = read.request.source.read_error(offset, read.request.required, error);
                self.finish(key, Err(error));
                false
            }
        }
    }

    /// Removes a read from the ring. Reports the read, unless it has been reported as timed out.
    fn finish(&mut self, key: usize, result: Result<usize, Error>) {
        let (read, buffers) = self.ring.remove(key);
        let RingRead { id, mut request, started_ns, timed_out, cancelled, .. } = read;
        self.inner.lock().started.retain(|(started, _)| *started != id);
        if timed_out {
            return;
        }
        self.live -= 1;
        request.buffers = buffers;
        // A cancelled read that succeeded anyway is reported as a success.
        let result = result.and_then(|bytes| {
            request.check_delivered(bytes)?;
            Ok(Transfer::new(ReadPath::Direct, bytes, started_ns))
        });
        (self.inner.sink)(match result {
            Err(_) if cancelled => request.cancelled(),
            result => Completion { token: request.token, buffers: request.buffers, result },
        });
    }

    /// Reports reads that exceed the timeout, and asks the kernel to abort them.
    fn expire(&mut self) {
        let (now, timeout) = (Instant::now(), self.timeout);
        let mut late = Vec::new();
        for (key, read) in self.ring.iter().filter(|(_, r)| !r.timed_out && r.deadline <= now) {
            read.timed_out = true;
            self.live -= 1;
            let error = read.request.timed_out(timeout);
            let completion =
                Completion { token: read.request.token, buffers: Vec::new(), result: Err(error) };
            late.push((key, completion));
        }
        for (key, completion) in late {
            (self.inner.sink)(completion);
            self.abort(key);
        }
    }
}
