// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the engine knows at a moment, and the steps between such moments. Everything here runs
//! under the engine's one lock and never blocks.

mod demand;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::thread::ThreadId;
use std::time::Duration;

use ts_io::{Backend, Completion, ReadPath, ReadRequest, Source};
use ts_pool::{Buffer, HostPool, Watched};
use ts_streams::Device;

use crate::Error;
use crate::engine::Verify;
use crate::layout::{Fill, SlotLayout};
use crate::load::{Cut, Event, Load, QueuedRead, add, split_token};
use crate::pass::Passes;
use crate::plan::{Plan, Residency, UnitDemand};
use crate::prefetch::Prefetch;
use crate::slot::{Home, NoRoom, Room, Slot, Slots, Uploaded, device_error};
use crate::stats::UnitStats;
use crate::unit::{Unit, UnitId};
use crate::worker::{Check, Damage, Job, Lost, Mismatch, Workers};

/// A unit as the engine uses it.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) unit: Unit,
    pub(crate) layout: SlotLayout,
    /// Its layout's length in whole blocks of the pool.
    pub(crate) slot_bytes: usize,
    /// The checksums of its tensors, as far as they have some.
    pub(crate) checks: Arc<[Check]>,
}

impl Prepared {
    /// The statistics of a unit to which nothing has happened.
    pub(crate) fn no_stats(&self) -> UnitStats {
        UnitStats {
            name: self.unit.name.clone(),
            slot_bytes: self.slot_bytes,
            ..UnitStats::default()
        }
    }
}

/// What does not change while an engine lives.
#[derive(Debug)]
pub(crate) struct Fixed<D: Device> {
    pub(crate) units: Vec<Prepared>,
    pub(crate) sources: Vec<Arc<Source>>,
    pub(crate) slots: Slots<D>,
    /// For reads that cannot go straight to their place, where there are such.
    pub(crate) bounces: Option<HostPool>,
    pub(crate) cut: Cut,
    pub(crate) prefetch: Prefetch,
    pub(crate) verify: Verify,
    /// How long a read may take.
    pub(crate) timeout: Duration,
    pub(crate) events: Sender<Event<D>>,
}

pub(crate) use demand::Shortage;

pub(crate) struct State<D: Device> {
    pub(crate) units: Vec<UnitState<D>>,
    pub(crate) passes: Passes,
    /// The order that the plan was made for.
    pub(crate) believed: Vec<UnitId>,
    pub(crate) plan: Plan,
    /// A better plan, to be put in force when nothing is in use.
    pub(crate) pending_plan: Option<Plan>,
    /// Sets of units that operations need at the same time; none is part of another.
    pub(crate) together: Vec<Vec<UnitId>>,
    /// Units that the plan keeps had to be let go: it does not suit what is done.
    pub(crate) outgrown: bool,
    /// The most that streamed units ever needed at once when that happened, in bytes.
    pub(crate) streamed_high_water: usize,
    /// Nothing is read ahead, so that what is on its way runs out.
    pub(crate) paused: bool,
    pub(crate) counts: Counts,
    /// Threads that wait for memory.
    pub(crate) starving: HashSet<ThreadId>,
    /// Threads that wait for their turn to begin a pass.
    pub(crate) queued: HashSet<ThreadId>,
    /// Units that are present and that nobody uses, waits for or keeps.
    idle: BTreeSet<UnitId>,
    /// How many of the units ahead are present or on their way.
    horizon: usize,
    loads: HashMap<u32, Load<D>>,
    next_load: u32,
    queue: VecDeque<QueuedRead>,
    in_flight: usize,
    /// Since when reads have been in flight without a pause.
    busy_since_ns: u64,
    /// Parts of slots whose bytes are being read aside.
    targets: HashMap<u64, (Buffer, Range<usize>, Fill)>,
    /// Parts that a worker brings to their place.
    copying: usize,
    /// `None` once the engine is gone.
    pub(crate) backend: Option<Box<dyn Backend>>,
    pub(crate) workers: Option<Workers<D>>,
}

