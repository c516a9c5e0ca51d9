// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of one unit: where its bytes are, and who uses them. All transitions between the
//! places are in this file.
//!
//! Two answers are independent. The [presence](Presence) says whether the unit can be used now. The
//! [home](Home) says where its bytes stay between uses; the plan chooses it, and short memory can
//! make it storage.

use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use ts_pool::{Buffer, SharedBuffer};
use ts_streams::Device;

use crate::Error;
use crate::config::Verify;
use crate::encoding::is_worthwhile;
use crate::kept_image::KeptImage;
use crate::plan::Residency;
use crate::prepared::PreparedUnit;
use crate::slot_pool::Slot;
use crate::stats::UnitStats;
use crate::unit_memory::UnitMemory;

/// The state of one unit.
#[derive(Debug)]
pub(crate) struct UnitState<D: Device> {
    presence: Presence<D>,
    home: Home<D>,
    /// The memory of earlier loads, evicted while leases or tensors still referenced it.
    evicted: Vec<EvictedMemory<D>>,
    /// How much memory the unit takes when it is encoded.
    pub(super) estimate: Estimate,
    /// The threads that use the unit, one entry for each lease.
    pub(crate) users: Vec<ThreadId>,
    /// The threads that wait for the unit, one entry for each time that a call names it.
    pub(super) waiters: Vec<ThreadId>,
    /// The error of the most recent load, if it failed. A call that waits for the unit takes this
    /// error.
    pub(crate) failure: Option<Error>,
    pub(super) used_since_load: bool,
    /// Whether a load of the unit has matched its checksums.
    verified: bool,
    /// The duration of the shortest use, in nanoseconds. The first use does not count, because it
    /// also warms up caches.
    pub(super) fastest_use_ns: Option<u64>,
    pub(crate) stats: UnitStats,
}

/// Whether a unit is in memory.
#[derive(Debug)]
enum Presence<D: Device> {
    Absent,
    Loading,
    Present(Arc<UnitMemory<D>>),
}

/// Where the bytes of a unit stay between its uses.
#[derive(Debug)]
enum Home<D: Device> {
    /// In storage: they are read for each use.
    Storage,
    /// In a slot of the unit's own: they are read once.
    Slot(OwnSlot<D>),
    /// In host memory, encoded or as they are stored: they are decoded or copied for each use.
    Host(HostCopy),
}

/// The slot of a resident unit.
#[derive(Debug)]
enum OwnSlot<D: Device> {
    /// The unit is in it, or is being loaded into it. If the unit is absent, there was no memory
    /// for the slot, and the next load allocates it.
    Taken,
    /// It is empty until the unit is loaded.
    Reserved(Slot<D>),
    /// It is empty, and the unit is in memory, or being loaded, like a streamed one.
    Postponed(Slot<D>),
}

/// The bytes of a unit in host memory.
#[derive(Debug)]
enum HostCopy {
    /// There is no memory for them. The next load allocates it, if it can.
    Missing,
    /// There is memory for them.
    Reserved(Buffer),
    /// They were read.
    Filled {
        image: KeptImage,
        /// Whether other processes can share them.
        shared: bool,
        /// Whether another process has read them, and this one has not decoded them yet.
        unchecked: bool,
    },
}

/// How much memory a unit takes when it is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Estimate {
    /// Not known yet.
    Unknown,
    /// This much, in bytes.
    Bytes(usize),
    /// Too much to be worth it.
    TooMuch,
}

impl Estimate {
    /// Returns the estimate that a unit of `slot_bytes` bytes needs `needed` bytes.
    pub(super) fn new(needed: usize, slot_bytes: usize) -> Self {
        if is_worthwhile(needed, slot_bytes) { Self::Bytes(needed) } else { Self::TooMuch }
    }
}

/// Memory of an evicted unit that leases or tensors may still reference.
#[derive(Debug)]
struct EvictedMemory<D: Device> {
    memory: Weak<UnitMemory<D>>,
    /// Whether the bytes were written to. If so, the memory must not be leased again.
    modified: bool,
}

impl<D: Device> UnitState<D> {
    pub(super) fn new(stats: UnitStats) -> Self {
        Self {
            presence: Presence::Absent,
            home: Home::Storage,
            evicted: Vec::new(),
            estimate: Estimate::Unknown,
            users: Vec::new(),
            waiters: Vec::new(),
            failure: None,
            used_since_load: false,
            verified: false,
            fastest_use_ns: None,
            stats,
        }
    }

    // Presence

    /// Returns the memory of the unit if it is present.
    pub(super) fn memory(&self) -> Option<&Arc<UnitMemory<D>>> {
        match &self.presence {
            Presence::Present(memory) => Some(memory),
            Presence::Absent | Presence::Loading => None,
        }
    }

