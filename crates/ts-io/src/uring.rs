// SPDX-License-Identifier: MIT OR Apache-2.0
//! `uring`: O_DIRECT by io_uring. One thread gives the system all reads and takes their answers.

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
    Rejected, Transfer, monotonic_ns,
};
use crate::fault::{Fault, Faults};
use crate::file::Access;
use crate::progress::{Progress, Step};
use crate::provider::{Availability, BackendProvider};
use crate::sys::{Gate, Op, Ring};
use crate::threads::take_wanted;
use crate::{Error, Source, sys};

/// `uring`: O_DIRECT by io_uring.
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
            return Availability::Unavailable(format!(
                "the system has no io_uring for us: {error}"
            ));
        }
        match sources.iter().find(|s| s.direct_alignment().is_ok() && !s.suits_rings()) {
            Some(source) => Availability::Unavailable(unsuited(source)),
            None => Access::Direct.probe(sources),
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

fn unsuited(source: &Source) -> String {
    format!(
        "{}: its file system can hold up a ring; `direct` reads it with threads",
        source.path().display()
    )
}

struct UringBackend {
    shared: Arc<Shared>,
    in_flight: usize,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    sink: CompletionSink,
    wake: Arc<Gate>,
    inbox: Mutex<Inbox>,
    /// The inbox's `end` has been set.
    ended: Condvar,
}

/// What the ring's thread is to do next.
#[derive(Default)]
struct Inbox {
    requests: VecDeque<ReadRequest>,
    /// Reads that the ring has, as (ticket, token). A ticket is given once.
    begun: Vec<(u64, u64)>,
    next_ticket: u64,
    /// Tickets of reads to be given up.
    cancelled: Vec<u64>,
    memory: Vec<HostPool>,
    closed: bool,
    end: Option<End>,
}

/// How the ring's thread left off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// With nothing in flight.
    Idle,
    /// With reads that have timed out and that the system still has. It waits for them by itself.
    Stuck,
}

/// A read in the ring.
struct Flight {
    ticket: u64,
    /// Its buffers are in the ring.
    request: ReadRequest,
    progress: Progress,
    alignment: usize,
    started_ns: u64,
    deadline: Instant,
    /// No more of what comes next is let through: a fault.
    limit: Option<usize>,
    /// What is in flight is only a fault's delay.
    delayed: bool,
    /// And has no end: a fault.
    stuck: bool,
    cancelled: bool,
    /// Has been reported as timed out.
    late: bool,
}

impl UringBackend {
    fn new(options: &BackendOptions, sink: CompletionSink) -> Result<Self, Error> {
        let in_flight = options.depth();
        let wake = Arc::new(Gate::new().map_err(|e| Error::Thread(e.into()))?);
        let shared =
            Arc::new(Shared { sink, wake, inbox: Mutex::default(), ended: Condvar::new() });
        let (of_thread, timeout) = (Arc::clone(&shared), options.deadline());
        let faults = options.faults.clone();
        let (ready, made) = channel();
        let thread = std::thread::Builder::new().name("ts-io-ring".into()).stack_size(256 << 10);
        let thread = thread.spawn(move || {
            // The system wants a ring to be used by the thread that made it.
            match Ring::new(in_flight, Arc::clone(&of_thread.wake)) {
                Ok(ring) => {
                    let _ = ready.send(Ok(()));
                    let _end = EndGuard(Arc::clone(&of_thread));
                    Driver { ring, shared: of_thread, in_flight, live: 0, timeout, faults }.run();
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        });
        let thread = Some(thread.map_err(|e| Error::Thread(e.into()))?);
        match made.recv() {
            Ok(Ok(())) => Ok(Self { shared, in_flight, thread }),
            Ok(Err(error)) => {
                Err(Error::Unavailable { backend: "uring".into(), reason: error.to_string() })
            }
            Err(_) => Err(Error::Thread(io::Error::other("it ended at once").into())),
        }
    }
}

/// Lets nobody wait for a thread that has ended, however it did.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        let mut inbox = self.0.lock();
        inbox.end = inbox.end.or(Some(End::Idle));
        drop(inbox);
        self.0.ended.notify_all();
    }
}

