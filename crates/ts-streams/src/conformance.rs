// SPDX-License-Identifier: MIT OR Apache-2.0
//! What every [`Device`] must do: for those who write one.

use std::alloc::Layout;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::{
    Device, Error, ErrorKind, Event, HostFn, MemoryKind, MemoryLocation, MemoryRange, RawMemory,
    Status, Stream, StreamPriority,
};

/// Checks all of it, on devices that `make` gives. Blocks for some seconds.
///
/// # Panics
/// At the first thing that is not as it must be, saying what.
pub fn check<D: Device>(make: impl Fn() -> D) {
    bytes_go_to_the_device_and_back(&make());
    lengths_and_overlaps_are_refused(&make());
    a_stream_keeps_its_order(&make());
    an_event_orders_two_streams(&make());
    an_event_that_was_never_recorded_is_reached(&make());
    a_wait_is_for_where_the_event_was_recorded_then(&make());
    events_tell_the_time_between_them(&make());
    priorities_are_levels_of_the_device(&make());
    the_device_waits_for_all_streams(&make());
    a_stream_without_handles_ends_its_work(&make());
    a_failure_takes_with_it_what_depends_on_it_and_nothing_else(&make());
    long_chains_of_waits_are_no_deep_ones(&make());
    streams_may_go_while_the_device_waits(&make());
    who_waits_inside_work_is_told(&make());
    metrics_count_what_was_submitted(&make());
    what_is_not_there_is_unsupported(&make());
    no_call_waits_for_work(&make());
    memory_of_its_own_allocator_is_in_order(&make());
    for seed in 1..=20 {
        random_programs_do_what_their_order_says(&make(), seed);
    }
}

fn memory<D: Device>(device: &D, len: usize) -> D::Memory {
    device
        .allocate(Layout::from_size_align(len, 64).expect("a power of two"), MemoryKind::Device)
        .expect("memory")
}

fn stream<D: Device>(device: &D) -> D::Stream {
    device.create_stream(StreamPriority::Normal).expect("a stream")
}

fn event<D: Device>(device: &D) -> D::Event {
    device.create_event().expect("an event")
}

/// What memory holds that nobody uses.
fn content<M: RawMemory>(memory: &M) -> Vec<u8> {
    let mut bytes = vec![0; memory.range().len()];
    // SAFETY: as those who call this say, all work on it is done.
    unsafe { memory.read(0, &mut bytes) }.expect("memory that nobody uses");
    bytes
}

/// What a stream gives back it gives back behind its work, also where the next block is the same
/// memory.
fn memory_of_its_own_allocator_is_in_order<D: Device>(device: &D) {
    let (stream, layout) =
        (stream(device), Layout::from_size_align(4096, 256).expect("a power of two"));
    let mut copies = vec![[0u8; 4096]; 20];
    for (number, copy) in copies.iter_mut().enumerate() {
        let memory = match device.allocate_in_order(layout, &stream) {
            Ok(memory) => memory,
            Err(error) => return assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}"),
        };
        assert_eq!((memory.range().len(), memory.range().address() % 256), (4096, 0));
        // SAFETY: nobody else uses it, and it is given back behind this; the copies are there until
        // the stream is done.
        unsafe {
            stream.fill(memory.range(), number as u8).expect("a stream that has not failed");
            stream
                .copy(MemoryRange::of(copy), memory.range())
                .expect("a stream that has not failed");
        }
        device.free_in_order(memory, &stream).expect("a stream that has not failed");
    }
    stream.synchronize().expect("nothing fails");
    assert!(copies.iter().enumerate().all(|(number, copy)| *copy == [number as u8; 4096]));
}

fn bytes_go_to_the_device_and_back<D: Device>(device: &D) {
    let stream = stream(device);
    let pinned = Layout::from_size_align(1000, 64).expect("a power of two");
    let pinned = device.allocate(pinned, MemoryKind::PinnedHost).expect("memory");
    let (near, back) = (memory(device, 1000), memory(device, 1000));
    let bytes: Vec<u8> = (0..1000).map(|i| (i * 7 % 251) as u8).collect();
    // SAFETY: nobody uses it yet; it outlives the work, which is waited for.
    unsafe {
        pinned.write(0, &bytes).expect("memory that nobody uses");
        stream.copy(near.range(), pinned.range()).expect("a copy");
        stream.copy(back.range(), near.range()).expect("a copy");
        stream.fill(back.range().slice(10..20), 9).expect("a fill");
    }
    stream.synchronize().expect("work that succeeds");
    assert_eq!(stream.query(), Ok(Status::Ready));
    let mut expected = bytes;
    expected[10..20].fill(9);
    assert!(content(&back) == expected, "what was copied");
}

