// SPDX-License-Identifier: MIT OR Apache-2.0
//! A backend of threads that each perform one blocking read at a time, and a watchdog thread that
//! enforces the timeout.

use std::collections::{HashMap, HashSet, VecDeque};
// parking_lot keeps one list of waiting threads for all locks of a process. In a forked process, it
// has entries of threads that no longer exist, and notifications of new threads get lost. The
// threads of this backend wait most of the time, so they use locks without such a list.
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Error;
use crate::backend::{
    Backend, BackendOptions, Capabilities, Completion, CompletionSink, ReadPath, ReadRequest,
    Rejected, Transfer, monotonic_ns, take_matching,
};

/// The blocking read that the threads of a [`ThreadBackend`] perform.
pub(crate) trait BlockingRead: Send + Sync + 'static {
    /// Returns the name of the backend.
    fn name(&self) -> &'static str;

    /// Returns whether memory must be aligned for direct I/O.
    fn needs_alignment(&self) -> bool;

    /// Fills the request's buffers up to the end of the source. Returns the number of bytes and the
    /// path that they took. Blocks.
    fn read(&self, request: &mut ReadRequest) -> Result<(usize, ReadPath), Error>;
}

pub(crate) struct ThreadBackend<R> {
    workers: Arc<Workers<R>>,
    watchdog: Option<JoinHandle<()>>,
}

/// The state that the backend shares with its threads.
struct Workers<R> {
    reader: R,
    sink: CompletionSink,
    in_flight: usize,
    timeout: Duration,
    state: Mutex<WorkersState>,
    /// Notified when a request is queued or the backend is dropped, to wake a thread.
    work: Condvar,
    /// Notified to wake the watchdog: when a read starts while no other is active, when the backend
    /// is dropped, and when a thread ends after that.
    watch: Condvar,
}

#[derive(Default)]
struct WorkersState {
    requests: VecDeque<ReadRequest>,
    /// The reads in progress that have not timed out, by thread number.
    active: HashMap<u64, ActiveRead>,
    /// The threads to join, by number. Threads whose read has timed out are not joined.
    threads: HashMap<u64, JoinHandle<()>>,
    next_thread: u64,
    /// The numbers of threads that end after their current read, which has timed out.
    replaced: HashSet<u64>,
    closed: bool,
}

struct ActiveRead {
    token: u64,
    /// The error to report at the deadline.
    timed_out: Error,
    deadline: Instant,
}

impl<R: BlockingRead> ThreadBackend<R> {
    pub(crate) fn new(
        reader: R,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Self, Error> {
        let workers = Arc::new(Workers {
            reader,
            sink,
            in_flight: options.clamped_threads(),
            timeout: options.clamped_timeout(),
            state: Mutex::default(),
            work: Condvar::new(),
            watch: Condvar::new(),
        });
        // The backend is created before its threads. If a thread cannot be started, dropping the
        // backend ends the others.
        let mut this = Self { workers, watchdog: None };
        for _ in 0..this.workers.in_flight {
            Workers::start_thread(&this.workers, &mut this.workers.lock())?;
        }
        let workers = Arc::clone(&this.workers);
        this.watchdog = Some(spawn("ts-io-watch".into(), move || Workers::watch(&workers))?);
        Ok(this)
    }
}

impl<R: BlockingRead> Backend for ThreadBackend<R> {
    fn name(&self) -> &'static str {
        self.workers.reader.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            needs_alignment: self.workers.reader.needs_alignment(),
            max_in_flight: self.workers.in_flight,
        }
    }

    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>> {
        let check_alignment = || match self.workers.reader.needs_alignment() {
            true => request.check_alignment(self.name()),
            false => Ok(()),
        };
        if let Err(error) = request.check_capacity().and_then(|()| check_alignment()) {
            return Err(Box::new(Rejected { request, error }));
        }
        self.workers.lock().requests.push_back(request);
        self.workers.work.notify_one();
        Ok(())
    }

    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        let cancelled = take_matching(&mut self.workers.lock().requests, wanted);
        let count = cancelled.len();
        cancelled.into_iter().for_each(|request| (self.workers.sink)(request.cancelled()));
        count
    }
}

