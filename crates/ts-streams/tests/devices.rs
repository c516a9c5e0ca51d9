// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the CPU and simulated devices, including the conformance suite on both.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::alloc::Layout;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use ts_streams::{
    AnyDevice, CpuDevice, Device, DeviceAvailability, DeviceKind, DeviceProvider, DeviceRegistry,
    Error, ErrorKind, Event, GpuStatus, HostFn, MemoryKind, RawMemory, SimDevice, SimOptions,
    Stream, StreamPriority, conformance,
};

#[test]
fn cpu_devices_conform() {
    conformance::check(|| CpuDevice::new().unwrap());
    conformance::check(|| CpuDevice::with_threads(7).unwrap());
}

#[test]
fn a_cpu_device_with_one_thread_conforms() {
    conformance::check(|| CpuDevice::with_threads(1).unwrap());
}

#[test]
fn devices_wrapped_in_any_device_conform() {
    conformance::check(|| AnyDevice::from(CpuDevice::with_threads(2).unwrap()));
    conformance::check(|| AnyDevice::from(SimDevice::new(SimOptions::default())));
}

#[test]
fn mixing_device_kinds_is_an_error() {
    let devices = ["cpu", "sim"].map(|name| DeviceRegistry::builtin().open(Some(name)).unwrap());
    let stream = devices[0].create_stream(StreamPriority::Normal).unwrap();
    let (own, other) = (devices[0].create_event().unwrap(), devices[1].create_event().unwrap());
    stream.record(&own).unwrap();
    let mixed = Error::MixedDevices { expected: DeviceKind::Cpu, actual: DeviceKind::Sim };
    assert_eq!(stream.record(&other), Err(mixed.clone()));
    assert_eq!(stream.wait(&other), Err(mixed.clone()));
    assert_eq!(stream.wait_ignoring_failure(&other), Err(mixed.clone()));
    assert_eq!(own.elapsed_since(&other), Err(mixed));
    assert_eq!(stream.wait(&own), Ok(()), "a refused call does not fail the stream");
}

#[test]
fn the_registry_chooses_the_best_device() {
    let registry = DeviceRegistry::builtin();
    let names: Vec<_> = registry.providers().iter().map(|p| p.name()).collect();
    assert_eq!(names, ["cuda", "cpu", "sim"]);
    let status = GpuStatus::detect();
    let choice = registry.choose(None).unwrap();
    if status.is_available() {
        assert_eq!(choice.provider.name(), "cuda");
    } else {
        assert_eq!(
            (choice.provider.name(), choice.unavailable),
            ("cpu", vec![("cuda", status.to_string())])
        );
        let error = registry.open(Some("cuda")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.to_string(), format!("device \"cuda\" is not available: {status}"));
    }
    assert_eq!(registry.open(Some("sim")).unwrap().info().kind, DeviceKind::Sim);
    assert_eq!(registry.open(Some("cpu:0")).unwrap().info().kind, DeviceKind::Cpu);
    for (name, kind, message) in [
        (
            "cpu:1",
            ErrorKind::Unsupported,
            "device \"cpu:1\" is not available: the only valid number is 0",
        ),
        (
            "tpu",
            ErrorKind::Misuse,
            "unknown device \"tpu\": expected one of cuda, cpu, sim, with an \
             optional number as in cuda:0",
        ),
        (
            "cpu:x",
            ErrorKind::Misuse,
            "unknown device \"cpu:x\": expected one of cuda, cpu, sim, with an \
             optional number as in cuda:0",
        ),
    ] {
        let error = registry.open(Some(name)).unwrap_err();
        assert_eq!((error.kind(), error.to_string()), (kind, message.to_string()));
    }
}

/// A provider that this crate does not contain. Its device is a host with two threads.
#[derive(Debug)]
struct TwoThreads;

impl DeviceProvider for TwoThreads {
    fn name(&self) -> &'static str {
        "small"
    }

    fn priority(&self) -> u8 {
        255
    }

    fn probe(&self) -> DeviceAvailability {
        DeviceAvailability::Available { device_count: 1 }
    }

    fn create(&self, _: usize) -> Result<AnyDevice, Error> {
        Ok(CpuDevice::with_threads(2)?.into())
    }
}

