// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that each do one blocking read at a time, and one that watches how long they take.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Error;
use crate::backend::{
    Backend, BackendOptions, Capabilities, Completion, CompletionSink, ReadPath, ReadRequest,
    Rejected, Transfer, monotonic_ns,
};
use parking_lot::{Condvar, Mutex, MutexGuard};

/// How a read is done by a thread that may block.
pub(crate) trait BlockingRead: Send + Sync + 'static {
    fn name(&self) -> &'static str;

    /// Whether memory must be aligned for direct I/O.
    fn needs_alignment(&self) -> bool;

    /// Fills the request's buffers as far as the file goes; returns how many bytes came, and how.
    fn read(&self, request: &mut ReadRequest) -> Result<(usize, ReadPath), Error>;
}

pub(crate) struct ThreadBackend<R> {
    shared: Arc<Shared<R>>,
    watch: Option<JoinHandle<()>>,
}

struct Shared<R> {
    reader: R,
    sink: CompletionSink,
    in_flight: usize,
    timeout: Duration,
    queue: Mutex<Queue>,
    work: Condvar,
    /// The watch's own: a read has begun that it does not know, or the last one has ended.
    begun: Condvar,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<ReadRequest>,
    /// Reads under way, by their thread's number.
    active: HashMap<u64, Active>,
    /// The threads, by their number, but for those that are stuck: nobody waits for them any more.
    threads: HashMap<u64, JoinHandle<()>>,
    next_thread: u64,
    /// Threads whose read has timed out and in whose place there is another.
    replaced: HashSet<u64>,
    closed: bool,
}

struct Active {
    token: u64,
    timed_out: Error,
    deadline: Instant,
}

impl<R: BlockingRead> ThreadBackend<R> {
    pub(crate) fn new(
        reader: R,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Self, Error> {
        let shared = Arc::new(Shared {
            reader,
            sink,
            in_flight: options.depth(),
            timeout: options.deadline(),
            queue: Mutex::default(),
            work: Condvar::new(),
            begun: Condvar::new(),
        });
        // Built first and filled after, so that a thread that cannot start still ends the others.
        let mut this = Self { shared, watch: None };
        for _ in 0..this.shared.in_flight {
            Shared::start_thread(&this.shared, &mut this.shared.lock())?;
        }
        let shared = Arc::clone(&this.shared);
        this.watch = Some(spawn("ts-io-watch".into(), move || Shared::watch(&shared))?);
        Ok(this)
    }
}

impl<R: BlockingRead> Backend for ThreadBackend<R> {
    fn name(&self) -> &'static str {
        self.shared.reader.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            needs_alignment: self.shared.reader.needs_alignment(),
            max_in_flight: self.shared.in_flight,
        }
    }

    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>> {
        let aligned = || match self.shared.reader.needs_alignment() {
            true => request.check_alignment(self.name()),
            false => Ok(()),
        };
        if let Err(error) = request.check_room().and_then(|()| aligned()) {
            return Err(Box::new(Rejected { request, error }));
        }
        self.shared.lock().requests.push_back(request);
        self.shared.work.notify_one();
        Ok(())
    }

    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        let cancelled = take_wanted(&mut self.shared.lock().requests, wanted);
        let count = cancelled.len();
        cancelled.into_iter().for_each(|request| (self.shared.sink)(request.cancelled()));
        count
    }
}

impl<R> Drop for ThreadBackend<R> {
    /// Waits for reads under way to end or time out.
    fn drop(&mut self) {
        let cancelled = {
            let mut queue = self.shared.lock();
            queue.closed = true;
            std::mem::take(&mut queue.requests)
        };
        self.shared.work.notify_all();
        self.shared.begun.notify_all();
        cancelled.into_iter().for_each(|request| (self.shared.sink)(request.cancelled()));
        // It stays until no read is under way, and so no thread is started after it. A thread runs
        // no code that panics but the sink's, whose panic is its owner's to report.
        let _ = self.watch.take().map(JoinHandle::join);
        let threads = std::mem::take(&mut self.shared.lock().threads);
        for thread in threads.into_values() {
            let _ = thread.join();
        }
    }
}

