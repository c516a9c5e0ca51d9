// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work on the bytes of many tensors, on several threads, that can be watched and interrupted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::convert::Progress;
use crate::read::Readers;
use crate::{Error, Watch};
use parking_lot::Mutex;

/// How often a wait looks around.
const POLL: Duration = Duration::from_millis(20);

/// As many threads as keep a device busy while each of them waits for it most of the time.
const READING: usize = 16;

/// The number of threads that `jobs` asks for: 0 for as many as there are cores.
pub(crate) fn threads(jobs: usize) -> usize {
    if jobs > 0 { jobs } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

/// Has `work` done for each piece of tensors of these lengths, `piece_len` bytes or what is left of
/// its tensor: it is given a tensor's index, the piece's first byte and its length. On threads
/// enough to keep storage busy, `jobs` of which decode and compare at a time; each has a state that
/// `begin` makes with a reader. `take` gets what comes of it, in no order, on the calling thread.
/// The first error ends it.
pub(crate) fn over_pieces<S, T: Send>(
    lens: &[u64],
    piece_len: u64,
    jobs: usize,
    watch: &mut Watch<'_>,
    begin: impl Fn(&Readers) -> S + Sync,
    work: impl Fn(&mut S, usize, u64, usize) -> Result<T, Error> + Sync,
    mut take: impl FnMut(usize, u64, T),
) -> Result<(), Error> {
    let jobs = threads(jobs);
    let count = jobs.max(READING);
    // Some want two.
    let readers = Readers::new(2 * count, jobs);
    let pieces = lens.iter().enumerate().flat_map(|(index, &len)| {
        let begins = (0..len).step_by(piece_len as usize);
        begins.map(move |begin| (index, begin, piece_len.min(len - begin) as usize))
    });
    let (pieces, stop, (results, inbox)) = (Mutex::new(pieces), AtomicBool::new(false), channel());
    let mut progress = Progress { done: 0, total: lens.iter().sum() };
    std::thread::scope(|scope| {
        for _ in 0..count {
            let results = results.clone();
            let (readers, pieces, stop, begin, work) = (&readers, &pieces, &stop, &begin, &work);
            scope.spawn(move || {
                let mut state = begin(readers);
                let next = || pieces.lock().next();
                while let Some((index, begin, len)) =
                    next().filter(|_| !stop.load(Ordering::Relaxed))
                {
                    let result = work(&mut state, index, begin, len);
                    // Nobody listens any more once something failed.
                    let _ = results.send((index, begin, len, result));
                }
            });
        }
        drop(results);
        let mut until_done = || loop {
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
        until_done().inspect_err(|_| stop.store(true, Ordering::Relaxed))
    })
}
