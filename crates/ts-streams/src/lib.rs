// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices, streams and events: work that is submitted in order, runs when it may, and never keeps
//! the host waiting.
//!
//! Code that is written for a [`Device`] runs on the host ([`CpuDevice`]), on a simulated GPU that
//! finds missing dependencies ([`SimDevice`]), and on a real one; which it is, a [`DeviceRegistry`]
//! can find out. It refuses to know tensors and files.
//!
//! ```
//! use std::alloc::Layout;
//! use ts_streams::{
//!     CpuDevice, Device, Event, HostFn, MemoryKind, RawMemory, Stream, StreamPriority,
//! };
//!
//! let device = CpuDevice::new()?;
//! let copies = device.create_stream(StreamPriority::Normal)?;
//! let compute = device.create_stream(StreamPriority::High)?;
//! let layout = Layout::from_size_align(1024, 64).expect("a power of two");
//! let memory = device.allocate(layout, MemoryKind::Device)?;
//!
//! // SAFETY: nobody else uses the memory, which outlives the work.
//! unsafe { copies.fill(memory.range(), 7)? };
//! let filled = device.create_event()?;
//! copies.record(&filled)?;
//! compute.wait(&filled)?;                      // on the device: the host goes on
//! compute.launch_host_fn(HostFn::new(|| println!("filled")).reading(memory.range()))?;
//! compute.synchronize()?;
//!
//! let mut bytes = [0; 4];
//! // SAFETY: all work on it is done.
//! unsafe { memory.read(1020, &mut bytes)? };
//! assert_eq!(bytes, [7; 4]);
//! # Ok::<(), ts_streams::Error>(())
//! ```
//!
//! # Invariants
//! - Submitting work never waits for work: only `synchronize` does, calls that say so, dropping the
//!   last handle to a [`CpuDevice`], and CUDA's driver where it copies from or to memory that is
//!   not pinned.
//! - What is submitted to a stream runs in that order, each operation once, after all that it waits
//!   for.
//! - What fails takes with it what is behind it and what waits for it, and nothing else; whoever
//!   waits for such a thing is told.
//!
//! # Features
//! `cuda` (off by default): `CudaDevice`, by a driver that is loaded when there is one. The same
//! program runs on machines without: [`GpuStatus::detect`] says what there is.

mod any;
mod coordinator;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod error;
mod gpu;
mod graph;
mod memory;
mod metrics;
mod pool;
mod priority;
mod profiler;
mod provider;
mod queue;
mod race;
mod sim;
mod sync;

pub mod conformance;

pub use any::{AnyDevice, AnyEvent, AnyMemory, AnyStream};
pub use coordinator::{CancelToken, Execution, MultiStreamCoordinator};
pub use cpu::{CpuDevice, CpuEvent, CpuMemory, CpuStream};
#[cfg(feature = "cuda")]
pub use cuda::{CudaDevice, CudaEvent, CudaMemory, CudaStream};
pub use device::{
    Device, DeviceInfo, DeviceKind, Event, HostFn, MemoryLocation, RawMemory, Status, Stream,
    StreamId,
};
pub use error::{Error, ErrorKind};
pub use gpu::{GpuError, GpuStatus};
pub use graph::{TaskGraph, TaskId};
pub use memory::{MemoryKind, MemoryRange};
pub use metrics::{MemoryMetrics, StreamMetrics};
pub use pool::{AllocationStrategy, StrategyChange, StreamPool, WorkloadType};
pub use priority::{PriorityRange, StreamPriority};
pub use profiler::{Activity, OpenScope, Profile, Span, StreamProfiler, Times};
pub use provider::{DeviceAvailability, DeviceChoice, DeviceProvider, DeviceRegistry};
pub use queue::may_wait;
pub use race::{Access, Race};
pub use sim::{SimDevice, SimEvent, SimMemory, SimOptions, SimStream};
