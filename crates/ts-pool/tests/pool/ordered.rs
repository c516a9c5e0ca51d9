// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the stream-ordered pool. Most of them run on a simulated device, which detects
//! unordered accesses to the same memory.

use std::alloc::Layout;
use std::sync::mpsc;
use std::time::Duration;

use proptest::prelude::*;
use ts_pool::{
    Backing, BlockPool, DeviceBuffer, Error, ErrorKind, OrderedOptions, PoolConfig,
    StreamOrderedAllocator, StreamOrderedPool, TensorBuffer,
};
use ts_streams::{
    CpuDevice, Device, HostFn, RawMemory, SimDevice, SimOptions, Status, Stream, StreamPriority,
};

const KIB: usize = 1 << 10;

fn options(segment_bytes: usize, limit_bytes: usize) -> OrderedOptions {
    OrderedOptions::default().with_segment_bytes(segment_bytes).with_limit_bytes(limit_bytes)
}

fn streams<D: Device>(device: &D, count: usize) -> Vec<D::Stream> {
    (0..count).map(|_| device.create_stream(StreamPriority::Normal).unwrap()).collect()
}

/// Fills a buffer with `byte`, as work on a stream.
fn write<D: Device>(stream: &D::Stream, buffer: &DeviceBuffer<D>, byte: u8) {
    // SAFETY: the pool orders the accesses. If it does not, the simulated device reports a race.
    unsafe { stream.fill(buffer.range().unwrap(), byte) }.unwrap();
}

#[test]
fn freed_memory_is_reused_in_stream_order() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamOrderedPool::new(device.clone(), options(64 * KIB, 64 * KIB));
    let [a, b] = &streams(&device, 2)[..] else { panic!() };
    let first = pool.allocate_for_stream(64 * KIB, a).unwrap();
    let range = first.range().unwrap();
    write(a, &first, 1);
    drop(first);
    let again = pool.allocate_for_stream(64 * KIB, a).unwrap();
    assert_eq!(again.range().unwrap(), range);
    write(a, &again, 2);
    drop(again);
    // The first stream still has work to do, so the second must wait for the first.
    assert!(a.metrics().outstanding() > 0);
    let other = pool.allocate_for_stream(64 * KIB, b).unwrap();
    assert_eq!(other.range().unwrap(), range);
    write(b, &other, 3);
    assert_eq!(pool.stats().reused_across_streams, 1);
    device.synchronize().unwrap();
    assert_eq!(device.races(), []);
    // Taking memory from an idle stream needs no wait.
    drop(other);
    let before = a.metrics().operations;
    let third = pool.allocate_for_stream(64 * KIB, a).unwrap();
    write(a, &third, 4);
    assert_eq!(a.metrics().operations, before + 1);
    device.synchronize().unwrap();
    assert_eq!(device.races(), []);
}

#[test]
fn memory_used_by_another_stream_is_freed_after_that_use() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamOrderedPool::new(device.clone(), options(64 * KIB, 128 * KIB));
    let [copies, compute] = &streams(&device, 2)[..] else { panic!() };
    let buffer = pool.allocate_for_stream(64 * KIB, copies).unwrap();
    write(copies, &buffer, 1);
    let copied = device.create_event().unwrap();
    copies.record(&copied).unwrap();
    compute.wait(&copied).unwrap();
    compute.launch_host_fn(HostFn::new(|| ()).reads(buffer.range().unwrap())).unwrap();
    pool.record_use(&buffer, compute).unwrap();
    let range = buffer.range().unwrap();
    drop(buffer);
    assert_eq!((pool.stats().in_use_bytes, pool.stats().pending_bytes), (0, 64 * KIB));
    // The pool is below its limit, so it allocates another segment instead of waiting.
    let other = pool.allocate_for_stream(64 * KIB, copies).unwrap();
    assert_ne!(other.range().unwrap(), range);
    write(copies, &other, 2);
    // The pool is at its limit, so it reuses the freed block.
    let third = pool.allocate_for_stream(64 * KIB, copies).unwrap();
    assert_eq!(third.range().unwrap(), range);
    write(copies, &third, 3);
    device.synchronize().unwrap();
    assert_eq!(device.races(), []);
}

