// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocates and frees device memory in stream order, on the CPU device.
//!
//! Run it with `cargo run -p ts-pool --example stream_ordered`. Replace `CpuDevice` by `CudaDevice`
//! (feature `cuda`) to run the same program on a GPU.

use std::thread::sleep;
use std::time::Duration;

use ts_pool::ts_streams::{CpuDevice, Device, Event, HostFn, Stream, StreamPriority};
use ts_pool::{Error, OrderedOptions, StreamOrderedAllocator, StreamOrderedPool};

const MIB: usize = 1 << 20;

/// Stands for a kernel that takes a while.
fn kernel() -> HostFn {
    HostFn::new(|| sleep(Duration::from_millis(50)))
}

fn main() -> Result<(), Error> {
    let device = CpuDevice::new()?;
    let copies = device.create_stream(StreamPriority::Normal)?;
    let compute = device.create_stream(StreamPriority::High)?;
    // One segment with room for one buffer, so that every allocation below reuses the same memory.
    let options = OrderedOptions::default().with_segment_bytes(MIB).with_limit_bytes(MIB);
    let pool = StreamOrderedPool::new(device.clone(), options);

    // The same stream reuses freed memory at once, although the kernel still runs: the work that
    // uses `second` runs after it.
    let first = pool.allocate_for_stream(MIB, &copies)?;
    let range = first.range()?;
    copies.launch_host_fn(kernel().writes(range))?;
    drop(first);
    let second = pool.allocate_for_stream(MIB, &copies)?;
    assert_eq!(second.range()?, range);

    // Another stream takes the memory too. The pool makes `compute` wait on the device for
    // `copies`; this thread does not wait.
    drop(second);
    let third = pool.allocate_for_stream(MIB, &compute)?;
    assert_eq!(third.range()?, range);
    println!("taken from another stream: {}", pool.stats().reused_across_streams);

    // A buffer can be used on a second stream. The event orders the accesses, and `record_use`
    // keeps the memory from being reused before the second stream is done with it.
    compute.launch_host_fn(kernel().writes(range))?;
    let written = device.create_event()?;
    compute.record(&written)?;
    copies.wait(&written)?;
    copies.launch_host_fn(kernel().reads(range))?;
    pool.record_use(&third, &copies)?;
    drop(third);
    println!("freed, but still in use by another stream: {} bytes", pool.stats().pending_bytes);

    written.synchronize()?;
    device.synchronize()?;
    println!("returned to the device: {} bytes", pool.trim(0));
    println!("{:#?}", pool.stats());
    Ok(())
}
