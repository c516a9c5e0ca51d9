// SPDX-License-Identifier: MIT OR Apache-2.0
//! Benchmarks of CPU streams: `cargo xtask bench streams`.
// `criterion_group!` generates undocumented items. A benchmark that cannot run may panic.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use tensorstream::streams::{
    AllocationStrategy, CpuDevice, CpuStream, Device, HostFn, Stream, StreamPool, StreamPriority,
    WorkloadType,
};

/// The duration of one task of the background load.
const TASK: Duration = Duration::from_micros(100);
/// The number of streams that keep the device busy.
const BUSY: usize = 64;
/// The number of unfinished tasks of each busy stream when a measurement begins.
const BACKLOG: u64 = 8;

fn busy_work() -> HostFn {
    HostFn::new(|| {
        let began = Instant::now();
        while began.elapsed() < TASK {
            std::hint::spin_loop();
        }
    })
}

fn keep_busy(streams: &[CpuStream]) {
    for stream in streams {
        while stream.metrics().outstanding() < BACKLOG {
            stream.launch_host_fn(busy_work()).unwrap();
        }
    }
}

/// Measures the time from submitting work until it begins, while streams of low priority keep the
/// device busy.
fn start_latency(c: &mut Criterion) {
    let mut group = c.benchmark_group("start latency on a busy device, by priority");
    group.sample_size(30);
    for priority in [StreamPriority::High, StreamPriority::Normal, StreamPriority::Low] {
        let device = CpuDevice::new().unwrap();
        let streams: Vec<_> =
            (0..BUSY).map(|_| device.create_stream(StreamPriority::Low).unwrap()).collect();
        let stream = device.create_stream(priority).unwrap();
        let (began, beginnings) = channel();
        group.bench_function(format!("{priority:?}"), |b| {
            b.iter_custom(|count| {
                let waited = (0..count).map(|_| {
                    keep_busy(&streams);
                    let (submitted, began) = (Instant::now(), began.clone());
                    stream
                        .launch_host_fn(HostFn::new(move || began.send(Instant::now()).unwrap()))
                        .unwrap();
                    beginnings.recv().unwrap() - submitted
                });
                waited.sum()
            });
        });
    }
    group.finish();
}

/// Measures the time that stream operations take on the calling thread.
fn operations(c: &mut Criterion) {
    let mut group = c.benchmark_group("operations");
    let device = CpuDevice::new().unwrap();
    let streams = [(); 2].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    group.bench_function("launch and synchronize", |b| {
        b.iter(|| {
            streams[0].launch_host_fn(HostFn::new(|| ())).unwrap();
            streams[0].synchronize().unwrap();
        });
    });
    let event = device.create_event().unwrap();
    group.bench_function("record and wait, on an idle stream", |b| {
        b.iter(|| {
            streams[0].record(&event).unwrap();
            streams[1].wait(&event).unwrap();
        });
    });
    for strategy in [
        AllocationStrategy::RoundRobin,
        AllocationStrategy::LoadBalanced,
        AllocationStrategy::Workload,
        AllocationStrategy::Learned,
    ] {
        let pool = StreamPool::new(device.clone(), 8, strategy).unwrap();
        group.bench_function(
            BenchmarkId::new("choose one of eight streams", format!("{strategy:?}")),
            |b| {
                b.iter(|| {
                    black_box(pool.stream_for_workload(black_box(WorkloadType::Compute)).id())
                });
            },
        );
    }
    group.finish();
}

/// Measures how long pieces of work of very different lengths take on four streams, by the strategy
/// that chooses the streams. All are submitted at once, so a strategy must know what it has queued.
fn uneven_work(c: &mut Criterion) {
    /// The lengths of the pieces, in bytes. A byte takes a nanosecond.
    const LENGTHS: [u64; 8] =
        [4_000_000, 200_000, 200_000, 200_000, 100_000, 2_000_000, 200_000, 100_000];
    const ROUNDS: usize = 8;
    let all_ns = LENGTHS.iter().sum::<u64>() * ROUNDS as u64;
    let name = format!("uneven work of {} ms on four streams", all_ns / 4 / 1_000_000);
    let mut group = c.benchmark_group(name);
    group.sample_size(20);
    for strategy in [
        AllocationStrategy::RoundRobin,
        AllocationStrategy::LoadBalanced,
        AllocationStrategy::Workload,
        AllocationStrategy::Learned,
    ] {
        let device = CpuDevice::with_threads(4).unwrap();
        let pool =
            StreamPool::with_priorities(device.clone(), &[StreamPriority::Normal; 4], strategy);
        let pool = pool.unwrap();
        group.bench_function(format!("{strategy:?}"), |b| {
            b.iter(|| {
                for bytes in std::iter::repeat_n(LENGTHS, ROUNDS).flatten() {
                    let work = move || std::thread::sleep(Duration::from_nanos(bytes));
                    let stream = pool.stream_for_work(WorkloadType::Memory, bytes);
                    stream.launch_host_fn(HostFn::new(work)).unwrap();
                }
                device.synchronize().unwrap();
            });
        });
    }
    group.finish();
}

criterion_group!(streams, start_latency, operations, uneven_work);
criterion_main!(streams);
