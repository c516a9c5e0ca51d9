// SPDX-License-Identifier: MIT OR Apache-2.0
//! The steps of futures: what the blocking calls do, but a waker is called instead of a thread that
//! waits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::thread::ThreadId;

use ts_streams::Device;

use crate::Error;
use crate::event::Event;
use crate::lease::TensorBytes;
use crate::pass::PassId;
use crate::prepared::PreparedUnit;
use crate::state::LimitWait;
use crate::unit::UnitId;
use crate::unit_memory::UnitMemory;

use super::{Shared, StateGuard};

/// A future's wait for a unit. Ends when it is dropped.
pub(crate) struct UnitWait<D: Device> {
    shared: Arc<Shared<D>>,
    pass: PassId,
    unit: UnitId,
    /// The thread of the first poll, once there was one and until the unit is acquired.
    waiter: Option<ThreadId>,
    tries: u32,
}

impl<D: Device> UnitWait<D> {
    pub(crate) fn new(shared: Arc<Shared<D>>, pass: PassId, unit: UnitId) -> Self {
        Self { shared, pass, unit, waiter: None, tries: 0 }
    }

    /// Acquires the unit if it is in memory, like `acquire`. Otherwise starts to read it, and
    /// `waker` is called when it may be there.
    ///
    /// A thread that polls does not wait for memory: it can run other futures, which free some.
    #[allow(clippy::type_complexity)] // the parts have these types in all of the engine
    pub(crate) fn poll(&mut self, waker: &Waker) -> Poll<Result<(Arc<UnitMemory<D>>, u64), Error>> {
        let (shared, units) = (Arc::clone(&self.shared), [self.unit]);
        let mut state = shared.lock();
        if self.waiter.is_none() {
            state.visit(Some(self.pass), self.unit);
            state.add_waiter(self.unit);
            self.waiter = Some(std::thread::current().id());
        }
        let acquired = shared.try_units(&mut state, &units, &mut self.tries);
        state.waiters.for_memory.remove(&std::thread::current().id());
        let Some(acquired) = acquired else {
            return shared.pending(state, waker);
        };
        if let Some(waiter) = self.waiter.take() {
            state.remove_waiter(self.unit, waiter);
        }
        let now_ns = (shared.clock)();
        state.advance(&shared.context, now_ns);
        Poll::Ready(acquired.map(|mut memory| (memory.pop().expect("one unit"), now_ns)))
    }
}

impl<D: Device> Drop for UnitWait<D> {
    fn drop(&mut self) {
        if let Some(waiter) = self.waiter.take().filter(|_| !self.shared.is_forked()) {
            self.shared.lock().remove_waiter(self.unit, waiter);
        }
    }
}

/// A future's wait for rows of a table. Ends when it is dropped.
pub(crate) struct RowsWait<D: Device> {
    shared: Arc<Shared<D>>,
    prepared: Arc<PreparedUnit>,
    asked_ns: u64,
    /// The read, once there was memory for it and until it has ended.
    load: Option<u32>,
    tries: u32,
}

impl<D: Device> RowsWait<D> {
    pub(crate) fn new(shared: Arc<Shared<D>>, prepared: PreparedUnit) -> Self {
        let asked_ns = (shared.clock)();
        Self { shared, prepared: Arc::new(prepared), asked_ns, load: None, tries: 0 }
    }

    /// Returns the rows if they were read. Otherwise starts to read them, and `waker` is called
    /// when they may be there.
    pub(crate) fn poll(&mut self, waker: &Waker) -> Poll<Result<TensorBytes<D>, Error>> {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let load = match self.load {
            Some(load) => load,
            None => {
                match shared.try_allocate_for_gather(&mut state, &self.prepared, &mut self.tries) {
                    Ok(Some(buffer)) => {
                        state.counters.gathered_rows += self.prepared.row_count();
                        *self.load.insert(shared.start_rows(&mut state, &self.prepared, buffer))
                    }
                    Ok(None) => return shared.pending(state, waker),
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
        };
        match state.transfers.gathers.take(load) {
            None => shared.pending(state, waker),
            Some(rows) => {
                self.load = None;
                let rows = rows
                    .map(|slot| shared.take_rows(&mut state, &self.prepared, slot, self.asked_ns));
                Poll::Ready(rows)
            }
        }
    }
}

impl<D: Device> Drop for RowsWait<D> {
    fn drop(&mut self) {
        if let Some(load) = self.load.take().filter(|_| !self.shared.is_forked()) {
            self.shared.lock().transfers.gathers.give_up(load);
        }
    }
}

impl<D: Device> Shared<D> {
    /// Begins a pass if fewer than the most are running. Otherwise, `waker` is called when that may
    /// have changed. `wait` is `None` at first, and the same for each poll.
    pub(crate) fn poll_begin_pass(
        &self,
        waker: &Waker,
        wait: &mut Option<LimitWait>,
    ) -> Poll<PassId> {
        let mut state = self.lock();
        if state.passes.running() >= self.max_passes || state.awaits_limit(wait) {
            return self.pending(state, waker);
        }
        Poll::Ready(self.begin(&mut state))
    }

    /// Calls `waker` after the next change, or after the time for which a blocking call waits.
    fn pending<T>(&self, mut state: StateGuard<'_, D>, waker: &Waker) -> Poll<T> {
        if state.waiters.add(waker) {
            let _ = self.context.events.send(Event::Polled); // the engine is alive
        }
        Poll::Pending
    }

    /// Wakes everything that waits for a change of the state.
    pub(super) fn notify(&self, mut state: StateGuard<'_, D>) {
        let wakers = state.waiters.take_wakers();
        drop(state);
        self.changed.notify_all();
        for waker in wakers {
            // The thread that calls this must go on if the code of an executor panics.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }
}
