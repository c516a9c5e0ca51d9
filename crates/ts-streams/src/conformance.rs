// SPDX-License-Identifier: MIT OR Apache-2.0
//! A conformance suite for implementers of [`Device`], whose documentation states their promises.

use std::alloc::Layout;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::{
    Device, Error, ErrorKind, Event, HostFn, MemoryKind, MemoryLocation, MemoryRange, RawMemory,
    Status, Stream, StreamPriority,
};

/// Runs all checks, each on a new device that `make` creates. Blocks for some seconds.
///
/// The checks cover each promise of [`Device`]: the size, alignment and kind of memory, the order
/// of streams and events, the ends of work, frees in order, and the identity of streams. Passing
/// them proves nothing for other runs, so an implementer still says in a `// SAFETY:` comment why
/// each promise holds.
///
/// # Panics
/// Panics if a check fails.
pub fn check<D: Device>(make: impl Fn() -> D) {
    allocations_meet_their_layout(&make());
    streams_have_their_own_identity(&make(), &make());
    copies_round_trip(&make());
    invalid_copies_are_refused(&make());
    a_stream_runs_in_order(&make());
    an_event_orders_two_streams(&make());
    an_unrecorded_event_is_ready(&make());
    recording_an_event_again_does_not_change_earlier_waits(&make());
    events_measure_elapsed_time(&make());
    priorities_are_clamped_to_the_range(&make());
    device_synchronize_waits_for_all_streams(&make());
    a_dropped_stream_finishes_its_work(&make());
    a_failure_stops_only_its_dependents(&make());
    long_wait_chains_do_not_overflow_the_stack(&make());
    streams_may_be_dropped_during_device_synchronize(&make());
    waiting_in_a_host_function_is_an_error(&make());
    metrics_count_submitted_work(&make());
    unsupported_operations_return_an_error(&make());
    submitting_does_not_block(&make());
    stream_ordered_memory_is_freed_in_order(&make());
    for seed in 1..=20 {
        random_programs_respect_dependencies(&make(), seed);
    }
}

fn memory<D: Device>(device: &D, len: usize) -> D::Memory {
    device
        .allocate(
            Layout::from_size_align(len, 64).expect("64 is a power of two"),
            MemoryKind::Device,
        )
        .expect("the allocation succeeds")
}

fn stream<D: Device>(device: &D) -> D::Stream {
    device.create_stream(StreamPriority::Normal).expect("a stream is created")
}

fn event<D: Device>(device: &D) -> D::Event {
    device.create_event().expect("an event is created")
}

/// Returns the contents of memory that no work uses.
fn content<M: RawMemory>(memory: &M) -> Vec<u8> {
    let mut bytes = vec![0; memory.range().len()];
    // SAFETY: the callers wait for all work on the memory first.
    unsafe { memory.read(0, &mut bytes) }.expect("unused memory is accessible");
    bytes
}

/// Memory has the size, the alignment and a kind that was asked for, and belongs to nobody else.
fn allocations_meet_their_layout<D: Device>(device: &D) {
    let kinds = [MemoryKind::Device, MemoryKind::Host, MemoryKind::PinnedHost, MemoryKind::Managed];
    let mut all = Vec::new();
    for kind in kinds {
        for (len, align) in [(0, 1), (1, 1), (4097, 64), (100, 4096), (1 << 20, 256)] {
            let layout = Layout::from_size_align(len, align).expect("the layout is valid");
            let memory = match device.allocate(layout, kind) {
                Ok(memory) => memory,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unsupported, "{kind:?}: {error}");
                    continue;
                }
            };
            let range = memory.range();
            assert!(range.len() >= len, "{kind:?}: {} bytes instead of {len}", range.len());
            assert_eq!(range.address() % align, 0, "{kind:?}: not aligned to {align}");
            assert_eq!(range, memory.range(), "the range does not change");
            let is_of_host = memory.kind() != MemoryKind::Device;
            assert!(is_of_host || kind == MemoryKind::Device, "{kind:?} is not on the host");
            let number = all.len() as u8;
            // SAFETY: nothing else uses the memory.
            unsafe { memory.write(0, &vec![number; range.len()]) }.expect("it can be written");
            all.push(memory);
        }
    }
    for (number, memory) in all.iter().enumerate() {
        assert!(content(memory).iter().all(|&byte| byte == number as u8), "memory is shared");
    }
}

