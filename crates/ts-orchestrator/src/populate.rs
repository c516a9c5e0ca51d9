// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pre-faults the memory of a pool before reads fill it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use ts_pool::HostPool;

/// The number of bytes that a thread pre-faults at a time: a few huge pages.
const STEP: usize = 8 << 20;

/// Threads that pre-fault a pool. Dropping the populator stops them, and waits until they have
/// ended.
#[derive(Debug)]
pub(crate) struct Populator {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Populator {
    /// Starts up to `threads` threads, which begin with the byte `first` of the pool and end with
    /// those before it. Ignores threads that cannot start, because the system also allocates pages
    /// when they are first written to.
    pub(crate) fn new(pool: &HostPool, threads: usize, first: usize) -> Self {
        let (stop, next) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let len = pool.stats().capacity_bytes;
        let (steps, first) = (len.div_ceil(STEP), first / STEP);
        let threads = (0..threads.min(len / STEP)).filter_map(|i| {
            let (pool, stop, next) = (pool.clone(), Arc::clone(&stop), Arc::clone(&next));
            let work = move || {
                while !stop.load(Ordering::Relaxed) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= steps {
                        return;
                    }
                    let begin = (first + number) % steps * STEP;
                    pool.populate(begin..(begin + STEP).min(len));
                }
            };
            let thread = std::thread::Builder::new().name(format!("ts-populate-{i}"));
            thread.stack_size(256 << 10).spawn(work).ok()
        });
        let threads = threads.collect();
        Self { stop, threads }
    }

    /// Returns whether any thread was started.
    pub(crate) fn has_threads(&self) -> bool {
        !self.threads.is_empty()
    }

    /// Makes the threads end soon. Does not wait for them.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Drop for Populator {
    fn drop(&mut self) {
        self.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use ts_pool::Budget;

    use super::*;

    #[test]
    fn all_of_a_pool_is_populated_wherever_it_begins() {
        const LEN: usize = 21 << 20;
        for first in [0, 17 << 20, LEN] {
            let pool = HostPool::new(&Budget::new(LEN), LEN).unwrap();
            let whole = pool.allocate(LEN).unwrap();
            let mut populator = Populator::new(&pool, 2, first);
            assert!(populator.has_threads());
            populator.threads.drain(..).for_each(|thread| thread.join().unwrap());
            assert!(whole.is_populated());
        }
    }
}
