// SPDX-License-Identifier: MIT OR Apache-2.0

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const ONLY: Owner = Owner(0);

#[test]
fn bins_are_ordered_by_size() {
    let mut last = 0;
    for len in 1..70_000u32 {
        let bin = bin_of(len);
        assert!(bin == last || bin == last + 1, "{len}");
        last = bin;
        assert!(bin_at_least(len) >= bin);
        assert!(bin_of(len.next_power_of_two()) >= bin_at_least(len), "{len}");
    }
    assert!(bin_of(u32::MAX) < BIN_COUNT - 1);
}

#[test]
fn an_exact_fit_is_found() {
    let mut a = OffsetAllocator::new(1733);
    let id = a.allocate(1733, ONLY).unwrap();
    assert!(a.allocate(1, ONLY).is_none());
    assert!(a.release(id));
    assert!(!a.release(id), "the block is already free");
    let again = a.allocate(1733, ONLY).unwrap();
    assert_eq!(a.block_info(again).unwrap().offset, 0);
}

/// The best-fit policy as a reference: it allocates the smallest free block that is long enough.
#[derive(Default)]
struct BestFit {
    by_offset: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    end: u64,
}

impl BestFit {
    fn allocate(&mut self, len: u64) -> u64 {
        let found = self.by_len.range((len, 0)..).next().copied();
        let (have, offset) = found.unwrap_or_else(|| {
            // Extends the heap. Uses the free block at its end, if there is one.
            let last = self.by_offset.last_key_value().filter(|(at, have)| *at + *have == self.end);
            last.map_or((0, self.end), |(at, have)| (*have, *at))
        });
        if have > 0 {
            self.remove(offset, have);
        }
        self.end = self.end.max(offset + len);
        if have > len {
            self.insert(offset + len, have - len);
        }
        offset
    }

    fn release(&mut self, mut offset: u64, mut len: u64) {
        if let Some(&after) = self.by_offset.get(&(offset + len)) {
            self.remove(offset + len, after);
            len += after;
        }
        let before = self.by_offset.range(..offset).next_back().map(|(&at, &have)| (at, have));
        if let Some((at, have)) = before.filter(|(at, have)| at + have == offset) {
            self.remove(at, have);
            (offset, len) = (at, have + len);
        }
        self.insert(offset, len);
    }

    fn insert(&mut self, offset: u64, len: u64) {
        self.by_offset.insert(offset, len);
        self.by_len.insert((len, offset));
    }

    fn remove(&mut self, offset: u64, len: u64) {
        self.by_offset.remove(&offset);
        self.by_len.remove(&(len, offset));
    }
}

/// Runs the random workload of RMM's benchmark: sizes up to 1 MiB, and allocations and frees with
/// equal probability.
#[test]
fn memory_use_is_within_ten_percent_of_best_fit() {
    for (seed, count) in [(1u64, 1000), (2, 10_000), (3, 100_000)] {
        let (mut ours, mut best, mut end) =
            (OffsetAllocator::new(u32::MAX - 1), BestFit::default(), 0);
        let (mut live, mut state) = (Vec::new(), seed);
        let mut below = |n: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let mut allocated = 0;
        while allocated < count {
            if live.is_empty() || below(2) == 0 {
                let len = 1 + below((1 << 20) / 512);
                let block = ours.allocate(len as u32, ONLY).unwrap();
                let info = ours.block_info(block).unwrap();
                end = end.max(u64::from(info.offset) + len);
                live.push((block, best.allocate(len), len));
                allocated += 1;
            } else {
                let (block, offset, len) = live.swap_remove(below(live.len() as u64) as usize);
                ours.release(block);
                best.release(offset, len);
            }
        }
        let ratio = end as f64 / best.end as f64;
        println!("{count} allocations: {ratio:.3} times the memory of best fit");
        assert!(ratio <= 1.1, "{count} allocations: {ratio} times the memory of best fit");
    }
}

/// The reference model. For each granule of each range, it stores the owner if the granule is free,
/// and `None` if the granule is allocated.
type Oracle = Vec<Vec<Option<Owner>>>;

/// Returns the length of the longest run of free granules of an owner, or of any owner.
fn longest(oracle: &Oracle, owner: Option<Owner>) -> u32 {
    let runs = oracle.iter().flat_map(|range| range.chunk_by(|a, b| a == b));
    let free = runs.filter(|run| run[0].is_some() && (owner.is_none() || run[0] == owner));
    free.map(<[_]>::len).max().unwrap_or(0) as u32
}

#[derive(Debug, Clone)]
enum Step {
    Allocate { len: u32, owner: u16 },
    Steal { len: u32, owner: u16, keep: bool },
    Release(usize),
    ReleaseSized(usize),
    ReleaseAll { owner: u16 },
    Give { owner: u16 },
    AddRange { len: u32, owner: u16 },
    RemoveRanges,
}

fn step() -> impl Strategy<Value = Step> {
    let owner = 0..3u16;
    prop_oneof![
        4 => (1..80u32, owner.clone()).prop_map(|(len, owner)| Step::Allocate { len, owner }),
        // These sizes repeat, so that quick lists are used.
        8 => (prop::sample::select(vec![3, 7, 20]), owner.clone())
            .prop_map(|(len, owner)| Step::Allocate { len, owner }),
        4 => any::<usize>().prop_map(Step::Release),
        6 => any::<usize>().prop_map(Step::ReleaseSized),
        2 => (1..80u32, owner.clone(), any::<bool>())
            .prop_map(|(len, owner, keep)| Step::Steal { len, owner, keep }),
        1 => owner.clone().prop_map(|owner| Step::ReleaseAll { owner }),
        1 => owner.clone().prop_map(|owner| Step::Give { owner }),
        1 => (1..200u32, owner).prop_map(|(len, owner)| Step::AddRange { len, owner }),
        1 => Just(Step::RemoveRanges),
    ]
}