impl<R> Drop for ThreadBackend<R> {
    /// Cancels queued requests, and waits until each read in progress has finished or timed out.
    fn drop(&mut self) {
        let cancelled = {
            let mut state = self.workers.lock();
            state.closed = true;
            std::mem::take(&mut state.requests)
        };
        self.workers.work.notify_all();
        self.workers.watch.notify_all();
        cancelled.into_iter().for_each(|request| (self.workers.sink)(request.cancelled()));
        // The watchdog runs until no read is in progress, so no thread is started after this join.
        // Results of joins are ignored: only the sink and a `RemoteSource`, which are code of the
        // caller, can panic in these threads. The panic hook has already reported such a panic.
        let _ = self.watchdog.take().map(JoinHandle::join);
        let threads = std::mem::take(&mut self.workers.lock().threads);
        for thread in threads.into_values() {
            let _ = thread.join();
        }
    }
}

fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    let thread = std::thread::Builder::new().name(name).stack_size(256 << 10);
    thread.spawn(work).map_err(|e| Error::Thread(e.into()))
}

impl<R> Workers<R> {
    fn lock(&self) -> MutexGuard<'_, WorkersState> {
        // No code that can panic leaves the state inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: BlockingRead> Workers<R> {
    fn start_thread(this: &Arc<Self>, state: &mut WorkersState) -> Result<(), Error> {
        let number = state.next_thread;
        state.next_thread += 1;
        let workers = Arc::clone(this);
        let thread = spawn(format!("ts-io-{number}"), move || workers.run(number))?;
        state.threads.insert(number, thread);
        Ok(())
    }

    fn run(&self, number: u64) {
        while let Some(mut request) = self.next_request(number) {
            let started_ns = monotonic_ns();
            let read = self.reader.read(&mut request);
            let result = read.and_then(|(bytes, path)| {
                request.check_delivered(bytes)?;
                Ok(Transfer::new(path, bytes, started_ns))
            });
            let mut state = self.lock();
            if state.active.remove(&number).is_none() {
                // The watchdog has reported this read as timed out. Dropping the request returns
                // its buffers to their pool.
                if state.replaced.remove(&number) {
                    return;
                }
                continue;
            }
            drop(state);
            (self.sink)(Completion { token: request.token, buffers: request.buffers, result });
        }
    }

    /// Waits for the next request. Returns `None` when the backend is being dropped.
    fn next_request(&self, number: u64) -> Option<ReadRequest> {
        let mut state = self.lock();
        loop {
            if let Some(request) = state.requests.pop_front() {
                let (token, timed_out) = (request.token, request.timed_out(self.timeout));
                let deadline = Instant::now() + self.timeout;
                if state.active.is_empty() {
                    self.watch.notify_all();
                }
                state.active.insert(number, ActiveRead { token, timed_out, deadline });
                return Some(request);
            }
            if state.closed {
                self.watch.notify_all();
                return None;
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reports reads that exceed the timeout and replaces their threads.
    fn watch(this: &Arc<Self>) {
        let mut state = this.lock();
        while !(state.closed && state.active.is_empty()) {
            let now = Instant::now();
            let late: Vec<u64> = state
                .active
                .iter()
                .filter(|(_, a)| a.deadline <= now)
                .map(|(&number, _)| number)
                .collect();
            let mut completions = Vec::new();
            for number in late {
                let ActiveRead { token, timed_out, .. } =
                    state.active.remove(&number).expect("`late` contains only keys of `active`");
                completions.push(Completion { token, buffers: Vec::new(), result: Err(timed_out) });
                state.threads.remove(&number);
                // If no replacement can be started, the thread continues after its read.
                if state.closed || Self::start_thread(this, &mut state).is_ok() {
                    state.replaced.insert(number);
                }
            }
            if !completions.is_empty() {
                drop(state);
                completions.into_iter().for_each(|completion| (this.sink)(completion));
                state = this.lock();
                continue;
            }
            let next = state.active.values().map(|active| active.deadline).min();
            state = match next {
                None => this.watch.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let waited = this.watch.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