#[derive(Debug)]
pub(crate) struct UnitState<D: Device> {
    pub(crate) residence: Residence<D>,
    /// The plan keeps it.
    pub(crate) resident: bool,
    /// Memory set aside for a resident unit that is not there yet.
    reserved: Option<Home<D>>,
    /// The threads that use it, one entry a lease.
    pub(crate) users: Vec<ThreadId>,
    /// How many calls wait for it.
    wanted: usize,
    /// Slots the engine let go that tensors still hold.
    lingering: Vec<Lingering<D>>,
    /// Why its last load failed; reported to the next who wants it.
    pub(crate) failure: Option<Error>,
    used_since_load: bool,
    /// It was read once, and compared with its checksums.
    verified: bool,
    /// Its fastest use but the first, which warms up more than the unit.
    fastest_use_ns: Option<u64>,
    pub(crate) stats: UnitStats,
}

#[derive(Debug)]
struct Lingering<D: Device> {
    slot: Weak<Slot<D>>,
    /// Its bytes were written to: it is never leased again.
    spoiled: bool,
}

#[derive(Debug, Default)]
pub(crate) enum Residence<D: Device> {
    #[default]
    Absent,
    Loading,
    Present(Arc<Slot<D>>),
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) passes: u64,
    pub(crate) read_bytes: Vec<(ReadPath, u64)>,
    pub(crate) wasted_loads: u64,
    pub(crate) replans: u64,
    /// Time in which at least one read was in flight.
    pub(crate) busy_ns: u64,
}

impl<D: Device> State<D> {
    pub(crate) fn new(
        fixed: &Fixed<D>,
        order: Vec<UnitId>,
        together: &[Vec<UnitId>],
        plan: Plan,
        backend: Box<dyn Backend>,
        workers: Option<Workers<D>>,
    ) -> Self {
        let units = fixed.units.iter().map(|prepared| UnitState::new(prepared.no_stats()));
        let mut this = Self {
            units: units.collect(),
            passes: Passes::new(order.clone()),
            believed: order,
            plan,
            pending_plan: None,
            together: Vec::new(),
            outgrown: false,
            streamed_high_water: 0,
            paused: false,
            counts: Counts::default(),
            starving: HashSet::new(),
            queued: HashSet::new(),
            idle: BTreeSet::new(),
            horizon: 0,
            loads: HashMap::new(),
            next_load: 0,
            queue: VecDeque::new(),
            in_flight: 0,
            busy_since_ns: 0,
            targets: HashMap::new(),
            copying: 0,
            backend: Some(backend),
            workers,
        };
        together.iter().for_each(|set| this.note_together(set));
        this.outgrown = false;
        this.reserve_residents(fixed);
        this
    }

    /// Notes that an operation needs these units at the same time.
    pub(crate) fn note_together(&mut self, units: &[UnitId]) {
        let [_, _, ..] = units else { return };
        let set: Vec<UnitId> = BTreeSet::from_iter(units.iter().copied()).into_iter().collect();
        let includes =
            |larger: &[UnitId], smaller: &[UnitId]| smaller.iter().all(|id| larger.contains(id));
        if set.len() < 2 || self.together.iter().any(|known| includes(known, &set)) {
            return;
        }
        self.together.retain(|known| !includes(&set, known));
        self.together.push(set);
        self.outgrown = true;
    }

    /// How each unit is held now, which may be less than the plan says.
    pub(crate) fn residency(&self) -> Vec<Residency> {
        let held = |unit: &UnitState<D>| {
            if unit.resident { Residency::Resident } else { Residency::Streamed }
        };
        self.units.iter().map(held).collect()
    }

    /// Sets memory aside for what the plan keeps, before anything else is in the pool, so that it
    /// lies together and leaves the ring in one piece.
    fn reserve_residents(&mut self, fixed: &Fixed<D>) {
        for (i, unit) in self.units.iter_mut().enumerate() {
            unit.reserved = None;
            unit.resident = self.plan.residency[i] == Residency::Resident;
            unit.stats.resident = unit.resident;
        }
        for (i, unit) in self.units.iter_mut().enumerate().filter(|(_, unit)| unit.resident) {
            // An empty pool has room for them all. Should a tensor's memory be on its way back only
            // now, the unit gets its memory when it is read.
            unit.reserved = fixed.slots.home(fixed.units[i].layout.len).ok();
        }
    }

