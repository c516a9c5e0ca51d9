// SPDX-License-Identifier: MIT OR Apache-2.0
use proptest::prelude::*;

use super::*;
use crate::plan::Rates;
use crate::plan::{Bottleneck, OtherPass};

fn units(sizes: &[usize]) -> Vec<UnitDemand> {
    let unit = |(i, &size): (usize, &usize)| {
        UnitDemand::new(format!("u{i}"), size).with_compute_s(size as f64 / 10e9)
    };
    sizes.iter().enumerate().map(unit).collect()
}

fn order(n: usize) -> Vec<UnitId> {
    (0..n as u32).map(UnitId).collect()
}

#[test]
fn all_units_are_resident_if_they_fit() {
    let (units, order) = (units(&[10, 20, 30]), order(3));
    let plan = plan(&PlanRequest::new(&units, &order, 60)).unwrap();
    assert!(plan.residency.iter().all(|&r| r == Residency::Resident));
    assert_eq!((plan.ring_bytes, plan.streamed_bytes_per_pass), (0, 0));
    assert_eq!(plan.bottleneck, Bottleneck::Compute);
}

#[test]
fn without_reading_ahead_the_ring_is_as_small_as_possible() {
    let order = order(10);
    let unit = |i| UnitDemand::new(format!("u{i}"), 100 << 20).with_compute_s(0.1);
    let units: Vec<_> = (0..10).map(unit).collect();
    let budget = 500 << 20;
    let plan_with = |reach| plan(&PlanRequest::new(&units, &order, budget).with_reach(reach));
    let plans = [0, 1, usize::MAX].map(|reach| plan_with(reach).unwrap());
    let rings = plans.each_ref().map(|plan| plan.ring_bytes >> 20);
    assert_eq!(rings[0], 100, "a second slot would stay empty");
    assert_eq!(rings[1], 200, "one unit is in use, and one is read");
    let times = plans.each_ref().map(|plan| plan.predicted_pass_s);
    // Each of the six streamed units is read, and then used.
    let read_s = Rates::default().read_latency_s + f64::from(100 << 20) / 1e9;
    assert!((times[0] - (6.0 * read_s + 1.0)).abs() < 1e-6, "{times:?}");
    assert!(times[1] < 0.8 * times[0] && times[2] <= times[1], "{times:?}");
}

#[test]
fn reading_one_unit_ahead_has_memory_for_it_at_each_budget() {
    let (order, mut units) = (order(10), units(&[100; 10]));
    // Reading takes no time in comparison, so a second slot does not pay.
    units.iter_mut().for_each(|unit| unit.compute_s = 100.0);
    for budget in (100..1000).step_by(33) {
        let request = PlanRequest::new(&units, &order, budget);
        let with = |reach| plan(&request.with_reach(reach)).unwrap();
        let (none, next) = (with(0), with(1));
        assert!(none.ring_bytes < 200, "{budget}: {}", none.ring_bytes);
        assert_eq!(next.ring_bytes >= 200, budget >= 200, "{budget}: {}", next.ring_bytes);
    }
    let all = plan(&PlanRequest::new(&units, &order, 1000).with_reach(1)).unwrap();
    assert_eq!(all.ring_bytes, 0, "everything stays");
}

#[test]
fn reading_takes_time_of_the_processors() {
    let (units, order) = (units(&[100, 100]), order(2));
    let rates = Rates::new(f64::INFINITY, 0.0).with_read_bytes_per_processor_s(1.0);
    let plan_with = |rates| plan(&PlanRequest::new(&units, &order, 100).with_rates(rates)).unwrap();
    assert!((plan_with(rates).predicted_pass_s - 200.0).abs() < 1e-6);
    assert!((plan_with(rates.with_processors(4)).predicted_pass_s - 50.0).abs() < 1e-6);
}

#[test]
fn computation_outside_of_visits_counts() {
    let (units, order) = (units(&[100; 4]), order(4));
    let request = PlanRequest::new(&units, &order, 400).with_other_compute_s(3.0);
    assert!((plan(&request).unwrap().predicted_pass_s - 3.0).abs() < 1e-6);
}

#[test]
fn a_budget_below_the_largest_unit_is_refused() {
    let (units, order) = (units(&[10, 50, 30]), order(3));
    let error = plan(&PlanRequest::new(&units, &order, 49)).unwrap_err();
    assert_eq!((error.largest_unit.as_str(), error.smallest_budget_bytes), ("u1", 50));
    let plan = plan(&PlanRequest::new(&units, &order, 50)).unwrap();
    assert_eq!(plan.smallest_budget_bytes, 50);
}