#[test]
fn a_registered_provider_is_chosen_by_priority() {
    let mut registry = DeviceRegistry::builtin();
    registry.register(Arc::new(TwoThreads));
    registry.register(Arc::new(TwoThreads));
    assert_eq!(registry.providers().len(), 4, "a provider replaces one of the same name");
    assert_eq!(registry.choose(None).unwrap().provider.name(), "small");
    assert_eq!(registry.open(None).unwrap().info().kind, DeviceKind::Cpu);
}

#[test]
fn simulated_devices_conform() {
    for seed in 0..10 {
        let device = std::cell::RefCell::new(Vec::new());
        conformance::check(|| {
            let made = SimDevice::new(SimOptions::default().with_seed(seed).with_stall_rate(0.5));
            device.borrow_mut().push(made.clone());
            made
        });
        assert!(device.into_inner().iter().all(|device| device.races().is_empty()));
    }
}

/// Urgent work that is submitted last still starts before most other work.
#[test]
fn urgent_work_starts_before_earlier_work() {
    let device = CpuDevice::with_threads(2).unwrap();
    let started = Arc::new(Mutex::new(Vec::new()));
    let (gates, holds): (Vec<_>, Vec<_>) = (0..2).map(|_| mpsc::channel::<()>()).unzip();
    for hold in holds {
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        stream
            .launch_host_fn(HostFn::new(move || {
                let _ = hold.recv();
            }))
            .unwrap();
    }
    let submit = |priority, name: &'static str| {
        let stream = device.create_stream(priority).unwrap();
        let started = Arc::clone(&started);
        stream.launch_host_fn(HostFn::new(move || started.lock().unwrap().push(name))).unwrap();
    };
    (0..20).for_each(|_| submit(StreamPriority::Low, "low"));
    (0..2).for_each(|_| submit(StreamPriority::High, "high"));
    drop(gates);
    device.synchronize().unwrap();
    let started = started.lock().unwrap();
    // Two threads record the start of their work, so the order is not exact.
    let last_high = started.iter().rposition(|&name| name == "high").unwrap();
    assert!(last_high <= 3, "{started:?}");
}

#[test]
fn work_may_drop_the_last_device_handle() {
    for threads in [1, 3] {
        let device = CpuDevice::with_threads(threads).unwrap();
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        let (sender, receiver) = mpsc::channel();
        let (open, gate) = mpsc::channel::<()>();
        let (work, last) = (stream.clone(), device.clone());
        let run = HostFn::new(move || {
            let _ = gate.recv();
            drop((work, last));
            let _ = sender.send(());
        });
        stream.launch_host_fn(run).unwrap();
        drop((stream, device));
        drop(open);
        receiver.recv_timeout(Duration::from_secs(10)).expect("the drop does not block");
    }
}

#[test]
fn simulations_are_reproducible_by_seed() {
    let run = |seed| {
        let device = SimDevice::new(SimOptions::default().with_seed(seed));
        let order = Arc::new(Mutex::new(Vec::new()));
        let streams = [0; 4].map(|_| device.create_stream(StreamPriority::Normal).unwrap());
        for i in 0..40 {
            let order = Arc::clone(&order);
            streams[i % 4]
                .launch_host_fn(HostFn::new(move || order.lock().unwrap().push(i)))
                .unwrap();
        }
        device.synchronize().unwrap();
        let order = order.lock().unwrap().clone();
        (order, device.now())
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1).0, run(2).0);
    assert!(run(1).1 > Duration::ZERO);
}

#[test]
fn a_host_read_without_a_wait_is_a_race() {
    let device = SimDevice::new(SimOptions::default());
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let memory =
        device.allocate(Layout::from_size_align(64, 64).unwrap(), MemoryKind::Device).unwrap();
    let mut bytes = [0; 64];
    // SAFETY: a simulated device runs work only on this thread.
    unsafe {
        stream.fill(memory.range(), 1).unwrap();
        let refused = memory.read(0, &mut bytes).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::Race(race) if race.earlier.writes && race.later.stream.is_none()
            ),
            "{refused}"
        );
        stream.synchronize().unwrap();
        memory.read(0, &mut bytes).unwrap();
    }
    assert_eq!(bytes, [1; 64]);
    assert_eq!(device.races().len(), 1);
}