impl Shared {
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
        let suits = || match request.source.suits_rings() {
            true => Ok(()),
            false => Err(Error::Unavailable {
                backend: self.name().into(),
                reason: unsuited(&request.source),
            }),
        };
        let checked = request
            .check_room()
            .and_then(|()| request.check_alignment(self.name()))
            .and_then(|()| suits());
        if let Err(error) = checked {
            return Err(Box::new(Rejected { request, error }));
        }
        self.shared.lock().requests.push_back(request);
        self.shared.wake.open();
        Ok(())
    }

    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        let mut inbox = self.shared.lock();
        let cancelled = take_wanted(&mut inbox.requests, wanted);
        let begun: Vec<_> =
            inbox.begun.iter().filter(|(_, token)| wanted(*token)).map(|b| b.0).collect();
        inbox.cancelled.extend(begun);
        drop(inbox);
        self.shared.wake.open();
        let count = cancelled.len();
        cancelled.into_iter().for_each(|request| (self.shared.sink)(request.cancelled()));
        count
    }

    fn register(&self, pool: &HostPool) {
        self.shared.lock().memory.push(pool.clone());
        self.shared.wake.open();
    }
}

impl Drop for UringBackend {
    /// Waits for reads under way to end or time out.
    fn drop(&mut self) {
        let cancelled = {
            let mut inbox = self.shared.lock();
            inbox.closed = true;
            std::mem::take(&mut inbox.requests)
        };
        self.shared.wake.open();
        cancelled.into_iter().for_each(|request| (self.shared.sink)(request.cancelled()));
        let mut inbox = self.shared.lock();
        let end = loop {
            if let Some(end) = inbox.end {
                break end;
            }
            self.shared.ended.wait(&mut inbox);
        };
        drop(inbox);
        if end == End::Idle {
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }
}

/// The ring's thread.
struct Driver {
    ring: Ring<Flight>,
    shared: Arc<Shared>,
    /// Reads at once.
    in_flight: usize,
    /// Reads that have not been reported.
    live: usize,
    timeout: Duration,
    faults: Faults,
}

impl Driver {
    fn run(mut self) {
        loop {
            self.take_orders();
            let now = Instant::now();
            let next = self
                .ring
                .iter()
                .filter(|(_, flight)| !flight.late)
                .map(|(_, flight)| flight.deadline)
                .min();
            let live = self.live;
            if live == 0 {
                self.ring.forget_files();
            }
            let mut inbox = self.shared.lock();
            if inbox.closed && inbox.requests.is_empty() && live == 0 {
                let end = if self.ring.len() == 0 { End::Idle } else { End::Stuck };
                inbox.end = inbox.end.or(Some(end));
                drop(inbox);
                self.shared.ended.notify_all();
                if end == End::Idle {
                    return;
                }
            } else {
                drop(inbox);
            }
            match self
                .ring
                .wait(next.map(|deadline: Instant| deadline.saturating_duration_since(now)))
            {
                Ok(ended) => {
                    ended.into_iter().for_each(|(key, answer)| self.on_answer(key, answer));
                }
                // The system refuses, perhaps for want of memory. Each read's deadline ends this if
                // nothing else does.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
            self.expire();
        }
    }

    /// Begins what there is room for, and gives up what is no longer wanted.
    fn take_orders(&mut self) {
        let mut inbox = self.shared.lock();
        let (memory, cancelled) =
            (std::mem::take(&mut inbox.memory), std::mem::take(&mut inbox.cancelled));
        drop(inbox);
        for pool in memory {
            self.ring.register(&pool);
        }
        for ticket in cancelled {
            let found = self.ring.iter().find(|(_, flight)| flight.ticket == ticket);
            if let Some((key, flight)) = found {
                flight.cancelled = true;
                self.give_up(key);
            }
        }
        // Reads that are stuck do not count: others go on in the places beside them.
        while self.live < self.in_flight {
            let mut inbox = self.shared.lock();
            let Some(mut request) = inbox.requests.pop_front() else { return };
            let ticket = inbox.next_ticket;
            inbox.next_ticket += 1;
            inbox.begun.push((ticket, request.token));
            drop(inbox);
            let source = Arc::clone(&request.source);
            let (len, buffers) = (request.room(), std::mem::take(&mut request.buffers));
            let alignment = source.direct_alignment().expect("it was checked when it came");
            let flight = Flight {
                ticket,
                progress: Progress::new(request.offset, len, source.len(), alignment),
                request,
                alignment,
                started_ns: monotonic_ns(),
                deadline: Instant::now() + self.timeout,
                limit: None,
                delayed: false,
                stuck: false,
                cancelled: false,
                late: false,
            };
            let key = self.ring.insert(flight, source, buffers);
            self.live += 1;
            self.go_on(key);
        }
    }

    /// Asks the system to give a read up. What a fault has stuck is stuck for good, as with a
    /// device that is gone.
    fn give_up(&mut self, key: usize) {
        if !self.ring.data(key).stuck {
            self.ring.cancel(key);
        }
    }

    /// Starts the next operation of a read, or ends it.
    fn go_on(&mut self, key: usize) {
        loop {
            let flight = self.ring.data(key);
            flight.stuck = false;
            let step = match flight.progress.step() {
                Some(_) if flight.cancelled => return self.end(key, Ok(0)),
                Some(step) => step,
                None => {
                    let bytes = flight.progress.done();
                    return self.end(key, Ok(bytes));
                }
            };
            let (offset, len) = match step {
                Step::Into { offset, len, .. } => (offset, len),
                Step::Aside { offset, .. } => (offset, flight.alignment),
            };
            // A delayed operation has had its fault.
            let fault = match std::mem::take(&mut flight.delayed) {
                true => None,
                false => self.faults.decide(flight.request.source.path(), offset, len),
            };
            match fault {
                None => {}
                Some(Fault::Short(limit)) => flight.limit = Some(limit.max(1)),
                Some(Fault::Errno(number)) => {
                    if self.note(key, Err(io::Error::from_raw_os_error(number))) {
                        continue;
                    }
                    return;
                }
                Some(Fault::Delay(time)) => {
                    flight.delayed = true;
                    return self.ring.start(key, &Op::Delay(time));
                }
                Some(Fault::Stuck) => {
                    (flight.delayed, flight.stuck) = (true, true);
                    let gate = self.faults.gate().expect("there are faults");
                    return self.ring.start(key, &Op::Gate(gate));
                }
            }
            return match step {
                Step::Into { at, .. } => self.ring.start(key, &Op::Into { offset, at, len }),
                Step::Aside { .. } => self.ring.start(key, &Op::Aside { offset, len }),
            };
        }
    }

    fn on_answer(&mut self, key: usize, answer: io::Result<usize>) {
        let flight = self.ring.data(key);
        if flight.late || (flight.cancelled && answer.is_err()) {
            return self.end(key, Ok(0));
        }
        if flight.delayed || self.note(key, answer) {
            self.go_on(key);
        }
    }

    /// Takes an answer to a read's step. Returns whether it goes on.
    fn note(&mut self, key: usize, answer: io::Result<usize>) -> bool {
        let flight = self.ring.data(key);
        let step = flight.progress.step().expect("it was under way");
        let offset = flight.request.offset + flight.progress.done() as u64;
        let limit = flight.limit.take().unwrap_or(usize::MAX);
        match flight.progress.answer(answer.map(|came| came.min(limit))) {
            Ok(counts) => {
                if let Step::Aside { skip, at, .. } = step
                    && counts > 0
                {
                    self.ring.copy_aside(key, skip, at, counts);
                }
                true
            }
            Err(error) => {
                let error = flight.request.source.failed(offset, flight.request.required, error);
                self.end(key, Err(error));
                false
            }
        }
    }

    /// Gives a read back: with the bytes that came, or why they did not.
    fn end(&mut self, key: usize, read: Result<usize, Error>) {
        let (flight, buffers) = self.ring.remove(key);
        let Flight { ticket, mut request, started_ns, late, cancelled, .. } = flight;
        self.shared.lock().begun.retain(|(begun, _)| *begun != ticket);
        if late {
            return;
        }
        self.live -= 1;
        request.buffers = buffers;
        // A read that was given up and came through all the same is fine.
        let result = read.and_then(|bytes| {
            request.judged(bytes)?;
            Ok(Transfer::by(ReadPath::Direct, bytes, started_ns))
        });
        (self.shared.sink)(match result {
            Err(_) if cancelled => request.cancelled(),
            result => Completion { token: request.token, buffers: request.buffers, result },
        });
    }

    /// Reports reads that take too long, and asks the system to give them up.
    fn expire(&mut self) {
        let (now, timeout) = (Instant::now(), self.timeout);
        let mut late = Vec::new();
        for (key, flight) in self.ring.iter().filter(|(_, f)| !f.late && f.deadline <= now) {
            flight.late = true;
            self.live -= 1;
            let error = flight.request.timed_out(timeout);
            let completion =
                Completion { token: flight.request.token, buffers: Vec::new(), result: Err(error) };
            late.push((key, completion));
        }
        for (key, completion) in late {
            (self.shared.sink)(completion);
            self.give_up(key);
        }
    }
}
