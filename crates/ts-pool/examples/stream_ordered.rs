// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocates and frees device memory in stream order, on the CPU device.
//!
//! Run it with `cargo run -p tensorstream-pool --example stream_ordered`. To run the same program
//! on a GPU, replace `CpuDevice::new()` with `CudaDevice::new(0)` (feature `cuda`).

use std::thread::sleep;
use std::time::Duration;

use ts_pool::ts_streams::{CpuDevice, Device, Event, HostFn, Stream, StreamPriority};
use ts_pool::{Error, OrderedOptions, StreamOrderedAllocator, StreamOrderedPool};

const MIB: usize = 1 << 20;

/// Returns a function that sleeps for 50 ms, as a stand-in for a kernel.
fn kernel() -> HostFn {
    HostFn::new(|| sleep(Duration::from_millis(50)))
}

fn main() -> Result<(), Error> {
    let device = CpuDevice::new()?;
    let copies = device.create_stream(StreamPriority::Normal)?;
    let compute = device.create_stream(StreamPriority::High)?;
    // The pool has one segment with room for one buffer, so the allocations below share its memory.
    let options = OrderedOptions::default().with_segment_bytes(MIB).with_limit_bytes(MIB);
    let pool = StreamOrderedPool::new(device.clone(), options);

    // The same stream reuses freed memory at once, although the kernel still runs. This is safe,
    // because work that uses `second` runs after the kernel.
    let first = pool.allocate_for_stream(MIB, &copies)?;
    let range = first.range()?;
    copies.launch_host_fn(kernel().writes(range))?;
    drop(first);
    let second = pool.allocate_for_stream(MIB, &copies)?;
    assert_eq!(second.range()?, range);

    // Another stream can take the memory too. The pool makes `compute` wait for `copies` on the
    // device. This thread does not wait.
    drop(second);
    let third = pool.allocate_for_stream(MIB, &compute)?;
    assert_eq!(third.range()?, range);
    println!("blocks taken from another stream: {}", pool.stats().reused_across_streams);

    // A second stream can use a buffer. The event orders the accesses. `record_use` keeps the pool
    // from reusing the memory before the second stream is done with it.
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
