// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conformance suite on every device that there is.

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
fn the_host_conforms() {
    conformance::check(|| CpuDevice::new().unwrap());
    conformance::check(|| CpuDevice::with_threads(7).unwrap());
}

#[test]
fn one_thread_conforms() {
    conformance::check(|| CpuDevice::with_threads(1).unwrap());
}

#[test]
fn devices_whose_kind_is_known_late_conform() {
    conformance::check(|| AnyDevice::from(CpuDevice::with_threads(2).unwrap()));
    conformance::check(|| AnyDevice::from(SimDevice::new(SimOptions::default())));
}

#[test]
fn events_of_another_kind_of_device_are_refused() {
    let devices = ["cpu", "sim"].map(|name| DeviceRegistry::builtin().open(Some(name)).unwrap());
    let stream = devices[0].create_stream(StreamPriority::Normal).unwrap();
    let (own, other) = (devices[0].create_event().unwrap(), devices[1].create_event().unwrap());
    stream.record(&own).unwrap();
    let mixed = Error::MixedDevices { of: DeviceKind::Cpu, with: DeviceKind::Sim };
    assert_eq!(stream.record(&other), Err(mixed.clone()));
    assert_eq!(stream.wait(&other), Err(mixed.clone()));
    assert_eq!(stream.follow(&other), Err(mixed.clone()));
    assert_eq!(own.elapsed_since(&other), Err(mixed));
    assert_eq!(stream.wait(&own), Ok(()), "and nothing has failed by that");
}

#[test]
fn the_registry_finds_the_best_device_and_says_why_not_another() {
    let registry = DeviceRegistry::builtin();
    let names: Vec<_> = registry.providers().iter().map(|p| p.name()).collect();
    assert_eq!(names, ["cuda", "cpu", "sim"]);
    let status = GpuStatus::detect();
    let choice = registry.choose(None).unwrap();
    if status.is_available() {
        assert_eq!(choice.provider.name(), "cuda");
    } else {
        assert_eq!(
            (choice.provider.name(), choice.passed_over),
            ("cpu", vec![("cuda", status.to_string())])
        );
        let error = registry.open(Some("cuda")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.to_string(), format!("no device `cuda` here: {status}"));
    }
    assert_eq!(registry.open(Some("sim")).unwrap().info().kind, DeviceKind::Sim);
    assert_eq!(registry.open(Some("cpu:0")).unwrap().info().kind, DeviceKind::Cpu);
    for (name, kind, message) in [
        ("cpu:1", ErrorKind::Unsupported, "no device `cpu:1` here: there is one"),
        (
            "tpu",
            ErrorKind::Misuse,
            "no device `tpu`; there are cuda, cpu, sim, with a number as in `cuda:0`",
        ),
        (
            "cpu:x",
            ErrorKind::Misuse,
            "no device `cpu:x`; there are cuda, cpu, sim, with a number as in `cuda:0`",
        ),
    ] {
        let error = registry.open(Some(name)).unwrap_err();
        assert_eq!((error.kind(), error.to_string()), (kind, message.to_string()));
    }
}

/// What somebody else adds: a host with two threads.
#[derive(Debug)]
struct Small;

