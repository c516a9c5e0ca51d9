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
    AllocationStrategy, AnyDevice, AnyStream, CancelToken, CpuDevice, Device, Error, ErrorKind,
    HostFn, MemoryKind, MultiStreamCoordinator, RawMemory, SimDevice, SimOptions, StageGraph,
    Status, Stream, StreamId, StreamPool, StreamPriority, TaskGraph, WorkloadType,
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
    assert_eq!(pool.len(), 3, "the pool has streams of several priorities");
    pool.set_strategy(AllocationStrategy::Priority);
    assert_eq!(pool.stream_for_workload(WorkloadType::Coordination).id(), urgent.id());
    assert_ne!(pool.stream_for_workload(WorkloadType::Compute).id(), urgent.id());
    pool.resize(2).unwrap();
    assert_eq!(pool.streams().count(), 2);
    // Only the requested stream becomes active again.
    assert_eq!(pool.priority_stream(StreamPriority::High).unwrap().id(), urgent.id());
    assert_eq!(pool.len(), 3, "it was the one that `resize` took away");
    pool.set_strategy(AllocationStrategy::RoundRobin);
    let given: Vec<_> = (0..6).map(|_| pool.stream().id()).collect();
    assert_eq!((given[..3].iter().collect::<HashSet<_>>().len(), &given[..3]), (3, &given[3..]));
    pool.resize(4).unwrap();
    assert_eq!(pool.len(), 4);
}

const STRATEGIES: [AllocationStrategy; 5] = [
    AllocationStrategy::RoundRobin,
    AllocationStrategy::LoadBalanced,
    AllocationStrategy::Priority,
    AllocationStrategy::Workload,
    AllocationStrategy::Learned,
];
const THREE: [WorkloadType; 3] = [WorkloadType::Compute, WorkloadType::Memory, WorkloadType::Mixed];

/// The streams are taken before anything is submitted to them. The work on each waits for that on
/// the others, so it only ends if all three run at the same time.
#[test]
fn three_workloads_get_three_streams_that_overlap() {
    for strategy in STRATEGIES {
        let pool = StreamPool::new(CpuDevice::with_threads(3).unwrap(), 8, strategy).unwrap();
        let all = Arc::new(std::sync::Barrier::new(3));
        for stream in THREE.map(|workload| pool.stream_for_workload(workload)) {
            let all = Arc::clone(&all);
            stream
                .launch_host_fn(HostFn::new(move || {
                    all.wait();
                }))
                .unwrap();
        }
        pool.device().synchronize().unwrap();
        // Other streams are busy: the idle ones still take turns.
        let busy: Vec<_> = pool.streams().step_by(2).collect();
        let gate = Arc::new(std::sync::Barrier::new(2));
        let close = Arc::clone(&gate);
        busy[0]
            .launch_host_fn(HostFn::new(move || {
                close.wait();
            }))
            .unwrap();
        let reached = pool.device().create_event().unwrap();
        busy[0].record(&reached).unwrap();
        busy[1..].iter().for_each(|stream| stream.wait(&reached).unwrap());
        let ids: HashSet<_> = THREE.map(|w| pool.stream_for_workload(w).id()).into();
        assert_eq!(ids.len(), 3, "{strategy:?}");
        gate.wait();
    }
}

#[test]
fn workloads_have_their_own_streams_from_the_first_use() {
    let device = SimDevice::new(SimOptions::default());
    let range = device.info().priorities;
    for strategy in [AllocationStrategy::Priority, AllocationStrategy::Workload] {
        let pool = StreamPool::new(device.clone(), 8, strategy).unwrap();
        for workload in WorkloadType::ALL.into_iter().cycle().take(12) {
            let level = pool.stream_for_workload(workload).level();
            assert_eq!(level, range.level(workload.priority()), "{strategy:?}, {workload:?}");
        }
    }
    // Two streams of one priority have two operations each. Copies are expected to end first.
    let priorities = [StreamPriority::Normal; 2];
    let strategy = AllocationStrategy::Workload;
    let pool = StreamPool::with_priorities(device.clone(), &priorities, strategy).unwrap();
    let [compute, memory] = [WorkloadType::Compute, WorkloadType::Memory].map(|workload| {
        let stream = pool.stream_for_workload(workload);
        (0..2).for_each(|_| stream.launch_host_fn(HostFn::new(|| ())).unwrap());
        stream.id()
    });
    assert_ne!(compute, memory);
    assert_eq!(pool.stream_for_workload(WorkloadType::Compute).id(), memory);
    device.synchronize().unwrap();
}

