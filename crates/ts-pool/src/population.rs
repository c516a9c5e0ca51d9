// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which parts of a pool have pages, so that each is populated at most once and never while its
//! pages are watched or returned to the system.

use std::ops::Range;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// The length of a part in bytes: a huge page, which takes the system a few milliseconds.
const PART: usize = 2 << 20;

/// The parts of a pool.
#[derive(Debug)]
pub(crate) struct Population {
    len: usize,
    parts: Mutex<Vec<Part>>,
    /// Notified when a part is no longer busy.
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// It may have no pages yet.
    Unpopulated,
    /// A thread populates it.
    Busy,
    /// It was populated, or must not be.
    Done,
}

impl Population {
    /// Creates the state of a pool of `len` bytes without pages.
    pub(crate) fn new(len: usize) -> Self {
        let parts = vec![Part::Unpopulated; len.div_ceil(PART)];
        Self { len, parts: Mutex::new(parts), changed: Condvar::new() }
    }

    /// Calls `populate` for each part of a byte range that may have no pages yet.
    pub(crate) fn populate(&self, range: Range<usize>, populate: impl Fn(Range<usize>)) {
        for index in parts_of(&range) {
            let whole = PART * index..(PART * (index + 1)).min(self.len);
            let wanted = range.start.max(whole.start)..range.end.min(whole.end);
            {
                let mut parts = self.lock();
                if parts[index] != Part::Unpopulated {
                    continue;
                }
                parts[index] = Part::Busy;
            }
            populate(wanted.clone());
            let after = if wanted == whole { Part::Done } else { Part::Unpopulated };
            self.lock()[index] = after;
            self.changed.notify_all();
        }
    }

    /// Excludes a byte range from [`populate`](Self::populate) from now on. Waits until no thread
    /// populates it.
    pub(crate) fn settle(&self, range: Range<usize>) {
        let mut parts = self.lock();
        for index in parts_of(&range) {
            while parts[index] == Part::Busy {
                self.changed.wait(&mut parts);
            }
            parts[index] = Part::Done;
        }
    }

    /// Returns whether a byte range was populated, or is excluded.
    pub(crate) fn is_done(&self, range: Range<usize>) -> bool {
        let parts = self.lock();
        parts_of(&range).all(|index| parts[index] == Part::Done)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Part>> {
        self.parts.lock()
    }
}

/// Returns the indices of the parts that overlap a byte range.
fn parts_of(range: &Range<usize>) -> Range<usize> {
    if range.is_empty() { 0..0 } else { range.start / PART..range.end.div_ceil(PART) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn each_part_is_populated_once_by_any_number_of_threads() {
        let population = Population::new(20 * PART + 5);
        let bytes = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    population.populate(0..20 * PART + 5, |range| {
                        bytes.fetch_add(range.len(), Ordering::Relaxed);
                    });
                });
            }
        });
        assert_eq!(bytes.into_inner(), 20 * PART + 5);
        assert!(population.is_done(0..20 * PART + 5));
    }

    #[test]
    fn a_settled_range_is_not_populated() {
        let population = Population::new(4 * PART);
        population.settle(PART + 10..PART + 20);
        assert!(population.is_done(PART..2 * PART) && !population.is_done(0..2 * PART));
        let populated = Mutex::new(Vec::new());
        population.populate(0..3 * PART, |range| populated.lock().push(range));
        assert_eq!(populated.into_inner(), [0..PART, 2 * PART..3 * PART]);
    }

    #[test]
    fn a_part_that_is_populated_in_pieces_is_not_done() {
        let population = Population::new(PART);
        population.populate(0..PART / 2, |range| assert_eq!(range, 0..PART / 2));
        assert!(!population.is_done(0..1));
    }

    #[test]
    fn settling_waits_for_the_thread_that_populates() {
        let (population, ended) = (Population::new(PART), AtomicBool::new(false));
        let (begun, has_begun) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                population.populate(0..PART, |_| {
                    begun.send(()).unwrap();
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    ended.store(true, Ordering::SeqCst);
                });
            });
            has_begun.recv().unwrap();
            population.settle(0..10);
            assert!(ended.load(Ordering::SeqCst));
        });
    }
}