    pub(crate) fn is_present(&self) -> bool {
        self.memory().is_some()
    }

    /// Returns whether the unit is neither present nor being loaded.
    pub(super) fn is_absent(&self) -> bool {
        matches!(self.presence, Presence::Absent)
    }

    pub(super) fn is_loading(&self) -> bool {
        matches!(self.presence, Presence::Loading)
    }

    /// Returns whether the unit is present, and no thread uses or waits for it.
    pub(super) fn is_unused(&self) -> bool {
        self.is_present() && self.users.is_empty() && self.waiters.is_empty()
    }

    /// Returns whether the unit is present, and nothing but the engine references its memory.
    pub(super) fn is_unreferenced(&self) -> bool {
        self.memory().is_some_and(|memory| Arc::strong_count(memory) == 1)
    }

    /// Returns whether the unit is being loaded, in use or referenced.
    pub(super) fn is_busy(&self) -> bool {
        match &self.presence {
            Presence::Absent => false,
            Presence::Loading => true,
            Presence::Present(_) => !self.users.is_empty() || !self.is_unreferenced(),
        }
    }

    /// Begins to load the unit.
    pub(super) fn begin_load(&mut self) {
        self.presence = Presence::Loading;
    }

    /// Ends a load that succeeded.
    pub(super) fn end_load(&mut self, memory: Arc<UnitMemory<D>>, verified: bool) {
        self.presence = Presence::Present(memory);
        (self.used_since_load, self.verified) = (false, verified);
    }

    /// Ends a load that did not succeed, or did not begin. Takes back its slot if that is the
    /// unit's own.
    pub(super) fn abandon_load(&mut self, slot: Option<Slot<D>>) {
        self.presence = Presence::Absent;
        let Home::Slot(own) = &mut self.home else { return };
        *own = match (std::mem::replace(own, OwnSlot::Taken), slot) {
            (OwnSlot::Postponed(own), _) => OwnSlot::Reserved(own),
            (_, Some(slot)) => OwnSlot::Reserved(slot),
            (_, None) => OwnSlot::Taken,
        };
    }

    /// Removes the unit from memory. Returns its memory if it was present. If something else
    /// references that, [`restore_evicted`](Self::restore_evicted) can make the unit present again.
    pub(super) fn take_present(&mut self) -> Option<Arc<UnitMemory<D>>> {
        let memory = Arc::clone(self.memory()?);
        self.presence = Presence::Absent;
        self.keep_slot_reserved();
        if Arc::strong_count(&memory) > 1 {
            let memory = Arc::downgrade(&memory);
            self.evicted.push(EvictedMemory { memory, modified: false });
        }
        Some(memory)
    }

    /// Makes an absent unit present again if tensors still reference its unmodified memory. Returns
    /// whether they do.
    pub(super) fn restore_evicted(&mut self) -> bool {
        if !self.is_absent() {
            return false;
        }
        let usable =
            |evicted: &EvictedMemory<D>| !evicted.modified && evicted.memory.strong_count() > 0;
        let index = self.evicted.iter().rposition(usable);
        let Some(memory) = index.and_then(|i| self.evicted.remove(i).memory.upgrade()) else {
            return false;
        };
        self.postpone();
        self.presence = Presence::Present(memory);
        true
    }

    /// Notes that the memory of earlier loads was written to.
    pub(super) fn set_evicted_modified(&mut self) {
        self.evicted.iter_mut().for_each(|evicted| evicted.modified = true);
    }

    /// Returns how many evicted copies of the unit are still referenced by leases or tensors.
    pub(super) fn referenced_evictions(&mut self) -> usize {
        self.evicted.retain(|evicted| evicted.memory.strong_count() > 0);
        self.evicted.len()
    }

    /// Returns how many copies of the unit are referenced by tensors alone.
    pub(super) fn copies_in_tensors(&mut self) -> usize {
        let present = self.users.is_empty() && self.is_present() && !self.is_unreferenced();
        self.referenced_evictions() + usize::from(present)
    }

    // Home

    /// Gives the unit the home of a plan. Bytes in memory stay there if the home stays the same,
    /// and reserved memory is freed.
    pub(super) fn settle(&mut self, residency: Residency) {
        let home = match (residency, std::mem::replace(&mut self.home, Home::Storage)) {
            (Residency::Streamed, _) => Home::Storage,
            (Residency::Resident, _) => Home::Slot(OwnSlot::Taken),
            (_, Home::Host(copy @ HostCopy::Filled { .. })) => Home::Host(copy),
            (Residency::Compressed | Residency::Host, _) => Home::Host(HostCopy::Missing),
        };
        self.home = home;
        self.stats.resident = residency == Residency::Resident;
        self.stats.compressed = residency == Residency::Compressed;
        self.stats.on_host = residency == Residency::Host;
    }

