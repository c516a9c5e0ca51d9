// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random events drive a unit, beside a model of which load is in memory and where the unit stays.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use proptest::prelude::*;
use ts_pool::{BLOCK_ALIGN, Budget, Buffer};
use ts_streams::CpuDevice;

use crate::event::Event;
use crate::image::ImageLayout;
use crate::kept_image::KeptImage;
use crate::plan::Residency;
use crate::slot_pool::{Slot, SlotPool};
use crate::stats::UnitStats;
use crate::unit_memory::UnitMemory;

use super::UnitState;

/// What can happen to a unit. An event that cannot happen in a state is skipped.
#[derive(Debug, Clone, Copy)]
enum Step {
    Settle(Residency),
    ReserveSlot,
    ReserveImage,
    Load { elsewhere: bool },
    EndLoad,
    AbandonLoad,
    KeepImage,
    DropImage,
    GiveUpImage,
    Reference,
    Release,
    Evict,
    Restore,
    Modify,
    Demote,
    TakeFromHost,
}

fn step() -> impl Strategy<Value = Step> {
    use Residency::{Compressed, Host, Resident, Streamed};
    let residency = prop::sample::select(vec![Streamed, Resident, Resident, Compressed, Host]);
    let others = vec![
        Step::ReserveSlot,
        Step::ReserveImage,
        Step::AbandonLoad,
        Step::KeepImage,
        Step::DropImage,
        Step::GiveUpImage,
        Step::Reference,
        Step::Release,
        Step::Evict,
        Step::Restore,
        Step::Modify,
        Step::Demote,
        Step::TakeFromHost,
    ];
    prop_oneof![
        3 => residency.prop_map(Step::Settle),
        4 => any::<bool>().prop_map(|elsewhere| Step::Load { elsewhere }),
        4 => Just(Step::EndLoad),
        13 => prop::sample::select(others),
    ]
}

struct World {
    slots: SlotPool<CpuDevice>,
    events: Sender<Event<CpuDevice>>,
    unit: UnitState<CpuDevice>,
    /// The slot of a load that runs.
    loading: Option<Slot<CpuDevice>>,
    /// What leases and tensors reference.
    held: Vec<Arc<UnitMemory<CpuDevice>>>,
    loads: u8,
    // The model.
    residency: Residency,
    /// The number of the load that is in memory.
    present: Option<u8>,
    /// The loads that were evicted while they were referenced, and whether they were written to.
    evicted: Vec<(u8, bool)>,
}

/// Returns the number of the load whose bytes these are.
fn load_of(memory: &UnitMemory<CpuDevice>) -> u8 {
    memory.on_host().unwrap()[0]
}

impl World {
    fn new() -> Self {
        let bytes = 64 * BLOCK_ALIGN;
        Self {
            slots: SlotPool::on_host(&Budget::new(bytes), bytes, false).unwrap(),
            events: channel().0,
            unit: UnitState::new(UnitStats::default()),
            loading: None,
            held: Vec::new(),
            loads: 0,
            residency: Residency::Streamed,
            present: None,
            evicted: Vec::new(),
        }
    }

    fn buffer(&self) -> Buffer {
        self.slots.host.allocate(BLOCK_ALIGN).unwrap()
    }

    fn is_held(&self, load: u8) -> bool {
        self.held.iter().any(|memory| load_of(memory) == load)
    }

    fn evict(&mut self) {
        drop(self.unit.take_present());
        self.evicted.extend(
            self.present.take().filter(|&load| self.is_held(load)).map(|load| (load, false)),
        );
    }

