// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of task graphs, barriers and pools, on the host and on simulated devices.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::alloc::Layout;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use proptest::prelude::*;
use ts_streams::{
    AllocationStrategy, CancelToken, CpuDevice, Device, Error, ErrorKind, HostFn, MemoryKind,
    MultiStreamCoordinator, RawMemory, SimDevice, SimOptions, Status, Stream, StreamPool,
    StreamPriority, TaskGraph, WorkloadType,
};

fn streams<D: Device>(device: &D, count: usize) -> Vec<D::Stream> {
    (0..count).map(|_| device.create_stream(StreamPriority::Normal).unwrap()).collect()
}

fn coordinator<D: Device>(device: &D, count: usize) -> MultiStreamCoordinator<D> {
    MultiStreamCoordinator::new(device.clone(), streams(device, count))
}

/// Runs a graph in which each task writes its own memory and reads that of its dependencies.
/// Returns the order in which the tasks ran, and the number of events that were recorded.
fn run<D: Device>(device: &D, streams: usize, waits: &[Vec<usize>]) -> (Vec<usize>, usize) {
    let layout = Layout::from_size_align(8, 8).unwrap();
    let memory: Vec<_> =
        waits.iter().map(|_| device.allocate(layout, MemoryKind::Device).unwrap()).collect();
    let (order, mut graph, mut ids) =
        (Arc::new(Mutex::new(Vec::new())), TaskGraph::new(), Vec::new());
    for (task, before) in waits.iter().enumerate() {
        let (order, own) = (Arc::clone(&order), memory[task].range());
        let read: Vec<_> = before.iter().map(|&task| memory[task].range()).collect();
        let id = graph.add(format!("task {task}"), move |stream: &D::Stream| {
            let work = HostFn::new(move || order.lock().unwrap().push(task)).writes(own);
            stream.launch_host_fn(read.into_iter().fold(work, HostFn::reads))
        });
        before.iter().for_each(|&task| graph.add_dependency(id, ids[task]).unwrap());
        ids.push(id);
    }
    let execution = coordinator(device, streams).execute(graph, &CancelToken::default());
    execution.wait().unwrap();
    let order = order.lock().unwrap().clone();
    (order, execution.event_count())
}

fn graphs() -> impl Strategy<Value = Vec<Vec<usize>>> {
    prop::collection::vec(prop::collection::vec(any::<prop::sample::Index>(), 0..4), 1..40)
        .prop_map(|graph| {
            let edges = |(i, before): (usize, &Vec<prop::sample::Index>)| -> Vec<usize> {
                before.iter().filter(|_| i > 0).map(|index| index.index(i)).collect()
            };
            graph.iter().enumerate().map(edges).collect()
        })
}

fn respects_dependencies(order: &[usize], waits: &[Vec<usize>]) -> bool {
    let mut done = HashSet::new();
    order
        .iter()
        .all(|&task| waits[task].iter().all(|before| done.contains(before)) && done.insert(task))
        && done.len() == waits.len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn tasks_run_after_their_dependencies(waits in graphs(), count in 1..5usize, seed: u64) {
        let simulated = SimDevice::new(SimOptions::default().with_seed(seed).with_stall_rate(0.5));
        let (order, events) = run(&simulated, count, &waits);
        prop_assert!(respects_dependencies(&order, &waits), "{order:?}");
        // The detector finds races of all possible schedules, not only of this one.
        prop_assert_eq!(simulated.races(), []);
        prop_assert!(events <= waits.len());
        prop_assert!(count > 1 || events == 0, "one stream needs no events");
        let (order, _) = run(&CpuDevice::with_threads(3).unwrap(), count, &waits);
        prop_assert!(respects_dependencies(&order, &waits), "{order:?}");
    }
}

#[test]
fn a_chain_stays_on_its_stream() {
    let device = SimDevice::new(SimOptions::default());
    let chains: Vec<Vec<usize>> =
        (0..30usize).map(|i| i.checked_sub(3).into_iter().collect()).collect();
    assert_eq!(run(&device, 3, &chains).1, 0);
    // Task 0 needs one event, for the two successors on other streams. The join (task 4) runs on
    // the stream of task 1, 2 or 3, so it needs events only for the other two of these tasks. They
    // already wait for task 0.
    let diamond = [vec![], vec![0], vec![0], vec![0], vec![1, 2, 3, 0]];
    assert_eq!(run(&device, 3, &diamond).1, 3);
}