#[test]
fn concurrent_passes_need_a_slot_each_or_resident_units() {
    let units = units(&[100, 10, 10]);
    assert_eq!(smallest_budget(&units, &[], 1), 100);
    assert_eq!(smallest_budget(&units, &[], 2), 120);
    assert_eq!(smallest_budget(&[], &[], 2), 0);
}

#[test]
fn the_smallest_budget_covers_units_needed_together() {
    let units = units(&[10, 50, 30, 20]);
    let together = [vec![UnitId(0), UnitId(2), UnitId(3)]];
    assert_eq!(smallest_budget(&units, &together, 1), 60);
    let order = order(4);
    let error = plan(&PlanRequest::new(&units, &order, 59).with_together(&together)).unwrap_err();
    assert_eq!((error.largest_unit.as_str(), error.largest_bytes), ("u0` + `u2` + `u3", 60));
    let plan = plan(&PlanRequest::new(&units, &order, 60).with_together(&together)).unwrap();
    assert!(plan.ring_bytes >= 50 && plan.peak_bytes() <= 60);
}

#[test]
fn the_smallest_budget_works_where_the_greedy_choice_fails() {
    // Two passes need 9 bytes: 4 + 1 resident, and 2 in the ring for each pass. With that ring,
    // the greedy choice makes 4 + 2 resident, which needs 10 bytes.
    let units = units(&[2, 4, 2, 1, 1]);
    let together = [vec![UnitId(4), UnitId(1)], vec![UnitId(2), UnitId(4)]];
    let order = order(5);
    let least = smallest_budget(&units, &together, 2);
    let request =
        PlanRequest::new(&units, &order, least).with_max_passes(2).with_together(&together);
    assert_eq!(plan(&request).unwrap().peak_bytes(), least);
}

#[test]
fn a_unit_visited_twice_is_preferred() {
    let units = units(&[40_000_000, 40_000_000, 40_000_000]);
    let order = [UnitId(0), UnitId(1), UnitId(2), UnitId(0)];
    let plan = plan(&PlanRequest::new(&units, &order, 100_000_000)).unwrap();
    assert_eq!(plan.residency[0], Residency::Resident);
}

#[test]
fn a_pass_that_runs_more_often_gets_the_memory() {
    let (units, all) = (units(&[40_000_000; 8]), order(8));
    let (encoder, decoder) = all.split_at(4);
    let plan_with = |decodes: f64| {
        let others = [OtherPass::new(decoder, decodes)];
        let request = PlanRequest::new(&units, encoder, 200_000_000);
        plan(&request.with_others(&others)).unwrap()
    };
    let kept = |plan: &Plan, pass: &[UnitId]| {
        pass.iter().filter(|id| plan.residency[id.index()] == Residency::Resident).count()
    };
    let (often, rarely) = (plan_with(20.0), plan_with(0.05));
    assert_eq!((kept(&often, encoder), kept(&often, decoder)), (0, 4), "{often:?}");
    assert_eq!((kept(&rarely, encoder), kept(&rarely, decoder)), (4, 0), "{rarely:?}");
    let mean_s = (often.predicted_pass_s + 20.0 * often.other_passes_s[0]) / 21.0;
    assert!((often.mean_pass_s - mean_s).abs() < 1e-9);
    assert!(often.predicted_pass_s > 0.15 && often.other_passes_s[0] < 0.02, "{often:?}");
}

#[test]
fn another_pass_computes_for_its_own_time() {
    let (units, order) = (units(&[1_000_000; 4]), order(4));
    let others = [OtherPass::new(&order, 0.1).with_compute_s(7.0)];
    let plan = plan(&PlanRequest::new(&units, &order, 4_000_000).with_others(&others)).unwrap();
    assert!((plan.other_passes_s[0] - 7.0).abs() < 1e-9 && plan.predicted_pass_s < 0.01);
}

#[test]
fn a_unit_that_is_never_visited_is_streamed() {
    let units = units(&[40_000_000, 40_000_000, 40_000_000]);
    let plan = plan(&PlanRequest::new(&units, &[UnitId(0), UnitId(2)], 80_000_000)).unwrap();
    assert_eq!(plan.residency[1], Residency::Streamed);
    assert_eq!(plan.ring_bytes, 40_000_000);
}

