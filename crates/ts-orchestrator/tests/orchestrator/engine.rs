// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that engines stream correct bytes from real files within the budget.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use ts_orchestrator::Residency::Resident;
use ts_orchestrator::{Error, ErrorKind, Phase, Prefetch, TensorBytes, UnitId};

use crate::testing::{KIB, Model, acquire_tensor, config, patience, tensor};

#[test]
fn a_model_four_times_the_budget_streams() {
    let model = Model::new(&[300 * KIB; 16]);
    let engine = model.engine(config(1200 * KIB)).unwrap();
    assert_eq!(engine.stats().total_read_bytes(), 0, "nothing is read before a pass begins");
    let order: Vec<_> = (0..16).collect();
    for _ in 0..5 {
        model.pass(&engine, &order);
    }
    let stats = engine.stats();
    assert!(stats.reserved_high_water_bytes <= 1200 * KIB);
    assert!(stats.in_use_high_water_bytes <= stats.reserved_high_water_bytes);
    let resident = stats.units.iter().filter(|u| u.resident).count();
    assert!(resident >= 1, "some units are resident");
    assert!(
        stats.units.iter().filter(|u| u.resident).all(|u| u.loads == 1),
        "resident units are read once"
    );
    assert!(stats.units.iter().filter(|u| !u.resident).all(|u| u.loads >= 5));
    assert_eq!(stats.wasted_loads, 0, "every unit that is read is used");
}

#[test]
fn tensors_have_their_phase() {
    let mut model = Model::new(&[1000, 1000]);
    model.units[0].tensors = vec![
        tensor("mapped", &[(8, 100)], Phase::Mapped),
        tensor("moved", &[(112, 100)], Phase::At(24)),
        tensor("merged", &[(700, 10), (300, 50), (3, 7)], Phase::At(0)),
    ];
    let engine = model.engine(config(256 * KIB)).unwrap();
    let lease = engine.acquire(None, UnitId(0)).unwrap();
    for (index, phase) in [8, 24, 0].into_iter().enumerate() {
        let bytes = lease.tensor(index);
        assert_eq!(bytes.as_ptr().addr() % 64, phase);
        let parts = &model.units[0].tensors[index].entry.parts;
        let expected: Vec<u8> = parts
            .iter()
            .flat_map(|p| model.content[p.offset as usize..][..p.len as usize].to_vec())
            .collect();
        assert_eq!(&bytes[..], expected);
    }
}

#[test]
fn an_assembled_tensor_is_complete() {
    let mut model = Model::new(&[4 << 20, 16]);
    let parts = [(2_000_001, 1_500_000), (11, 1_900_000), (3_999_000, 900)];
    model.units[0].tensors = vec![tensor("stacked", &parts, Phase::At(0))];
    let engine = model.engine(config(8 << 20)).unwrap();
    for _ in 0..3 {
        model.check(0, &acquire_tensor(&engine, 0).unwrap());
    }
    let stats = engine.stats();
    assert!(stats.reserved_high_water_bytes <= 8 << 20);
}

#[test]
fn a_kept_tensor_is_never_overwritten() {
    let model = Model::new(&[200 * KIB; 4]);
    let engine = model.engine(config(210 * KIB)).unwrap();
    let kept = acquire_tensor(&engine, 0).unwrap();
    let error = acquire_tensor(&engine, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(
        matches!(
            &error,
            Error::StillReferenced { unit, holders, .. } if unit == "u1" && holders == "`u0` x1"
        ),
        "{error}"
    );
    model.check(0, &kept);
    drop(kept);
    model.check(1, &acquire_tensor(&engine, 1).unwrap());
}

#[test]
fn a_kept_tensor_of_a_resident_unit_is_named() {
    let model = Model::new(&[200 * KIB; 3]);
    let engine = model.engine(config(520 * KIB)).unwrap();
    let resident = engine.stats().plan.residency.iter().position(|unit| *unit == Resident).unwrap();
    let kept = acquire_tensor(&engine, resident as u32).unwrap();
    let set: Vec<_> = (0..3).filter(|unit| *unit != resident as u32).map(UnitId).collect();
    let error = engine.acquire_all_interruptible(None, &set, &mut patience()).unwrap_err();
    let name = format!("`u{resident}` x1");
    assert!(
        matches!(&error, Error::StillReferenced { holders, .. } if *holders == name),
        "{error}"
    );
    drop(kept);
    engine.acquire_all_interruptible(None, &set, &mut patience()).unwrap();
}

#[test]
fn a_tensor_dropped_on_another_thread_frees_memory() {
    let model = Model::new(&[200 * KIB; 2]);
    let engine = model.engine(config(210 * KIB)).unwrap();
    let kept = acquire_tensor(&engine, 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            drop(kept);
        });
        model.check(1, &acquire_tensor(&engine, 1).unwrap());
    });
}

