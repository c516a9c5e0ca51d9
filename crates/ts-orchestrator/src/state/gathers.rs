// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rows that calls gather: each call loads a unit that exists only for it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use ts_streams::Device;

use crate::Error;
use crate::prepared::PreparedUnit;
use crate::slot_pool::Slot;
use crate::unit_memory::UnitMemory;

/// The gathers whose callers wait, and the rows that callers have.
#[derive(Debug)]
pub(crate) struct Gathers<D: Device> {
    /// The gathers whose callers wait, by load. `None` until the load ends.
    waiting: HashMap<u32, Option<Result<Slot<D>, Error>>>,
    /// The rows that were gathered. Some may be dropped already.
    rows: Vec<GatheredRows<D>>,
}

/// Rows that a call has gathered, and that the caller may still reference.
#[derive(Debug)]
pub(super) struct GatheredRows<D: Device> {
    pub(super) name: String,
    pub(super) slot_bytes: usize,
    memory: Weak<UnitMemory<D>>,
    /// The thread that gathered the rows.
    pub(super) user: ThreadId,
}

impl<D: Device> Gathers<D> {
    pub(super) fn new() -> Self {
        Self { waiting: HashMap::new(), rows: Vec::new() }
    }

    /// Records that a caller waits for a load.
    pub(super) fn begin(&mut self, load: u32) {
        self.waiting.insert(load, None);
    }

    /// Stores the result of a load for its caller, unless the caller has given up.
    pub(super) fn end(&mut self, load: u32, result: Result<Slot<D>, Error>) {
        if let Some(waiting) = self.waiting.get_mut(&load) {
            *waiting = Some(result);
        }
    }

    /// Takes the result of a load if it has ended.
    pub(crate) fn take(&mut self, load: u32) -> Option<Result<Slot<D>, Error>> {
        self.waiting.get(&load)?.as_ref()?;
        self.waiting.remove(&load)?
    }

    /// Records that a caller no longer waits.
    pub(crate) fn give_up(&mut self, load: u32) {
        self.waiting.remove(&load);
    }

    /// Returns whether callers wait.
    pub(super) fn is_awaited(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Records that this thread has the rows of a unit, in this memory.
    pub(crate) fn add(&mut self, prepared: &PreparedUnit, memory: &Arc<UnitMemory<D>>) {
        self.forget_dropped();
        self.rows.push(GatheredRows {
            name: prepared.unit.name.clone(),
            slot_bytes: prepared.slot_bytes,
            memory: Arc::downgrade(memory),
            user: std::thread::current().id(),
        });
    }

    /// Forgets rows that are no longer referenced.
    pub(super) fn forget_dropped(&mut self) {
        self.rows.retain(|rows| rows.memory.strong_count() > 0);
    }

    /// The rows that were referenced when [`forget_dropped`](Self::forget_dropped) was called.
    pub(super) fn rows(&self) -> &[GatheredRows<D>] {
        &self.rows
    }
}
