// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pre-faults the memory of a pool before reads fill it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use ts_pool::HostPool;

/// The number of bytes that a thread pre-faults at a time: a few huge pages.
const STEP: usize = 8 << 20;

/// Threads that pre-fault a pool from beginning to end. Dropping the populator stops them.
#[derive(Debug)]
pub(crate) struct Populator {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Populator {
    /// Starts up to `threads` threads. Ignores threads that cannot start, because the system also
    /// allocates pages when they are first written to.
    pub(crate) fn new(pool: &HostPool, threads: usize) -> Self {
        let (stop, next) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let len = pool.stats().capacity_bytes;
        let threads = (0..threads.min(len / STEP)).filter_map(|i| {
            let (pool, stop, next) = (pool.clone(), Arc::clone(&stop), Arc::clone(&next));
            let work = move || {
                while !stop.load(Ordering::Relaxed) {
                    let begin = next.fetch_add(STEP, Ordering::Relaxed);
                    if begin >= len {
                        return;
                    }
                    pool.populate(begin..(begin + STEP).min(len));
                }
            };
            let thread = std::thread::Builder::new().name(format!("ts-populate-{i}"));
            thread.stack_size(256 << 10).spawn(work).ok()
        });
        let threads = threads.collect();
        Self { stop, threads }
    }
}

impl Drop for Populator {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
