// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of calls that wait for memory or for passes. The calls are interrupted, or their threads
//! block each other.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ts_orchestrator::{Error, ErrorKind, UnitId};

use crate::testing::{KIB, Model, acquire_tensor, config, patience};

#[test]
fn an_interrupted_wait_leaves_the_engine_usable() {
    let model = Model::new(&[200 * KIB; 2]);
    let engine = model.engine(config(210 * KIB)).unwrap();
    let pass = engine.begin_pass();
    let error = engine.begin_pass_interruptible(&mut || true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    engine.end_pass(pass);
    let (held, done) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let lease = engine.acquire(None, UnitId(0)).unwrap();
            held.wait();
            done.wait();
            drop(lease);
        });
        held.wait();
        let error = engine.acquire_interruptible(None, UnitId(1), &mut || true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
        done.wait();
    });
    model.check(1, &acquire_tensor(&engine, 1).unwrap());
}

#[test]
fn a_thread_that_waits_for_itself_gets_an_error() {
    let model = Model::new(&[200 * KIB; 2]);
    let engine = model.engine(config(210 * KIB)).unwrap();
    let _held = engine.acquire(None, UnitId(0)).unwrap();
    let error = engine.acquire_interruptible(None, UnitId(1), &mut patience()).unwrap_err();
    assert!(matches!(&error, Error::Deadlock { holders, .. } if holders == "`u0`"), "{error}");
}

#[test]
fn a_lease_kept_while_waiting_for_a_pass_is_an_error() {
    let model = Model::new(&[200 * KIB; 2]);
    let engine = model.engine(config(210 * KIB)).unwrap();
    let (queueing, over) = (Barrier::new(2), AtomicBool::new(false));
    let pass = engine.begin_pass();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _held = engine.acquire(None, UnitId(0)).unwrap();
            queueing.wait();
            let error =
                engine.begin_pass_interruptible(&mut || over.load(Ordering::SeqCst)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Interrupted);
        });
        queueing.wait();
        let error =
            engine.acquire_interruptible(Some(pass), UnitId(1), &mut patience()).unwrap_err();
        assert!(matches!(error, Error::Deadlock { .. }), "{error}");
        over.store(true, Ordering::SeqCst);
    });
    engine.end_pass(pass);
    model.pass(&engine, &[0, 1]);
}

#[test]
fn a_wait_is_interrupted_while_the_engine_is_busy() {
    let model = Model::new(&[64 * KIB; 24]);
    let engine = model.engine(config(700 * KIB)).unwrap();
    let stop = AtomicBool::new(false);
    let pass = engine.begin_pass();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                for unit in 0..24 {
                    model.check(unit, &acquire_tensor(&engine, unit as u32).unwrap());
                }
            }
        });
        let error = engine.begin_pass_interruptible(&mut || true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted);
        stop.store(true, Ordering::SeqCst);
    });
    engine.end_pass(pass);
}

#[test]
fn threads_that_wait_for_the_same_set_in_divided_memory_get_it() {
    let model = Model::new(&[150 * KIB, 200 * KIB, 230 * KIB]);
    let set = [UnitId(1), UnitId(2)];
    let config = config(440 * KIB).with_together(vec![set.to_vec()]);
    let engine = model.engine(config).unwrap();
    for _ in 0..5 {
        let held = engine.acquire(None, UnitId(0)).unwrap();
        // Lies behind the first unit, and leaves no free piece that the third unit fits into.
        drop(engine.acquire(None, UnitId(1)).unwrap());
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let leases =
                        engine.acquire_all_interruptible(None, &set, &mut patience()).unwrap();
                    leases.iter().zip(1..).for_each(|(lease, unit)| {
                        model.check(unit, &lease.tensor(0));
                    });
                });
            }
            std::thread::sleep(Duration::from_millis(20));
            drop(held);
        });
    }
}