    /// Puts the pending plan in force. Returns whether it did: it cannot while anything is in use
    /// or on its way.
    pub(crate) fn apply_pending_plan(&mut self, fixed: &Fixed<D>) -> bool {
        let lingers = self.units.iter_mut().any(|unit| unit.lingering_count() > 0);
        let busy = self.units.iter().any(|unit| match &unit.residence {
            Residence::Absent => false,
            Residence::Loading => true,
            Residence::Present(slot) => !unit.users.is_empty() || Arc::strong_count(slot) > 1,
        });
        if lingers || busy || self.pending_plan.is_none() {
            return false;
        }
        self.plan = self.pending_plan.take().expect("just checked");
        self.believed = self.passes.order().to_vec();
        self.counts.replans += 1;
        self.idle.clear();
        self.horizon = 0;
        for unit in &mut self.units {
            unit.residence = Residence::Absent;
            unit.reserved = None;
        }
        fixed.slots.coalesce();
        self.reserve_residents(fixed);
        true
    }

    /// Bytes read in all.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.counts.read_bytes.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Whether reads are under way or waiting.
    pub(crate) fn is_loading(&self) -> bool {
        !self.loads.is_empty()
    }

    /// Sizes and measured times of all units, for the planner.
    pub(crate) fn demands(&self, fixed: &Fixed<D>) -> Vec<UnitDemand> {
        let demand = |(prepared, unit): (&Prepared, &UnitState<D>)| UnitDemand {
            compute_s: match unit.fastest_use_ns {
                None => guess_compute_s(prepared.slot_bytes),
                Some(ns) => ns as f64 / 1e9,
            },
            ..demand_of(prepared)
        };
        fixed.units.iter().zip(&self.units).map(demand).collect()
    }

    /// The slots of units that are all present, now in use by this thread.
    pub(crate) fn take_slots(&mut self, ids: &[UnitId]) -> Option<Vec<Arc<Slot<D>>>> {
        ids.iter().for_each(|&id| self.revive(id));
        if !self.are_all_present(ids) {
            return None;
        }
        let take = |&id: &UnitId| {
            let unit = &mut self.units[id.index()];
            let Residence::Present(slot) = &unit.residence else { unreachable!("just checked") };
            unit.users.push(std::thread::current().id());
            unit.used_since_load = true;
            Arc::clone(slot)
        };
        Some(ids.iter().map(take).collect())
    }

    /// The units in memory to which writes are found.
    pub(crate) fn watched(&self) -> Vec<(UnitId, Arc<Watched>)> {
        let watched = |(i, unit): (usize, &UnitState<D>)| match &unit.residence {
            Residence::Present(slot) => Some((UnitId(i as u32), Arc::clone(slot.watched()?))),
            _ => None,
        };
        self.units.iter().enumerate().filter_map(watched).collect()
    }

    pub(crate) fn are_all_present(&self, ids: &[UnitId]) -> bool {
        ids.iter().all(|id| matches!(self.units[id.index()].residence, Residence::Present(_)))
    }

    fn is_absent(&self, id: UnitId) -> bool {
        matches!(self.units[id.index()].residence, Residence::Absent)
    }

    pub(crate) fn is_any_absent(&self, ids: &[UnitId]) -> bool {
        ids.iter().any(|&id| self.is_absent(id))
    }

    /// Those of some units that are neither present nor on their way, once each.
    pub(crate) fn absent(&self, ids: &[UnitId]) -> Vec<UnitId> {
        BTreeSet::from_iter(ids.iter().copied().filter(|&id| self.is_absent(id)))
            .into_iter()
            .collect()
    }

    /// Has a unit that was let go be present again, from the memory in which tensors still hold its
    /// bytes.
    fn revive(&mut self, id: UnitId) {
        let unit = &mut self.units[id.index()];
        if !matches!(unit.residence, Residence::Absent) {
            return;
        }
        let held =
            unit.lingering.iter().rposition(|held| !held.spoiled && held.slot.strong_count() > 0);
        let Some(slot) = held.and_then(|at| unit.lingering.remove(at).slot.upgrade()) else {
            return;
        };
        // Memory that was set aside for it is not needed.
        unit.reserved = None;
        unit.residence = Residence::Present(slot);
        self.note_idle(id);
    }