#[test]
fn free_for_stream_makes_buffers_stale() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamOrderedPool::new(device.clone(), options(64 * KIB, usize::MAX));
    let [a, b] = &streams(&device, 2)[..] else { panic!() };
    let stale: Vec<_> = (0..5).map(|_| pool.allocate_for_stream(KIB, a).unwrap()).collect();
    let live = pool.allocate_for_stream(KIB, b).unwrap();
    assert_eq!(pool.free_for_stream(a), 5 * KIB);
    assert_eq!(pool.free_for_stream(a), 0);
    let again = pool.allocate_for_stream(KIB, a).unwrap();
    for buffer in &stale {
        assert!(matches!(buffer.range(), Err(Error::Stale)));
        assert!(matches!(pool.record_use(buffer, b), Err(Error::Stale)));
    }
    drop(stale);
    assert!(again.range().is_ok() && live.range().is_ok());
    assert_eq!(pool.stats().in_use_bytes, 2 * KIB);
}

#[test]
fn an_out_of_memory_error_reports_the_pool_state() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamOrderedPool::new(device.clone(), options(16 * KIB, 64 * KIB));
    let [a, b] = &streams(&device, 2)[..] else { panic!() };
    let _live = pool.allocate_for_stream(40 * KIB, a).unwrap();
    drop(pool.allocate_for_stream(10 * KIB, b).unwrap());
    let error = pool.allocate_for_stream(30 * KIB, a).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    let Error::OutOfMemory { requested_bytes, capacity_bytes, in_use_bytes, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!((*requested_bytes, *capacity_bytes, *in_use_bytes), (30 * KIB, 56 * KIB, 40 * KIB));
    assert!(error.to_string().contains("the largest free block has 16384 bytes"), "{error}");
    assert_eq!(pool.stats().failures, 1);
    let layout = Layout::from_size_align(8, 4096).unwrap();
    assert_eq!(pool.allocate(layout, a).unwrap_err().kind(), ErrorKind::Misuse);
}

#[test]
fn trim_frees_only_segments_of_idle_streams() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamOrderedPool::new(device.clone(), options(64 * KIB, usize::MAX));
    let [a] = &streams(&device, 1)[..] else { panic!() };
    pool.reserve_segment(100 * KIB, a).unwrap();
    let buffers: Vec<_> = (0..3).map(|_| pool.allocate_for_stream(50 * KIB, a).unwrap()).collect();
    assert_eq!(pool.stats().capacity_bytes, 100 * KIB + 64 * KIB);
    assert_eq!(pool.trim(0), 0, "all segments are in use");
    buffers.iter().for_each(|buffer| write(a, buffer, 1));
    drop(buffers);
    assert_eq!(pool.trim(0), 0, "the stream still uses the memory");
    device.synchronize().unwrap();
    assert_eq!(pool.trim(70 * KIB), 100 * KIB);
    assert_eq!(pool.trim(0), 64 * KIB);
    assert_eq!((pool.stats().capacity_bytes, device.memory().in_use_bytes), (0, 0));
    let after = pool.allocate_for_stream(KIB, a).unwrap();
    assert_eq!(pool.snapshot().segments.len(), 1);
    drop(after);
    assert_eq!(device.races(), []);
}

#[test]
fn dropping_a_pool_waits_for_its_streams() {
    let device = SimDevice::new(SimOptions::default());
    let [a] = &streams(&device, 1)[..] else { panic!() };
    let pool = StreamOrderedPool::new(device.clone(), options(4 * KIB, usize::MAX));
    let buffer = pool.allocate_for_stream(4 * KIB, a).unwrap();
    write(a, &buffer, 1);
    drop(buffer);
    drop(pool);
    assert_eq!((device.races(), device.memory().in_use_bytes), (vec![], 0));
}

