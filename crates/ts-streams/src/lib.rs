// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices, streams and events that run work asynchronously, in an order that the caller defines.
//!
//! Code that is generic over [`Device`] runs on the host ([`CpuDevice`]), on a simulated GPU that
//! finds missing synchronization ([`SimDevice`]), and on NVIDIA GPUs (`CudaDevice`). A
//! [`DeviceRegistry`] chooses a device at run time. This crate does not deal with tensors or files.
//!
//! ```
//! use std::alloc::Layout;
//! use ts_streams::{CpuDevice, Device, HostFn, MemoryKind, RawMemory, Stream, StreamPriority};
//!
//! let device = CpuDevice::new()?;
//! let copies = device.create_stream(StreamPriority::Normal)?;
//! let compute = device.create_stream(StreamPriority::High)?;
//! let layout = Layout::from_size_align(1024, 64).expect("64 is a power of two");
//! let memory = device.allocate(layout, MemoryKind::Device)?;
//!
//! // SAFETY: nothing else uses the memory, and it outlives the work.
//! unsafe { copies.fill(memory.range(), 7)? };
//! let filled = device.create_event()?;
//! copies.record(&filled)?;
//! compute.wait(&filled)?; // the stream waits, not the host
//! compute.launch_host_fn(HostFn::new(|| println!("filled")).reads(memory.range()))?;
//! compute.synchronize()?;
//!
//! let mut bytes = [0; 4];
//! // SAFETY: all work on the memory is done.
//! unsafe { memory.read(1020, &mut bytes)? };
//! assert_eq!(bytes, [7; 4]);
//! # Ok::<(), ts_streams::Error>(())
//! ```
//!
//! `examples/overlap.rs` is a longer example, which overlaps copies with computation.
//!
//! # Invariants
//! - Submitting work does not block, with one exception: CUDA copies from or to host memory that is
//!   not pinned may block.
//! - Other calls block only if their documentation states it. Dropping the last handle to a device,
//!   its streams and its memory can also block: see [`CpuDevice`].
//! - Each operation on a stream runs at most once, in submission order, and after all events that
//!   the stream waits for.
//! - When an operation fails, later work on its stream is skipped. Work on other streams that
//!   [waits](Stream::wait) for the operation is skipped too. All of these streams report the error.
//!   No other stream is affected, unless the GPU itself fails. [`Stream`] describes the details.
//!
//! # From a pool to an order
//! A [`StreamPool`] chooses streams by workload and priority. A [`MultiStreamCoordinator`] orders
//! work on them: a [`TaskGraph`] once, a [`Pipeline`] again and again. TensorStream takes the
//! streams of accelerators from both. It does not use the profiler
//! ([`StreamProfiler`], [`Profile`]), which is for programs, also in Python
//! (`tensorstream.streams`).
//!
//! # Features
//! - `cuda` (off by default) adds `CudaDevice`. The driver is loaded at run time, so the same
//!   program also runs on machines without it; [`GpuStatus::detect`] reports whether GPUs can be
//!   used.
//! - `runtime` (off by default) adds `RuntimeDevice`: other accelerators, through a library that
//!   has the functions of CUDA's runtime under another prefix.

#[cfg(any(feature = "cuda", feature = "runtime"))]
mod accelerator;
mod any;
mod coordinator;
mod cpu;
mod detect;
mod device;
mod energy;
mod error;
mod gpu;
mod graph;
mod id;
mod kernel;
mod memory;
mod metrics;
mod open;
mod pipeline;
mod pool;
mod priority;
mod profiler;
mod provider;
mod queue;
mod race;
mod range;
mod sim;
mod sync;
mod workload;

pub mod conformance;

#[cfg(any(feature = "cuda", feature = "runtime"))]
pub use accelerator::{AcceleratorDevice, AcceleratorEvent, AcceleratorMemory, AcceleratorStream};
#[cfg(feature = "cuda")]
pub use accelerator::{CudaDevice, CudaEvent, CudaMemory, CudaStream, CudarcSlice};
#[cfg(feature = "runtime")]
pub use accelerator::{RuntimeDevice, RuntimeEvent, RuntimeLibrary, RuntimeMemory, RuntimeStream};
pub use any::{AnyDevice, AnyEvent, AnyMemory, AnyStream};
pub use coordinator::{CancelToken, Execution, MultiStreamCoordinator};
pub use cpu::{CpuDevice, CpuEvent, CpuMemory, CpuStream};
/// The `cudarc` crate, whose streams and slices [`CudaDevice`] shares.
#[cfg(feature = "cuda")]
pub use cudarc;
pub use detect::GpuError;
pub use device::{
    Device, DeviceInfo, Event, HostFn, MemoryLocation, RawMemory, Registration, Status, Stream,
};
pub use energy::{Energy, EnergyDomain, EnergyMeter};
pub use error::{Error, ErrorKind};
pub use gpu::GpuStatus;
pub use graph::{TaskGraph, TaskId};
pub use id::{DeviceKind, StreamId};
pub use kernel::Kernel;
pub use metrics::{MemoryMetrics, StreamMetrics};
pub use open::OpenDevice;
pub use pipeline::{Pipeline, StageGraph, StageId};
pub use pool::{AllocationStrategy, PooledStreamStats, StrategyChange, StreamPool};
pub use priority::{PriorityRange, StreamPriority};
pub use profiler::{
    Activity, ActivityStats, Profile, ProfileReport, ScopeGuard, Span, StreamProfiler, StreamReport,
};
pub use provider::{DeviceAvailability, DeviceChoice, DeviceProvider, DeviceRegistry};
pub use queue::check_may_block;
pub use race::{Access, Race};
pub use range::{MemoryKind, MemoryRange};
pub use sim::{SimDevice, SimEvent, SimMemory, SimOptions, SimStream};
pub use workload::WorkloadType;