fn lengths_and_overlaps_are_refused<D: Device>(device: &D) {
    let (stream, memory) = (stream(device), memory(device, 100));
    let range = memory.range();
    for (to, from) in [(range, range.slice(0..50)), (range.slice(0..60), range.slice(40..100))] {
        // SAFETY: nobody else uses it.
        let refused = unsafe { stream.copy(to, from) };
        assert!(matches!(refused, Err(Error::BadCopy { .. })), "{refused:?}");
    }
    // SAFETY: of no bytes.
    unsafe { stream.copy(range.slice(3..3), range.slice(50..50)) }.expect("a copy of nothing");
    stream.synchronize().expect("work that succeeds");
}

fn a_stream_keeps_its_order<D: Device>(device: &D) {
    let (stream, memory) = (stream(device), memory(device, 4096));
    let seen = Arc::new(Mutex::new(Vec::new()));
    for i in 0..200u8 {
        // SAFETY: the stream orders it; the memory outlives it.
        unsafe { stream.fill(memory.range(), i) }.expect("a fill");
        let seen = Arc::clone(&seen);
        stream
            .launch_host_fn(HostFn::new(move || seen.lock().expect("no panic").push(i)))
            .expect("a function");
    }
    stream.synchronize().expect("work that succeeds");
    assert!(seen.lock().expect("no panic").iter().copied().eq(0..200), "in order");
    assert!(content(&memory) == [199; 4096]);
}

fn an_event_orders_two_streams<D: Device>(device: &D) {
    let (first, second, filled) = (stream(device), stream(device), event(device));
    let (a, b) = (memory(device, 1 << 20), memory(device, 1 << 20));
    for i in 0..10 {
        // SAFETY: events order all of it; the memory outlives it.
        unsafe {
            first.fill(a.range(), i).expect("a fill");
            first.record(&filled).expect("a record");
            second.wait(&filled).expect("a wait");
            second.copy(b.range(), a.range()).expect("a copy");
            second.record(&filled).expect("a record");
            first.wait(&filled).expect("a wait");
        }
    }
    filled.synchronize().expect("work that succeeds");
    assert_eq!(filled.query(), Ok(Status::Ready));
    assert!(content(&b) == vec![9; 1 << 20], "the copy was after the fill");
    device.synchronize().expect("work that succeeds");
}

fn an_event_that_was_never_recorded_is_reached<D: Device>(device: &D) {
    let (stream, never) = (stream(device), event(device));
    assert_eq!(never.query(), Ok(Status::Ready));
    stream.wait(&never).expect("a wait");
    never.synchronize().expect("nothing to wait for");
    stream.synchronize().expect("nothing to wait for");
    let reached = event(device);
    stream.record(&reached).expect("a record");
    reached.synchronize().expect("work that succeeds");
    assert!(reached.elapsed_since(&never).is_err() && never.elapsed_since(&reached).is_err());
}

fn a_wait_is_for_where_the_event_was_recorded_then<D: Device>(device: &D) {
    let (first, second, point) = (stream(device), stream(device), event(device));
    first.record(&point).expect("a record");
    second.wait(&point).expect("a wait");
    // Were the wait for this, both streams would wait for each other.
    second.record(&point).expect("a record");
    first.wait(&point).expect("a wait");
    first.synchronize().expect("no circle");
    second.synchronize().expect("no circle");
}

fn events_tell_the_time_between_them<D: Device>(device: &D) {
    let (stream, start, end) = (stream(device), event(device), event(device));
    let memory = memory(device, 1 << 20);
    stream.record(&start).expect("a record");
    // SAFETY: the stream orders it; the memory outlives it.
    (0..10).for_each(|i| unsafe { stream.fill(memory.range(), i) }.expect("a fill"));
    stream.record(&end).expect("a record");
    end.synchronize().expect("work that succeeds");
    assert!(end.elapsed_since(&start).expect("both are reached") > Duration::ZERO);
    assert_eq!(start.elapsed_since(&start), Ok(Duration::ZERO));
}

fn priorities_are_levels_of_the_device<D: Device>(device: &D) {
    let range = device.info().priorities;
    let level = |priority| device.create_stream(priority).expect("a stream").level();
    assert_eq!(level(StreamPriority::High), range.greatest);
    assert_eq!(level(StreamPriority::Low), range.least);
    assert_eq!(level(StreamPriority::Level(i32::MIN)), range.greatest);
    assert_eq!(level(StreamPriority::Level(i32::MAX)), range.least);
}