    fn run(&mut self, step: Step) {
        match step {
            // Plans change only while nothing loads, uses or references units.
            Step::Settle(residency) if !self.unit.is_busy() && self.held.is_empty() => {
                let (stays, kept) = (residency == self.residency, self.unit.is_kept());
                let had_image = self.unit.image().is_some();
                self.unit.empty(stays, stays);
                self.unit.settle(residency);
                self.present.take_if(|_| !stays || !kept);
                self.residency = residency;
                assert_eq!(self.unit.image().is_some(), stays && had_image);
            }
            Step::ReserveSlot if self.unit.is_resident() && self.unit.is_absent() => {
                let slot = self.unit.take_slot().unwrap_or_else(|| Slot::Host(self.buffer()));
                self.unit.reserve_slot(slot);
                assert!(self.unit.reserved_slot().is_some());
            }
            Step::ReserveImage => self.unit.reserve_image(self.buffer()),
            Step::Load { elsewhere } if self.unit.is_absent() => {
                if elsewhere {
                    self.unit.postpone();
                }
                let slot = self.unit.take_slot().unwrap_or_else(|| Slot::Host(self.buffer()));
                self.unit.begin_load();
                self.loading = Some(slot);
            }
            Step::EndLoad => {
                let Some(Slot::Host(mut buffer)) = self.loading.take() else { return };
                self.loads += 1;
                buffer[0] = self.loads;
                let kept = self.unit.is_kept();
                let memory = self.slots.loaded(Slot::Host(buffer), kept, self.events.clone());
                self.unit.end_load(Arc::new(memory), true);
                self.present = Some(self.loads);
            }
            Step::AbandonLoad if self.loading.is_some() => {
                self.unit.abandon_load(self.loading.take());
                assert!(self.unit.is_absent());
                assert_eq!(self.unit.reserved_slot().is_some(), self.unit.is_resident());
            }
            Step::KeepImage => {
                let memory = self.unit.take_image_memory().unwrap_or_else(|| self.buffer());
                let layout = ImageLayout { parts: Vec::new(), len: BLOCK_ALIGN, is_slot: true };
                self.unit.keep_image(KeptImage::new(memory.freeze(), Arc::new(layout)));
                assert_eq!(self.unit.image().is_some(), self.unit.is_on_host());
            }
            Step::DropImage => self.unit.drop_image(),
            Step::GiveUpImage => {
                if self.unit.is_on_host() && self.unit.image().is_none() {
                    self.residency = Residency::Streamed;
                }
                self.unit.give_up_image();
            }
            Step::Reference => self.held.extend(self.unit.memory().cloned()),
            Step::Release => drop(self.held.pop()),
            Step::Evict => self.evict(),
            Step::Restore => {
                let usable = |&(load, modified): &(u8, bool)| !modified && self.is_held(load);
                let expected = self.evicted.iter().rposition(usable);
                let expected = expected.filter(|_| self.unit.is_absent());
                assert_eq!(self.unit.restore_evicted(), expected.is_some());
                let restored = expected.map(|at| self.evicted.remove(at).0);
                self.present = self.present.or(restored);
            }
            Step::Modify => {
                self.unit.set_evicted_modified();
                self.evicted.iter_mut().for_each(|(_, modified)| *modified = true);
            }
            Step::Demote if self.unit.is_evictable() => {
                if self.unit.is_kept() {
                    self.evict();
                }
                drop(self.unit.demote());
                self.residency = Residency::Streamed;
            }
            Step::TakeFromHost if self.unit.occupies_host() => {
                drop(self.unit.take_from_host());
                self.residency = Residency::Streamed;
            }
            _ => {}
        }
    }

    /// Compares the unit with the model, and its memory with what the pool has given.
    fn check(&mut self) {
        let unit = &self.unit;
        assert_eq!(unit.residency(), self.residency);
        assert_eq!(unit.memory().map(|memory| load_of(memory)), self.present);
        assert_eq!(unit.is_loading(), self.loading.is_some());
        assert_eq!(unit.is_absent(), self.loading.is_none() && self.present.is_none());
        assert!(unit.is_resident() || !unit.is_kept());
        assert!(unit.is_resident() || unit.reserved_slot().is_none());
        // Only what is in other memory postpones the use of the unit's own slot, which is empty.
        assert!(!unit.is_absent() || unit.is_kept() == unit.is_resident());
        assert!(unit.is_absent() || !unit.is_kept() || unit.reserved_slot().is_none());
        let live: BTreeSet<u8> =
            self.held.iter().chain(unit.memory()).map(|m| load_of(m)).collect();
        let blocks = live.len()
            + usize::from(self.loading.is_some())
            + usize::from(unit.reserved_slot().is_some())
            + usize::from(unit.occupies_host());
        assert_eq!(self.slots.host.stats().in_use_bytes, blocks * BLOCK_ALIGN);
        let evicted = self.evicted.iter().filter(|&&(load, _)| self.is_held(load)).count();
        assert_eq!(self.unit.referenced_evictions(), evicted);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn the_bytes_of_a_unit_are_where_it_says(steps in prop::collection::vec(step(), 0..200)) {
        let mut world = World::new();
        for step in steps {
            world.run(step);
            world.check();
        }
    }
}