    /// Ends one use of a unit by `user`. What the plan does not keep goes, unless it is expected
    /// again sooner than others that are already here.
    pub(crate) fn release(&mut self, id: UnitId, user: ThreadId, used_ns: u64) {
        let unit = &mut self.units[id.index()];
        if unit.stats.uses > 0 {
            unit.fastest_use_ns = Some(unit.fastest_use_ns.map_or(used_ns, |ns| ns.min(used_ns)));
        }
        unit.stats.uses += 1;
        unit.stats.use_ns += used_ns;
        let users = &mut unit.users;
        let at = users
            .iter()
            .position(|&u| u == user)
            .expect("a lease is released by the name it was taken in");
        users.swap_remove(at);
        self.note_idle(id);
        if self.idle.contains(&id) && self.passes.next_use(id) >= self.horizon {
            self.evict(id);
        }
    }

    /// Notes that a call waits for a unit, which must not be let go until it has it.
    pub(crate) fn want(&mut self, id: UnitId) {
        self.units[id.index()].wanted += 1;
        self.idle.remove(&id);
    }

    /// Ends [`want`](Self::want).
    pub(crate) fn unwant(&mut self, id: UnitId) {
        self.units[id.index()].wanted -= 1;
        self.starving.remove(&std::thread::current().id());
        self.note_idle(id);
    }

    fn note_idle(&mut self, id: UnitId) {
        let unit = &self.units[id.index()];
        let present = matches!(unit.residence, Residence::Present(_));
        if present && unit.users.is_empty() && unit.wanted == 0 && !unit.resident {
            self.idle.insert(id);
        }
    }

    /// Lets go of a unit whose bytes are no longer its own, in use or not, kept by the plan or not.
    pub(crate) fn discard(&mut self, fixed: &Fixed<D>, id: UnitId) {
        if matches!(self.units[id.index()].residence, Residence::Present(_)) {
            self.evict(id);
            let unit = &mut self.units[id.index()];
            // Its place among those that are kept is gone while tensors hold it.
            if unit.resident && unit.lingering_count() == 0 {
                unit.reserved = fixed.slots.home(fixed.units[id.index()].layout.len).ok();
            }
            unit.resident &= unit.reserved.is_some();
            unit.stats.resident = unit.resident;
        }
        self.units[id.index()].lingering.iter_mut().for_each(|held| held.spoiled = true);
    }

    /// Lets go of an idle unit; its memory is free when its last tensor is.
    fn evict(&mut self, id: UnitId) {
        self.idle.remove(&id);
        let unit = &mut self.units[id.index()];
        if let Residence::Present(slot) = std::mem::take(&mut unit.residence) {
            if !unit.used_since_load {
                self.counts.wasted_loads += 1;
            }
            if Arc::strong_count(&slot) > 1 {
                unit.lingering.push(Lingering { slot: Arc::downgrade(&slot), spoiled: false });
            }
        }
    }

    /// Reads ahead, as far as memory goes.
    pub(crate) fn advance(&mut self, fixed: &Fixed<D>, now_ns: u64) {
        if self.backend.is_some() && !self.paused && self.starving.is_empty() {
            let ahead: Vec<UnitId> = self.passes.ahead().take(fixed.prefetch.reach()).collect();
            self.horizon = ahead.len();
            for (distance, &id) in ahead.iter().enumerate() {
                self.revive(id);
                let unit = &self.units[id.index()];
                if !matches!(unit.residence, Residence::Absent) || unit.failure.is_some() {
                    continue;
                }
                let room = match self.room_ahead(fixed, id, distance) {
                    Ok(room) => room,
                    Err(NoRoom::Slots) => {
                        self.horizon = distance;
                        break;
                    }
                    // There may be memory for more when others have arrived.
                    Err(NoRoom::Staging | NoRoom::Device(_)) => break,
                };
                let reads = self.start(fixed, id, room, now_ns);
                self.queue.extend(reads);
            }
        }
        self.pump(fixed, now_ns);
    }