fn the_device_waits_for_all_streams<D: Device>(device: &D) {
    let (count, streams) = (Arc::new(AtomicUsize::new(0)), [0; 5].map(|_| stream(device)));
    for stream in streams.iter().cycle().take(50) {
        let count = Arc::clone(&count);
        let add = HostFn::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        stream.launch_host_fn(add).expect("a function");
    }
    device.synchronize().expect("work that succeeds");
    assert_eq!(count.load(Ordering::SeqCst), 50);
}

fn a_stream_without_handles_ends_its_work<D: Device>(device: &D) {
    let (count, point) = (Arc::new(AtomicUsize::new(0)), event(device));
    {
        let stream = stream(device);
        for _ in 0..10 {
            let count = Arc::clone(&count);
            let add = HostFn::new(move || {
                count.fetch_add(1, Ordering::SeqCst);
            });
            stream.launch_host_fn(add).expect("a function");
        }
        stream.record(&point).expect("a record");
    }
    point.synchronize().expect("work that succeeds");
    assert_eq!(count.load(Ordering::SeqCst), 10);
}

fn a_failure_takes_with_it_what_depends_on_it_and_nothing_else<D: Device>(device: &D) {
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
        .expect("a function");
    // Whether or not the failure is known yet.
    let _ = failing.launch_host_fn(add(1000));
    failing.record(&point).expect("a record, also of a stream that failed");
    dependent.wait(&point).expect("a wait");
    let _ = dependent.launch_host_fn(add(100));
    follower.follow(&point).expect("a wait");
    follower.launch_host_fn(add(10)).expect("a stream that follows and does not depend");
    other.launch_host_fn(add(1)).expect("a function");
    other.synchronize().expect("a stream of its own");
    follower.synchronize().expect("a stream that follows and does not depend");
    assert_eq!(ran.load(Ordering::SeqCst), 11);
    for stream in [&failing, &dependent] {
        let error = stream.synchronize().expect_err("it failed");
        assert!(
            error.kind() == ErrorKind::Failed && error.to_string().contains("on purpose"),
            "{error}"
        );
        assert_eq!(stream.query(), Err(error.clone()));
        // What is refused may own the last handle to another stream.
        let last = self::stream(device);
        let refused = stream.launch_host_fn(HostFn::new(move || drop(last)));
        assert_eq!(refused, Err(error));
    }
    assert!(point.query().is_err() && point.synchronize().is_err(), "what it stands for failed");
    assert!(device.synchronize().is_err(), "one of its streams failed");
    if failing.take_error().is_some() {
        assert_eq!(failing.take_error(), None);
        failing.launch_host_fn(add(0)).expect("it takes work again");
        failing.synchronize().expect("the failure is over");
    }
}

fn long_chains_of_waits_are_no_deep_ones<D: Device>(device: &D) {
    let ([first, second], done) = ([(); 2].map(|()| stream(device)), Arc::new(AtomicUsize::new(0)));
    let (open, gate) = mpsc::channel::<()>();
    if device.info().runs_by_itself {
        let held = HostFn::new(move || {
            let _ = gate.recv();
        });
        first.launch_host_fn(held).expect("a function");
    }
    for _ in 0..3000 {
        for (one, other) in [(&first, &second), (&second, &first)] {
            let point = event(device);
            one.record(&point).expect("a record");
            other.wait(&point).expect("a wait");
        }
    }
    let count = Arc::clone(&done);
    let add = move || {
        count.fetch_add(1, Ordering::SeqCst);
    };
    first.launch_host_fn(HostFn::new(add)).expect("a function");
    drop(open);
    first.synchronize().expect("work that succeeds");
    assert_eq!(done.load(Ordering::SeqCst), 1);
}

fn streams_may_go_while_the_device_waits<D: Device>(device: &D) {
    for _ in 0..100 {
        stream(device).launch_host_fn(HostFn::new(|| ())).expect("a function");
    }
    device.synchronize().expect("work that succeeds");
}