#[test]
fn the_ring_is_small_if_storage_is_the_bottleneck() {
    // The sizes of a model with 1.1 billion parameters: a large embedding and head, and 22 layers
    // of 7 matrices.
    let mut sizes = vec![131_000_000];
    for _ in 0..22 {
        sizes.extend([
            8_400_000, 1_000_000, 1_000_000, 8_400_000, 23_000_000, 23_000_000, 23_000_000,
        ]);
    }
    sizes.push(131_000_000);
    let (units, order) = (units(&sizes), order(sizes.len()));
    let plan = plan(&PlanRequest::new(&units, &order, 1_000_000_000)).unwrap();
    assert_eq!(plan.bottleneck, Bottleneck::Storage);
    assert!(plan.ring_bytes < 150_000_000, "{}", plan.ring_bytes);
    let floor = plan.streamed_bytes_per_pass as f64 / 1e9;
    assert!(plan.predicted_pass_s < 1.1 * floor, "{} s for {floor} GB", plan.predicted_pass_s);
}

#[test]
fn the_least_ring_is_kept_if_possible() {
    let (units, order) = (units(&[100_000_000; 20]), order(20));
    let ask = |budget, least_ring_bytes| {
        plan(&PlanRequest::new(&units, &order, budget).with_least_ring_bytes(least_ring_bytes))
            .unwrap()
    };
    assert!(ask(1_000_000_000, 0).ring_bytes < 500_000_000);
    assert!(ask(1_000_000_000, 500_000_000).ring_bytes >= 500_000_000);
    assert_eq!(ask(2_000_000_000, 1_000_000_000).streamed_bytes_per_pass, 0);
    assert!(ask(1_000_000_000, usize::MAX).peak_bytes() <= 1_000_000_000);
}

/// Returns units that shrink to two thirds, and are compressed on storage if `stored`.
fn compressible(sizes: &[usize], stored: bool) -> Vec<UnitDemand> {
    let with = |unit: UnitDemand| {
        let (size, bytes) = (unit.slot_bytes, unit.slot_bytes * 2 / 3);
        let unit = unit.with_compressed(bytes, size as f64 / 3e9).with_stored_compressed(stored);
        if stored { unit.with_read_bytes(bytes as u64) } else { unit }
    };
    units(sizes).into_iter().map(with).collect()
}

#[test]
fn units_are_kept_compressed_where_storage_is_slower_than_decoding() {
    let order = order(20);
    let ask = |read_bytes_per_s, processors, budget| {
        let rates = Rates::new(read_bytes_per_s, 1e-4).with_processors(processors);
        let units = compressible(&[50_000_000; 20], true);
        plan(&PlanRequest::new(&units, &order, budget).with_rates(rates)).unwrap()
    };
    let count = |plan: &Plan, kind| plan.residency.iter().filter(|&&r| r == kind).count();
    // All units fit if they are compressed, and slow storage is not needed any more.
    let slow = ask(0.3e9, 4, 850_000_000);
    assert_eq!((slow.streamed_bytes_per_pass, count(&slow, Residency::Streamed)), (0, 0));
    assert!(count(&slow, Residency::Compressed) > 5, "{slow:?}");
    assert_eq!(slow.bottleneck, Bottleneck::Decoding);
    // Fast storage leaves no reason to decode what is in memory.
    let fast = ask(50e9, 1, 850_000_000);
    assert_eq!(count(&fast, Residency::Compressed), 0);
    // What fits decoded is kept decoded.
    let whole = ask(0.3e9, 4, 1_000_000_000);
    assert_eq!(count(&whole, Residency::Resident), 20);
    assert!(slow.peak_bytes() <= 850_000_000 && fast.peak_bytes() <= 850_000_000);
}

#[test]
fn a_host_keeps_what_a_device_cannot() {
    let (mut units, order) = (units(&[100_000_000; 20]), order(20));
    for unit in &mut units {
        unit.compressed_bytes = Some(unit.slot_bytes);
    }
    let ask = |host_bytes, copy_bytes_per_s| {
        let rates = Rates::new(1e9, 1e-4).with_copy_bytes_per_s(copy_bytes_per_s);
        let request = PlanRequest::new(&units, &order, 500_000_000).with_rates(rates);
        plan(&request.with_host_bytes(Some(host_bytes))).unwrap()
    };
    let count = |plan: &Plan, kind| plan.residency.iter().filter(|&&r| r == kind).count();
    let (none, some, all) = (ask(0, 10e9), ask(800_000_000, 10e9), ask(3_000_000_000, 10e9));
    assert_eq!((count(&none, Residency::Host), none.bottleneck), (0, Bottleneck::Storage));
    assert_eq!((count(&some, Residency::Host), some.host_bytes), (8, 800_000_000));
    assert!(count(&some, Residency::Streamed) > 0 && some.predicted_pass_s < none.predicted_pass_s);
    assert_eq!((all.streamed_bytes_per_pass, count(&all, Residency::Streamed)), (0, 0));
    assert!(count(&all, Residency::Resident) >= 2, "the device is used as well");
    // A slow bus limits the pass, and nothing is gained by more memory on the host.
    let slow = ask(3_000_000_000, 0.5e9);
    assert_eq!(slow.bottleneck, Bottleneck::Copying);
    let copied = count(&slow, Residency::Host) + count(&slow, Residency::Streamed);
    // One slot is enough: a second one would cost more than the overlap of the computation gains.
    assert!(slow.predicted_pass_s < 0.22 * copied as f64, "{slow:?}");
    for plan in [none, some, all, slow] {
        assert!(plan.peak_bytes() <= 500_000_000);
    }
}