fn streams_have_their_own_identity<D: Device>(device: &D, other: &D) {
    let streams: Vec<_> = [device, device, other].into_iter().map(stream).collect();
    for (number, stream) in streams.iter().enumerate() {
        let same = streams.iter().filter(|other| other.id() == stream.id());
        assert_eq!(same.count(), 1, "each stream has its own identifier");
        assert_eq!(stream.id(), stream.clone().id());
        assert_eq!(device.owns(stream), number < 2);
        assert_eq!((device.clone().owns(stream), other.owns(stream)), (number < 2, number == 2));
    }
}

/// Memory freed in stream order stays valid until the work before the free is done, even if the
/// next allocation gets the same address.
fn stream_ordered_memory_is_freed_in_order<D: Device>(device: &D) {
    let (stream, layout) =
        (stream(device), Layout::from_size_align(4096, 256).expect("256 is a power of two"));
    let mut copies = vec![[0u8; 4096]; 20];
    for (number, copy) in copies.iter_mut().enumerate() {
        let memory = match device.allocate_async(layout, &stream) {
            Ok(memory) => memory,
            Err(error) => return assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}"),
        };
        assert_eq!((memory.range().len(), memory.range().address() % 256), (4096, 0));
        // SAFETY: only this stream uses the memory, and `free_async` frees it after that use.
        // `copies` lives until the stream is done.
        unsafe {
            stream.fill(memory.range(), number as u8).expect("the stream has not failed");
            stream.copy(MemoryRange::of(copy), memory.range()).expect("the stream has not failed");
        }
        device.free_async(memory, &stream).expect("the stream has not failed");
    }
    stream.synchronize().expect("the work succeeds");
    assert!(copies.iter().enumerate().all(|(number, copy)| *copy == [number as u8; 4096]));
}

fn copies_round_trip<D: Device>(device: &D) {
    let stream = stream(device);
    let pinned = Layout::from_size_align(1000, 64).expect("64 is a power of two");
    let pinned = device.allocate(pinned, MemoryKind::PinnedHost).expect("the allocation succeeds");
    let (near, back) = (memory(device, 1000), memory(device, 1000));
    let bytes: Vec<u8> = (0..1000).map(|i| (i * 7 % 251) as u8).collect();
    // SAFETY: nothing else uses the memory, and it lives until `synchronize` has waited for the
    // work.
    unsafe {
        pinned.write(0, &bytes).expect("unused memory is accessible");
        stream.copy(near.range(), pinned.range()).expect("the copy is accepted");
        stream.copy(back.range(), near.range()).expect("the copy is accepted");
        stream.fill(back.range().slice(10..20), 9).expect("the fill is accepted");
    }
    stream.synchronize().expect("the work succeeds");
    assert_eq!(stream.query(), Ok(Status::Ready));
    let mut expected = bytes;
    expected[10..20].fill(9);
    assert!(content(&back) == expected, "the copied bytes differ");
}

fn invalid_copies_are_refused<D: Device>(device: &D) {
    let (stream, memory) = (stream(device), memory(device, 100));
    let range = memory.range();
    for (to, from) in [(range, range.slice(0..50)), (range.slice(0..60), range.slice(40..100))] {
        // SAFETY: nothing else uses the memory.
        let refused = unsafe { stream.copy(to, from) };
        assert!(matches!(refused, Err(Error::BadCopy { .. })), "{refused:?}");
    }
    // SAFETY: the ranges are empty.
    unsafe { stream.copy(range.slice(3..3), range.slice(50..50)) }
        .expect("an empty copy is accepted");
    stream.synchronize().expect("the work succeeds");
}

fn a_stream_runs_in_order<D: Device>(device: &D) {
    let (stream, memory) = (stream(device), memory(device, 4096));
    let seen = Arc::new(Mutex::new(Vec::new()));
    for i in 0..200u8 {
        // SAFETY: the stream orders the accesses; the memory outlives the work.
        unsafe { stream.fill(memory.range(), i) }.expect("the fill is accepted");
        let seen = Arc::clone(&seen);
        stream
            .launch_host_fn(HostFn::new(move || {
                seen.lock().expect("no thread panics while it owns the lock").push(i);
            }))
            .expect("the host function is accepted");
    }
    stream.synchronize().expect("the work succeeds");
    assert!(
        seen.lock().expect("no thread panics while it owns the lock").iter().copied().eq(0..200),
        "the host functions ran out of order"
    );
    assert!(content(&memory) == [199; 4096]);
}