#[test]
fn a_discarded_unit_is_read_again() {
    let model = Model::new(&[200 * KIB; 2]);
    let engine = model.engine(config(2 << 20)).unwrap();
    for loads in 1..4 {
        let lease = engine.acquire(None, UnitId(1)).unwrap();
        assert_eq!(lease.is_resident(), loads == 1);
        let kept = lease.tensor(0);
        lease.discard();
        model.check(1, &kept);
        assert_eq!(engine.stats().units[1].loads, loads);
    }
}

#[test]
fn a_write_to_a_resident_unit_is_detected() {
    let model = Model::new(&[200 * KIB; 8]);
    for budget in [700 * KIB, 4 << 20] {
        let engine = model.engine(config(budget).with_watch_writes(true)).unwrap();
        if !engine.stats().watches_writes {
            eprintln!("skipped: this system does not support write watching");
            return;
        }
        let order: Vec<usize> = (0..8).collect();
        for _ in 0..3 {
            model.pass(&engine, &order);
            assert!(engine.modified_units().is_empty(), "reading a unit is not a write to it");
            let kept = engine
                .stats()
                .units
                .iter()
                .rposition(|unit| unit.resident)
                .expect("some units are resident");
            let tensor = acquire_tensor(&engine, kept as u32).unwrap();
            let address = tensor.range().as_ptr();
            // SAFETY: `tensor` keeps its 200 KiB allocated, so the address is in bounds. No
            // reference to its bytes exists, and no other thread accesses them now.
            unsafe {
                address.add(100 * KIB).write_volatile(!address.add(100 * KIB).read_volatile());
            };
            drop(tensor);
            assert_eq!(engine.modified_units(), [(UnitId(kept as u32), vec![0])]);
            engine.discard(UnitId(kept as u32)).unwrap();
            assert!(engine.modified_units().is_empty());
            assert!(
                engine.stats().units[kept].resident,
                "the unit stays resident, because its memory was free"
            );
        }
        model.pass(&engine, &order);
    }
}

#[test]
fn tensors_outlive_the_engine() {
    let model = Model::new(&[200 * KIB; 3]);
    let engine = model.engine(config(420 * KIB)).unwrap();
    let kept = acquire_tensor(&engine, 2).unwrap();
    drop(engine);
    let clone = kept.clone();
    drop(kept);
    std::thread::spawn(move || model.check(2, &clone)).join().unwrap();
}

#[test]
fn a_budget_that_is_too_small_is_refused() {
    let model = Model::new(&[100 * KIB, 500 * KIB, 100 * KIB]);
    let Err(Error::NeverFits(error)) = model.engine(config(400 * KIB)) else {
        panic!("500 KiB do not fit into 400 KiB")
    };
    assert_eq!(error.largest_unit, "u1");
    assert!(model.engine(config(error.smallest_budget_bytes - 1)).is_err());
    let engine = model.engine(config(error.smallest_budget_bytes)).unwrap();
    for _ in 0..3 {
        model.pass(&engine, &[0, 1, 2]);
    }
}

