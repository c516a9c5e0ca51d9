// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes the bytes of many tensors on several threads, with progress and interruption.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use parking_lot::Mutex;

use crate::Error;
use crate::progress::{Progress, Watch};
use crate::read::ReaderPool;

/// Interval between calls of `watch` while the calling thread waits for results.
const POLL: Duration = Duration::from_millis(20);

/// Minimum number of threads. Each thread waits for storage most of the time, so many threads are
/// needed to keep the storage busy.
const MIN_THREADS: usize = 16;

/// Returns the number of threads for a `jobs` option, where 0 means the number of cores.
pub(crate) fn thread_count(jobs: usize) -> usize {
    if jobs > 0 { jobs } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

/// The threads that process pieces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Threads {
    count: usize,
    /// How many threads decode or compute checksums at a time.
    jobs: usize,
}

impl Threads {
    /// Enough threads to keep storage busy. `jobs` is an option as for [`thread_count`].
    pub(crate) fn for_storage(jobs: usize) -> Self {
        let jobs = thread_count(jobs);
        Self { count: jobs.max(MIN_THREADS), jobs }
    }

    /// Threads that never wait for storage. `jobs` is an option as for [`thread_count`].
    pub(crate) fn for_memory(jobs: usize) -> Self {
        let jobs = thread_count(jobs);
        Self { count: jobs, jobs }
    }
}

/// Splits tensors of these lengths into pieces, and processes them on several threads. Blocks.
///
/// A piece has `piece_len` bytes, or the rest of its tensor. `work` runs on a worker thread, and
/// gets the index of the tensor, the offset of the piece in it, and the length of the piece. `take`
/// gets each result, in any order, on the calling thread.
///
/// `init` creates the state of each worker, with up to two readers of the pool.
///
/// # Errors
/// Returns the first error of `work`, or [`Error::Interrupted`] if `watch` returns true.
pub(crate) fn for_each_piece<S, T: Send>(
    lens: &[u64],
    piece_len: u64,
    threads: Threads,
    watch: &mut Watch<'_>,
    init: impl Fn(&ReaderPool) -> S + Sync,
    work: impl Fn(&mut S, usize, u64, usize) -> Result<T, Error> + Sync,
    mut take: impl FnMut(usize, u64, T),
) -> Result<(), Error> {
    let piece_count: u64 = lens.iter().map(|len| len.div_ceil(piece_len)).sum();
    let count = threads.count.min(usize::try_from(piece_count).unwrap_or(usize::MAX));
    let readers = ReaderPool::new(2 * count, threads.jobs);
    let pieces = lens.iter().enumerate().flat_map(|(index, &len)| {
        let begins = (0..len).step_by(piece_len as usize);
        begins.map(move |begin| (index, begin, piece_len.min(len - begin) as usize))
    });
    let (pieces, stop, (results, inbox)) = (Mutex::new(pieces), AtomicBool::new(false), channel());
    let mut progress = Progress { done: 0, total: lens.iter().sum() };
    std::thread::scope(|scope| {
        for _ in 0..count {
            let results = results.clone();
            let (readers, pieces, stop, init, work) = (&readers, &pieces, &stop, &init, &work);
            scope.spawn(move || {
                let mut state = init(readers);
                let next = || pieces.lock().next();
                while let Some((index, begin, len)) =
                    next().filter(|_| !stop.load(Ordering::Relaxed))
                {
                    let result = work(&mut state, index, begin, len);
                    // This cannot fail, because the receiver outlives the threads.
                    let _ = results.send((index, begin, len, result));
                }
            });
        }
        drop(results);
        let mut collect = || loop {
            match inbox.recv_timeout(POLL) {
                Ok((index, begin, len, result)) => {
                    take(index, begin, result?);
                    progress.done += len as u64;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            if watch(progress) {
                return Err(Error::Interrupted);
            }
        };
        collect().inspect_err(|_| stop.store(true, Ordering::Relaxed))
    })
}