    /// Memory for a unit expected in `distance` visits, at the cost only of units that are expected
    /// later.
    fn room_ahead(
        &mut self,
        fixed: &Fixed<D>,
        id: UnitId,
        distance: usize,
    ) -> Result<Room<D>, NoRoom> {
        loop {
            match self.room(fixed, id) {
                Err(NoRoom::Slots) => {}
                answer => return answer,
            }
            match self.idle.iter().map(|&unit| (self.passes.next_use(unit), unit)).max() {
                Some((next_use, unit)) if next_use > distance => self.evict(unit),
                _ => return Err(NoRoom::Slots),
            }
        }
    }

    fn room(&mut self, fixed: &Fixed<D>, id: UnitId) -> Result<Room<D>, NoRoom> {
        let len = fixed.units[id.index()].layout.len;
        fixed.slots.room(len, &mut self.units[id.index()].reserved)
    }

    fn start(
        &mut self,
        fixed: &Fixed<D>,
        id: UnitId,
        room: Room<D>,
        now_ns: u64,
    ) -> Vec<QueuedRead> {
        let load_id = self.next_load;
        self.next_load = self.next_load.wrapping_add(1);
        let layout = &fixed.units[id.index()].layout;
        let (load, reads) = Load::new(load_id, id, layout, room, fixed.cut, now_ns);
        self.units[id.index()].residence = Residence::Loading;
        let complete = load.is_complete();
        self.loads.insert(load_id, load);
        if complete {
            self.complete(fixed, load_id, now_ns);
        }
        reads
    }

    /// Hands waiting reads to the backend, as many as keep it busy.
    fn pump(&mut self, fixed: &Fixed<D>, now_ns: u64) {
        let Some(backend) = &self.backend else { return };
        // As many again as it works on, so that it never waits for this thread to be scheduled.
        let limit = 2 * backend.capabilities().max_in_flight;
        let mut rejected = Vec::new();
        while self.in_flight < limit
            && let Some(read) = self.queue.pop_front()
        {
            let source = Arc::clone(&fixed.sources[read.file.0 as usize]);
            let request = if read.fill != Fill::Straight {
                let bounce = match fixed
                    .bounces
                    .as_ref()
                    .map(|pool| pool.allocate(fixed.cut.bounce_bytes))
                {
                    Some(Ok(bounce)) => bounce,
                    _ if self.in_flight + self.copying > 0 => {
                        self.queue.push_front(read);
                        break;
                    }
                    // The system still holds them all, after reads that timed out.
                    _ => {
                        let (path, offset) = (source.path().into(), read.offset);
                        let (len, timeout) = (read.required, fixed.timeout);
                        let result = Err(ts_io::Error::TimedOut { path, offset, len, timeout });
                        self.targets.insert(read.token, (read.target, 0..0, read.fill));
                        self.in_flight += 1;
                        rejected.push(Completion {
                            token: read.token,
                            buffers: Vec::new(),
                            result,
                        });
                        continue;
                    }
                };
                let alignment = fixed.cut.alignment as u64;
                let skip = (read.offset % alignment) as usize;
                let stored = skip..skip + read.required;
                self.targets.insert(read.token, (read.target, stored, read.fill));
                let (offset, required) = (read.offset - skip as u64, skip + read.required);
                ReadRequest::new(read.token, source, offset, required, bounce)
            } else {
                ReadRequest::new(read.token, source, read.offset, read.required, read.target)
            };
            if self.in_flight == 0 {
                self.busy_since_ns = now_ns;
            }
            self.in_flight += 1;
            if let Err(r) = backend.submit(request) {
                let ReadRequest { token, buffers, .. } = r.request;
                rejected.push(Completion { token, buffers, result: Err(r.error) });
            }
        }
        for completion in rejected {
            // By way of the loader's queue: the unit's state must not change in the middle of a
            // step.
            let _ = fixed.events.send(Event::Read(completion));
        }
    }