/// Two streams that wait for each other do not deadlock, because each wait is for an earlier point.
#[test]
fn streams_may_wait_for_each_other_repeatedly() {
    let device = SimDevice::new(SimOptions::default());
    let coordinator = coordinator(&device, 2);
    let [copies, compute] = coordinator.streams() else { panic!() };
    let memory =
        device.allocate(Layout::from_size_align(64, 64).unwrap(), MemoryKind::Device).unwrap();
    for i in 0..10 {
        // SAFETY: a simulated device runs one operation at a time; the memory outlives the work.
        unsafe { copies.fill(memory.range(), i) }.unwrap();
        coordinator.order(compute, copies).unwrap();
        compute.launch_host_fn(HostFn::new(|| ()).reads(memory.range())).unwrap();
        coordinator.order(copies, compute).unwrap();
    }
    device.synchronize().unwrap();
    assert_eq!(device.races(), []);
}

/// A barrier must wait for all streams, not only for one, without blocking the host.
#[test]
fn a_barrier_covers_all_streams_without_blocking_the_host() {
    let device = CpuDevice::with_threads(2).unwrap();
    let coordinator = coordinator(&device, 4);
    let (open, gate) = mpsc::channel::<()>();
    let before = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&before);
    let mut gate = Some(gate);
    for stream in coordinator.streams() {
        let (count, gate) = (Arc::clone(&count), gate.take());
        let wait = move || {
            let _ = gate.map(|gate| gate.recv());
            count.fetch_add(1, Ordering::SeqCst);
        };
        stream.launch_host_fn(HostFn::new(wait)).unwrap();
    }
    coordinator.barrier().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for stream in coordinator.streams() {
        let (seen, before) = (Arc::clone(&seen), Arc::clone(&before));
        let look = move || seen.lock().unwrap().push(before.load(Ordering::SeqCst));
        stream.launch_host_fn(HostFn::new(look)).unwrap();
    }
    // `barrier` returned although the first stream is blocked.
    assert_eq!(coordinator.streams()[3].query(), Ok(Status::Pending));
    drop(open);
    device.synchronize().unwrap();
    assert_eq!(*seen.lock().unwrap(), [4; 4]);
}