/// One stream has a long copy, the other three short ones: the number of operations misleads.
#[test]
fn a_learned_pool_knows_how_long_work_is() {
    let device = SimDevice::new(SimOptions::default());
    let priorities = [StreamPriority::Normal; 2];
    let strategy = AllocationStrategy::Learned;
    let pool = StreamPool::with_priorities(device.clone(), &priorities, strategy).unwrap();
    let kind = WorkloadType::Memory;
    assert_eq!(pool.expected_time(kind, 1 << 20), None);
    for bytes in [1 << 10, 1 << 20, 64 << 20] {
        // 10 us, and 1 ns for each byte.
        let first = pool.streams().next().unwrap().id();
        pool.record_work(first, kind, bytes, Duration::from_nanos(10_000 + bytes));
    }
    let expected = pool.expected_time(kind, 32 << 20).unwrap();
    assert!(expected.abs_diff(Duration::from_nanos(10_000 + (32 << 20))) < expected / 100);
    assert_eq!(pool.expected_time(WorkloadType::Compute, 0), None, "each workload has its model");

    let submit = |bytes| {
        let stream = pool.stream_for_work(kind, bytes);
        stream.launch_host_fn(HostFn::new(|| ())).unwrap();
        stream.id()
    };
    let long = submit(64 << 20);
    let short = submit(1 << 10);
    assert_ne!(long, short);
    assert_eq!([submit(1 << 10), submit(1 << 20)], [short; 2]);
    pool.set_strategy(AllocationStrategy::LoadBalanced);
    assert_eq!(pool.stream().id(), long);
    device.synchronize().unwrap();
    pool.set_strategy(strategy);
    assert!(pool.optimize().is_none());
}

/// The model is trained by what runs on the streams; nothing is recorded by hand.
#[test]
fn a_learned_pool_is_trained_by_its_work() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamPool::new(device.clone(), 2, AllocationStrategy::Learned).unwrap();
    let layout = Layout::from_size_align(4 << 20, 64).unwrap();
    let memory = device.allocate(layout, MemoryKind::Device).unwrap();
    for len in [64, 4 << 20].into_iter().cycle().take(60) {
        let stream = pool.stream_for_work(WorkloadType::Memory, len as u64);
        // SAFETY: the device is synchronized before the memory is used again.
        unsafe { stream.fill(memory.range().slice(0..len), 1) }.unwrap();
        device.synchronize().unwrap();
    }
    let expected = |bytes| pool.expected_time(WorkloadType::Memory, bytes).unwrap();
    assert!(expected(4 << 20) > 2 * expected(64), "{:?}, {:?}", expected(4 << 20), expected(64));
    // Work of two kinds on one stream cannot be told apart, and does not count.
    pool.resize(1).unwrap();
    for kind in [WorkloadType::Compute, WorkloadType::Mixed] {
        pool.stream_for_workload(kind).launch_host_fn(HostFn::new(|| ())).unwrap();
    }
    device.synchronize().unwrap();
    assert_eq!(pool.expected_time(WorkloadType::Compute, 0), None);
    assert_eq!(pool.expected_time(WorkloadType::Mixed, 0), None);
}