#[test]
fn a_decoder_that_fits_is_not_read_again_between_passes_of_its_encoder() {
    let model = Model::new(&[200 * KIB; 8]);
    // Enough for the four units of the decoder, and a slot for another unit.
    let engine = model.engine(config(1030 * KIB)).unwrap();
    // Passes that compute nothing, so that reading takes all of the time.
    let generate = || {
        for order in std::iter::once(0..4).chain(std::iter::repeat_n(4..8, 8)) {
            let pass = engine.begin_pass();
            order.for_each(|unit| drop(engine.acquire(Some(pass), UnitId(unit)).unwrap()));
            if engine.end_pass(pass) {
                engine.replan();
            }
        }
    };
    (0..3).for_each(|_| generate());
    let before = engine.stats();
    generate();
    let after = engine.stats();
    assert_eq!(after.replans, before.replans);
    assert!((4..8).all(|unit| after.units[unit].loads == before.units[unit].loads));
    assert_eq!(after.wasted_loads, before.wasted_loads);
    let kinds: Vec<u64> = after.recent_passes.iter().rev().take(9).map(|pass| pass.kind).collect();
    assert!(kinds[..8].iter().all(|&kind| kind != kinds[8]), "{kinds:?}");
}

#[test]
fn concurrent_passes_get_the_right_bytes() {
    let model = Model::new(&[100 * KIB; 12]);
    let engine = model.engine(config(450 * KIB).with_max_passes(2)).unwrap();
    let order: Vec<_> = (0..12).collect();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..6).for_each(|_| _ = model.pass(&engine, &order)));
        }
    });
    assert_eq!(engine.stats().passes, 18);
}

#[test]
fn prefetch_reads_as_far_ahead_as_configured() {
    let model = Model::new(&[64 * KIB; 12]);
    for (prefetch, most_ahead) in
        [(Prefetch::None, 0), (Prefetch::NextLayer, 1), (Prefetch::Adaptive, 2)]
    {
        let engine = model.engine(config(6 * 68 * KIB).with_prefetch(prefetch)).unwrap();
        let pass = engine.begin_pass();
        let mut most = 0;
        for unit in 0..12 {
            let lease = engine.acquire(Some(pass), UnitId(unit)).unwrap();
            model.check(unit as usize, &lease.tensor(0));
            std::thread::sleep(Duration::from_millis(10));
            let loads: u64 = engine.stats().units.iter().map(|u| u.loads).sum();
            most = most.max(loads - u64::from(unit) - 1);
        }
        engine.end_pass(pass);
        let stalls = engine.stats().stalls();
        match prefetch {
            Prefetch::None => assert_eq!((most, stalls), (0, 12)),
            Prefetch::NextLayer => assert_eq!(most, 1),
            _ => assert!(most >= most_ahead, "only {most} units were read ahead"),
        }
    }
}

#[test]
fn units_needed_together_fit_the_smallest_budget() {
    let model =
        Model::new(&[100 * KIB, 20 * KIB, 60 * KIB, 200 * KIB, 40 * KIB, 300 * KIB, 30 * KIB]);
    let sets = [vec![0, 1, 2, 3], vec![5, 6], vec![2, 4, 5]];
    let ids = |set: &[u32]| set.iter().copied().map(UnitId).collect::<Vec<_>>();
    let together: Vec<_> = sets.iter().map(|set| ids(set)).collect();
    let with = |budget| model.engine(config(budget).with_together(together.clone()));
    let smallest = match with(4 * KIB) {
        Err(Error::NeverFits(refusal)) => refusal.smallest_budget_bytes,
        other => panic!("{:?}", other.err()),
    };
    assert!(with(smallest - 1).is_err());
    let engine = with(smallest).unwrap();
    for round in 0..20 {
        let pass = engine.begin_pass();
        for step in 0..sets.len() {
            let set = &sets[(step * (round % 2 + 1) + round) % sets.len()];
            let leases =
                engine.acquire_all_interruptible(Some(pass), &ids(set), &mut patience()).unwrap();
            for (lease, &unit) in leases.iter().zip(set) {
                model.check(unit as usize, &lease.tensor(0));
            }
            drop(leases);
            let alone = (round * 5 + step) as u32 % 7;
            let lease =
                engine.acquire_interruptible(Some(pass), UnitId(alone), &mut patience()).unwrap();
            model.check(alone as usize, &lease.tensor(0));
        }
        engine.end_pass(pass);
    }
    assert!(engine.stats().in_use_high_water_bytes <= smallest);
    let all = ids(&[0, 1, 2, 3, 4, 5, 6]);
    let refused = engine.acquire_all_interruptible(None, &all, &mut patience()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NeverFits, "{refused}");
}