#[test]
fn freeing_memory_in_use_is_a_race() {
    let device = SimDevice::new(SimOptions::default());
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let memory =
        device.allocate(Layout::from_size_align(64, 64).unwrap(), MemoryKind::Device).unwrap();
    // SAFETY: the device finds the race and keeps the memory, so the fill writes to valid memory.
    unsafe { stream.fill(memory.range(), 1) }.unwrap();
    drop(memory);
    assert_eq!(device.races().len(), 1);
    stream.synchronize().unwrap();
}

#[test]
fn injected_faults_are_reported() {
    let options = SimOptions::default().with_fault_rate(0.2).with_seed(3);
    let device = SimDevice::new(options);
    let mut failed = 0;
    for _ in 0..50 {
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        stream.launch_host_fn(HostFn::new(|| ())).unwrap();
        match stream.synchronize() {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Failed);
                failed += 1;
            }
        }
    }
    assert!((1..40).contains(&failed), "{failed}");
}

/// One stream frees the memory while another stream may still write to it. The device finds the
/// race and keeps the memory.
#[test]
fn freeing_in_order_while_another_stream_writes_is_a_race() {
    let device = SimDevice::new(SimOptions::default());
    let [own, other] = [(); 2].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let layout = Layout::from_size_align(64, 64).unwrap();
    let memory = device.allocate_async(layout, &own).unwrap();
    // SAFETY: the device finds the race and keeps the memory, so the fill writes to valid memory.
    unsafe { other.fill(memory.range(), 1) }.unwrap();
    assert!(matches!(device.free_async(memory, &own), Err(Error::Race(_))));
    device.synchronize().unwrap();
    assert_ne!(device.races(), []);
}

/// A stream that has failed still frees memory only after the events that it waits for.
#[test]
fn a_failed_stream_frees_memory_in_order() {
    let device = CpuDevice::with_threads(2).unwrap();
    let [own, other] = [(); 2].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let (open, gate) = mpsc::channel::<()>();
    let wait = move || {
        let _ = gate.recv();
    };
    other.launch_host_fn(HostFn::new(wait)).unwrap();
    let done = device.create_event().unwrap();
    other.record(&done).unwrap();
    let memory = device.allocate_async(Layout::from_size_align(64, 64).unwrap(), &own).unwrap();
    own.launch_host_fn(HostFn::new(|| panic!("on purpose"))).unwrap();
    own.wait(&done).unwrap_or(());
    device.free_async(memory, &own).unwrap();
    if own.query() == Ok(ts_streams::Status::Pending) {
        assert_eq!(device.memory().in_use_bytes, 64, "the free waits");
    }
    drop(open);
    assert!(own.synchronize().is_err());
    assert_eq!(device.memory().in_use_bytes, 0);
}

#[test]
fn allocations_beyond_the_capacity_fail() {
    let device = SimDevice::new(SimOptions::default().with_total_bytes(1000));
    let layout = |len| Layout::from_size_align(len, 8).unwrap();
    let held = device.allocate(layout(600), MemoryKind::Device).unwrap();
    let refused = device.allocate(layout(401), MemoryKind::Device).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Full);
    drop(held);
    device.allocate(layout(1000), MemoryKind::Device).unwrap();
    assert_eq!((device.memory().in_use_bytes, device.memory().peak_bytes), (0, 1000));
}

#[test]
fn an_event_orders_streams_of_two_devices() {
    let (a, b) =
        (SimDevice::new(SimOptions::default()), SimDevice::new(SimOptions::default().with_seed(1)));
    let (first, second) = (
        a.create_stream(StreamPriority::Low).unwrap(),
        b.create_stream(StreamPriority::Low).unwrap(),
    );
    order_across(&a, &first, &second);
    let (a, b) = (CpuDevice::with_threads(1).unwrap(), CpuDevice::with_threads(1).unwrap());
    let (first, second) = (
        a.create_stream(StreamPriority::Low).unwrap(),
        b.create_stream(StreamPriority::Low).unwrap(),
    );
    order_across(&a, &first, &second);
}