    /// A read ended.
    pub(crate) fn on_read(&mut self, fixed: &Fixed<D>, completion: Completion, now_ns: u64) {
        self.in_flight -= 1;
        if self.in_flight == 0 {
            self.counts.busy_ns += now_ns.saturating_sub(self.busy_since_ns);
        }
        let Completion { token, mut buffers, result } = completion;
        let buffer = buffers.pop();
        let (load_id, part) = split_token(token);
        let load = self.loads.get_mut(&load_id).expect("a read belongs to a load");
        let delivered = match result {
            Ok(transfer) => {
                transfer.paths.iter().for_each(|&(path, bytes)| load.count(path, bytes));
                true
            }
            Err(error) => {
                let prepared = &fixed.units[load.unit.index()];
                load.fail(part, &prepared.unit, &prepared.layout, error);
                false
            }
        };
        match self.targets.remove(&token) {
            None => self.put_back(fixed, load_id, part, buffer, now_ns),
            Some((target, stored, fill)) if delivered => {
                let workers =
                    self.workers.as_ref().expect("there are workers where there are bounces");
                let bounce = buffer.expect("what is delivered is in a buffer");
                self.copying += 1;
                let unit = &self.units[load.unit.index()];
                let verify = unit.is_to_be_verified(fixed.verify);
                workers.submit(
                    Job::Bring { token, bounce, stored, fill, verify, target },
                    unit.wanted > 0,
                );
            }
            Some((target, ..)) => {
                // One that the system still holds goes back to its pool, whence the next read takes
                // it.
                drop(buffer);
                self.put_back(fixed, load_id, part, Some(target), now_ns);
            }
        }
    }

    /// A part that was read aside is in its place.
    pub(crate) fn on_brought(
        &mut self,
        fixed: &Fixed<D>,
        token: u64,
        bounce: Buffer,
        target: Buffer,
        damage: Option<Damage>,
        now_ns: u64,
    ) {
        drop(bounce);
        self.copying -= 1;
        let (load_id, part) = split_token(token);
        if let Some(damage) = damage {
            let load = self.loads.get_mut(&load_id).expect("a part belongs to a load");
            let prepared = &fixed.units[load.unit.index()];
            let file = load.file(part);
            let path = fixed.sources[file.0 as usize].path().to_path_buf();
            load.fail_damaged(part, &prepared.unit, &prepared.layout, path, damage);
        }
        self.put_back(fixed, load_id, part, Some(target), now_ns);
    }

    /// A worker gave a part or a unit up.
    pub(crate) fn on_lost(&mut self, fixed: &Fixed<D>, lost: Lost, now_ns: u64) {
        let load_id = match lost {
            Lost::Part(token) => split_token(token).0,
            Lost::Check(load) => load,
        };
        let load = self.loads.get_mut(&load_id).expect("a job belongs to a load");
        let unit = &fixed.units[load.unit.index()].unit.name;
        load.error.get_or_insert(Error::System(format!(
            "unit `{unit}`: a worker panicked: this is a bug"
        )));
        match lost {
            Lost::Part(token) => {
                self.copying -= 1;
                self.put_back(fixed, load_id, split_token(token).1, None, now_ns);
            }
            Lost::Check(_) => self.settle(fixed, load_id, None, now_ns),
        }
    }

    fn put_back(
        &mut self,
        fixed: &Fixed<D>,
        load_id: u32,
        part: usize,
        buffer: Option<Buffer>,
        now_ns: u64,
    ) {
        let load = self.loads.get_mut(&load_id).expect("a read belongs to a load");
        if load.put_back(part, buffer) {
            self.complete(fixed, load_id, now_ns);
        }
    }

    /// All parts of a unit are back.
    fn complete(&mut self, fixed: &Fixed<D>, load_id: u32, now_ns: u64) {
        let load = self.loads.get_mut(&load_id).expect("just seen");
        let slot = load.join();
        let checks = &fixed.units[load.unit.index()].checks;
        let unit = &self.units[load.unit.index()];
        let verify = !checks.is_empty() && unit.is_to_be_verified(fixed.verify);
        match (&self.workers, slot) {
            (Some(workers), Some(slot)) if verify && load.error.is_none() => {
                let job = Job::Check { load: load_id, slot, checks: Arc::clone(checks) };
                workers.submit(job, unit.wanted > 0);
            }
            (_, slot) => self.settle(fixed, load_id, slot, now_ns),
        }
    }

