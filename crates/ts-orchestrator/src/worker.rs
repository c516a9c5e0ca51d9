// SPDX-License-Identifier: MIT OR Apache-2.0
//! The one bounded pool of threads for work on bytes that have arrived.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use ts_pool::Buffer;

use crate::Error;
use crate::load::Event;

/// A part of a unit that was read aside, to be brought to its place.
#[derive(Debug)]
pub(crate) struct CopyJob {
    pub(crate) token: u64,
    pub(crate) bounce: Buffer,
    /// Where in `bounce` the part begins.
    pub(crate) skip: usize,
    pub(crate) target: Buffer,
}

/// Threads that do [`CopyJob`]s and report [`Event::Copied`]. Dropping it finishes what was given to it.
#[derive(Debug)]
pub(crate) struct WorkerPool {
    jobs: Option<Sender<CopyJob>>,
    threads: Vec<JoinHandle<()>>,
}

impl WorkerPool {
    pub(crate) fn new(threads: usize, events: &Sender<Event>) -> Result<Self, Error> {
        let (jobs, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let mut this = Self { jobs: Some(jobs), threads: Vec::new() };
        for i in 0..threads {
            let (queue, events) = (Arc::clone(&queue), events.clone());
            let thread = std::thread::Builder::new()
                .name(format!("ts-worker-{i}"))
                .stack_size(256 << 10)
                .spawn(move || run(&queue, &events))
                .map_err(|e| Error::System(format!("cannot start a worker thread: {e}")))?;
            this.threads.push(thread);
        }
        Ok(this)
    }

    pub(crate) fn submit(&self, job: CopyJob) {
        let jobs = self.jobs.as_ref().expect("present until drop");
        jobs.send(job).expect("workers run until the pool is dropped");
    }
}

fn run(queue: &Mutex<Receiver<CopyJob>>, events: &Sender<Event>) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(CopyJob { token, bounce, skip, mut target }) = job else { return };
        let len = target.len();
        target.copy_from_slice(&bounce[skip..skip + len]);
        // Without a listener the engine is gone, and the buffers go home by being dropped.
        let _ = events.send(Event::Copied { token, bounce, target });
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