/// Starts a stream that is busy until the returned sender is dropped, and that has freed the only
/// block of the pool.
fn start_busy_stream(device: &CpuDevice, pool: &StreamOrderedPool<CpuDevice>) -> mpsc::Sender<()> {
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let buffer = pool.allocate_for_stream(4 * KIB, &stream).unwrap();
    let (stop, gate) = mpsc::channel::<()>();
    let work = HostFn::new(move || {
        let _ = gate.recv();
    });
    stream.launch_host_fn(work).unwrap();
    drop(buffer);
    stop
}

#[test]
fn a_failed_stream_still_waits_for_the_previous_owner() {
    let device = CpuDevice::with_threads(3).unwrap();
    let panics = || HostFn::new(|| std::panic::resume_unwind(Box::new("on purpose")));
    let is_ordered = |stream: &<CpuDevice as Device>::Stream| {
        stream.launch_host_fn(HostFn::new(|| ())).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        stream.query() == Ok(Status::Pending)
    };
    // The stream fails before the allocation. The allocation then returns an error.
    let pool = StreamOrderedPool::new(device.clone(), options(4 * KIB, 4 * KIB));
    let (stop, stream) = (start_busy_stream(&device, &pool), &streams(&device, 1)[0]);
    stream.launch_host_fn(panics()).unwrap();
    stream.synchronize().unwrap_err();
    assert!(pool.allocate_for_stream(4 * KIB, stream).is_err());
    stream.take_error().unwrap();
    let buffer = pool.allocate_for_stream(4 * KIB, stream).unwrap();
    assert!(is_ordered(stream));
    drop((buffer, stop));
    // The stream fails after the allocation, before its wait for the busy stream.
    let pool = StreamOrderedPool::new(device.clone(), options(4 * KIB, 4 * KIB));
    let (stop, stream) = (start_busy_stream(&device, &pool), &streams(&device, 1)[0]);
    let (fail, gate) = mpsc::channel::<()>();
    let fails = HostFn::new(move || {
        let _ = gate.recv();
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    stream.launch_host_fn(fails).unwrap();
    let buffer = pool.allocate_for_stream(4 * KIB, stream).unwrap();
    drop(fail);
    while stream.take_error().is_none() {
        std::thread::yield_now();
    }
    assert!(is_ordered(stream));
    drop((buffer, stop));
}

#[test]
fn reusing_memory_does_not_spread_failures() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamOrderedPool::new(device.clone(), options(4 * KIB, 4 * KIB));
    let [a, b, c] = &streams(&device, 3)[..] else { panic!() };
    let first = pool.allocate_for_stream(4 * KIB, a).unwrap();
    write(a, &first, 1);
    a.launch_host_fn(HostFn::new(|| std::panic::resume_unwind(Box::new("on purpose")))).unwrap();
    drop(first);
    let second = pool.allocate_for_stream(4 * KIB, b).unwrap();
    write(b, &second, 2);
    b.synchronize().unwrap();
    a.synchronize().unwrap_err();
    drop(second);
    write(c, &pool.allocate_for_stream(4 * KIB, c).unwrap(), 3);
    device.synchronize().unwrap_err();
    assert_eq!(device.races(), []);
}

#[test]
fn segment_numbers_are_reused() {
    let device = CpuDevice::with_threads(1).unwrap();
    let [stream] = &streams(&device, 1)[..] else { panic!() };
    let pool = StreamOrderedPool::new(device, options(4 * KIB, usize::MAX));
    for _ in 0..70_000 {
        drop(pool.allocate_for_stream(512, stream).unwrap());
        assert_eq!(pool.trim(0), 4 * KIB);
    }
}

/// A pool calls streams while it searches for memory. On the simulated device such a call runs
/// work, and that work may drop buffers of the pool.
#[test]
fn stream_work_may_own_buffers_of_the_pool() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamOrderedPool::new(device.clone(), options(64 * KIB, 64 * KIB));
    let [a, b] = &streams(&device, 2)[..] else { panic!() };
    for _ in 0..20 {
        let owned: Vec<_> =
            (0..4).map(|_| pool.allocate_for_stream(16 * KIB, a).unwrap()).collect();
        owned.iter().for_each(|buffer| pool.record_use(buffer, b).unwrap());
        let kept = owned.into_iter().map(|buffer| HostFn::new(move || drop(buffer)));
        kept.for_each(|work| a.launch_host_fn(work).unwrap());
        // No memory is free before some of the work has run.
        let mut other = pool.allocate_for_stream(64 * KIB, b);
        while other.is_err() {
            device.synchronize().unwrap();
            other = pool.allocate_for_stream(64 * KIB, b);
        }
        write(b, &other.unwrap(), 1);
        pool.trim(0);
    }
    device.synchronize().unwrap();
    assert_eq!((device.races(), pool.stats().in_use_bytes), (vec![], 0));
}

