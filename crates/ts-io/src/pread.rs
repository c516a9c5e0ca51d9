// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that each do one blocking read at a time: the `buffered`, `direct` and `adaptive` backends.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::backend::{
    Backend, BackendOptions, Capabilities, Completion, CompletionSink, ReadPath, ReadRequest, Rejected,
    Transfer, monotonic_ns,
};
use crate::provider::{Availability, BackendProvider};
use crate::{Error, Source};

/// Which path a read takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Buffered,
    Direct,
    /// Copies what is in the page cache already, reads the rest directly.
    Adaptive,
}

/// `buffered`: pread through the page cache, at any alignment.
pub(crate) struct BufferedProvider;
/// `direct`: O_DIRECT, everything aligned.
pub(crate) struct DirectProvider;
/// `adaptive`: for each request, a copy when the page cache has it all, O_DIRECT when it has not.
pub(crate) struct AdaptiveProvider;

impl BackendProvider for BufferedProvider {
    fn name(&self) -> &'static str {
        "buffered"
    }

    fn priority(&self) -> u8 {
        10
    }

    fn probe(&self, _: &[Arc<Source>]) -> Availability {
        Availability::Available
    }

    fn create(&self, options: &BackendOptions, sink: CompletionSink) -> Result<Box<dyn Backend>, Error> {
        Ok(Box::new(ThreadBackend::new(Policy::Buffered, options, sink)?))
    }
}

impl BackendProvider for DirectProvider {
    fn name(&self) -> &'static str {
        "direct"
    }

    fn priority(&self) -> u8 {
        50
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        let refusal = sources.iter().find_map(|s| Some((s.path(), s.direct_alignment().err()?)));
        match refusal {
            Some((path, reason)) => Availability::Unavailable(format!("{}: {reason}", path.display())),
            None => Availability::Available,
        }
    }

    fn create(&self, options: &BackendOptions, sink: CompletionSink) -> Result<Box<dyn Backend>, Error> {
        Ok(Box::new(ThreadBackend::new(Policy::Direct, options, sink)?))
    }
}

impl BackendProvider for AdaptiveProvider {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn priority(&self) -> u8 {
        100
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        if sources.iter().any(|s| s.residency(0, 1).is_none()) {
            return Availability::Unavailable("the system does not tell what its page cache holds".into());
        }
        DirectProvider.probe(sources)
    }

    fn create(&self, options: &BackendOptions, sink: CompletionSink) -> Result<Box<dyn Backend>, Error> {
        Ok(Box::new(ThreadBackend::new(Policy::Adaptive, options, sink)?))
    }
}

struct ThreadBackend {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    policy: Policy,
    sink: CompletionSink,
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<ReadRequest>,
    closed: bool,
}

impl ThreadBackend {
    fn new(policy: Policy, options: &BackendOptions, sink: CompletionSink) -> Result<Self, Error> {
        let shared = Arc::new(Shared { policy, sink, queue: Mutex::default(), work: Condvar::new() });
        // Built first and filled after, so that a thread that cannot start still ends the others.
        let mut this = Self { shared, threads: Vec::new() };
        for i in 0..options.in_flight.max(1) {
            let shared = Arc::clone(&this.shared);
            let thread = std::thread::Builder::new()
                .name(format!("ts-io-{i}"))
                .stack_size(256 << 10)
                .spawn(move || shared.run())
                .map_err(|e| Error::Thread(e.into()))?;
            this.threads.push(thread);
        }
        Ok(this)
    }
}

impl Backend for ThreadBackend {
    fn name(&self) -> &'static str {
        match self.shared.policy {
            Policy::Buffered => BufferedProvider.name(),
            Policy::Direct => DirectProvider.name(),
            Policy::Adaptive => AdaptiveProvider.name(),
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            needs_alignment: self.shared.policy == Policy::Direct,
            max_in_flight: self.threads.len(),
        }
    }

    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>> {
        if self.shared.policy == Policy::Direct
            && let Err(error) = check_alignment(&request)
        {
            return Err(Box::new(Rejected { request, error }));
        }
        self.shared.lock().requests.push_back(request);
        self.shared.work.notify_one();
        Ok(())
    }

    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        let mut cancelled = Vec::new();
        let mut queue = self.shared.lock();
        for request in std::mem::take(&mut queue.requests) {
            if wanted(request.token) { cancelled.push(request) } else { queue.requests.push_back(request) }
        }
        drop(queue);
        let count = cancelled.len();
        for request in cancelled {
            let error = Error::Cancelled { path: request.source.path().into(), offset: request.offset };
            (self.shared.sink)(Completion {
                token: request.token,
                buffer: request.buffer,
                result: Err(error),
            });
        }
        count
    }
}

impl Drop for ThreadBackend {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        self.cancel(&|_| true);
        for thread in self.threads.drain(..) {
            // A worker runs no code that panics but the sink's, whose panic is its owner's to report.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while let Some(mut request) = self.take() {
            let started_ns = monotonic_ns();
            let result = self.read(&mut request).map(|(bytes, path)| Transfer {
                bytes,
                path,
                started_ns,
                finished_ns: monotonic_ns(),
            });
            (self.sink)(Completion { token: request.token, buffer: request.buffer, result });
        }
    }

    /// The next request; waits for one, `None` when the backend is being dropped.
    fn take(&self) -> Option<ReadRequest> {
        let mut queue = self.lock();
        loop {
            if let Some(request) = queue.requests.pop_front() {
                return Some(request);
            }
            if queue.closed {
                return None;
            }
            queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn read(&self, request: &mut ReadRequest) -> Result<(usize, ReadPath), Error> {
        let path = self.choose(request);
        let (source, offset) = (&request.source, request.offset);
        let bytes = match path {
            ReadPath::Buffered => source.read_at(offset, &mut request.buffer)?,
            ReadPath::Direct => source.read_direct_at(offset, &mut request.buffer)?,
        };
        // After the read, so that a change at any moment before its last byte is seen. A file that was cut
        // is reported as such, with the byte where it now ends.
        if bytes < request.required {
            let (path, expected) = (source.path().into(), request.required);
            return Err(Error::ShortRead { path, offset, expected, actual: bytes });
        }
        source.verify(offset)?;
        Ok((bytes, path))
    }

    fn choose(&self, request: &ReadRequest) -> ReadPath {
        let (source, len) = (&request.source, request.required);
        match self.policy {
            Policy::Buffered => ReadPath::Buffered,
            Policy::Direct => ReadPath::Direct,
            Policy::Adaptive => {
                let warm = source.residency(request.offset, len).is_some_and(|share| share >= 1.0);
                if warm || check_alignment(request).is_err() { ReadPath::Buffered } else { ReadPath::Direct }
            }
        }
    }
}

fn check_alignment(request: &ReadRequest) -> Result<(), Error> {
    let source = &request.source;
    let alignment = source
        .direct_alignment()
        .map_err(|reason| Error::Unavailable { backend: "direct".into(), reason: reason.into() })?;
    let (address, len) = (request.buffer.as_ptr().addr(), request.buffer.len());
    let aligned = (address | len | request.offset as usize).is_multiple_of(alignment);
    if aligned {
        return Ok(());
    }
    Err(Error::Misaligned { path: source.path().into(), offset: request.offset, len, alignment })
}
