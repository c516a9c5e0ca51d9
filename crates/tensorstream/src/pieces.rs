// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work on the bytes of many tensors, on several threads, that can be watched and interrupted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ts_format::CHUNK_LEN;

use crate::convert::Progress;
use crate::{Error, Watch};

/// How often a wait looks around.
const POLL: Duration = Duration::from_millis(20);

/// The number of threads that `jobs` asks for: 0 for as many as there are cores.
pub(crate) fn threads(jobs: usize) -> usize {
    if jobs > 0 { jobs } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

/// Has `work` done for each chunk of tensors of these lengths, on `jobs` threads, each with a state of its own: it is
/// given a tensor's index, the chunk's first byte and its length. `take` gets what comes of it, in no order, on the
/// calling thread. The first error ends it.
pub(crate) fn over_pieces<S: Default, T: Send>(
    lens: &[u64],
    jobs: usize,
    watch: &mut Watch<'_>,
    work: impl Fn(&mut S, usize, u64, usize) -> Result<T, Error> + Sync,
    mut take: impl FnMut(usize, u64, T),
) -> Result<(), Error> {
    let pieces = lens.iter().enumerate().flat_map(|(index, &len)| {
        let begins = (0..len).step_by(CHUNK_LEN as usize);
        begins.map(move |begin| (index, begin, CHUNK_LEN.min(len - begin) as usize))
    });
    let (pieces, stop, (results, inbox)) = (Mutex::new(pieces), AtomicBool::new(false), channel());
    let mut progress = Progress { done: 0, total: lens.iter().sum() };
    std::thread::scope(|scope| {
        for _ in 0..threads(jobs) {
            let (results, pieces, stop, work) = (results.clone(), &pieces, &stop, &work);
            scope.spawn(move || {
                let mut state = S::default();
                let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
                while let Some((index, begin, len)) = next().filter(|_| !stop.load(Ordering::Relaxed)) {
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