#[test]
fn an_unknown_set_evicts_resident_units_and_is_planned_for() {
    let model = Model::new(&[64 * KIB; 12]);
    let engine = model.engine(config(600 * KIB)).unwrap();
    let set: Vec<_> = (2..9).map(UnitId).collect();
    for _ in 0..6 {
        let pass = engine.begin_pass();
        for unit in 0..12 {
            let lease =
                engine.acquire_interruptible(Some(pass), UnitId(unit), &mut patience()).unwrap();
            model.check(unit as usize, &lease.tensor(0));
        }
        let leases = engine.acquire_all_interruptible(Some(pass), &set, &mut patience()).unwrap();
        for (lease, unit) in leases.iter().zip(2..) {
            model.check(unit, &lease.tensor(0));
        }
        drop(leases);
        if engine.end_pass(pass) {
            engine.replan();
        }
    }
    let plan = engine.stats().plan;
    assert!(plan.smallest_budget_bytes >= 7 * 64 * KIB, "{plan:?}");
}

#[test]
fn bytes_still_in_memory_are_not_read_again() {
    let model = Model::new(&[300 * KIB; 4]);
    let smallest = 300 * KIB + 16 * KIB;
    let engine = model.engine(config(smallest)).unwrap();
    let kept = acquire_tensor(&engine, 1).unwrap();
    for _ in 0..3 {
        let lease = engine.acquire_interruptible(None, UnitId(1), &mut patience()).unwrap();
        assert_eq!(lease.tensor(0).as_ptr(), kept.as_ptr(), "the lease has the same memory");
    }
    assert_eq!(engine.stats().units[1].loads, 1);
    let error = engine.acquire_interruptible(None, UnitId(2), &mut patience()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    let again = acquire_tensor(&engine, 1).unwrap();
    assert_eq!(again.as_ptr(), kept.as_ptr());
    engine.discard(UnitId(1)).unwrap();
    assert!(
        engine.acquire_interruptible(None, UnitId(1), &mut patience()).is_err(),
        "a modified unit is not leased again"
    );
    drop((kept, again));
    model.check(1, &acquire_tensor(&engine, 1).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// For random models, budgets, limits and visits: the bytes are correct, the budget is kept,
    /// and nothing hangs.
    #[test]
    fn random_programs_get_correct_bytes_within_budget(
        sizes in prop::collection::vec(1usize..120_000, 1..14),
        spare in 0usize..600_000,
        visits in prop::collection::vec(
            (
                any::<prop::sample::Index>(),
                any::<bool>(),
                prop::option::weighted(0.1, 0usize..700_000),
            ),
            0..60,
        ),
        passes in 1usize..4,
    ) {
        let model = Model::new(&sizes);
        let smallest = match model.engine(config(0)) {
            Err(Error::NeverFits(e)) => e.smallest_budget_bytes,
            _ => panic!("a budget of 0 is refused"),
        };
        let budget = smallest + spare;
        let engine = model.engine(config(budget)).unwrap();
        let mut kept: Vec<(usize, TensorBytes)> = Vec::new();
        for _ in 0..passes {
            let pass = engine.begin_pass();
            for (unit, keep, limit) in &visits {
                if let Some(limit) = limit {
                    engine.set_limit(engine.smallest_limit() + limit).unwrap();
                }
                let unit = unit.index(sizes.len());
                let id = UnitId(unit as u32);
                match engine.acquire_interruptible(Some(pass), id, &mut patience()) {
                    Ok(lease) => {
                        let bytes = lease.tensor(0);
                        model.check(unit, &bytes);
                        if *keep {
                            kept.push((unit, bytes));
                        }
                    }
                    Err(Error::StillReferenced { .. }) => {
                        prop_assert!(!kept.is_empty());
                        kept.iter().for_each(|(unit, bytes)| model.check(*unit, bytes));
                        kept.clear();
                    }
                    Err(error) => prop_assert!(false, "{error}"),
                }
            }
            if engine.end_pass(pass) {
                engine.replan();
            }
            let stats = engine.stats();
            if engine.limit_in_force() {
                prop_assert!(engine.is_within_limit());
                prop_assert!(stats.in_use_bytes <= stats.limit_bytes, "{stats:?}");
            }
        }
        kept.iter().for_each(|(unit, bytes)| model.check(*unit, bytes));
        let stats = engine.stats();
        prop_assert!(stats.reserved_high_water_bytes <= budget);
        prop_assert!(stats.in_use_high_water_bytes <= stats.reserved_high_water_bytes);
    }
}

#[test]
fn a_limit_below_the_budget_gives_memory_back() {
    let model = Model::new(&[512 * KIB; 12]);
    let engine = model.engine(config(6 << 20)).unwrap();
    let order: Vec<usize> = (0..12).collect();
    model.pass(&engine, &order);
    let whole = engine.stats();
    assert!(whole.in_use_bytes > 5 << 20);
    let Err(Error::NeverFits(refusal)) = engine.set_limit(100 * KIB) else {
        panic!("a unit does not fit into 100 KiB")
    };
    assert_eq!(engine.stats().limit_bytes, whole.limit_bytes, "a refused limit changes nothing");
    engine.set_limit(refusal.smallest_budget_bytes).unwrap();
    engine.set_limit(2 << 20).unwrap();
    // The limit waits for the end of a pass.
    let lease = engine.acquire(None, UnitId(3)).unwrap();
    assert!(!engine.replan());
    model.check(3, &lease.tensor(0));
    drop(lease);
    assert!(engine.replan());
    for _ in 0..3 {
        model.pass(&engine, &order);
        let limited = engine.stats();
        assert!(limited.limit_bytes <= 2 << 20 && limited.in_use_bytes <= limited.limit_bytes);
        assert!(limited.plan.peak_bytes() <= limited.limit_bytes);
    }
    let error = engine.acquire_all(None, &[UnitId(1), UnitId(2), UnitId(3), UnitId(4)]).err();
    assert!(matches!(error, Some(Error::NeverFits(_))), "{error:?}");
    engine.set_limit(usize::MAX).unwrap();
    assert!(engine.replan());
    model.pass(&engine, &order);
    let again = engine.stats();
    assert_eq!(again.limit_bytes, whole.limit_bytes);
    assert_eq!(again.plan.residency, whole.plan.residency);
}

#[test]
fn a_new_plan_reads_only_what_was_not_kept() {
    let model = Model::new(&[300 * KIB; 10]);
    let engine = model.engine(config(2000 * KIB)).unwrap();
    let order: Vec<usize> = (0..10).collect();
    for _ in 0..3 {
        if model.pass(&engine, &order) {
            engine.replan();
        }
    }
    let before = engine.stats();
    // Two units that were streamed are used most often now.
    let streamed = |unit: &&usize| !before.units[**unit].resident;
    let [first, second] = [0, 1].map(|at| *order.iter().filter(streamed).nth(at).unwrap());
    let often: Vec<usize> = order.iter().flat_map(|&unit| [unit, first, second]).collect();
    // The passes compute nothing, so that memory is worth the most.
    let visit = || {
        let pass = engine.begin_pass();
        often.iter().for_each(|&unit| drop(engine.acquire(Some(pass), UnitId(unit as u32))));
        engine.end_pass(pass)
    };
    let replanned = (0..20).any(|_| visit() && engine.replan());
    assert!(replanned);
    let between = engine.stats();
    assert!(between.units[first].resident && between.units[second].resident);
    for _ in 0..2 {
        model.pass(&engine, &often);
    }
    let after = engine.stats();
    let stayed = |&unit: &usize| before.units[unit].resident && after.units[unit].resident;
    let stayed: Vec<usize> = order.iter().copied().filter(stayed).collect();
    // One that is where the ring is to be is read again, to another place.
    let read_once = |&unit: &usize| after.units[unit].loads == 1;
    assert!(stayed.iter().copied().filter(read_once).count() * 2 >= stayed.len(), "{stayed:?}");
    assert!(after.in_use_high_water_bytes <= after.reserved_high_water_bytes);
}

#[test]
fn memory_is_given_back_during_a_pass() {
    let sizes: Vec<usize> = (1..=12).map(|i| i * 64 * KIB).collect();
    let model = Model::new(&sizes);
    let engine = model.engine(config(6 << 20)).unwrap();
    let order: Vec<usize> = (0..12).collect();
    model.pass(&engine, &order);
    for round in 0..3 {
        let before = engine.stats();
        assert!(before.in_use_bytes > 4 << 20, "{}", before.in_use_bytes);
        let pass = engine.begin_pass();
        let lease = engine.acquire(Some(pass), UnitId(0)).unwrap();
        engine.set_limit(engine.smallest_limit() + round * 256 * KIB).unwrap();
        let less = engine.stats();
        assert!(less.in_use_bytes <= less.limit_bytes, "given back although a unit is in use");
        assert!(!engine.limit_in_force(), "the plan is not for this limit");
        drop(lease);
        // What is left is in pieces, and the units that were given up are needed again.
        for &unit in &order {
            let lease = engine.acquire(Some(pass), UnitId(unit as u32)).unwrap();
            model.check(unit, &lease.tensor(0));
        }
        // The memory is taken again, although the limit is the one of the plan.
        engine.set_limit(usize::MAX).unwrap();
        assert!(engine.end_pass(pass));
        assert!(engine.replan());
        model.pass(&engine, &order);
        assert_eq!(engine.stats().plan.residency, before.plan.residency);
    }
}

#[test]
fn memory_beyond_the_limit_in_force_is_not_taken_again() {
    let model = Model::new(&[512 * KIB; 12]);
    let engine = model.engine(config(6 << 20)).unwrap();
    let order: Vec<usize> = (0..12).collect();
    model.pass(&engine, &order);
    engine.set_limit(2 << 20).unwrap();
    assert!(engine.replan());
    // No unit is kept, so a lower limit returns nothing at once.
    let kept: Vec<_> = (0..3).map_while(|unit| acquire_tensor(&engine, unit).ok()).collect();
    let lower = engine.smallest_limit();
    engine.set_limit(lower).unwrap();
    let mut failed = 0;
    for unit in 3..8 {
        failed += usize::from(acquire_tensor(&engine, unit).is_err());
        assert!(engine.stats().in_use_bytes <= 2 << 20, "the memory of the earlier limit");
    }
    assert!(failed > 0, "the tensors that are kept occupy the memory");
    drop(kept);
    engine.set_limit(2 << 20).unwrap();
    model.pass(&engine, &order);
    engine.replan();
    assert!(engine.limit_in_force() && engine.is_within_limit());
    assert!(engine.stats().in_use_bytes <= 2 << 20);
}

#[test]
fn a_limit_comes_into_force_while_threads_always_run_passes() {
    [1, 2].into_iter().for_each(a_limit_comes_into_force);
}

fn a_limit_comes_into_force(max_passes: usize) {
    let model = Model::new(&[64 * KIB; 24]);
    let engine = model.engine(config(2 << 20).with_max_passes(max_passes)).unwrap();
    let order: Vec<usize> = (0..24).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    if model.pass(&engine, &order) {
                        // Callers do other things before they replan.
                        std::thread::sleep(Duration::from_millis(5));
                        engine.replan();
                    }
                }
            });
        }
        // A pass of a slow model takes longer than other waits are patient.
        scope.spawn(|| {
            let pass = engine.begin_pass();
            std::thread::sleep(Duration::from_millis(1500));
            if engine.end_pass(pass) {
                engine.replan();
            }
        });
        for limit in [1 << 20, 2 << 20, 1500 * KIB, 2 << 20] {
            engine.set_limit(limit).unwrap();
            let began = Instant::now();
            // On a busy machine, passes can give up waiting for a limit. They wait again a minute
            // later.
            while !engine.limit_in_force() && began.elapsed() < Duration::from_secs(100) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let in_force = engine.limit_in_force();
            done.store(!in_force, Ordering::Relaxed);
            assert!(in_force, "a limit of {limit} bytes with {max_passes} passes");
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_limit_during_a_pass_is_proposed_at_its_end() {
    let model = Model::new(&[512 * KIB; 6]);
    let engine = model.engine(config(4 << 20)).unwrap();
    let order: Vec<usize> = (0..6).collect();
    model.pass(&engine, &order);
    let pass = engine.begin_pass();
    engine.set_limit(2 << 20).unwrap();
    for unit in 0..6 {
        let lease = engine.acquire(Some(pass), UnitId(unit)).unwrap();
        model.check(unit as usize, &lease.tensor(0));
    }
    assert!(engine.end_pass(pass));
    assert!(engine.replan());
    assert!(!model.pass(&engine, &order), "the limit is in force");
    assert!(engine.stats().in_use_bytes <= 2 << 20);
}

#[test]
fn all_units_are_leased_at_once_while_they_stay_in_memory() {
    let model = Model::new(&[512 * KIB; 6]);
    let engine = model.engine(config(4 << 20)).unwrap();
    let order: Vec<usize> = (0..6).collect();
    assert!(engine.acquire_all_resident().is_none(), "nothing was read");
    (0..8).for_each(|_| _ = model.pass(&engine, &order));
    let uses = engine.stats().units[3].uses;
    let pass = engine.begin_pass();
    let leases = engine.acquire_all_resident().unwrap();
    for (unit, lease) in leases.iter().enumerate() {
        assert_eq!(lease.unit(), UnitId(unit as u32));
        model.check(unit, &lease.tensor(0));
    }
    engine.set_limit(2 << 20).unwrap();
    assert!(engine.acquire_all_resident().is_none(), "a limit waits");
    assert!(engine.end_pass(pass) && !engine.replan(), "all units are in use");
    drop(leases);
    assert!(engine.replan());
    assert_eq!(engine.stats().units[3].uses, uses, "such leases are no uses");
    (0..8).for_each(|_| _ = model.pass(&engine, &order));
    assert!(engine.acquire_all_resident().is_none(), "units are streamed");
    engine.set_limit(usize::MAX).unwrap();
    assert!(engine.replan());
    model.pass(&engine, &order);
    assert!(engine.acquire_all_resident().is_none(), "the new plan was not measured yet");
    (0..4).for_each(|_| _ = model.pass(&engine, &order));
    assert!(engine.acquire_all_resident().is_some());
    engine.begin_trace();
    assert!(engine.acquire_all_resident().is_none(), "each use is traced");
    engine.end_trace();
    let lease = engine.acquire(None, UnitId(2)).unwrap();
    let kept = lease.tensor(0);
    lease.seal();
    assert!(engine.acquire_all_resident().is_none(), "a unit has a checksum");
    drop((lease, kept));
    drop(engine.acquire(None, UnitId(2)).unwrap());
    assert!(engine.acquire_all_resident().is_some(), "nothing can write to the unit any more");
}