impl DeviceProvider for Small {
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
fn a_device_of_others_is_chosen_when_it_comes_first() {
    let mut registry = DeviceRegistry::builtin();
    registry.register(Arc::new(Small));
    registry.register(Arc::new(Small));
    assert_eq!(registry.providers().len(), 4, "one of the same name takes the place of the first");
    assert_eq!(registry.choose(None).unwrap().provider.name(), "small");
    assert_eq!(registry.open(None).unwrap().info().kind, DeviceKind::Cpu);
}

#[test]
fn simulations_conform() {
    for seed in 0..10 {
        let device = std::cell::RefCell::new(Vec::new());
        conformance::check(|| {
            let made = SimDevice::new(SimOptions { seed, stalls: 0.5, ..SimOptions::default() });
            device.borrow_mut().push(made.clone());
            made
        });
        assert!(device.into_inner().iter().all(|device| device.races().is_empty()));
    }
}

/// The regression of a library whose priorities were dropped on the way.
#[test]
fn urgent_work_begins_before_work_that_was_there_first() {
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
    // Two threads note what they begin.
    let last_high = started.iter().rposition(|&name| name == "high").unwrap();
    assert!(last_high <= 3, "{started:?}");
}

#[test]
fn the_last_handle_to_a_device_can_be_part_of_its_work() {
    for threads in [1, 3] {
        let device = CpuDevice::with_threads(threads).unwrap();
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        let (tell, told) = mpsc::channel();
        let (open, gate) = mpsc::channel::<()>();
        let (work, last) = (stream.clone(), device.clone());
        let run = HostFn::new(move || {
            let _ = gate.recv();
            drop((work, last));
            let _ = tell.send(());
        });
        stream.launch_host_fn(run).unwrap();
        drop((stream, device));
        drop(open);
        told.recv_timeout(Duration::from_secs(10)).expect("it waits for nobody");
    }
}

#[test]
fn a_simulation_is_the_same_again_with_its_seed() {
    let run = |seed| {
        let device = SimDevice::new(SimOptions { seed, ..SimOptions::default() });
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
fn what_the_host_forgets_to_wait_for_is_a_race() {
    let device = SimDevice::new(SimOptions::default());
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let memory =
        device.allocate(Layout::from_size_align(64, 64).unwrap(), MemoryKind::Device).unwrap();
    let mut bytes = [0; 64];
    // SAFETY: a simulated device runs nothing behind this thread's back.
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
fn memory_that_is_freed_while_it_is_used_is_a_race() {
    let device = SimDevice::new(SimOptions::default());
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let memory =
        device.allocate(Layout::from_size_align(64, 64).unwrap(), MemoryKind::Device).unwrap();
    // SAFETY: the device keeps memory that is freed too early.
    unsafe { stream.fill(memory.range(), 1) }.unwrap();
    drop(memory);
    assert_eq!(device.races().len(), 1);
    stream.synchronize().unwrap();
}

#[test]
fn faults_that_are_asked_for_come_and_are_told() {
    let options = SimOptions { faults: 0.2, seed: 3, ..SimOptions::default() };
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

/// Given back in the order of one stream while another may still write to it: found, and the memory
/// stays where it is.
#[test]
fn memory_that_is_given_back_in_order_while_another_stream_uses_it_is_a_race() {
    let device = SimDevice::new(SimOptions::default());
    let [own, other] = [(); 2].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let layout = Layout::from_size_align(64, 64).unwrap();
    let memory = device.allocate_in_order(layout, &own).unwrap();
    // SAFETY: that it is not allowed is what the device is to say.
    unsafe { other.fill(memory.range(), 1) }.unwrap();
    assert!(matches!(device.free_in_order(memory, &own), Err(Error::Race(_))));
    device.synchronize().unwrap();
    assert_ne!(device.races(), []);
}

/// A stream that failed gives memory back in its turn as well: behind what it waits for.
#[test]
fn a_stream_that_fails_gives_memory_back_in_its_turn() {
    let device = CpuDevice::with_threads(2).unwrap();
    let [own, other] = [(); 2].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let (open, gate) = mpsc::channel::<()>();
    let wait = move || {
        let _ = gate.recv();
    };
    other.launch_host_fn(HostFn::new(wait)).unwrap();
    let done = device.create_event().unwrap();
    other.record(&done).unwrap();
    let memory = device.allocate_in_order(Layout::from_size_align(64, 64).unwrap(), &own).unwrap();
    own.launch_host_fn(HostFn::new(|| panic!("as it shall"))).unwrap();
    own.wait(&done).unwrap_or(());
    device.free_in_order(memory, &own).unwrap();
    if own.query() == Ok(ts_streams::Status::Pending) {
        assert_eq!(device.memory().in_use_bytes, 64, "it waits");
    }
    drop(open);
    assert!(own.synchronize().is_err());
    assert_eq!(device.memory().in_use_bytes, 0);
}

#[test]
fn memory_has_an_end() {
    let device = SimDevice::new(SimOptions { total_bytes: 1000, ..SimOptions::default() });
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
    let (a, b) = (
        SimDevice::new(SimOptions::default()),
        SimDevice::new(SimOptions { seed: 1, ..SimOptions::default() }),
    );
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
fn a_device_goes_when_what_its_streams_wait_for_is_done() {
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

/// Also where a device's handles are gone, and where the one that it waits for waits for another.
#[test]
fn simulated_devices_work_for_each_other() {
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
fn what_is_refused_has_not_happened() {
    let device = SimDevice::new(SimOptions::default());
    let [a, b, c] = [(); 3].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let memory =
        device.allocate(Layout::from_size_align(64, 64).unwrap(), MemoryKind::Device).unwrap();
    let done = device.create_event().unwrap();
    // SAFETY: a simulated device runs nothing behind this thread's back.
    unsafe {
        a.fill(memory.range(), 1).unwrap();
        assert!(matches!(b.fill(memory.range(), 2), Err(Error::Race(_))));
        b.synchronize().unwrap();
        assert!(memory.read(0, &mut [0; 64]).is_err(), "the first is not waited for");
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
