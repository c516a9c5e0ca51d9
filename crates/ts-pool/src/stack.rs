// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stacks of numbers that many threads push to and pop from without locks (Treiber, 1986). The head
//! has a count beside the number on top, so that a head which came back is not mistaken for one
//! that never left.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const NONE: u32 = u32::MAX;

/// What is below each number, in whatever stack it is: it is in one at a time.
#[derive(Debug)]
pub(crate) struct Links {
    below: Box<[Link]>,
}

/// On a cache line of its own: the numbers beside it may be with other threads.
#[derive(Debug)]
#[repr(align(64))]
struct Link(AtomicU32);

impl Links {
    /// For the numbers `0..count`.
    pub(crate) fn new(count: u32) -> Self {
        Self { below: (0..count).map(|_| Link(AtomicU32::new(NONE))).collect() }
    }
}

/// A stack. All that is done to it names the same links.
#[derive(Debug)]
pub(crate) struct Stack {
    /// A count in the upper half, the top in the lower.
    head: AtomicU64,
}

impl Stack {
    pub(crate) fn new() -> Self {
        Self { head: AtomicU64::new(u64::from(NONE)) }
    }

    /// Whoever pushes a number has it, and has it no more.
    pub(crate) fn push(&self, links: &Links, number: u32) {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            links.below[number as usize].0.store(head as u32, Ordering::Relaxed);
            let new = next_count(head) | u64::from(number);
            // Releases what was done to what the number stands for.
            match self.head.compare_exchange_weak(head, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    pub(crate) fn pop(&self, links: &Links) -> Option<u32> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let top = head as u32;
            if top == NONE {
                return None;
            }
            // It may be another's by now; then the count has changed.
            let below = links.below[top as usize].0.load(Ordering::Relaxed);
            let new = next_count(head) | u64::from(below);
            match self.head.compare_exchange_weak(head, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(top),
                Err(now) => head = now,
            }
        }
    }
}

/// The next count, in its place.
fn next_count(head: u64) -> u64 {
    ((head >> 32) + 1) << 32
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_number_is_with_one_thread_at_a_time() {
        let (links, stack) = (Links::new(64), Stack::new());
        (0..64).for_each(|number| stack.push(&links, number));
        let taken: Vec<_> = (0..64).map(|_| std::sync::atomic::AtomicBool::new(false)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        let held: Vec<u32> = (0..3).map_while(|_| stack.pop(&links)).collect();
                        for &number in &held {
                            assert!(
                                !taken[number as usize].swap(true, Ordering::Relaxed),
                                "{number} twice"
                            );
                        }
                        for number in held {
                            taken[number as usize].store(false, Ordering::Relaxed);
                            stack.push(&links, number);
                        }
                    }
                });
            }
        });
        let left: HashSet<u32> = std::iter::from_fn(|| stack.pop(&links)).collect();
        assert_eq!(left.len(), 64);
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    struct Shared {
        links: Links,
        stack: Stack,
        /// What the numbers stand for: only who has a number touches it.
        values: Vec<UnsafeCell<u32>>,
    }

    impl Shared {
        fn pop(&self) -> Option<u32> {
            self.stack.pop(&self.links)
        }

        fn push(&self, number: Option<u32>) {
            number.into_iter().for_each(|number| self.stack.push(&self.links, number));
        }

        fn touch(&self, number: Option<u32>) {
            if let Some(number) = number {
                // SAFETY: this thread alone has the number; loom fails the test otherwise.
                self.values[number as usize].with_mut(|value| unsafe { *value += 1 });
            }
        }
    }

    /// Loom checks, for all orders with up to three preemptions, that no two threads touch a value
    /// at once and that each sees what the last one left. One thread takes both numbers and puts
    /// back the first alone: to the other the top is then what it was, and what is below it is not.
    #[test]
    fn who_has_a_number_has_what_it_stands_for() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let values = (0..2).map(|_| UnsafeCell::new(0)).collect();
            let shared = Arc::new(Shared { links: Links::new(2), stack: Stack::new(), values });
            (0..2).for_each(|number| shared.push(Some(number)));
            let other = Arc::clone(&shared);
            let thread = thread::spawn(move || {
                let (first, second) = (other.pop(), other.pop());
                other.touch(first);
                other.push(first);
                other.touch(second);
                other.push(second);
            });
            let first = shared.pop();
            shared.touch(first);
            let second = shared.pop();
            shared.touch(second);
            shared.push(first);
            shared.push(second);
            thread.join().unwrap();
            let mut left = [shared.pop(), shared.pop(), shared.pop()];
            left.sort_unstable();
            assert_eq!(left, [None, Some(0), Some(1)]);
        });
    }
}