/// A simulated device reports how long its work takes; nothing is recorded by hand.
#[test]
fn a_pool_learns_from_what_it_runs() {
    let device = SimDevice::new(SimOptions::default());
    let priorities = [StreamPriority::Normal; 4];
    let strategy = AllocationStrategy::RoundRobin;
    let pool = StreamPool::with_priorities(device.clone(), &priorities, strategy).unwrap();
    let layout = Layout::from_size_align(4 << 20, 64).unwrap();
    let memory = device.allocate(layout, MemoryKind::Device).unwrap();
    let slow = pool.streams().next().unwrap().id();
    for _ in 0..400 {
        let stream = pool.stream_for_workload(WorkloadType::Memory);
        let len = if stream.id() == slow { 4 << 20 } else { 64 };
        // SAFETY: the device is synchronized before the memory is used again.
        unsafe { stream.fill(memory.range().slice(0..len), 1) }.unwrap();
        device.synchronize().unwrap();
    }
    let change = pool.optimize().unwrap();
    assert_eq!(change.to, AllocationStrategy::Workload);
    assert!(change.evidence.contains("Memory work"), "{}", change.evidence);
    assert!(pool.average_time(WorkloadType::Memory).unwrap() > Duration::ZERO);
    assert_eq!(pool.average_time(WorkloadType::Compute), None);
    for _ in 0..20 {
        assert_ne!(pool.stream_for_workload(WorkloadType::Memory).id(), slow);
    }
    let stats = pool.stats();
    let slow = stats.iter().find(|stats| stats.stream == slow).unwrap();
    assert_eq!(slow.workload, Some(WorkloadType::Memory));
    assert_eq!(slow.metrics.workload(), Some(WorkloadType::Memory));
    assert_eq!((slow.active, slow.metrics.completed_work), (true, 100));
}

#[test]
fn work_of_several_workloads_at_once_teaches_nothing() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamPool::new(device.clone(), 1, AllocationStrategy::Workload).unwrap();
    for workload in THREE {
        pool.stream_for_workload(workload).launch_host_fn(HostFn::new(|| ())).unwrap();
    }
    assert_eq!(pool.stats()[0].workload, None);
    device.synchronize().unwrap();
    assert_eq!(THREE.map(|workload| pool.average_time(workload)), [None; 3]);
    // The stream is idle, so what runs on it now is known.
    pool.stream_for_workload(WorkloadType::Mixed).launch_host_fn(HostFn::new(|| ())).unwrap();
    device.synchronize().unwrap();
    assert!(pool.average_time(WorkloadType::Mixed).is_some());
}

