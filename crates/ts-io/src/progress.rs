// SPDX-License-Identifier: MIT OR Apache-2.0
//! Determines the steps of one read: the range to read next, given the results so far. This module
//! performs no I/O, so that blocking reads, io_uring and fault injection share the same rules.

use std::io;

/// The maximum number of consecutive retries of a read that was interrupted or would block.
const MAX_RETRIES: u32 = 1000;
/// After more than this many consecutive results without a requested byte, the file is assumed to
/// end before the next requested byte.
const MAX_SHORT_RESULTS: u32 = 64;

/// A read of `offset..offset + len` of a file, in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Progress {
    offset: u64,
    len: usize,
    file_len: u64,
    /// The alignment of reads, in bytes. 1 if reads need not be aligned.
    alignment: usize,
    done: usize,
    ended: bool,
    retries: u32,
    short_results: u32,
}

/// The next range to read. `at` is a position in the request's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Read `len` bytes at `offset` of the file into the memory at `at`.
    InPlace { offset: u64, at: usize, len: usize },
    /// Read the block at `offset` of the file into a bounce buffer, for an end that is not aligned.
    /// Then copy `len` bytes from position `skip` of the bounce buffer to `at`.
    Bounce { offset: u64, skip: usize, at: usize, len: usize },
}

impl Progress {
    /// Starts a read of `offset..offset + len`. `file_len` is the length of the file when it was
    /// opened. No step begins at or after that length.
    pub(crate) fn new(offset: u64, len: usize, file_len: u64, alignment: usize) -> Self {
        assert!(alignment.is_power_of_two(), "alignment {alignment} is not a power of two");
        Self {
            offset,
            len,
            file_len,
            alignment,
            done: 0,
            ended: false,
            retries: 0,
            short_results: 0,
        }
    }

    /// Returns the current step, or `None` at the end. [`advance`](Self::advance) moves to the next
    /// step.
    pub(crate) fn step(&self) -> Option<Step> {
        let (offset, at, left) = (self.offset + self.done as u64, self.done, self.len - self.done);
        if left == 0 || self.ended || offset >= self.file_len {
            return None;
        }
        let skip = (offset % self.alignment as u64) as usize;
        let whole = left - left % self.alignment;
        Some(if skip > 0 || whole == 0 {
            let len = left.min(self.alignment - skip);
            Step::Bounce { offset: offset - skip as u64, skip, at, len }
        } else {
            Step::InPlace { offset, at, len: whole }
        })
    }

    /// Records the result of the current step: the number of bytes read from the step's `offset`
    /// on. Returns how many of these bytes belong to the requested range.
    ///
    /// # Errors
    /// Returns the error in `result`, unless the step can be retried.
    pub(crate) fn advance(&mut self, result: io::Result<usize>) -> io::Result<usize> {
        let step = self.step().expect("callers advance only while there is a current step");
        let read = match result {
            Ok(read) => read,
            Err(e) if is_transient(&e) && self.retries < MAX_RETRIES => {
                self.retries += 1;
                return Ok(0);
            }
            Err(e) => return Err(e),
        };
        let wanted = match step {
            Step::InPlace { len, .. } => read.min(len),
            Step::Bounce { skip, len, .. } => read.saturating_sub(skip).min(len),
        };
        self.done += wanted;
        self.ended = read == 0;
        if wanted > 0 {
            (self.retries, self.short_results) = (0, 0);
        } else {
            self.short_results += 1;
            self.ended |= self.short_results > MAX_SHORT_RESULTS;
        }
        Ok(wanted)
    }

    /// Returns the number of bytes that have been read into the request's memory.
    pub(crate) fn done(&self) -> usize {
        self.done
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// For any results, every step is aligned, and the bytes delivered are those of the file.
        #[test]
        fn any_results_lead_to_the_right_bytes(
            file in prop::collection::vec(any::<u8>(), 0..5000),
            offset in 0u64..5000,
            len in 0usize..3000,
            shift in 0u32..10,
            results in prop::collection::vec(prop::option::of(1usize..3000), 0..60),
        ) {
            let alignment = 1usize << shift;
            let mut progress = Progress::new(offset, len, file.len() as u64, alignment);
            let (mut memory, mut results) = (vec![0u8; len], results.into_iter());
            while let Some(step) = progress.step() {
                let (from, capacity) = match step {
                    Step::InPlace { offset, len, .. } => (offset, len),
                    Step::Bounce { offset, skip, len, .. } => {
                        prop_assert!(skip + len <= alignment);
                        (offset, alignment)
                    }
                };
                prop_assert!(
                    (from as usize).is_multiple_of(alignment) && capacity.is_multiple_of(alignment)
                );
                let available = file.len().saturating_sub(from as usize).min(capacity);
                let read = match results.next() {
                    Some(Some(limit)) => available.min(limit),
                    Some(None) => {
                        prop_assert_eq!(
                            progress.advance(Err(io::ErrorKind::Interrupted.into())).unwrap(),
                            0
                        );
                        continue;
                    }
                    None => available,
                };
                let wanted = progress.advance(Ok(read)).unwrap();
                let (at, skip) = match step {
                    Step::InPlace { at, .. } => (at, 0),
                    Step::Bounce { at, skip, .. } => (at, skip),
                };
                memory[at..at + wanted].copy_from_slice(&file[from as usize + skip..][..wanted]);
            }
            let expected = file.len().saturating_sub(offset as usize).min(len);
            prop_assert_eq!(progress.done(), expected);
            prop_assert!(
                memory[..expected] == file[(offset as usize).min(file.len())..][..expected]
            );
        }
    }

    #[test]
    fn endless_interruptions_fail_the_read() {
        let mut progress = Progress::new(0, 10, 10, 1);
        let results = (0..).map(|_| progress.advance(Err(io::ErrorKind::Interrupted.into())));
        assert!(results.take(MAX_RETRIES as usize + 1).any(|result| result.is_err()));
    }

    #[test]
    fn a_truncated_file_ends_the_read() {
        let mut progress = Progress::new(0, 8192, 8192, 512);
        assert_eq!(progress.advance(Ok(1000)).unwrap(), 1000);
        assert_eq!(
            progress.step(),
            Some(Step::Bounce { offset: 512, skip: 488, at: 1000, len: 24 })
        );
        (0..=MAX_SHORT_RESULTS).for_each(|_| assert_eq!(progress.advance(Ok(488)).unwrap(), 0));
        assert_eq!((progress.step(), progress.done()), (None, 1000));
    }
}