#[derive(Debug, Clone)]
enum Step {
    Allocate {
        stream: usize,
        bytes: usize,
    },
    Free(usize),
    /// A stream, usually not the buffer's own, reads the buffer.
    Share {
        buffer: usize,
        stream: usize,
    },
    FreeAll {
        stream: usize,
    },
    Trim {
        keep: usize,
    },
    Synchronize {
        stream: usize,
    },
}

const STREAMS: usize = 3;

fn step() -> impl Strategy<Value = Step> {
    let stream = 0..STREAMS;
    prop_oneof![
        4 => (stream.clone(), 1..20 * KIB)
            .prop_map(|(stream, bytes)| Step::Allocate { stream, bytes }),
        // These sizes repeat, so that quick lists are used.
        6 => (stream.clone(), prop::sample::select(vec![1000, 3000, 10 * KIB]))
            .prop_map(|(stream, bytes)| Step::Allocate { stream, bytes }),
        6 => any::<usize>().prop_map(Step::Free),
        4 => (any::<usize>(), stream.clone())
            .prop_map(|(buffer, stream)| Step::Share { buffer, stream }),
        1 => stream.clone().prop_map(|stream| Step::FreeAll { stream }),
        1 => (0..128 * KIB).prop_map(|keep| Step::Trim { keep }),
        1 => stream.prop_map(|stream| Step::Synchronize { stream }),
    ]
}

struct Live {
    buffer: DeviceBuffer<SimDevice>,
    stream: usize,
    byte: u8,
}

#[test]
fn a_background_reservation_counts_towards_the_limit() {
    for backing in [Backing::Segments, Backing::Device] {
        let device = SimDevice::new(SimOptions::default());
        let limited = options(4 * KIB, 100 * KIB).with_backing(backing);
        let pool = StreamOrderedPool::new(device.clone(), limited);
        let stream = &streams(&device, 1)[0];
        let priming = pool.reserve_segment_in_background(60 * KIB, stream).unwrap();
        priming.wait().unwrap();
        let buffer = pool.allocate_for_stream(60 * KIB, stream).unwrap();
        assert_eq!((pool.stats().capacity_bytes, pool.stats().segments), (60 * KIB, 1));
        let error = pool.reserve_segment_in_background(60 * KIB, stream).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full);
        write(stream, &buffer, 1);
        drop(buffer);
        device.synchronize().unwrap();
        assert_eq!(device.races(), []);
    }
    // If the device has too little memory, `wait` returns the error, and the bytes no longer count
    // towards the limit.
    let device = SimDevice::new(SimOptions::default().with_total_bytes(50 * KIB));
    let pool = StreamOrderedPool::new(device.clone(), options(4 * KIB, 100 * KIB));
    let stream = &streams(&device, 1)[0];
    assert_eq!(
        pool.reserve_segment_in_background(60 * KIB, stream).unwrap().wait().unwrap_err().kind(),
        ErrorKind::Full
    );
    pool.reserve_segment_in_background(40 * KIB, stream).unwrap().wait().unwrap();
}

