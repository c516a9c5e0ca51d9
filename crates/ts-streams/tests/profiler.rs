// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the profiler, in simulated time.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::alloc::Layout;
use std::time::Duration;

use ts_streams::{
    Activity, CpuDevice, Device, HostFn, MemoryKind, RawMemory, SimDevice, SimOptions, Stream,
    StreamId, StreamPriority, StreamProfiler,
};

/// Two streams have a scope of 60 us each. The second scope starts 30 us after the first, so the
/// scopes overlap for a third of the busy time.
#[test]
fn a_profile_measures_scopes_and_their_overlap() {
    let options =
        SimOptions::default().with_stall_rate(0.0).with_overhead_ns(1000).with_bytes_per_us(1);
    let device = SimDevice::new(options);
    let [a, b] = [(); 2].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let memory =
        device.allocate(Layout::from_size_align(64, 64).unwrap(), MemoryKind::Device).unwrap();
    let profiler = StreamProfiler::new(device.clone()).unwrap();
    {
        let whole = profiler.scope(&a, "whole").unwrap();
        for _ in 0..2 {
            let _transfer = profiler.transfer(&a, 29).unwrap();
            // SAFETY: a simulated device runs one operation at a time; the memory outlives the
            // work.
            unsafe { a.fill(memory.range().slice(0..29), 1) }.unwrap();
        }
        drop(whole);
        // These 30 functions together take as long as one transfer.
        b.launch_host_fn(HostFn::new(|| ())).unwrap();
        (0..29).for_each(|_| b.launch_host_fn(HostFn::new(|| ())).unwrap());
        let _launch = profiler.launch(&b, "kernel \"quoted\"").unwrap();
        (0..60).for_each(|_| b.launch_host_fn(HostFn::new(|| ())).unwrap());
    }
    profiler.record_operation(a.id(), Activity::Transfer, Duration::from_secs(5), 7);
    assert!(profiler.profile().spans.len() < 4, "most work has not run");
    let profile = profiler.finish().unwrap();
    let us = Duration::from_micros;
    let transfers = profile.times(Some(a.id()))[&Activity::Transfer];
    assert_eq!(
        (transfers.count, transfers.total, transfers.p50, transfers.bytes),
        (2, us(60), us(30), 58)
    );
    assert!((transfers.bytes_per_s() - 58.0 / 60e-6).abs() < 1.0);
    assert_eq!(profile.times(None)[&Activity::Scope("whole".into())].total, us(60));
    assert_eq!(profile.times(Some(b.id())).len(), 1);
    assert_eq!(profile.busy(), (us(90), us(30)));
    assert!((profile.overlap_percent() - 100.0 / 3.0).abs() < 1e-9);
    assert_eq!(
        profile.reported_times(Some(a.id()))[&Activity::Transfer].total,
        Duration::from_secs(5)
    );
    assert_eq!(profile.reported_times(Some(b.id())).len(), 0);

    let trace: serde_json::Value = serde_json::from_str(&profile.chrome_trace()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let kernel = events.iter().find(|event| event["name"] == "kernel \"quoted\"").unwrap();
    assert_eq!((kernel["ph"].as_str(), kernel["dur"].as_f64()), (Some("X"), Some(60.0)));
    assert_eq!(events.len(), 2 + 4);
    let text = profile.to_string();
    assert!(text.contains("whole") && text.contains("33.3%"), "{text}");
}

#[test]
fn scopes_of_failed_streams_are_lost() {
    let device = CpuDevice::with_threads(1).unwrap();
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let profiler = StreamProfiler::new(device).unwrap();
    {
        let _scope = profiler.scope(&stream, "fails").unwrap();
        stream
            .launch_host_fn(HostFn::new(|| std::panic::resume_unwind(Box::new("on purpose"))))
            .unwrap();
    }
    let profile = profiler.finish().unwrap();
    assert_eq!((profile.lost, profile.spans.len()), (1, 0));
    assert_eq!(profile.times(Some(StreamId(0))).len(), 0);
}

#[test]
fn a_profiler_that_is_off_records_nothing() {
    let device = SimDevice::new(SimOptions::default());
    let streams = [(); 2].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let profiler = StreamProfiler::new(device).unwrap();
    let run = |index: usize| {
        let _scope = profiler.scope(&streams[index], "scope").unwrap();
        streams[index].launch_host_fn(HostFn::new(|| ())).unwrap();
        let time = Duration::from_micros(5);
        profiler.record_operation(streams[index].id(), Activity::Transfer, time, 10);
    };
    assert!(profiler.is_enabled());
    profiler.set_enabled(false);
    let before = streams[0].metrics().operations;
    run(0);
    assert_eq!(streams[0].metrics().operations, before + 1, "no event is recorded");
    let report = profiler.finish().unwrap().report();
    assert_eq!((report.total_streams, report.streams, report.lost), (0, vec![], 0));
    profiler.set_enabled(true);
    (0..4).for_each(|turn| run(turn % 2));
    let report = profiler.finish().unwrap().report();
    assert_eq!(report.total_streams, 2);
    let ids: Vec<_> = report.streams.iter().map(|stream| stream.stream).collect();
    assert_eq!(ids, [streams[0].id(), streams[1].id()]);
    for stream in &report.streams {
        assert_eq!(stream.measured[&Activity::Scope("scope".into())].count, 2);
        assert_eq!(stream.reported[&Activity::Transfer].bytes, 20);
    }
    assert!(report.busy > Duration::ZERO && report.overlap <= report.busy);
}