    /// Returns where the unit stays between its uses.
    pub(super) fn residency(&self) -> Residency {
        match self.home {
            Home::Storage => Residency::Streamed,
            Home::Slot(_) => Residency::Resident,
            Home::Host(_) if self.stats.on_host => Residency::Host,
            Home::Host(_) => Residency::Compressed,
        }
    }

    pub(super) fn is_resident(&self) -> bool {
        matches!(self.home, Home::Slot(_))
    }

    /// Returns whether the unit is kept compressed, or on the host for a device with its own
    /// memory.
    pub(super) fn is_on_host(&self) -> bool {
        matches!(self.home, Home::Host(_))
    }

    /// Returns whether the unit stays in memory where it is.
    pub(crate) fn is_kept(&self) -> bool {
        matches!(self.home, Home::Slot(OwnSlot::Taken | OwnSlot::Reserved(_)))
    }

    /// Returns whether the unit is resident, and no thread uses or waits for its slot.
    pub(super) fn is_evictable(&self) -> bool {
        let Home::Slot(own) = &self.home else { return false };
        let is_free = match (own, &self.presence) {
            (OwnSlot::Postponed(_), _) => return true,
            (own, Presence::Absent) => matches!(own, OwnSlot::Reserved(_)),
            (_, Presence::Loading) => false,
            (_, Presence::Present(_)) => self.is_unreferenced(),
        };
        is_free && self.users.is_empty() && self.waiters.is_empty()
    }

    /// Makes the unit a streamed one. Returns its slot if that is empty. Bytes on the host are
    /// freed; the memory of a unit that is present stays until it is evicted.
    pub(super) fn demote(&mut self) -> Option<Slot<D>> {
        match self.leave_home() {
            Home::Slot(OwnSlot::Reserved(slot) | OwnSlot::Postponed(slot)) => Some(slot),
            Home::Slot(OwnSlot::Taken) | Home::Storage | Home::Host(_) => None,
        }
    }

    /// Makes the unit a streamed one. Returns the memory that it had on the host.
    pub(super) fn take_from_host(&mut self) -> Option<SharedBuffer> {
        match self.leave_home() {
            Home::Host(HostCopy::Filled { image, .. }) => Some(image.bytes),
            Home::Host(HostCopy::Reserved(memory)) => Some(memory.freeze()),
            Home::Host(HostCopy::Missing) | Home::Storage | Home::Slot(_) => None,
        }
    }

    fn leave_home(&mut self) -> Home<D> {
        (self.stats.resident, self.stats.compressed, self.stats.on_host) = (false, false, false);
        std::mem::replace(&mut self.home, Home::Storage)
    }

    /// Frees all memory of the unit, except its slot or its bytes on the host if they `stay`.
    pub(super) fn empty(&mut self, slot_stays: bool, image_stays: bool) {
        if !slot_stays || !self.is_kept() {
            self.presence = Presence::Absent;
        }
        match &mut self.home {
            Home::Storage => {}
            Home::Slot(own) => *own = OwnSlot::Taken,
            Home::Host(HostCopy::Filled { .. }) if image_stays => {}
            Home::Host(copy) => *copy = HostCopy::Missing,
        }
    }

    // The slot of a resident unit

    /// Returns the unit's own slot if that is empty.
    pub(super) fn reserved_slot(&self) -> Option<&Slot<D>> {
        match &self.home {
            Home::Slot(OwnSlot::Reserved(slot) | OwnSlot::Postponed(slot)) => Some(slot),
            Home::Slot(OwnSlot::Taken) | Home::Storage | Home::Host(_) => None,
        }
    }

    /// Keeps an empty slot for a resident unit that is absent.
    pub(super) fn reserve_slot(&mut self, slot: Slot<D>) {
        if let Home::Slot(own) = &mut self.home {
            *own = OwnSlot::Reserved(slot);
        }
    }

    /// Returns the empty slot of an absent unit, to load the unit into it.
    pub(super) fn take_slot(&mut self) -> Option<Slot<D>> {
        let Home::Slot(own @ OwnSlot::Reserved(_)) = &mut self.home else { return None };
        match std::mem::replace(own, OwnSlot::Taken) {
            OwnSlot::Reserved(slot) => Some(slot),
            OwnSlot::Taken | OwnSlot::Postponed(_) => None,
        }
    }

    /// Makes the unit use other memory than its own slot until it is evicted, if that is empty.
    pub(super) fn postpone(&mut self) {
        if let Some(slot) = self.take_slot() {
            self.home = Home::Slot(OwnSlot::Postponed(slot));
        }
    }