#[test]
fn a_pool_grows_and_shrinks_with_queued_work() {
    let device = SimDevice::new(SimOptions::default());
    for strategy in STRATEGIES {
        let pool = StreamPool::with_bounds(device.clone(), 2..=5, strategy).unwrap();
        assert_eq!((pool.len(), pool.bounds()), (2, Some(2..=5)));
        for _ in 0..100 {
            pool.stream().launch_host_fn(HostFn::new(|| ())).unwrap();
        }
        assert_eq!(pool.len(), 5, "{strategy:?}");
        (0..100).for_each(|_| assert!(pool.stream().level() <= 0));
        assert_eq!(pool.len(), 5, "no stream is idle");
        device.synchronize().unwrap();
        (0..100).for_each(|_| assert!(pool.stream().level() <= 0));
        assert_eq!(pool.len(), 2, "{strategy:?}");
        (0..100).for_each(|_| pool.stream().launch_host_fn(HostFn::new(|| ())).unwrap());
        assert_eq!((pool.len(), pool.stats().len()), (5, 5), "streams are used again");
        device.synchronize().unwrap();
    }
    let fixed = StreamPool::new(device, 2, AllocationStrategy::RoundRobin).unwrap();
    (0..100).for_each(|_| fixed.stream().launch_host_fn(HostFn::new(|| ())).unwrap());
    assert_eq!((fixed.len(), fixed.bounds()), (2, None));
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

/// The first device writes to memory that the second then reads, and the reverse.
fn orders_two_devices(devices: &[AnyDevice; 2]) {
    let [first, second] = [0, 1].map(|i| streams(&devices[i], 1).remove(0));
    let coordinator = MultiStreamCoordinator::new(devices[0].clone(), vec![first.clone()])
        .with_device(devices[1].clone(), vec![second.clone()]);
    assert_eq!(coordinator.streams().len(), 2);
    let order = Arc::new(Mutex::new(Vec::new()));
    let push = |step: usize| {
        let order = Arc::clone(&order);
        HostFn::new(move || order.lock().unwrap().push(step))
    };
    for step in 0..6 {
        let (own, other) = if step % 2 == 0 { (&first, &second) } else { (&second, &first) };
        own.launch_host_fn(push(step)).unwrap();
        coordinator.order(other, own).unwrap();
    }
    coordinator.barrier().unwrap();
    // A graph whose tasks alternate between the devices.
    let mut graph = TaskGraph::new();
    let mut before = None;
    for step in 6..12 {
        let work = push(step);
        let task =
            graph.add(step.to_string(), move |stream: &AnyStream| stream.launch_host_fn(work));
        graph.set_stream(task, coordinator.streams()[step % 2].id());
        before.into_iter().for_each(|before| graph.add_dependency(task, before).unwrap());
        before = Some(task);
    }
    let execution = coordinator.execute(graph, &CancelToken::default());
    let last = Arc::clone(&order);
    execution.on_complete(&second, move || last.lock().unwrap().push(12)).unwrap();
    execution.wait().unwrap();
    second.synchronize().unwrap();
    assert_eq!(*order.lock().unwrap(), (0..13).collect::<Vec<_>>());
}

#[test]
fn streams_of_several_devices_are_ordered() {
    let sim = |seed| AnyDevice::from(SimDevice::new(SimOptions::default().with_seed(seed)));
    let cpu = || AnyDevice::from(CpuDevice::with_threads(1).unwrap());
    orders_two_devices(&[cpu(), cpu()]);
    orders_two_devices(&[sim(1), sim(2)]);
    // These cannot wait for each other, so the host does.
    orders_two_devices(&[sim(3), cpu()]);
    orders_two_devices(&[cpu(), sim(4)]);
}

#[test]
fn a_task_for_a_foreign_stream_fails() {
    let device = SimDevice::new(SimOptions::default());
    let foreign = device.create_stream(StreamPriority::Normal).unwrap();
    let mut graph = TaskGraph::new();
    let task = graph.add_host_fn("lost", || panic!("it has no stream"));
    graph.set_stream(task, foreign.id());
    let error = coordinator(&device, 1).execute(graph, &CancelToken::default()).wait().unwrap_err();
    assert!(matches!(error, Error::ForeignStream { stream, .. } if stream == foreign.id()));
}

/// Each function waits for all others, so they only return if they run at the same time.
#[test]
fn functions_on_different_streams_run_at_the_same_time() {
    let device = CpuDevice::with_threads(1).unwrap();
    let coordinator = coordinator(&device, 3);
    let (all, threads) = (std::sync::Barrier::new(3), Mutex::new(Vec::new()));
    let works = (0..9).map(|number| {
        let (all, threads) = (&all, &threads);
        move |stream: &<CpuDevice as Device>::Stream| {
            all.wait();
            threads.lock().unwrap().push((stream.id(), number, std::thread::current().id()));
            match number {
                4 => Err(Error::TimedOut { timeout: Duration::ZERO }),
                7 => panic!("on purpose"),
                _ => Ok(()),
            }
        }
    });
    let failed = coordinator.execute_parallel(works).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::TimedOut, "the first error is that of function 4");
    let threads = threads.into_inner().unwrap();
    assert_eq!(threads.iter().map(|(.., thread)| thread).collect::<HashSet<_>>().len(), 3);
    for (index, stream) in coordinator.streams().iter().enumerate() {
        let own: Vec<usize> =
            threads.iter().filter(|(id, ..)| *id == stream.id()).map(|own| own.1).collect();
        assert_eq!(own, [index, index + 3, index + 6]);
    }
}