proptest! {
    #[test]
    fn random_programs_agree_with_the_reference_model(
        capacity in 1u32..300,
        program in prop::collection::vec((step(), prop::bool::weighted(0.1)), 1..200),
    ) {
        let mut a = OffsetAllocator::new(capacity);
        (0..3).for_each(|owner| a.add_owner(Owner(owner)));
        let mut oracle: Oracle = vec![vec![Some(ONLY); capacity as usize]];
        let mut live: Vec<(BlockId, BlockInfo)> = Vec::new();
        let granules = |info: &BlockInfo| info.offset as usize..(info.offset + info.len) as usize;
        for (step, check) in program {
            match step {
                Step::Allocate { len, owner } => match a.allocate(len, Owner(owner)) {
                    Some(id) => {
                        let info = a.block_info(id).unwrap();
                        prop_assert_eq!((info.len, info.owner), (len, Owner(owner)));
                        for granule in &mut oracle[usize::from(info.range)][granules(&info)] {
                            prop_assert_eq!(granule.take(), Some(Owner(owner)), "blocks overlap");
                        }
                        live.push((id, info));
                    }
                    None => prop_assert!(longest(&oracle, Some(Owner(owner))) < len),
                },
                Step::Steal { len, owner, keep } => {
                    match a.steal(len, Owner(owner), |other| other != Owner(1)) {
                        Some((id, from)) => {
                            let info = a.block_info(id).unwrap();
                            prop_assert!(from != Owner(owner) && from != Owner(1));
                            if !keep {
                                a.unsteal(id, from);
                                prop_assert!(!a.is_live(id));
                                continue;
                            }
                            for granule in &mut oracle[usize::from(info.range)][granules(&info)] {
                                prop_assert_eq!(granule.take(), Some(from), "blocks overlap");
                            }
                            live.push((id, info));
                        }
                        None => {
                            let others = (0..3).filter(|&other| other != 1 && other != owner);
                            prop_assert!(
                                others.map(Owner).all(|other| longest(&oracle, Some(other)) < len)
                            );
                        }
                    }
                }
                Step::Release(n) if !live.is_empty() => {
                    let (id, info) = live.swap_remove(n % live.len());
                    prop_assert!(a.release(id) && !a.release(id));
                    oracle[usize::from(info.range)][granules(&info)].fill(Some(info.owner));
                }
                Step::ReleaseSized(n) if !live.is_empty() => {
                    let (id, info) = live.swap_remove(n % live.len());
                    a.release_sized(id, info.len, info.owner);
                    oracle[usize::from(info.range)][granules(&info)].fill(Some(info.owner));
                }
                Step::Release(_) | Step::ReleaseSized(_) => {}
                Step::ReleaseAll { owner } => {
                    let (gone, left): (Vec<_>, Vec<_>) =
                        live.into_iter().partition(|(_, info)| info.owner == Owner(owner));
                    live = left;
                    let found = a.live_of(Owner(owner));
                    prop_assert_eq!(found.len(), gone.len());
                    for (id, info) in gone {
                        prop_assert!(found.contains(&id) && a.release(id));
                        oracle[usize::from(info.range)][granules(&info)].fill(Some(info.owner));
                    }
                }
                Step::Give { owner } => {
                    // Owner 2 keeps its free blocks.
                    let may_take = |other: Owner| other != Owner(2);
                    a.give(Owner(owner), may_take);
                    let given =
                        oracle.iter_mut().flatten().flatten().filter(|granule| may_take(**granule));
                    given.for_each(|granule| *granule = Owner(owner));
                }
                Step::AddRange { len, owner } => {
                    a.add_range(oracle.len() as u16, len, Owner(owner));
                    oracle.push(vec![Some(Owner(owner)); len as usize]);
                }
                Step::RemoveRanges => {
                    let mut removed = a.remove_ranges(|info| info.owner == Owner(2));
                    removed.sort_unstable();
                    let is_whole = |range: &Vec<Option<Owner>>| {
                        !range.is_empty() && range.iter().all(|granule| *granule == Some(Owner(2)))
                    };
                    let expected: Vec<u16> = (0..oracle.len())
                        .filter(|&i| is_whole(&oracle[i]))
                        .map(|i| i as u16)
                        .collect();
                    prop_assert_eq!(&removed, &expected);
                    removed.iter().for_each(|&i| oracle[usize::from(i)].clear());
                }
            }
            prop_assert!(live.iter().all(|(id, _)| a.is_live(*id)));
            let free = oracle.iter().flatten().flatten();
            prop_assert_eq!(a.free(), free.clone().count() as u64);
            if !check {
                // The checks below coalesce the quick lists.
                continue;
            }
            prop_assert_eq!(a.largest_free(), longest(&oracle, None));
            let free = oracle.iter().flatten().flatten();
            prop_assert_eq!(a.free(), free.clone().count() as u64);
            for owner in (0..3).map(Owner) {
                prop_assert_eq!(
                    a.free_of(owner) as usize,
                    free.clone().filter(|of| **of == owner).count()
                );
            }
            let taken: u32 =
                a.blocks().iter().filter(|info| !info.free).map(|info| info.len).sum();
            prop_assert_eq!(taken, live.iter().map(|(_, info)| info.len).sum::<u32>());
        }
    }
}