    /// Reverses [`postpone`](Self::postpone).
    fn keep_slot_reserved(&mut self) {
        if let Home::Slot(own @ OwnSlot::Postponed(_)) = &mut self.home
            && let OwnSlot::Postponed(slot) = std::mem::replace(own, OwnSlot::Taken)
        {
            *own = OwnSlot::Reserved(slot);
        }
    }

    // The bytes on the host

    /// Returns the bytes of the unit on the host, once they were read.
    pub(super) fn image(&self) -> Option<&KeptImage> {
        match &self.home {
            Home::Host(HostCopy::Filled { image, .. }) => Some(image),
            Home::Host(_) | Home::Storage | Home::Slot(_) => None,
        }
    }

    /// Returns whether another process has read the bytes on the host, and this one has not decoded
    /// them yet.
    pub(super) fn has_unchecked_image(&self) -> bool {
        matches!(self.home, Home::Host(HostCopy::Filled { unchecked: true, .. }))
    }

    /// Returns whether there is memory on the host for the unit.
    pub(super) fn occupies_host(&self) -> bool {
        matches!(self.home, Home::Host(HostCopy::Filled { .. } | HostCopy::Reserved(_)))
    }

    /// Returns the memory for the bytes on the host if it is empty.
    pub(super) fn take_image_memory(&mut self) -> Option<Buffer> {
        let Home::Host(copy @ HostCopy::Reserved(_)) = &mut self.home else { return None };
        match std::mem::replace(copy, HostCopy::Missing) {
            HostCopy::Reserved(memory) => Some(memory),
            HostCopy::Missing | HostCopy::Filled { .. } => None,
        }
    }

    /// Keeps empty memory for the bytes on the host, if they are to be there and are not.
    pub(super) fn reserve_image(&mut self, memory: Buffer) {
        if let Home::Host(copy @ (HostCopy::Missing | HostCopy::Reserved(_))) = &mut self.home {
            *copy = HostCopy::Reserved(memory);
        }
    }

    /// Keeps the bytes on the host, if they are to be there.
    pub(super) fn keep_image(&mut self, new: KeptImage) {
        match &mut self.home {
            Home::Host(HostCopy::Filled { image, .. }) => *image = new,
            Home::Host(copy) => {
                *copy = HostCopy::Filled { image: new, shared: false, unchecked: false };
            }
            Home::Storage | Home::Slot(_) => {}
        }
    }

    /// Notes that other processes can share the bytes on the host. `unchecked` says whether one of
    /// them has read them.
    pub(super) fn set_shared_image(&mut self, is_unchecked: bool) {
        if let Home::Host(HostCopy::Filled { shared, unchecked, .. }) = &mut self.home {
            (*shared, *unchecked) = (true, is_unchecked);
        }
    }

    /// Notes that the bytes on the host were decoded without an error.
    pub(super) fn set_image_checked(&mut self) {
        if let Home::Host(HostCopy::Filled { unchecked, .. }) = &mut self.home {
            *unchecked = false;
        }
    }

    /// Frees the bytes on the host. The next load reads them again.
    pub(super) fn drop_image(&mut self) {
        if let Home::Host(copy) = &mut self.home {
            *copy = HostCopy::Missing;
        }
    }

    /// Makes a unit whose bytes are to be on the host, and were not read, a streamed one.
    pub(super) fn give_up_image(&mut self) {
        if self.is_on_host() && self.image().is_none() {
            drop(self.leave_home());
        }
    }

    /// Returns the memory that the compressed unit takes, in bytes; `None` if it is not known, or
    /// if the unit does not shrink.
    pub(crate) fn image_bytes(&self, prepared: &PreparedUnit) -> Option<usize> {
        let encoded = match self.estimate {
            Estimate::Bytes(bytes) => Some(bytes),
            Estimate::Unknown | Estimate::TooMuch => None,
        };
        prepared.image.as_ref().map(|image| image.bytes()).or(encoded)
    }

    // Uses

    pub(super) fn needs_verification(&self, verify: Verify) -> bool {
        match verify {
            Verify::EveryRead => true,
            Verify::Once => !self.verified,
            Verify::Never => false,
        }
    }

    pub(super) fn count_use(&mut self, used_ns: u64) {
        if self.stats.uses > 0 {
            self.fastest_use_ns = Some(self.fastest_use_ns.map_or(used_ns, |ns| ns.min(used_ns)));
        }
        self.stats.uses += 1;
        self.stats.use_ns += used_ns;
    }

    /// Returns the statistics of the unit.
    pub(crate) fn snapshot(&self) -> UnitStats {
        let present = self.is_present();
        let shared_slot = present && self.is_resident() && self.stats.shared;
        let shared_image = matches!(self.home, Home::Host(HostCopy::Filled { shared: true, .. }));
        UnitStats { present, shared: shared_slot || shared_image, ..self.stats.clone() }
    }
}

#[cfg(test)]
mod tests;
