// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who waits for a change of the engine's state.

use std::collections::HashSet;
use std::task::Waker;
use std::thread::ThreadId;

/// The threads that wait and free no memory meanwhile, and the futures that wait.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    /// The threads that wait for memory.
    pub(crate) for_memory: HashSet<ThreadId>,
    /// The threads that wait to begin a pass.
    pub(crate) for_pass: HashSet<ThreadId>,
    /// The wakers of futures that wait for a change.
    wakers: Vec<Waker>,
}

impl Waiters {
    /// Returns whether a thread waits for memory or for a pass.
    pub(super) fn contains(&self, thread: &ThreadId) -> bool {
        self.for_memory.contains(thread) || self.for_pass.contains(thread)
    }

    /// Remembers a future that waits. Returns whether it is the first one since the last change.
    pub(crate) fn add(&mut self, waker: &Waker) -> bool {
        let is_first = self.wakers.is_empty();
        if !self.wakers.iter().any(|known| known.will_wake(waker)) {
            self.wakers.push(waker.clone());
        }
        is_first
    }

    /// Takes the wakers of all futures that wait.
    pub(crate) fn take_wakers(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.wakers)
    }
}