fn an_event_orders_two_streams<D: Device>(device: &D) {
    let (first, second, filled) = (stream(device), stream(device), event(device));
    let (a, b) = (memory(device, 1 << 20), memory(device, 1 << 20));
    for i in 0..10 {
        // SAFETY: events order all accesses; the memory outlives the work.
        unsafe {
            first.fill(a.range(), i).expect("the fill is accepted");
            first.record(&filled).expect("the record is accepted");
            second.wait(&filled).expect("the wait is accepted");
            second.copy(b.range(), a.range()).expect("the copy is accepted");
            second.record(&filled).expect("the record is accepted");
            first.wait(&filled).expect("the wait is accepted");
        }
    }
    filled.synchronize().expect("the work succeeds");
    assert_eq!(filled.query(), Ok(Status::Ready));
    assert!(content(&b) == vec![9; 1 << 20], "the copy ran before the fill");
    device.synchronize().expect("the work succeeds");
}

fn an_unrecorded_event_is_ready<D: Device>(device: &D) {
    let (stream, never) = (stream(device), event(device));
    assert_eq!(never.query(), Ok(Status::Ready));
    stream.wait(&never).expect("the wait is accepted");
    never.synchronize().expect("there is nothing to wait for");
    stream.synchronize().expect("there is nothing to wait for");
    let reached = event(device);
    stream.record(&reached).expect("the record is accepted");
    reached.synchronize().expect("the work succeeds");
    assert!(reached.elapsed_since(&never).is_err() && never.elapsed_since(&reached).is_err());
}

fn recording_an_event_again_does_not_change_earlier_waits<D: Device>(device: &D) {
    let (first, second, point) = (stream(device), stream(device), event(device));
    first.record(&point).expect("the record is accepted");
    second.wait(&point).expect("the wait is accepted");
    // If the wait above referred to this record, `second` would wait for itself.
    second.record(&point).expect("the record is accepted");
    first.wait(&point).expect("the wait is accepted");
    first.synchronize().expect("the waits form no cycle");
    second.synchronize().expect("the waits form no cycle");
}

fn events_measure_elapsed_time<D: Device>(device: &D) {
    let (stream, start, end) = (stream(device), event(device), event(device));
    let memory = memory(device, 1 << 20);
    stream.record(&start).expect("the record is accepted");
    // SAFETY: the stream orders the accesses; the memory outlives the work.
    (0..10).for_each(|i| unsafe { stream.fill(memory.range(), i) }.expect("the fill is accepted"));
    stream.record(&end).expect("the record is accepted");
    end.synchronize().expect("the work succeeds");
    assert!(end.elapsed_since(&start).expect("both events are reached") > Duration::ZERO);
    assert_eq!(start.elapsed_since(&start), Ok(Duration::ZERO));
}

fn priorities_are_clamped_to_the_range<D: Device>(device: &D) {
    let range = device.info().priorities;
    let level = |priority| device.create_stream(priority).expect("a stream is created").level();
    assert_eq!(level(StreamPriority::High), range.greatest);
    assert_eq!(level(StreamPriority::Low), range.least);
    assert_eq!(level(StreamPriority::Level(i32::MIN)), range.greatest);
    assert_eq!(level(StreamPriority::Level(i32::MAX)), range.least);
}

fn device_synchronize_waits_for_all_streams<D: Device>(device: &D) {
    let (count, streams) = (Arc::new(AtomicUsize::new(0)), [0; 5].map(|_| stream(device)));
    for stream in streams.iter().cycle().take(50) {
        let count = Arc::clone(&count);
        let add = HostFn::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        stream.launch_host_fn(add).expect("the host function is accepted");
    }
    device.synchronize().expect("the work succeeds");
    assert_eq!(count.load(Ordering::SeqCst), 50);
}

fn a_dropped_stream_finishes_its_work<D: Device>(device: &D) {
    let (count, point) = (Arc::new(AtomicUsize::new(0)), event(device));
    {
        let stream = stream(device);
        for _ in 0..10 {
            let count = Arc::clone(&count);
            let add = HostFn::new(move || {
                count.fetch_add(1, Ordering::SeqCst);
            });
            stream.launch_host_fn(add).expect("the host function is accepted");
        }
        stream.record(&point).expect("the record is accepted");
    }
    point.synchronize().expect("the work succeeds");
    assert_eq!(count.load(Ordering::SeqCst), 10);
}