#[test]
fn each_stream_has_its_own_completion() {
    let device = CpuDevice::with_threads(2).unwrap();
    let coordinator = coordinator(&device, 3);
    let (open, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(Some(gate));
    let works = (0..2).map(|number| {
        let gate = &gate;
        move |stream: &<CpuDevice as Device>::Stream| {
            let gate = gate.lock().unwrap().take_if(|_| number == 0);
            stream.launch_host_fn(HostFn::new(move || {
                let _ = gate.map(|gate| gate.recv());
            }))
        }
    });
    let execution = coordinator.execute_parallel(works).unwrap();
    let (sender, receiver) = mpsc::channel::<StreamId>();
    execution.on_stream_complete(move |stream| sender.send(stream).unwrap()).unwrap();
    // The work on the first stream has not ended.
    assert_eq!(receiver.recv().unwrap(), coordinator.streams()[1].id());
    assert_eq!(receiver.try_recv(), Err(mpsc::TryRecvError::Empty));
    drop(open);
    assert_eq!(receiver.recv().unwrap(), coordinator.streams()[0].id());
    assert!(receiver.recv().is_err(), "no task ran on the third stream");
}

/// Copies to two buffers in turn, each of which a host function then reads. Without one of the
/// waits, the device finds a race.
#[test]
fn a_pipeline_orders_its_stages_in_every_run() {
    for repeats in [true, false] {
        let device = SimDevice::new(SimOptions::default().with_stall_rate(0.5));
        let (mut graph, mut stages) = (StageGraph::new(), Vec::new());
        for buffer in 0..2 {
            let copy = graph.add(format!("copy {buffer}"), WorkloadType::Memory, &[]);
            let read = graph.add(format!("read {buffer}"), WorkloadType::Compute, &[copy]);
            if repeats {
                graph.repeat_after(copy, read);
            }
            stages.push((copy, read));
        }
        assert_eq!(graph.len(), 4);
        let strategy = AllocationStrategy::Workload;
        let pool = Arc::new(StreamPool::new(device.clone(), 4, strategy).unwrap());
        let pipeline = MultiStreamCoordinator::with_pool(Arc::clone(&pool)).pipeline(&graph);
        let pipeline = pipeline.unwrap();
        let (copy, read) = stages[0];
        assert_ne!(pipeline.stream(copy).id(), pipeline.stream(read).id());
        assert_eq!(pipeline.stream(copy).id(), pipeline.stream(stages[1].0).id());
        let workload = |of: StreamId| {
            pool.stats().into_iter().find(|stats| stats.stream == of).unwrap().workload
        };
        assert_eq!(workload(pipeline.stream(copy).id()), Some(WorkloadType::Memory));
        assert_eq!(workload(pipeline.stream(read).id()), Some(WorkloadType::Compute));
        let layout = Layout::from_size_align(4096, 64).unwrap();
        let memory = [0, 1].map(|_| device.allocate(layout, MemoryKind::Device).unwrap());
        let mut raced = false;
        for turn in 0..10 {
            let (range, (copy, read)) = (memory[turn % 2].range(), stages[turn % 2]);
            // SAFETY: a simulated device runs one operation at a time; the memory outlives it.
            let copied = pipeline.run(copy, |stream| unsafe { stream.fill(range, turn as u8) });
            raced |= matches!(copied, Err(Error::Race(_)));
            let work = HostFn::new(|| ()).reads(range);
            pipeline.run(read, |stream| stream.launch_host_fn(work)).unwrap();
        }
        pipeline.synchronize().unwrap();
        assert_eq!((raced, device.races().is_empty()), (!repeats, repeats));
        let events = pipeline.stages().map(|(name, stream)| (name.len(), stream.metrics()));
        assert!(events.into_iter().all(|(name, metrics)| name == 6 && metrics.operations > 0));
    }
}
