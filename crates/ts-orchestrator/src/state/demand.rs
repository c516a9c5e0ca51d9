// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory for units that are wanted now: what is given up for them, and why there may be none.

use std::sync::Arc;
use std::thread::ThreadId;

use ts_streams::Device;

use crate::slot::{Home, NoRoom, Room};
use crate::unit::UnitId;

use super::{Fixed, Residence, State, UnitState};

/// Why a unit's load did not start.
#[derive(Debug)]
pub(crate) enum Shortage {
    /// Reads under way, streams, or users that are not waiting themselves, will free memory.
    Passing,
    /// Only tensors that outlived their lease hold memory.
    Lingering { bytes: usize, holders: Vec<String> },
    /// All users of memory wait for memory.
    Stuck { holders: Vec<String> },
    /// The device refused.
    Device(ts_pool::Error),
}

impl<D: Device> State<D> {
    /// Begins to read the absent ones of units that are wanted now, ahead of everything that was
    /// only expected: all of them or none.
    pub(crate) fn demand(
        &mut self,
        fixed: &Fixed<D>,
        set: &[UnitId],
        now_ns: u64,
    ) -> Result<(), Shortage> {
        let mut scattered = false;
        loop {
            match self.rooms(fixed, &self.absent(set)) {
                Ok(rooms) => {
                    for (id, room) in rooms.into_iter().rev() {
                        let reads = self.start(fixed, id, room, now_ns);
                        reads.into_iter().rev().for_each(|read| self.queue.push_front(read));
                    }
                    self.pump(fixed, now_ns);
                    return Ok(());
                }
                Err(NoRoom::Slots) => {}
                // Uploads under way end, whatever becomes of them.
                Err(NoRoom::Staging | NoRoom::Device(_)) if self.is_loading() => {
                    return Err(Shortage::Passing);
                }
                Err(NoRoom::Staging) => {
                    let holders = vec!["reads that the system has not let go of".into()];
                    return Err(Shortage::Stuck { holders });
                }
                Err(NoRoom::Device(error)) => return Err(Shortage::Device(error)),
            }
            // Of what nobody uses, the one that is needed last goes first.
            if let Some(victim) =
                self.idle.iter().copied().max_by_key(|&unit| self.passes.next_use(unit))
            {
                self.evict(victim);
                continue;
            }
            match self.shortage(fixed, set) {
                Shortage::Passing => return Err(Shortage::Passing),
                // Nothing else will free memory: what the plan keeps is given up, and at last what
                // of the set itself lies in the way of the rest.
                _ if self.demote(fixed, set) => {}
                _ if !scattered && self.gather(set) => scattered = true,
                shortage => return Err(shortage),
            }
        }
    }

    /// Memory for each of some absent units, or for none.
    fn rooms(
        &mut self,
        fixed: &Fixed<D>,
        ids: &[UnitId],
    ) -> Result<Vec<(UnitId, Room<D>)>, NoRoom> {
        let mut rooms: Vec<(UnitId, Room<D>, bool)> = Vec::with_capacity(ids.len());
        for &id in ids {
            let kept = self.units[id.index()].reserved.is_some();
            match self.room(fixed, id) {
                Ok(room) => rooms.push((id, room, kept)),
                Err(shortage) => {
                    for (id, Room { slot, stays }, _) in
                        rooms.into_iter().filter(|(.., kept)| *kept)
                    {
                        let home = stays.map_or_else(|| Home::Host(slot), Home::Device);
                        self.units[id.index()].reserved = Some(home);
                    }
                    return Err(shortage);
                }
            }
        }
        Ok(rooms.into_iter().map(|(id, room, _)| (id, room)).collect())
    }

    /// Lets go of a unit that the plan keeps and that nobody uses, or of the memory that is set
    /// aside for it. Returns whether there was one. The last in the pool goes first, so that what
    /// is free stays in one piece.
    fn demote(&mut self, fixed: &Fixed<D>, set: &[UnitId]) -> bool {
        let spare = |unit: &UnitState<D>| {
            let free = match &unit.residence {
                Residence::Present(slot) => Arc::strong_count(slot) == 1,
                Residence::Absent => unit.reserved.is_some(),
                Residence::Loading => false,
            };
            unit.resident && unit.users.is_empty() && unit.wanted == 0 && free
        };
        let Some(last) = self.units.iter().rposition(spare) else { return false };
        self.outgrown = true;
        self.evict(UnitId(last as u32));
        let unit = &mut self.units[last];
        unit.reserved = None;
        unit.resident = false;
        unit.stats.resident = false;
        let held = |unit: &mut UnitState<D>| match unit.residence {
            Residence::Absent => unit.lingering_count() > 0,
            _ => !unit.resident,
        };
        let absent = self.absent(set);
        let sizes = self.units.iter_mut().zip(&fixed.units).enumerate();
        let needed = sizes.filter_map(|(i, (unit, prepared))| {
            (held(unit) || absent.contains(&UnitId(i as u32))).then_some(prepared.slot_bytes)
        });
        self.streamed_high_water = self.streamed_high_water.max(needed.sum());
        true
    }

    /// Lets go of the present ones of a set that only this call waits for, so that all of it can be
    /// read to what is then one piece of memory. Returns whether there was one.
    fn gather(&mut self, set: &[UnitId]) -> bool {
        let mut any = false;
        for &id in set {
            let unit = &self.units[id.index()];
            let asked = set.iter().filter(|&&other| other == id).count();
            let ours = unit.users.is_empty() && unit.wanted == asked;
            let unshared = |slot| Arc::strong_count(slot) == 1;
            if ours && matches!(&unit.residence, Residence::Present(slot) if unshared(slot)) {
                self.evict(id);
                any = true;
            }
        }
        any
    }

    /// What stands in the way when no idle unit can go.
    fn shortage(&mut self, fixed: &Fixed<D>, set: &[UnitId]) -> Shortage {
        let this_thread = std::thread::current().id();
        let waiting = |user: &ThreadId| {
            *user == this_thread || self.starving.contains(user) || self.queued.contains(user)
        };
        // Read for another call, which is about to take it.
        let asked = |id: usize| set.iter().filter(|own| own.index() == id).count();
        let awaited = |(id, unit): (usize, &UnitState<D>)| {
            unit.wanted > asked(id)
                && unit.users.is_empty()
                && matches!(unit.residence, Residence::Present(_))
        };
        let in_use = |unit: &&UnitState<D>| !unit.resident && !unit.users.is_empty();
        let can_end = |unit: &UnitState<D>| unit.users.iter().any(|user| !waiting(user));
        if self.is_loading()
            || fixed.slots.waits_for_streams()
            || self.units.iter().enumerate().any(awaited)
            || self.units.iter().filter(in_use).any(can_end)
        {
            return Shortage::Passing;
        }
        let in_use: Vec<String> =
            self.units.iter().filter(in_use).map(|u| u.stats.name.clone()).collect();
        let (mut bytes, mut holders) = (0, Vec::new());
        for (unit, prepared) in self.units.iter_mut().zip(&fixed.units) {
            let count = unit.lingering_count();
            if count > 0 {
                bytes += count * prepared.slot_bytes;
                holders.push(format!("`{}` x{count}", unit.stats.name));
            }
        }
        if holders.is_empty() {
            Shortage::Stuck { holders: in_use }
        } else {
            Shortage::Lingering { bytes, holders }
        }
    }
}
