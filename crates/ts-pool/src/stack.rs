// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lock-free stacks of indices (Treiber, 1986). The head combines the top index with a counter of
//! changes. The counter solves the ABA problem: if an index is popped and pushed again, the head
//! differs from its earlier value.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const NONE: u32 = u32::MAX;

/// Stores, for each index in a stack, the index below it. An index is in at most one stack at a
/// time.
#[derive(Debug)]
pub(crate) struct Links {
    below: Box<[Link]>,
}

/// A link on its own cache line, because different threads use neighbouring indices.
#[derive(Debug)]
#[repr(align(64))]
struct Link(AtomicU32);

impl Links {
    /// Creates links for the indices `0..count`.
    pub(crate) fn new(count: u32) -> Self {
        Self { below: (0..count).map(|_| Link(AtomicU32::new(NONE))).collect() }
    }
}

/// A stack of indices. All calls for one stack must pass the same [`Links`].
#[derive(Debug)]
pub(crate) struct Stack {
    /// The counter in the upper 32 bits, and the top index or `NONE` in the lower 32 bits.
    head: AtomicU64,
}

impl Stack {
    pub(crate) fn new() -> Self {
        Self { head: AtomicU64::new(u64::from(NONE)) }
    }

    /// Pushes an index that the caller owns. The stack then owns the index.
    pub(crate) fn push(&self, links: &Links, index: u32) {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            links.below[index as usize].0.store(head as u32, Ordering::Relaxed);
            let new = next_counter(head) | u64::from(index);
            // `Release` makes all writes of this owner visible to the next owner of the index.
            match self.head.compare_exchange_weak(head, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Pops an index, which the caller then owns. Returns `None` if the stack is empty.
    pub(crate) fn pop(&self, links: &Links) -> Option<u32> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let top = head as u32;
            if top == NONE {
                return None;
            }
            // Another thread may have popped `top` by now. In that case the counter has changed,
            // and the exchange below fails.
            let below = links.below[top as usize].0.load(Ordering::Relaxed);
            let new = next_counter(head) | u64::from(below);
            match self.head.compare_exchange_weak(head, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(top),
                Err(now) => head = now,
            }
        }
    }
}

/// Returns the counter of `head` plus one in the upper 32 bits, and zeros in the lower 32 bits.
fn next_counter(head: u64) -> u64 {
    ((head >> 32) + 1) << 32
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn an_index_has_one_owner_at_a_time() {
        let (links, stack) = (Links::new(64), Stack::new());
        (0..64).for_each(|index| stack.push(&links, index));
        let taken: Vec<_> = (0..64).map(|_| std::sync::atomic::AtomicBool::new(false)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        let held: Vec<u32> = (0..3).map_while(|_| stack.pop(&links)).collect();
                        for &index in &held {
                            assert!(
                                !taken[index as usize].swap(true, Ordering::Relaxed),
                                "index {index} has two owners"
                            );
                        }
                        for index in held {
                            taken[index as usize].store(false, Ordering::Relaxed);
                            stack.push(&links, index);
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

    struct StackModel {
        links: Links,
        stack: Stack,
        /// One value per index. Only the owner of an index accesses its value.
        values: Vec<UnsafeCell<u32>>,
    }

    impl StackModel {
        fn pop(&self) -> Option<u32> {
            self.stack.pop(&self.links)
        }

        fn push(&self, index: Option<u32>) {
            index.into_iter().for_each(|index| self.stack.push(&self.links, index));
        }

        fn touch(&self, index: Option<u32>) {
            if let Some(index) = index {
                // SAFETY: only this thread owns the index; otherwise loom fails the test.
                self.values[index as usize].with_mut(|value| unsafe { *value += 1 });
            }
        }
    }

    /// Loom checks all interleavings with up to three preemptions. No two threads may access a
    /// value at the same time, and each owner must see the writes of the previous owner. One thread
    /// pops both indices, and pushes the first back before the second. In between, the other thread
    /// can see the same top index with a different index below it (ABA).
    #[test]
    fn the_owner_of_an_index_has_exclusive_access() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let values = (0..2).map(|_| UnsafeCell::new(0)).collect();
            let model = Arc::new(StackModel { links: Links::new(2), stack: Stack::new(), values });
            (0..2).for_each(|index| model.push(Some(index)));
            let other = Arc::clone(&model);
            let thread = thread::spawn(move || {
                let (first, second) = (other.pop(), other.pop());
                other.touch(first);
                other.push(first);
                other.touch(second);
                other.push(second);
            });
            let first = model.pop();
            model.touch(first);
            let second = model.pop();
            model.touch(second);
            model.push(first);
            model.push(second);
            thread.join().unwrap();
            let mut left = [model.pop(), model.pop(), model.pop()];
            left.sort_unstable();
            assert_eq!(left, [None, Some(0), Some(1)]);
        });
    }
}