/// Returns a bound that no plan can beat: for each weight of storage and processors, the least
/// weighted time if units could be divided.
fn lower_bound(request: &PlanRequest<'_>) -> f64 {
    let (rates, processors) = (request.rates, request.rates.processors as f64);
    let compute: f64 = request.order.iter().map(|u| request.units[u.index()].compute_s).sum();
    let bound = |share: f64| {
        let mut total = (1.0 - share) * compute;
        let mut steps = Vec::new();
        for unit in request.order.iter().map(|id| &request.units[id.index()]) {
            let (decoded, slot) =
                ((1.0 - share) * unit.decode_s / processors, unit.slot_bytes as f64);
            let read = share * unit.read_bytes as f64 / rates.read_bytes_per_s;
            let streamed = read + if unit.stored_compressed { decoded } else { 0.0 };
            total += streamed;
            let bytes = unit.compressed_bytes.map_or(slot, |bytes| bytes as f64);
            let compressed = (streamed - decoded) / bytes;
            if compressed > streamed / slot {
                steps.push((compressed, bytes));
                steps.push((decoded / (slot - bytes), slot - bytes));
            } else {
                steps.push((streamed / slot, slot));
            }
        }
        steps.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut room = request.budget_bytes as f64;
        for (per_byte, bytes) in steps {
            total -= per_byte * bytes.min(room);
            room = (room - bytes).max(0.0);
        }
        total
    };
    (0..=100).map(|percent| bound(f64::from(percent) / 100.0)).fold(compute, f64::max)
}

#[test]
fn plans_for_ten_thousand_units_are_nearly_optimal() {
    let sizes: Vec<usize> =
        (0..10_000).map(|i| [8, 1, 1, 8, 23, 23, 23][i % 7] * 100_000).collect();
    let total: usize = sizes.iter().sum();
    let order = order(sizes.len());
    for (stored, read_bytes_per_s, processors) in
        [(true, 2e9, 2), (false, 2e9, 2), (true, 0.5e9, 2), (false, 5e9, 16), (true, 0.2e9, 1)]
    {
        let units = compressible(&sizes, stored);
        let rates = Rates::new(read_bytes_per_s, 0.0).with_processors(processors);
        for tenths in [1, 3, 5, 7, 9] {
            let budget = total / 10 * tenths;
            let request = PlanRequest::new(&units, &order, budget).with_rates(rates);
            let (plan, bound) = (plan(&request).unwrap(), lower_bound(&request));
            let ratio = plan.predicted_pass_s / bound;
            assert!(
                ratio < 1.02,
                "{ratio} of the bound with {stored} {rates:?} and {tenths} tenths of the model"
            );
        }
    }
}