    /// A unit was compared with its checksums.
    pub(crate) fn on_checked(
        &mut self,
        fixed: &Fixed<D>,
        load_id: u32,
        slot: Buffer,
        mismatch: Option<Mismatch>,
        now_ns: u64,
    ) {
        let load = self.loads.get_mut(&load_id).expect("a check belongs to a load");
        if let Some(Mismatch { tensor, range }) = mismatch {
            let unit = &fixed.units[load.unit.index()].unit;
            let part = unit.tensors[tensor].entry.parts[0];
            load.error = Some(Error::Corrupt {
                unit: unit.name.clone(),
                tensor: unit.tensors[tensor].name.clone(),
                path: fixed.sources[part.file.0 as usize].path().to_path_buf(),
                offset: part.offset + range.start as u64,
                len: range.len() as u64,
                what: "do not have their checksum".into(),
            });
        }
        self.settle(fixed, load_id, Some(slot), now_ns);
    }

    /// A unit was read, well or not; `None` when the system still holds what it was read to.
    fn settle(&mut self, fixed: &Fixed<D>, load_id: u32, slot: Option<Buffer>, now_ns: u64) {
        let load = self.loads.get_mut(&load_id).expect("what is read belongs to a load");
        match (slot, load.stays.take()) {
            (Some(slot), Some(home)) if load.error.is_none() => {
                fixed.slots.upload(load_id, slot, home);
            }
            (_, Some(home)) => self.finish(fixed, load_id, Some(Home::Device(home)), now_ns),
            (slot, None) => self.finish(fixed, load_id, slot.map(Home::Host), now_ns),
        }
    }

    /// A unit is on its device, or its copy failed.
    pub(crate) fn on_uploaded(&mut self, fixed: &Fixed<D>, uploaded: Uploaded<D>, now_ns: u64) {
        let Uploaded { load: load_id, home, result } = uploaded;
        let load = self.loads.get_mut(&load_id).expect("an upload belongs to a load");
        if let Err(error) = result {
            load.error = Some(device_error(&fixed.units[load.unit.index()].unit.name, error));
        }
        self.finish(fixed, load_id, Some(Home::Device(home)), now_ns);
    }

    fn finish(&mut self, fixed: &Fixed<D>, load_id: u32, home: Option<Home<D>>, now_ns: u64) {
        let mut load = self.loads.remove(&load_id).expect("it ends once");
        let id = load.unit;
        let unit = &mut self.units[id.index()];
        for &(path, bytes) in &load.read_bytes {
            add(&mut self.counts.read_bytes, path, bytes);
            unit.stats.read_bytes += bytes;
        }
        unit.stats.load_ns += now_ns - load.started_ns;
        unit.stats.loads += 1;
        if let Some(error) = load.error.take() {
            unit.residence = Residence::Absent;
            unit.failure = Some(error);
            unit.reserved = home.filter(|_| unit.resident);
            return;
        }
        let home = home.expect("a read that timed out is an error");
        let keep = self.plan.residency[id.index()] == Residency::Resident;
        let slot = fixed.slots.slot(home, keep, fixed.events.clone());
        unit.residence = Residence::Present(Arc::new(slot));
        (unit.used_since_load, unit.verified) = (false, fixed.verify != Verify::Never);
        self.note_idle(id);
    }
}

impl<D: Device> UnitState<D> {
    fn new(stats: UnitStats) -> Self {
        Self {
            residence: Residence::Absent,
            resident: false,
            reserved: None,
            users: Vec::new(),
            wanted: 0,
            lingering: Vec::new(),
            failure: None,
            used_since_load: false,
            verified: false,
            fastest_use_ns: None,
            stats,
        }
    }

    fn is_to_be_verified(&self, verify: Verify) -> bool {
        match verify {
            Verify::EveryRead => true,
            Verify::Once => !self.verified,
            Verify::Never => false,
        }
    }

    fn lingering_count(&mut self) -> usize {
        self.lingering.retain(|held| held.slot.strong_count() > 0);
        self.lingering.len()
    }
}

/// What is known of a unit before it was ever used.
pub(crate) fn demand_of(prepared: &Prepared) -> UnitDemand {
    UnitDemand {
        name: prepared.unit.name.clone(),
        slot_bytes: prepared.slot_bytes,
        read_bytes: prepared.layout.read_bytes(),
        compute_s: guess_compute_s(prepared.slot_bytes),
    }
}

/// Matrix-vector products, the common case, go over a unit's weights once at the speed of memory.
fn guess_compute_s(bytes: usize) -> f64 {
    const MEMORY_BYTES_PER_S: f64 = 10e9;
    bytes as f64 / MEMORY_BYTES_PER_S
}