#[test]
fn dropping_a_device_waits_for_foreign_events() {
    let [a, b] = [(); 2].map(|()| CpuDevice::with_threads(1).unwrap());
    let [waits, works] =
        [&a, &b].map(|device| device.create_stream(StreamPriority::Normal).unwrap());
    works.launch_host_fn(HostFn::new(|| std::thread::sleep(Duration::from_millis(50)))).unwrap();
    let done = b.create_event().unwrap();
    works.record(&done).unwrap();
    waits.wait(&done).unwrap();
    drop(waits);
    drop(a);
}

/// One device waits for a second, and the second waits for a third. The wait for the first device
/// runs the work of all three, even after the handles to the other two are dropped.
#[test]
fn simulated_devices_drive_each_other() {
    let [a, b, c] = [(); 3].map(|()| SimDevice::new(SimOptions::default()));
    let [first, second, third] =
        [&c, &b, &a].map(|device| device.create_stream(StreamPriority::Normal).unwrap());
    let ran = Arc::new(Mutex::new(false));
    let run = Arc::clone(&ran);
    first.launch_host_fn(HostFn::new(move || *run.lock().unwrap() = true)).unwrap();
    for (earlier, later) in [(&first, &second), (&second, &third)] {
        let point = a.create_event().unwrap();
        earlier.record(&point).unwrap();
        later.wait(&point).unwrap();
    }
    drop((first, second, b, c));
    third.synchronize().unwrap();
    assert!(*ran.lock().unwrap());
}

#[test]
fn a_refused_operation_has_no_effect() {
    let device = SimDevice::new(SimOptions::default());
    let [a, b, c] = [(); 3].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let memory =
        device.allocate(Layout::from_size_align(64, 64).unwrap(), MemoryKind::Device).unwrap();
    let done = device.create_event().unwrap();
    // SAFETY: a simulated device runs work only on this thread.
    unsafe {
        a.fill(memory.range(), 1).unwrap();
        assert!(matches!(b.fill(memory.range(), 2), Err(Error::Race(_))));
        b.synchronize().unwrap();
        assert!(memory.read(0, &mut [0; 64]).is_err(), "nothing waits for the first fill");
        a.record(&done).unwrap();
        c.wait(&done).unwrap();
        c.fill(memory.range(), 3).unwrap();
    }
    device.synchronize().unwrap();
}

fn order_across<D: Device>(device: &D, first: &D::Stream, second: &D::Stream) {
    let (seen, point) = (Arc::new(Mutex::new(Vec::new())), device.create_event().unwrap());
    let push = |n| {
        let seen = Arc::clone(&seen);
        HostFn::new(move || seen.lock().unwrap().push(n))
    };
    for i in 0..20 {
        first.launch_host_fn(push(2 * i)).unwrap();
        first.record(&point).unwrap();
        second.wait(&point).unwrap();
        second.launch_host_fn(push(2 * i + 1)).unwrap();
        second.record(&point).unwrap();
        first.wait(&point).unwrap();
    }
    point.synchronize().unwrap();
    assert!(seen.lock().unwrap().iter().copied().eq(0..40));
}

/// Work that was submitted before an error was taken is skipped, so an event after it must fail:
/// whoever waits for it would read what was never written.
#[test]
fn events_after_skipped_work_fail() {
    let device = CpuDevice::with_threads(2).unwrap();
    let [failing, gated] = [(); 2].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let [failed, opened, after, later] = [(); 4].map(|()| device.create_event().unwrap());
    let (open, gate) = mpsc::channel::<()>();
    let (start, started) = mpsc::channel::<()>();
    gated.launch_host_fn(HostFn::new(move || gate.recv().unwrap())).unwrap();
    gated.record(&opened).unwrap();
    let panic = || std::panic::resume_unwind(Box::new("on purpose"));
    let fail = HostFn::new(move || started.recv().map_or((), |()| panic()));
    failing.launch_host_fn(fail).unwrap();
    failing.record(&failed).unwrap();
    failing.wait(&opened).unwrap();
    failing.launch_host_fn(HostFn::new(|| unreachable!("this work is skipped"))).unwrap();
    failing.record(&after).unwrap();
    start.send(()).unwrap();
    failed.synchronize().unwrap_err();
    failing.take_error().unwrap();
    failing.record(&later).unwrap();
    open.send(()).unwrap();
    assert!(after.synchronize().unwrap_err().to_string().contains("on purpose"));
    later.synchronize().unwrap();
    failing.synchronize().unwrap();
}