#[test]
fn a_snapshot_is_json() {
    let device = SimDevice::new(SimOptions::default());
    let pool = StreamOrderedPool::new(device.clone(), options(4 * KIB, 4 * KIB));
    assert_eq!(pool.snapshot().to_string(), r#"{"segments":[]}"#);
    let stream = &streams(&device, 1)[0];
    let buffer = pool.allocate_for_stream(1000, stream).unwrap();
    let (address, id) = (buffer.range().unwrap().address(), stream.id());
    let blocks = [(0, 1024, false), (1024, 3072, true)];
    let blocks = blocks.map(|(offset, len, free)| {
        format!(r#"{{"offset":{offset},"len":{len},"free":{free},"stream":{id}}}"#)
    });
    let expected = format!(
        r#"{{"segments":[{{"address":{address},"len":4096,"blocks":[{}]}}]}}"#,
        blocks.join(",")
    );
    assert_eq!(pool.snapshot().to_string(), expected);
}

/// If the allocator of the device backs a pool, blocks are freed in stream order, after the uses by
/// other streams.
#[test]
fn the_allocator_of_the_device_can_back_a_pool() {
    let device = SimDevice::new(SimOptions::default());
    let own = options(64 * KIB, 64 * KIB).with_backing(Backing::Device);
    let pool = StreamOrderedPool::new(device.clone(), own);
    let [a, b] = &streams(&device, 2)[..] else { panic!() };
    pool.reserve_segment(10 * KIB, a).unwrap();
    let first = pool.allocate_for_stream(40 * KIB, a).unwrap();
    write(a, &first, 1);
    let error = pool.allocate_for_stream(40 * KIB, a).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Full && error.to_string().contains("40960 are in use"),
        "{error}"
    );
    let written = device.create_event().unwrap();
    a.record(&written).unwrap();
    b.wait(&written).unwrap();
    b.launch_host_fn(HostFn::new(|| ()).reads(first.range().unwrap())).unwrap();
    pool.record_use(&first, b).unwrap();
    drop(first);
    assert_eq!(pool.stats().pending_bytes, 40 * KIB, "the other stream may still read the memory");
    b.synchronize().unwrap();
    let second = pool.allocate_for_stream(40 * KIB, a).unwrap();
    assert_eq!((pool.stats().pending_bytes, pool.stats().segments), (0, 1));
    drop(second);
    device.synchronize().unwrap();
    assert_eq!((device.memory().in_use_bytes, device.races()), (0, vec![]));
    // The memory of a failed stream is freed too.
    let failing = SimDevice::new(SimOptions::default().with_fault_rate(1.0));
    let pool = StreamOrderedPool::new(failing.clone(), own);
    let stream = failing.create_stream(StreamPriority::Normal).unwrap();
    let buffers = [(); 2].map(|()| pool.allocate_for_stream(10 * KIB, &stream).unwrap());
    write(&stream, &buffers[0], 1);
    let [before, after] = buffers;
    drop(before);
    assert!(stream.synchronize().is_err());
    drop(after);
    assert_eq!((failing.memory().in_use_bytes, failing.races()), (0, vec![]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn random_programs_never_share_memory_between_live_buffers(
        program in prop::collection::vec((step(), prop::bool::weighted(0.2)), 1..150),
        limit in 40 * KIB..200 * KIB,
        backing in prop_oneof![Just(Backing::Segments), Just(Backing::Device)],
        seed: u64,
    ) {
        let device = SimDevice::new(SimOptions::default().with_seed(seed));
        let pool = StreamOrderedPool::new(
            device.clone(),
            options(32 * KIB, limit).with_backing(backing),
        );
        let streams = streams(&device, STREAMS);
        let mut live: Vec<Live> = Vec::new();
        let rounded = |bytes: usize| bytes.next_multiple_of(512);
        for (number, (step, check)) in program.into_iter().enumerate() {
            match step {
                Step::Allocate { stream, bytes } => match pool
                    .allocate_for_stream(bytes, &streams[stream])
                {
                    Ok(buffer) => {
                        let range = buffer.range().unwrap();
                        prop_assert_eq!((range.len(), range.address() % 512), (bytes, 0));
                        prop_assert!(
                            live.iter().all(|other| !other.buffer.range().unwrap().overlaps(range))
                        );
                        write(&streams[stream], &buffer, number as u8);
                        live.push(Live { buffer, stream, byte: number as u8 });
                    }
                    Err(error) => {
                        prop_assert_eq!(error.kind(), ErrorKind::Full);
                        // A request that fits into a free block never fails.
                        prop_assert!(pool.stats().largest_free_bytes < rounded(bytes), "{error}");
                    }
                },
                Step::Free(n) if !live.is_empty() => drop(live.swap_remove(n % live.len())),
                Step::Share { buffer, stream } if !live.is_empty() => {
                    let shared = &live[buffer % live.len()];
                    let written = device.create_event().unwrap();
                    streams[shared.stream].record(&written).unwrap();
                    streams[stream].wait(&written).unwrap();
                    let read = HostFn::new(|| ()).reads(shared.buffer.range().unwrap());
                    streams[stream].launch_host_fn(read).unwrap();
                    pool.record_use(&shared.buffer, &streams[stream]).unwrap();
                }
                Step::Free(_) | Step::Share { .. } => {}
                Step::FreeAll { stream } => {
                    let (gone, left): (Vec<_>, Vec<_>) =
                        live.into_iter().partition(|live| live.stream == stream);
                    live = left;
                    let bytes: usize = gone.iter().map(|gone| rounded(gone.buffer.len())).sum();
                    prop_assert_eq!(pool.free_for_stream(&streams[stream]), bytes);
                    prop_assert!(gone.iter().all(|gone| gone.buffer.range().is_err()));
                }
                Step::Trim { keep } => {
                    pool.trim(keep);
                }
                Step::Synchronize { stream } => streams[stream].synchronize().unwrap(),
            }
            if !check {
                // The checks below coalesce the quick lists.
                continue;
            }
            let stats = pool.stats();
            prop_assert_eq!(
                stats.in_use_bytes,
                live.iter().map(|live| rounded(live.buffer.len())).sum::<usize>()
            );
            let free: usize = stats.free_bytes.iter().map(|(_, bytes)| bytes).sum();
            prop_assert_eq!(stats.in_use_bytes + stats.pending_bytes + free, stats.capacity_bytes);
            prop_assert!(
                stats.capacity_bytes <= limit && stats.high_water_bytes >= stats.in_use_bytes
            );
            let blocks = pool.snapshot().segments;
            let whole = |segment: &ts_pool::SegmentSnapshot| {
                let mut at = 0;
                segment.blocks.iter().all(|block| {
                    std::mem::replace(&mut at, block.offset + block.len) == block.offset
                }) && at == segment.len
            };
            prop_assert!(blocks.iter().all(whole), "blocks cover their segment without gaps");
        }
        device.synchronize().unwrap();
        prop_assert_eq!(device.races(), []);
        for Live { buffer, byte, .. } in &live {
            let range = buffer.range().unwrap();
            let own = device.allocate(
                Layout::from_size_align(range.len(), 8).unwrap(),
                ts_streams::MemoryKind::Device,
            );
            let (own, mut bytes) = (own.unwrap(), vec![0; range.len()]);
            // SAFETY: all work on both ranges is done, because the device was synchronized.
            unsafe {
                streams[0].copy(own.range(), range).unwrap();
                streams[0].synchronize().unwrap();
                own.read(0, &mut bytes).unwrap();
            }
            prop_assert!(bytes.iter().all(|b| b == byte), "no other buffer overwrote this one");
        }
        drop(live);
        device.synchronize().unwrap();
        pool.trim(0);
        prop_assert_eq!(pool.stats().pending_bytes, 0);
        prop_assert_eq!(
            (pool.stats().in_use_bytes, pool.stats().capacity_bytes),
            (0, 0),
            "all segments are free and trimmed"
        );
        drop(pool);
        prop_assert_eq!(device.memory().in_use_bytes, 0);
    }
}

#[test]
fn several_threads_can_use_one_pool() {
    let device = CpuDevice::with_threads(2).unwrap();
    let pool = StreamOrderedPool::new(device.clone(), options(1 << 20, usize::MAX));
    std::thread::scope(|scope| {
        for byte in 1..=4u8 {
            let (pool, device) = (pool.clone(), device.clone());
            scope.spawn(move || {
                let stream = device.create_stream(StreamPriority::Normal).unwrap();
                for round in 0..200 {
                    let buffers: Vec<_> = (1..5)
                        .map(|i| pool.allocate_for_stream(i * 700 + round, &stream).unwrap())
                        .collect();
                    buffers.iter().for_each(|buffer| write(&stream, buffer, byte));
                    let range = buffers[3].range().unwrap();
                    let (mut read, own) = (vec![0; range.len()], vec![byte; range.len()]);
                    // SAFETY: only this thread uses both ranges, and it waits for the copy.
                    unsafe { stream.copy(ts_streams::MemoryRange::of(&mut read), range) }.unwrap();
                    stream.synchronize().unwrap();
                    assert!(read == own);
                }
            });
        }
    });
    device.synchronize().unwrap();
    assert_eq!(pool.stats().in_use_bytes, 0);
}

#[test]
fn errors_name_the_limit_that_applies() {
    let device = SimDevice::new(SimOptions::default().with_total_bytes(1 << 20));
    let pool = StreamOrderedPool::new(device.clone(), OrderedOptions::default());
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let granule_bytes = OrderedOptions::default().granule_bytes;
    let never = pool.allocate_for_stream(usize::MAX, &stream).unwrap_err();
    let most = granule_bytes * u32::MAX as usize;
    assert_eq!(
        never.to_string(),
        format!(
            "cannot allocate {} bytes: the limit for one allocation is {most} bytes",
            usize::MAX
        )
    );
    let full = pool.allocate_for_stream(1 << 30, &stream).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Full);
    assert!(full.to_string().contains("of the pool's 0 bytes, 0 are in use"), "{full}");
    let limited = StreamOrderedPool::new(device, options(4096, 8192));
    let full = limited.allocate_for_stream(1 << 14, &stream).unwrap_err();
    assert!(
        full.to_string().contains("of the pool's 0 bytes (limit 8192), 0 are in use"),
        "{full}"
    );
}

#[test]
fn out_of_range_copies_are_errors_and_copy_nothing() {
    let device = CpuDevice::new().unwrap();
    let pool = StreamOrderedPool::new(device.clone(), OrderedOptions::default());
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let mut buffer = pool.allocate_for_stream(8, &stream).unwrap();
    buffer.write(0, &[7; 8]).unwrap();
    let mut read = [0; 4];
    for (offset, result) in [
        (5, buffer.write(5, &[1; 4])),
        (5, buffer.read(5, &mut read)),
        (usize::MAX, buffer.write(usize::MAX, &[1; 4])),
    ] {
        let error = result.unwrap_err();
        assert!(
            matches!(error, Error::OutOfRange { offset: at, len: 4, size_bytes: 8 } if at == offset)
        );
        assert_eq!(error.kind(), ErrorKind::Misuse);
        assert!(error.to_string().ends_with("past the end of the buffer of 8 bytes"), "{error}");
    }
    assert_eq!(read, [0; 4]);
    let mut all = [0; 8];
    buffer.read(0, &mut all).unwrap();
    buffer.read(8, &mut []).unwrap();
    assert_eq!(all, [7; 8]);
    // Pooled blocks and host buffers return the same errors.
    let blocks = BlockPool::new(device, PoolConfig::low_memory()).unwrap();
    let mut block = blocks.acquire(8).unwrap();
    assert!(matches!(block.write(7, &[1; 2], &stream), Err(Error::OutOfRange { offset: 7, .. })));
    assert!(matches!(block.read(9, &mut [], &stream), Err(Error::OutOfRange { offset: 9, .. })));
    let host = TensorBuffer::cpu_zeros(3).write(2, &[1; 2]);
    assert!(matches!(host, Err(Error::OutOfRange { offset: 2, len: 2, size_bytes: 3 })));
}