fn a_failure_stops_only_its_dependents<D: Device>(device: &D) {
    let [failing, dependent, follower, other] = [(); 4].map(|()| stream(device));
    let (point, ran) = (event(device), Arc::new(AtomicUsize::new(0)));
    let add = |n: usize| {
        let ran = Arc::clone(&ran);
        HostFn::new(move || {
            ran.fetch_add(n, Ordering::SeqCst);
        })
    };
    failing
        .launch_host_fn(HostFn::new(|| std::panic::resume_unwind(Box::new("on purpose"))))
        .expect("the host function is accepted");
    // The stream refuses this function if the failure is known already, and otherwise skips it.
    let _ = failing.launch_host_fn(add(1000));
    failing.record(&point).expect("a failed stream accepts records");
    dependent.wait(&point).expect("the wait is accepted");
    let _ = dependent.launch_host_fn(add(100));
    follower.wait_ignoring_failure(&point).expect("the wait is accepted");
    follower.launch_host_fn(add(10)).expect("a stream that ignores the failure does not fail");
    other.launch_host_fn(add(1)).expect("the host function is accepted");
    other.synchronize().expect("a stream without a dependency succeeds");
    follower.synchronize().expect("a stream that ignores the failure does not fail");
    assert_eq!(ran.load(Ordering::SeqCst), 11);
    for stream in [&failing, &dependent] {
        let error = stream.synchronize().expect_err("the stream has failed");
        assert!(
            error.kind() == ErrorKind::Failed && error.to_string().contains("on purpose"),
            "{error}"
        );
        assert_eq!(stream.query(), Err(error.clone()));
        // Dropping the refused function drops the last handle to a stream, which may lock the
        // device. `launch_host_fn` must therefore drop the function outside that lock.
        let last = self::stream(device);
        let refused = stream.launch_host_fn(HostFn::new(move || drop(last)));
        assert_eq!(refused, Err(error));
    }
    assert!(
        point.query().is_err() && point.synchronize().is_err(),
        "the event fails because the work before it failed"
    );
    assert!(device.synchronize().is_err(), "synchronize returns the error of a failed stream");
    if failing.take_error().is_some() {
        assert_eq!(failing.take_error(), None);
        failing.launch_host_fn(add(0)).expect("the stream accepts work again");
        failing.synchronize().expect("the stream works after its error was taken");
    }
}

fn long_wait_chains_do_not_overflow_the_stack<D: Device>(device: &D) {
    let ([first, second], done) = ([(); 2].map(|()| stream(device)), Arc::new(AtomicUsize::new(0)));
    let (open, gate) = mpsc::channel::<()>();
    if device.info().runs_by_itself {
        let blocked = HostFn::new(move || {
            let _ = gate.recv();
        });
        first.launch_host_fn(blocked).expect("the host function is accepted");
    }
    for _ in 0..3000 {
        for (one, other) in [(&first, &second), (&second, &first)] {
            let point = event(device);
            one.record(&point).expect("the record is accepted");
            other.wait(&point).expect("the wait is accepted");
        }
    }
    let count = Arc::clone(&done);
    let add = move || {
        count.fetch_add(1, Ordering::SeqCst);
    };
    first.launch_host_fn(HostFn::new(add)).expect("the host function is accepted");
    drop(open);
    first.synchronize().expect("the work succeeds");
    assert_eq!(done.load(Ordering::SeqCst), 1);
}

fn streams_may_be_dropped_during_device_synchronize<D: Device>(device: &D) {
    for _ in 0..100 {
        stream(device).launch_host_fn(HostFn::new(|| ())).expect("the host function is accepted");
    }
    device.synchronize().expect("the work succeeds");
}

fn waiting_in_a_host_function_is_an_error<D: Device>(device: &D) {
    let (stream, other, (answers, inbox)) = (stream(device), stream(device), mpsc::channel());
    let (inner, whole) = (other.clone(), device.clone());
    let ask = HostFn::new(move || {
        let _ = answers.send((inner.synchronize(), whole.synchronize()));
    });
    stream.launch_host_fn(ask).expect("the host function is accepted");
    stream.synchronize().expect("the work succeeds");
    assert_eq!(
        inbox.recv().expect("the host function ran"),
        (Err(Error::WaitInHostFn), Err(Error::WaitInHostFn))
    );
}

