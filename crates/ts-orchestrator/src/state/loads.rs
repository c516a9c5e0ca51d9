// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loads that have not ended.

use std::collections::HashMap;

use ts_streams::Device;

use crate::unit::UnitId;
use crate::unit_load::UnitLoad;

/// The loads whose reads, jobs or uploads have not ended, and the copies that go on after them.
#[derive(Debug)]
pub(super) struct Loads<D: Device> {
    running: HashMap<u32, UnitLoad<D>>,
    next: u32,
    /// The number of copies to the device that have not ended.
    copies: usize,
}

impl<D: Device> Loads<D> {
    pub(super) fn new() -> Self {
        Self { running: HashMap::new(), next: 0, copies: 0 }
    }

    /// Returns the number of a new load.
    pub(super) fn next_id(&mut self) -> u32 {
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        id
    }

    /// Adds a load.
    pub(super) fn insert(&mut self, id: u32, load: UnitLoad<D>) {
        self.running.insert(id, load);
    }

    /// Returns a load. A load exists until its reads, jobs and uploads have ended, so whoever
    /// handles the end of one of them can call this.
    pub(super) fn get(&self, id: u32) -> &UnitLoad<D> {
        self.running.get(&id).expect("a load exists until its work has ended")
    }

    /// Like [`get`](Self::get).
    pub(super) fn get_mut(&mut self, id: u32) -> &mut UnitLoad<D> {
        self.running.get_mut(&id).expect("a load exists until its work has ended")
    }

    /// Ends a load.
    pub(super) fn remove(&mut self, id: u32) -> UnitLoad<D> {
        self.running.remove(&id).expect("a load ends once")
    }

    /// Returns the unit of a load. Returns `None` for a gather, and for a load that has ended.
    pub(super) fn unit(&self, id: u32) -> Option<UnitId> {
        self.running.get(&id).and_then(|load| load.id)
    }

    /// Returns the load of a unit that was guessed, unless it was cancelled.
    pub(super) fn guessed(&self, unit: UnitId) -> Option<u32> {
        let is_its = |load: &UnitLoad<D>| load.id == Some(unit) && load.guessed && !load.cancelled;
        self.running.iter().find(|(_, load)| is_its(load)).map(|(&id, _)| id)
    }

    /// Returns whether all loads and copies have ended.
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.copies == 0
    }

    /// Counts a copy to the device.
    pub(super) fn begin_copy(&mut self) {
        self.copies += 1;
    }

    /// Counts the end of a copy to the device.
    pub(super) fn end_copy(&mut self) {
        self.copies -= 1;
    }
}
