// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that is taken from the system ahead of the reads that fill it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use ts_pool::HostPool;

/// What is taken at a time, in bytes: some huge pages.
const STEP: usize = 8 << 20;

/// Threads that go through a pool from its beginning to its end. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Populating {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Populating {
    /// A thread that cannot be had is no error: its pages come when they are touched.
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

impl Drop for Populating {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