#[test]
fn dependents_of_a_failed_task_do_not_run() {
    for panics in [false, true] {
        let device = CpuDevice::with_threads(2).unwrap();
        let (mut graph, ran) = (TaskGraph::new(), Arc::new(AtomicUsize::new(0)));
        let add = |n| {
            let ran = Arc::clone(&ran);
            move || {
                ran.fetch_add(n, Ordering::SeqCst);
            }
        };
        let fails = graph.add("fails", move |_| {
            assert!(!panics, "on purpose");
            Err(Error::TimedOut { timeout: Duration::ZERO })
        });
        let after = graph.add_host_fn("after", add(10));
        let last = graph.add_host_fn("last", add(100));
        graph.add_host_fn("other", add(1));
        graph.add_dependency(after, fails).unwrap();
        graph.add_dependency(last, after).unwrap();
        let execution = coordinator(&device, 2).execute(graph, &CancelToken::default());
        let error = execution.wait().unwrap_err();
        assert_eq!(error.kind(), if panics { ErrorKind::Failed } else { ErrorKind::TimedOut });
        let names: HashSet<&str> =
            execution.failures().iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, HashSet::from(["fails", "after", "last"]));
        assert_eq!(ran.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn a_stream_recovers_from_a_panicking_task() {
    let device = CpuDevice::with_threads(2).unwrap();
    let coordinator = coordinator(&device, 1);
    let mut graph = TaskGraph::new();
    graph.add_host_fn("panics", || std::panic::resume_unwind(Box::new("on purpose")));
    let error = coordinator.execute(graph, &CancelToken::default()).wait().unwrap_err();
    assert!(error.to_string().contains("on purpose"), "{error}");
    assert!(coordinator.streams()[0].take_error().is_some());
    coordinator.execute_parallel([|_: &_| Ok(())]).unwrap().wait().unwrap();
}

#[test]
fn cancelled_tasks_are_not_submitted() {
    let device = SimDevice::new(SimOptions::default());
    let (mut graph, cancel) = (TaskGraph::new(), CancelToken::default());
    let inner = cancel.clone();
    let first = graph.add("first", move |_| {
        inner.cancel();
        Ok(())
    });
    let second = graph.add_host_fn("second", || panic!("a cancelled task must not run"));
    graph.add_dependency(second, first).unwrap();
    let execution = coordinator(&device, 2).execute(graph, &cancel);
    assert!(matches!(execution.wait(), Err(Error::Cancelled { task }) if task == "second"));
}

#[test]
fn on_complete_runs_after_all_work() {
    let device = CpuDevice::with_threads(2).unwrap();
    let (coordinator, last) =
        (coordinator(&device, 3), device.create_stream(StreamPriority::High).unwrap());
    let done = Arc::new(AtomicUsize::new(0));
    let works = (0..9).map(|_| {
        let done = Arc::clone(&done);
        move |stream: &<CpuDevice as Device>::Stream| {
            stream.launch_host_fn(HostFn::new(move || {
                std::thread::sleep(Duration::from_millis(1));
                done.fetch_add(1, Ordering::SeqCst);
            }))
        }
    });
    let execution = coordinator.execute_parallel(works).unwrap();
    let (sender, receiver) = mpsc::channel();
    execution
        .on_complete(&last, move || {
            let _ = sender.send(done.load(Ordering::SeqCst));
        })
        .unwrap();
    assert_eq!(receiver.recv().unwrap(), 9);
    execution.wait_timeout(Duration::from_secs(10)).unwrap();
}

#[test]
fn a_pool_follows_its_strategy() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamPool::new(device.clone(), 3, AllocationStrategy::RoundRobin).unwrap();
    let ids: Vec<_> = (0..6).map(|_| pool.stream().id()).collect();
    assert_eq!(ids[..3], ids[3..]);
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 3);

    pool.set_strategy(AllocationStrategy::LoadBalanced);
    for expected in [1, 2, 3, 3, 3] {
        let stream = pool.stream();
        stream.launch_host_fn(HostFn::new(|| ())).unwrap();
        let busy = pool.streams().filter(|stream| stream.metrics().outstanding() > 0).count();
        assert_eq!(busy, expected);
    }
    device.synchronize().unwrap();

    // One stream takes twice as long as the others.
    pool.set_strategy(AllocationStrategy::Workload);
    let slow = pool.streams().next().unwrap().id();
    for stream in pool.streams() {
        let time = Duration::from_micros(if stream.id() == slow { 200 } else { 100 });
        pool.record_completion(stream.id(), WorkloadType::Compute, time);
    }
    assert_eq!(pool.average_time(WorkloadType::Compute), Some(Duration::from_nanos(133_333)));
    assert_eq!(pool.average_time(WorkloadType::Memory), None);
    assert!((0..4).all(|_| {
        let stream = pool.stream_for_workload(WorkloadType::Compute);
        stream.launch_host_fn(HostFn::new(|| ())).unwrap();
        stream.id() != slow || stream.metrics().outstanding() == 1
    }));

    let urgent = pool.priority_stream(StreamPriority::High).unwrap();
    assert_eq!(urgent.level(), device.info().priorities.greatest);
    assert_eq!(pool.len(), 4);
    pool.set_strategy(AllocationStrategy::Priority);
    assert_eq!(pool.stream_for_workload(WorkloadType::Coordination).id(), urgent.id());
    assert_ne!(pool.stream_for_workload(WorkloadType::Compute).id(), urgent.id());
    pool.resize(2).unwrap();
    assert_eq!(pool.streams().count(), 2);
    // Only the requested stream becomes active again.
    assert_eq!(pool.priority_stream(StreamPriority::High).unwrap().id(), urgent.id());
    assert_eq!(pool.len(), 3);
    pool.set_strategy(AllocationStrategy::RoundRobin);
    let given: Vec<_> = (0..6).map(|_| pool.stream().id()).collect();
    assert_eq!((given[..3].iter().collect::<HashSet<_>>().len(), &given[..3]), (3, &given[3..]));
    pool.resize(4).unwrap();
    assert_eq!(pool.len(), 4);
}

