// SPDX-License-Identifier: MIT OR Apache-2.0
//! Overlaps copies with computation, on two streams of the CPU.
//!
//! The data is processed in chunks through two buffers: while one stream sums the chunk in one
//! buffer, the other stream copies the next chunk into the other buffer. Events order the streams.
//! The host submits everything at once and waits only at the end.
//!
//! ```sh
//! cargo run --release --package tensorstream-streams --example overlap
//! ```

use std::alloc::Layout;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ts_streams::{
    CpuDevice, CpuMemory, Device, Error, HostFn, MemoryKind, MemoryRange, RawMemory, Stream,
    StreamPriority, StreamProfiler,
};

const CHUNKS: usize = 8;
const CHUNK_BYTES: usize = 4 << 20;

fn main() -> Result<(), Error> {
    let device = CpuDevice::with_threads(2)?;
    let mut data: Vec<u8> = (0..CHUNKS * CHUNK_BYTES).map(|i| (i % 251) as u8).collect();
    let expected = sum(&data);
    let layout = Layout::from_size_align(CHUNK_BYTES, 64).expect("64 is a power of two");
    let buffers = [
        device.allocate(layout, MemoryKind::Device)?,
        device.allocate(layout, MemoryKind::Device)?,
    ];
    let total = Arc::new(AtomicU64::new(0));
    let profiler = StreamProfiler::new(device.clone())?;

    let range = MemoryRange::of(&mut data);
    // SAFETY: `data` and `buffers` are used by nothing else, and live until `synchronize` below.
    let submitted = unsafe { submit(&device, &profiler, range, &buffers, &total) };
    // Wait even if submitting failed, so that no work outlives its memory.
    let finished = device.synchronize();
    submitted.and(finished)?;
    assert_eq!(total.load(Ordering::Relaxed), expected);

    let profile = profiler.finish()?;
    for span in &profile.spans {
        let (start, end) = (span.start, span.start + span.time);
        let activity = span.activity.to_string();
        println!("stream {}: {activity:<8} from {start:>9.2?} to {end:>9.2?}", span.stream);
    }
    let percent = profile.overlap_percent();
    println!("sum {expected}; both streams were busy for {percent:.0}% of the time with any work");
    Ok(())
}

/// Submits the copies and sums of all chunks. Does not block.
///
/// # Safety
/// Until the device is synchronized, `data` must be valid, and nothing else may access `data` or
/// `buffers`.
unsafe fn submit(
    device: &CpuDevice,
    profiler: &StreamProfiler<CpuDevice>,
    data: MemoryRange,
    buffers: &[CpuMemory; 2],
    total: &Arc<AtomicU64>,
) -> Result<(), Error> {
    let copies = device.create_stream(StreamPriority::Normal)?;
    let compute = device.create_stream(StreamPriority::Normal)?;
    let copied = [device.create_event()?, device.create_event()?];
    let summed = [device.create_event()?, device.create_event()?];
    for chunk in 0..CHUNKS {
        let (from, index) = (data.slice(chunk * CHUNK_BYTES..(chunk + 1) * CHUNK_BYTES), chunk % 2);
        let buffer = buffers[index].range();

        // The copy waits until the previous chunk in this buffer is summed. The first wait for each
        // buffer has no effect, because its event was never recorded.
        copies.wait(&summed[index])?;
        let scope = profiler.transfer(&copies, CHUNK_BYTES as u64)?;
        // SAFETY: the caller guarantees that `data` and `buffers` are valid and not used by other
        // code. The events order this copy and the sums.
        unsafe { copies.copy(buffer, from)? };
        drop(scope);
        copies.record(&copied[index])?;

        compute.wait(&copied[index])?;
        let scope = profiler.launch(&compute, format!("sum {chunk}"))?;
        let total = Arc::clone(total);
        let work = move || {
            // SAFETY: the caller guarantees that the buffer is valid and not used by other code.
            // The events order the sum after the copy into the buffer and before the next copy.
            let bytes = unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len()) };
            total.fetch_add(sum(bytes), Ordering::Relaxed);
        };
        compute.launch_host_fn(HostFn::new(work).reads(buffer))?;
        drop(scope);
        compute.record(&summed[index])?;
    }
    Ok(())
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().map(|&byte| u64::from(byte)).sum()
}
