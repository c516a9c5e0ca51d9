// SPDX-License-Identifier: MIT OR Apache-2.0
//! An own device: the CPU with a limit for the memory of an allocation. It passes the conformance
//! tests, and works in a stream pool.

use std::alloc::Layout;
use std::error::Error;
use std::sync::mpsc;

use ts_streams::{
    AllocationStrategy, CpuDevice, CpuEvent, CpuMemory, CpuStream, Device, DeviceInfo, HostFn,
    MemoryKind, Stream, StreamPool, StreamPriority, WorkloadType, conformance,
};

const LIMIT_BYTES: usize = 64 << 20;

#[derive(Debug, Clone)]
struct Limited {
    cpu: CpuDevice,
    info: DeviceInfo,
}

impl Limited {
    fn new() -> Result<Self, ts_streams::Error> {
        let cpu = CpuDevice::with_threads(2)?;
        let info = DeviceInfo { name: "limited CPU".into(), ..cpu.info().clone() };
        Ok(Self { cpu, info })
    }
}

// SAFETY: memory, streams and events are those of `CpuDevice`, which keeps the promises. The limit
// only adds errors.
unsafe impl Device for Limited {
    type Stream = CpuStream;
    type Event = CpuEvent;
    type Memory = CpuMemory;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn create_stream(&self, priority: StreamPriority) -> Result<CpuStream, ts_streams::Error> {
        self.cpu.create_stream(priority)
    }

    fn owns(&self, stream: &CpuStream) -> bool {
        self.cpu.owns(stream)
    }

    fn create_event(&self) -> Result<CpuEvent, ts_streams::Error> {
        self.cpu.create_event()
    }

    fn allocate(&self, layout: Layout, kind: MemoryKind) -> Result<CpuMemory, ts_streams::Error> {
        if layout.size() > LIMIT_BYTES {
            let (device, requested_bytes) = (self.info.name.clone(), layout.size());
            return Err(ts_streams::Error::OutOfMemory { device, requested_bytes });
        }
        self.cpu.allocate(layout, kind)
    }

    fn synchronize(&self) -> Result<(), ts_streams::Error> {
        self.cpu.synchronize()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    conformance::check(|| Limited::new().expect("threads can be started"));

    let device = Limited::new()?;
    let too_large = Layout::from_size_align(LIMIT_BYTES + 1, 64)?;
    let error = device.allocate(too_large, MemoryKind::Device).expect_err("it is over the limit");
    println!("{}: {error}", device.info().name);

    let pool = StreamPool::new(device, 2, AllocationStrategy::RoundRobin)?;
    let stream = pool.stream_for_workload(WorkloadType::Compute);
    let (sender, results) = mpsc::channel();
    stream.launch_host_fn(HostFn::new(move || {
        let _ = sender.send(6 * 7);
    }))?;
    stream.synchronize()?;
    assert_eq!(results.recv()?, 42);
    Ok(())
}