#[test]
fn a_pool_changes_strategy_only_on_evidence() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamPool::new(device, 2, AllocationStrategy::RoundRobin).unwrap();
    assert_eq!(pool.optimize(), None);
    let [a, b] = [0, 1].map(|i| pool.streams().nth(i).unwrap());
    (0..20).for_each(|_| a.launch_host_fn(HostFn::new(|| ())).unwrap());
    let change = pool.optimize().unwrap();
    assert_eq!(
        (change.from, change.to),
        (AllocationStrategy::RoundRobin, AllocationStrategy::LoadBalanced)
    );
    assert!(change.evidence.contains("20 operations"), "{}", change.evidence);
    assert_eq!(pool.optimize(), None);
    let record = |times| {
        for _ in 0..times {
            pool.record_completion(a.id(), WorkloadType::Memory, Duration::from_micros(10));
            pool.record_completion(b.id(), WorkloadType::Memory, Duration::from_micros(20));
        }
    };
    record(15);
    assert_eq!(pool.optimize(), None, "15 completions are too few");
    record(1);
    assert_eq!(pool.optimize().unwrap().to, AllocationStrategy::Workload);
    assert_eq!(pool.strategy(), AllocationStrategy::Workload);
}

#[test]
fn a_pool_finds_idle_streams() {
    let device = CpuDevice::with_threads(2).unwrap();
    let pool = StreamPool::new(device, 2, AllocationStrategy::RoundRobin).unwrap();
    assert!(pool.has_ready());
    let (gates, holds): (Vec<_>, Vec<_>) = (0..2).map(|_| mpsc::channel::<()>()).unzip();
    for (stream, hold) in pool.streams().zip(holds) {
        stream.launch_host_fn(HostFn::new(move || drop(hold))).unwrap();
        let _ = stream;
    }
    drop(gates);
    assert!(pool.wait_any_ready(Duration::from_secs(10)).unwrap().is_some());
    let (open, gate) = mpsc::channel::<()>();
    let gate = Arc::new(Mutex::new(gate));
    for stream in pool.streams() {
        let gate = Arc::clone(&gate);
        stream
            .launch_host_fn(HostFn::new(move || {
                let _ = gate.lock().unwrap().recv();
            }))
            .unwrap();
    }
    assert!(pool.wait_any_ready(Duration::from_millis(20)).unwrap().is_none());
    drop(open);
    assert!(pool.wait_any_ready(Duration::from_secs(10)).unwrap().is_some());
}

#[test]
fn waiting_for_a_failed_pool_returns_its_error() {
    let pool =
        StreamPool::new(CpuDevice::new().unwrap(), 2, AllocationStrategy::RoundRobin).unwrap();
    for stream in pool.streams() {
        stream.launch_host_fn(HostFn::new(|| panic!("on purpose"))).unwrap();
    }
    let failed = pool.wait_any_ready(Duration::from_secs(60)).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Failed);
    pool.streams().next().unwrap().take_error().unwrap();
    assert!(pool.wait_any_ready(Duration::from_secs(60)).unwrap().is_some());
}

#[test]
fn ordering_a_foreign_stream_is_an_error() {
    let (own, other) =
        (SimDevice::new(SimOptions::default()), SimDevice::new(SimOptions::default()));
    let coordinator = coordinator(&own, 1);
    let [stream] = coordinator.streams() else { panic!() };
    let foreign = other.create_stream(StreamPriority::Normal).unwrap();
    let before = (stream.metrics(), foreign.metrics());
    for (later, earlier) in [(stream, &foreign), (&foreign, stream)] {
        let refused = coordinator.order(later, earlier).unwrap_err();
        assert!(
            matches!(refused, Error::ForeignStream { stream, .. } if stream == foreign.id()),
            "{refused}"
        );
        assert_eq!(refused.kind(), ErrorKind::Misuse);
    }
    assert_eq!((stream.metrics(), foreign.metrics()), before);
    // A clone of the handle is the same device.
    let same = own.clone().create_stream(StreamPriority::Normal).unwrap();
    coordinator.order(stream, &same).unwrap();
}