fn metrics_count_submitted_work<D: Device>(device: &D) {
    let (stream, memory, point) = (stream(device), memory(device, 300), event(device));
    // SAFETY: the stream orders the accesses; the memory outlives the work.
    unsafe {
        stream.fill(memory.range(), 1).expect("the fill is accepted");
        stream
            .copy(memory.range().slice(0..100), memory.range().slice(100..200))
            .expect("the copy is accepted");
    }
    stream.launch_host_fn(HostFn::new(|| ())).expect("the host function is accepted");
    stream.record(&point).expect("the record is accepted");
    point.synchronize().expect("the work succeeds");
    let metrics = stream.metrics();
    assert_eq!((metrics.transfers, metrics.transferred_bytes, metrics.launches), (2, 400, 1));
    assert_eq!((metrics.operations, metrics.outstanding()), (4, 0));
    assert!(metrics.average_latency().is_some());
    assert_eq!((stream.outstanding(), metrics.completed_work), (0, 3));
    assert!(Duration::ZERO < metrics.busy && metrics.busy <= metrics.latency, "{metrics:?}");
}

fn unsupported_operations_return_an_error<D: Device>(device: &D) {
    let (stream, memory) = (stream(device), memory(device, 64));
    if !device.info().can_prefetch {
        let refused = stream
            .prefetch(memory.range(), MemoryLocation::Device)
            .expect_err("prefetch fails if `can_prefetch` is false");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
    }
    stream.synchronize().expect("a refused call does not fail the stream");
}

fn submitting_does_not_block<D: Device>(device: &D) {
    if !device.info().runs_by_itself {
        return;
    }
    let (blocked, waiting, point) = (stream(device), stream(device), event(device));
    let memory = memory(device, 64);
    let (open, gate) = mpsc::channel::<()>();
    blocked
        .launch_host_fn(HostFn::new(move || {
            let _ = gate.recv();
        }))
        .expect("the host function is accepted");
    blocked.record(&point).expect("the record is accepted");
    waiting.wait(&point).expect("the wait is accepted");
    // SAFETY: the stream orders the accesses; the memory outlives the work.
    unsafe { waiting.fill(memory.range(), 1) }.expect("the fill is accepted");
    assert_eq!((point.query(), waiting.query()), (Ok(Status::Pending), Ok(Status::Pending)));
    drop(open);
    waiting.synchronize().expect("the work succeeds");
}

/// Runs random copies and fills of blocks on several streams. Each operation waits only for those
/// that it depends on.
fn random_programs_respect_dependencies<D: Device>(device: &D, seed: u64) {
    const BLOCK: usize = 512;
    const BLOCKS: usize = 6;
    let mut state = seed;
    let mut below = |n: usize| {
        // The linear congruential generator of Knuth's MMIX.
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let streams: Vec<_> = (0..3).map(|_| stream(device)).collect();
    let memory = memory(device, BLOCK * BLOCKS);
    let block = |i: usize| -> MemoryRange { memory.range().slice(i * BLOCK..(i + 1) * BLOCK) };
    let mut expected = vec![vec![0; BLOCK]; BLOCKS];
    // SAFETY: nothing uses the memory yet.
    unsafe { memory.write(0, &[0; BLOCK * BLOCKS]) }.expect("unused memory is accessible");
    // For each block, the event after its latest write and the events after the reads since then.
    let mut writes: Vec<Option<D::Event>> = vec![None; BLOCKS];
    let mut reads: Vec<Vec<D::Event>> = vec![Vec::new(); BLOCKS];
    for step in 0..100 {
        let (stream, to, from) = (&streams[below(3)], below(BLOCKS), below(BLOCKS + 2));
        let from = (from < BLOCKS && from != to).then_some(from);
        let before =
            writes[to].iter().chain(&reads[to]).chain(from.and_then(|from| writes[from].as_ref()));
        before.for_each(|event| stream.wait(event).expect("the wait is accepted"));
        let done = event(device);
        // SAFETY: the waits order all accesses; the memory outlives the work.
        unsafe {
            match from {
                Some(from) => {
                    stream.copy(block(to), block(from)).expect("the copy is accepted");
                    expected[to] = expected[from].clone();
                    reads[from].push(done.clone());
                }
                None => {
                    stream.fill(block(to), step as u8).expect("the fill is accepted");
                    expected[to] = vec![step as u8; BLOCK];
                }
            }
        }
        stream.record(&done).expect("the record is accepted");
        (writes[to], reads[to]) = (Some(done), Vec::new());
    }
    device.synchronize().expect("the work succeeds");
    assert!(content(&memory) == expected.concat(), "the final contents are wrong, seed {seed}");
}