/// Takes the requests whose token is wanted out of a queue.
pub(crate) fn take_wanted(
    requests: &mut VecDeque<ReadRequest>,
    wanted: &dyn Fn(u64) -> bool,
) -> VecDeque<ReadRequest> {
    let (taken, left) =
        std::mem::take(requests).into_iter().partition(|request| wanted(request.token));
    *requests = left;
    taken
}

fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    let thread = std::thread::Builder::new().name(name).stack_size(256 << 10);
    thread.spawn(work).map_err(|e| Error::Thread(e.into()))
}

impl<R> Shared<R> {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }
}

impl<R: BlockingRead> Shared<R> {
    fn start_thread(this: &Arc<Self>, queue: &mut Queue) -> Result<(), Error> {
        let number = queue.next_thread;
        queue.next_thread += 1;
        let shared = Arc::clone(this);
        let thread = spawn(format!("ts-io-{number}"), move || shared.run(number))?;
        queue.threads.insert(number, thread);
        Ok(())
    }

    fn run(&self, number: u64) {
        while let Some(mut request) = self.take(number) {
            let started_ns = monotonic_ns();
            let read = self.reader.read(&mut request);
            let result = read.and_then(|(bytes, path)| {
                request.judged(bytes)?;
                Ok(Transfer::by(path, bytes, started_ns))
            });
            let mut queue = self.lock();
            if queue.active.remove(&number).is_none() {
                // Too late: it has been reported. The buffers go home, and so does this thread, if
                // there is another in its place.
                if queue.replaced.remove(&number) {
                    return;
                }
                continue;
            }
            drop(queue);
            (self.sink)(Completion { token: request.token, buffers: request.buffers, result });
        }
    }

    /// The next request; waits for one, `None` when the backend is being dropped.
    fn take(&self, number: u64) -> Option<ReadRequest> {
        let mut queue = self.lock();
        loop {
            if let Some(request) = queue.requests.pop_front() {
                let (token, timed_out) = (request.token, request.timed_out(self.timeout));
                let deadline = Instant::now() + self.timeout;
                if queue.active.is_empty() {
                    self.begun.notify_all();
                }
                queue.active.insert(number, Active { token, timed_out, deadline });
                return Some(request);
            }
            if queue.closed {
                self.begun.notify_all();
                return None;
            }
            self.work.wait(&mut queue);
        }
    }

    /// Reports reads that take too long, and puts other threads in the place of theirs.
    fn watch(this: &Arc<Self>) {
        let mut queue = this.lock();
        while !(queue.closed && queue.active.is_empty()) {
            let now = Instant::now();
            let late: Vec<u64> = queue
                .active
                .iter()
                .filter(|(_, a)| a.deadline <= now)
                .map(|(&number, _)| number)
                .collect();
            let mut completions = Vec::new();
            for number in late {
                let Active { token, timed_out, .. } =
                    queue.active.remove(&number).expect("just seen");
                completions.push(Completion { token, buffers: Vec::new(), result: Err(timed_out) });
                queue.threads.remove(&number);
                // Without another thread the others go on, and in the end this one.
                if queue.closed || Self::start_thread(this, &mut queue).is_ok() {
                    queue.replaced.insert(number);
                }
            }
            if !completions.is_empty() {
                drop(queue);
                completions.into_iter().for_each(|completion| (this.sink)(completion));
                queue = this.lock();
                continue;
            }
            let next = queue.active.values().map(|active| active.deadline).min();
            match next {
                None => this.begun.wait(&mut queue),
                Some(deadline) => {
                    this.begun.wait_until(&mut queue, deadline);
                }
            }
        }
    }
}
