// SPDX-License-Identifier: MIT OR Apache-2.0
//! One read, step by step: what to ask the system for next, given what it has answered so far. Does
//! no I/O, so that threads, io_uring and the tests of faults go through the same rules.

use std::io;

/// Answers without progress (interrupted, try again) after which a read is given up.
const FRUITLESS_LIMIT: u32 = 1000;
/// Answers that do not reach the first byte wanted of a block after which the file is taken to end
/// before it.
const SHORT_LIMIT: u32 = 64;

/// A read of `offset..offset + len` of a file, under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Progress {
    offset: u64,
    len: usize,
    file_len: u64,
    /// What the system's reads must be aligned to; 1 when they need not be.
    alignment: usize,
    done: usize,
    ended: bool,
    fruitless: u32,
    short: u32,
}

/// What to ask the system for. `at` counts from the first byte of the request's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Read straight to where the bytes belong.
    Into {
        /// In the file.
        offset: u64,
        at: usize,
        len: usize,
    },
    /// Read one block aside, and bring `len` bytes from `skip` on to their place: an end that is
    /// not aligned.
    Aside { offset: u64, skip: usize, at: usize, len: usize },
}

impl Progress {
    /// `file_len` is where the file ended when it was opened: nothing is asked for beyond.
    pub(crate) fn new(offset: u64, len: usize, file_len: u64, alignment: usize) -> Self {
        assert!(alignment.is_power_of_two(), "an alignment of {alignment}");
        Self { offset, len, file_len, alignment, done: 0, ended: false, fruitless: 0, short: 0 }
    }

    /// The next step, `None` at the end. The same one until it is answered.
    pub(crate) fn step(&self) -> Option<Step> {
        let (offset, at, left) = (self.offset + self.done as u64, self.done, self.len - self.done);
        if left == 0 || self.ended || offset >= self.file_len {
            return None;
        }
        let skip = (offset % self.alignment as u64) as usize;
        let whole = left - left % self.alignment;
        Some(if skip > 0 || whole == 0 {
            let len = left.min(self.alignment - skip);
            Step::Aside { offset: offset - skip as u64, skip, at, len }
        } else {
            Step::Into { offset, at, len: whole }
        })
    }

    /// Takes the system's answer to the step: how many bytes came, from the step's `offset` on.
    /// Returns how many of them count.
    ///
    /// # Errors
    /// The system's, but for those that only mean that it shall be asked again.
    pub(crate) fn answer(&mut self, answer: io::Result<usize>) -> io::Result<usize> {
        let step = self.step().expect("only a step is answered");
        let came = match answer {
            Ok(came) => came,
            Err(e) if is_passing(&e) && self.fruitless < FRUITLESS_LIMIT => {
                self.fruitless += 1;
                return Ok(0);
            }
            Err(e) => return Err(e),
        };
        let counts = match step {
            Step::Into { len, .. } => came.min(len),
            Step::Aside { skip, len, .. } => came.saturating_sub(skip).min(len),
        };
        self.done += counts;
        self.ended = came == 0;
        if counts > 0 {
            (self.fruitless, self.short) = (0, 0);
        } else {
            self.short += 1;
            self.ended |= self.short > SHORT_LIMIT;
        }
        Ok(counts)
    }

    /// Bytes that are in place.
    pub(crate) fn done(&self) -> usize {
        self.done
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever the system answers: every step is aligned, and the bytes that count are the
        /// file's.
        #[test]
        fn any_answers_lead_to_the_right_bytes(
            file in prop::collection::vec(any::<u8>(), 0..5000),
            offset in 0u64..5000,
            len in 0usize..3000,
            shift in 0u32..10,
            answers in prop::collection::vec(prop::option::of(1usize..3000), 0..60),
        ) {
            let alignment = 1usize << shift;
            let mut progress = Progress::new(offset, len, file.len() as u64, alignment);
            let (mut memory, mut answers) = (vec![0u8; len], answers.into_iter());
            while let Some(step) = progress.step() {
                let (from, room) = match step {
                    Step::Into { offset, len, .. } => (offset, len),
                    Step::Aside { offset, skip, len, .. } => {
                        prop_assert!(skip + len <= alignment);
                        (offset, alignment)
                    }
                };
                prop_assert!(
                    (from as usize).is_multiple_of(alignment) && room.is_multiple_of(alignment)
                );
                let there = file.len().saturating_sub(from as usize).min(room);
                let came = match answers.next() {
                    Some(Some(limit)) => there.min(limit),
                    Some(None) => {
                        prop_assert_eq!(
                            progress.answer(Err(io::ErrorKind::Interrupted.into())).unwrap(),
                            0
                        );
                        continue;
                    }
                    None => there,
                };
                let counts = progress.answer(Ok(came)).unwrap();
                let (at, skip) = match step {
                    Step::Into { at, .. } => (at, 0),
                    Step::Aside { at, skip, .. } => (at, skip),
                };
                memory[at..at + counts].copy_from_slice(&file[from as usize + skip..][..counts]);
            }
            let expected = file.len().saturating_sub(offset as usize).min(len);
            prop_assert_eq!(progress.done(), expected);
            prop_assert!(
                memory[..expected] == file[(offset as usize).min(file.len())..][..expected]
            );
        }
    }

    #[test]
    fn a_system_that_never_gives_anything_is_given_up() {
        let mut progress = Progress::new(0, 10, 10, 1);
        let answers = (0..).map(|_| progress.answer(Err(io::ErrorKind::Interrupted.into())));
        assert!(answers.take(FRUITLESS_LIMIT as usize + 1).any(|answer| answer.is_err()));
    }

    #[test]
    fn a_file_that_was_cut_ends_the_read() {
        let mut progress = Progress::new(0, 8192, 8192, 512);
        assert_eq!(progress.answer(Ok(1000)).unwrap(), 1000);
        assert_eq!(
            progress.step(),
            Some(Step::Aside { offset: 512, skip: 488, at: 1000, len: 24 })
        );
        (0..=SHORT_LIMIT).for_each(|_| assert_eq!(progress.answer(Ok(488)).unwrap(), 0));
        assert_eq!((progress.step(), progress.done()), (None, 1000));
    }
}