proptest! {
    #[test]
    fn plans_for_few_units_are_optimal(
        sizes in prop::collection::vec((1usize..1000, 1usize..1000, any::<bool>()), 1..6),
        visits in prop::collection::vec(any::<prop::sample::Index>(), 1..12),
        others in prop::collection::vec(
            (prop::collection::vec(any::<prop::sample::Index>(), 1..6), 0.01..2.0f64),
            0..3,
        ),
        spare in 0usize..3000,
        read in 1e4..1e7f64,
        processors in 1usize..5,
        host_bytes in prop::option::of(0usize..2000),
        copy in 1e4..1e8f64,
    ) {
        let unit = |(i, &(slot, compressed, stored)): (usize, &(usize, usize, bool))| {
            UnitDemand::new(format!("u{i}"), slot)
                .with_compute_s(slot as f64 / 1e7)
                .with_compressed(compressed, slot as f64 / 3e6)
                .with_stored_compressed(stored)
        };
        let units: Vec<_> = sizes.iter().enumerate().map(unit).collect();
        let id = |visit: &prop::sample::Index| UnitId(visit.index(units.len()) as u32);
        let order: Vec<_> = visits.iter().map(id).collect();
        let other = |(visits, passes): &(Vec<prop::sample::Index>, f64)| {
            OtherPass::new(&visits.iter().map(id).collect::<Vec<_>>(), *passes)
        };
        let others: Vec<_> = others.iter().map(other).collect();
        let budget = smallest_budget(&units, &[], 1) + spare;
        let rates = Rates::new(read, 1e-6).with_processors(processors).with_copy_bytes_per_s(copy);
        let request = PlanRequest::new(&units, &order, budget)
            .with_host_bytes(host_bytes)
            .with_rates(rates)
            .with_others(&others);
        let found = plan(&request).unwrap();
        prop_assert!(found.peak_bytes() <= budget && found.host_bytes <= host_bytes.unwrap_or(0));
        let kept_form = host_bytes.map_or(Residency::Compressed, |_| Residency::Host);
        let kinds = [Residency::Streamed, kept_form, Residency::Resident];
        for code in 0..3usize.pow(units.len() as u32) {
            let kind = |i: usize| kinds[code / 3usize.pow(i as u32) % 3];
            let residency: Vec<_> = (0..units.len()).map(kind).collect();
            if let Some(other) = predict(&request, &residency) {
                prop_assert!(found.cost() <= other.cost(), "{found:?} is worse than {other:?}");
            }
        }
    }

    #[test]
    fn every_plan_keeps_the_budget_and_no_refusal_is_wrong(
        sizes in prop::collection::vec(1usize..1000, 1..150),
        visits in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
        spare in prop_oneof![Just(0), 0usize..20_000],
        max_passes in prop_oneof![1usize..4, Just(usize::MAX)],
        sets in prop::collection::vec(
            prop::collection::vec(any::<prop::sample::Index>(), 1..7),
            0..8,
        ),
    ) {
        let units = units(&sizes);
        let id = |v: &prop::sample::Index| UnitId(v.index(sizes.len()) as u32);
        let together: Vec<Vec<UnitId>> =
            sets.iter().map(|set| set.iter().map(id).collect()).collect();
        let together = &together[..];
        let least = smallest_budget(&units, together, max_passes);
        let request = |order, budget| {
            PlanRequest::new(&units, order, budget)
                .with_max_passes(max_passes)
                .with_together(together)
        };
        prop_assert!(plan(&request(&[], least - 1)).is_err());
        let budget = least + spare;
        let order: Vec<_> = visits.iter().map(id).collect();
        let request = request(&order, budget);
        let plan = plan(&request).unwrap();
        prop_assert!(plan.peak_bytes() <= budget);
        for set in together {
            let distinct: std::collections::BTreeSet<_> = set.iter().collect();
            let streamed =
                distinct.iter().filter(|id| plan.residency[id.index()] == Residency::Streamed);
            let bytes: usize = streamed.map(|id| units[id.index()].slot_bytes).sum();
            prop_assert!(bytes.saturating_mul(max_passes) <= budget - plan.resident_bytes);
        }
        prop_assert!(
            plan.largest_streamed_bytes.saturating_mul(max_passes)
                <= budget - plan.resident_bytes
        );
        prop_assert!(plan.predicted_pass_s.is_finite() && plan.predicted_pass_s >= 0.0);
        let again = predict(&request, &plan.residency).unwrap();
        prop_assert_eq!(again, plan);
    }
}

#[test]
fn small_neighbours_are_streamed_together() {
    let units: Vec<UnitDemand> =
        (0..256).map(|i| UnitDemand::new(i.to_string(), 64 << 10)).collect();
    let order: Vec<UnitId> = (0..256).map(UnitId).collect();
    let half = plan(&PlanRequest::new(&units, &order, 8 << 20)).unwrap();
    let changes = half.residency.windows(2).filter(|pair| pair[0] != pair[1]).count();
    let streamed = half.residency.iter().filter(|&&of| of == Residency::Streamed).count();
    assert!(streamed >= 128);
    // Most requests can read eight of them, a sixteenth of the budget.
    assert!(changes <= 2 * (streamed / 8) + 2, "{changes} changes, {streamed} streamed units");
}

#[test]
fn large_units_are_groups_of_their_own() {
    let sizes = [3 << 20, 4 << 10, 4 << 10, 3 << 20, 1 << 20, 1 << 10];
    let units: Vec<UnitDemand> =
        sizes.iter().map(|&bytes| UnitDemand::new("unit", bytes)).collect();
    let order: Vec<UnitId> = (0..6).map(UnitId).collect();
    let lens: Vec<usize> = groups(&order, &units, 1 << 20).map(<[UnitId]>::len).collect();
    assert_eq!(lens, [1, 2, 1, 1, 1]);
}