fn who_waits_inside_work_is_told<D: Device>(device: &D) {
    let (stream, other, (answers, inbox)) = (stream(device), stream(device), mpsc::channel());
    let (inner, whole) = (other.clone(), device.clone());
    let ask = HostFn::new(move || {
        let _ = answers.send((inner.synchronize(), whole.synchronize()));
    });
    stream.launch_host_fn(ask).expect("a function");
    stream.synchronize().expect("work that succeeds");
    assert_eq!(inbox.recv().expect("it ran"), (Err(Error::WaitInHostFn), Err(Error::WaitInHostFn)));
}

fn metrics_count_what_was_submitted<D: Device>(device: &D) {
    let (stream, memory, point) = (stream(device), memory(device, 300), event(device));
    // SAFETY: the stream orders it; the memory outlives it.
    unsafe {
        stream.fill(memory.range(), 1).expect("a fill");
        stream.copy(memory.range().slice(0..100), memory.range().slice(100..200)).expect("a copy");
    }
    stream.launch_host_fn(HostFn::new(|| ())).expect("a function");
    stream.record(&point).expect("a record");
    point.synchronize().expect("work that succeeds");
    let metrics = stream.metrics();
    assert_eq!((metrics.transfers, metrics.transferred_bytes, metrics.launches), (2, 400, 1));
    assert_eq!((metrics.operations, metrics.outstanding()), (4, 0));
    assert!(metrics.average_latency().is_some());
}

fn what_is_not_there_is_unsupported<D: Device>(device: &D) {
    let (stream, memory) = (stream(device), memory(device, 64));
    if !device.info().can_prefetch {
        let refused =
            stream.prefetch(memory.range(), MemoryLocation::Device).expect_err("it cannot");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
    }
    stream.synchronize().expect("a refusal is no failure");
}

fn no_call_waits_for_work<D: Device>(device: &D) {
    if !device.info().runs_by_itself {
        return;
    }
    let (held, waiting, point) = (stream(device), stream(device), event(device));
    let memory = memory(device, 64);
    let (open, gate) = mpsc::channel::<()>();
    held.launch_host_fn(HostFn::new(move || {
        let _ = gate.recv();
    }))
    .expect("a function");
    held.record(&point).expect("a record");
    waiting.wait(&point).expect("a wait");
    // SAFETY: the stream orders it; the memory outlives it.
    unsafe { waiting.fill(memory.range(), 1) }.expect("a fill");
    assert_eq!((point.query(), waiting.query()), (Ok(Status::Pending), Ok(Status::Pending)));
    drop(open);
    waiting.synchronize().expect("work that succeeds");
}

/// Copies and fills between blocks on several streams, each ordered after those that it depends on
/// and no others.
fn random_programs_do_what_their_order_says<D: Device>(device: &D, seed: u64) {
    const BLOCK: usize = 512;
    const BLOCKS: usize = 6;
    let mut state = seed;
    let mut below = |n: usize| {
        // Knuth's MMIX.
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let streams: Vec<_> = (0..3).map(|_| stream(device)).collect();
    let memory = memory(device, BLOCK * BLOCKS);
    let block = |i: usize| -> MemoryRange { memory.range().slice(i * BLOCK..(i + 1) * BLOCK) };
    let mut expected = vec![vec![0; BLOCK]; BLOCKS];
    // SAFETY: nobody uses it yet.
    unsafe { memory.write(0, &[0; BLOCK * BLOCKS]) }.expect("memory that nobody uses");
    // Behind the last write of each block, and the reads since.
    let mut writes: Vec<Option<D::Event>> = vec![None; BLOCKS];
    let mut reads: Vec<Vec<D::Event>> = vec![Vec::new(); BLOCKS];
    for step in 0..100 {
        let (stream, to, from) = (&streams[below(3)], below(BLOCKS), below(BLOCKS + 2));
        let from = (from < BLOCKS && from != to).then_some(from);
        let before =
            writes[to].iter().chain(&reads[to]).chain(from.and_then(|from| writes[from].as_ref()));
        before.for_each(|event| stream.wait(event).expect("a wait"));
        let done = event(device);
        // SAFETY: the waits order it; the memory outlives it.
        unsafe {
            match from {
                Some(from) => {
                    stream.copy(block(to), block(from)).expect("a copy");
                    expected[to] = expected[from].clone();
                    reads[from].push(done.clone());
                }
                None => {
                    stream.fill(block(to), step as u8).expect("a fill");
                    expected[to] = vec![step as u8; BLOCK];
                }
            }
        }
        stream.record(&done).expect("a record");
        (writes[to], reads[to]) = (Some(done), Vec::new());
    }
    device.synchronize().expect("work that succeeds");
    assert!(content(&memory) == expected.concat(), "seed {seed}");
}
