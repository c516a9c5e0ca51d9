// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the coordinator and the CPU device under many thread interleavings. Shuttle chooses the
//! interleavings and finds deadlocks. `TS_SCHEDULES` is their number for each test and each way of
//! choosing, 10,000 by default. `cargo xtask ci` builds these tests separately, and tries fewer.
//! Without shuttle this file is empty.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use shuttle::thread;
use ts_streams::{
    CancelToken, CpuDevice, Device, Error, HostFn, MultiStreamCoordinator, Stream, StreamPriority,
    TaskGraph,
};

/// Runs a model under random schedules, and under schedules that PCT chooses: few preemptions at
/// random places (Burckhardt et al., 2010).
fn check(model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let same = Arc::clone(&model);
    let schedules = std::env::var("TS_SCHEDULES").map_or(10_000, |count| count.parse().unwrap());
    shuttle::check_random(move || same(), schedules);
    shuttle::check_pct(move || model(), schedules, 3);
}

fn coordinator(device: &CpuDevice, count: usize) -> MultiStreamCoordinator<CpuDevice> {
    let streams =
        (0..count).map(|_| device.create_stream(StreamPriority::Normal).unwrap()).collect();
    MultiStreamCoordinator::new(device.clone(), streams)
}

/// The dependencies of each task in a graph of two diamonds in sequence.
const DIAMONDS: [&[usize]; 7] = [&[], &[0], &[0], &[1, 2], &[3], &[3], &[4, 5]];

/// Returns a graph whose tasks record whether their dependencies were done.
fn graph(done: &Arc<[AtomicBool; 7]>) -> TaskGraph<<CpuDevice as Device>::Stream> {
    let (mut graph, mut ids) = (TaskGraph::new(), Vec::new());
    for (task, waits) in DIAMONDS.into_iter().enumerate() {
        let done = Arc::clone(done);
        let id = graph.add_host_fn(task.to_string(), move || {
            thread::yield_now();
            let before = waits.iter().all(|&before| done[before].load(Ordering::SeqCst));
            done[task].store(before, Ordering::SeqCst);
        });
        waits.iter().for_each(|&before| graph.add_dependency(id, ids[before]).unwrap());
        ids.push(id);
    }
    graph
}

#[test]
fn tasks_run_in_graph_order() {
    check(|| {
        let device = CpuDevice::with_threads(2).unwrap();
        let done: Arc<[AtomicBool; 7]> = Arc::default();
        let execution = coordinator(&device, 3).execute(graph(&done), &CancelToken::default());
        execution.wait().unwrap();
        assert!(done.iter().all(|done| done.load(Ordering::SeqCst)));
    });
}

#[test]
fn concurrent_cancellation_ends_the_wait() {
    check(|| {
        let device = CpuDevice::with_threads(2).unwrap();
        let (done, cancel): (Arc<[AtomicBool; 7]>, _) = (Arc::default(), CancelToken::default());
        let token = cancel.clone();
        let other = thread::spawn(move || token.cancel());
        let execution = coordinator(&device, 2).execute(graph(&done), &cancel);
        let ended = execution.wait();
        other.join().unwrap();
        let lost = execution.failures().len();
        assert_eq!(ended.is_err(), lost > 0);
        assert!(
            execution.failures().iter().all(|(_, error)| matches!(error, Error::Cancelled { .. }))
        );
        let ran = done.iter().filter(|done| done.load(Ordering::SeqCst)).count();
        assert_eq!(ran + lost, 7, "all submitted tasks ran after their dependencies");
    });
}

#[test]
fn dependents_of_a_refused_task_are_skipped() {
    check(|| {
        let device = CpuDevice::with_threads(2).unwrap();
        let ran = Arc::new(AtomicUsize::new(0));
        let mut graph = TaskGraph::new();
        let count = |graph: &mut TaskGraph<_>, name: &str| {
            let ran = Arc::clone(&ran);
            graph.add_host_fn(name, move || {
                ran.fetch_add(1, Ordering::SeqCst);
            })
        };
        let first = count(&mut graph, "first");
        let lost = graph.add("lost", |_: &_| Err(Error::WaitInHostFn));
        let dependent = count(&mut graph, "dependent");
        let sibling = count(&mut graph, "sibling");
        graph.add_dependency(lost, first).unwrap();
        graph.add_dependency(dependent, lost).unwrap();
        graph.add_dependency(sibling, first).unwrap();
        let execution = coordinator(&device, 2).execute(graph, &CancelToken::default());
        assert_eq!(execution.wait(), Err(Error::WaitInHostFn));
        let names: Vec<_> = execution.failures().iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!((names, ran.load(Ordering::SeqCst)), (vec!["lost", "dependent"], 2));
    });
}

#[test]
fn a_barrier_covers_all_streams() {
    check(|| {
        let device = CpuDevice::with_threads(2).unwrap();
        let coordinator = coordinator(&device, 3);
        let (before, wrong) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        for stream in coordinator.streams() {
            let before = Arc::clone(&before);
            let work = move || {
                before.fetch_add(1, Ordering::SeqCst);
            };
            stream.launch_host_fn(HostFn::new(work)).unwrap();
        }
        coordinator.barrier().unwrap();
        for stream in coordinator.streams() {
            let (before, wrong) = (Arc::clone(&before), Arc::clone(&wrong));
            let work = move || {
                wrong.fetch_or(before.load(Ordering::SeqCst) != 3, Ordering::SeqCst);
            };
            stream.launch_host_fn(HostFn::new(work)).unwrap();
        }
        device.synchronize().unwrap();
        assert!(!wrong.load(Ordering::SeqCst));
    });
}

#[test]
fn dropping_the_device_finishes_all_work() {
    check(|| {
        let device = CpuDevice::with_threads(2).unwrap();
        let ran = Arc::new(AtomicUsize::new(0));
        for stream in coordinator(&device, 2).streams() {
            for _ in 0..2 {
                let ran = Arc::clone(&ran);
                let work = move || {
                    ran.fetch_add(1, Ordering::SeqCst);
                };
                stream.launch_host_fn(HostFn::new(work)).unwrap();
            }
        }
        drop(device);
        assert_eq!(ran.load(Ordering::SeqCst), 4);
    });
}

#[test]
fn devices_that_wait_for_each_other_finish() {
    check(|| {
        let devices = [(); 2].map(|()| CpuDevice::with_threads(1).unwrap());
        let streams =
            [0, 1].map(|i: usize| devices[i].create_stream(StreamPriority::Normal).unwrap());
        let order = Arc::new(Mutex::new(Vec::new()));
        for step in 0..4 {
            let (stream, order) = (&streams[step % 2], Arc::clone(&order));
            stream.launch_host_fn(HostFn::new(move || order.lock().unwrap().push(step))).unwrap();
            let done = devices[step % 2].create_event().unwrap();
            stream.record(&done).unwrap();
            streams[(step + 1) % 2].wait(&done).unwrap();
        }
        // The last handles are dropped while work may still be pending.
        drop((devices, streams));
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3]);
    });
}
