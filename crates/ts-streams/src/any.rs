// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices whose kind is chosen at run time.

use std::alloc::Layout;
use std::ffi::c_void;
use std::time::Duration;

#[cfg(feature = "cuda")]
use crate::accelerator::{CudaDevice, CudaEvent, CudaMemory, CudaStream};
#[cfg(feature = "runtime")]
use crate::accelerator::{RuntimeDevice, RuntimeEvent, RuntimeMemory, RuntimeStream};
use crate::cpu::{CpuDevice, CpuEvent, CpuMemory, CpuStream};
use crate::device::{
    Device, DeviceInfo, Event, HostFn, MemoryLocation, RawMemory, Registration, Status, Stream,
};
use crate::id::StreamId;
use crate::kernel::Kernel;
use crate::priority::StreamPriority;
use crate::range::{MemoryKind, MemoryRange};
use crate::sim::{SimDevice, SimEvent, SimMemory, SimStream};
use crate::{DeviceKind, Error, MemoryMetrics, StreamMetrics};

/// A device of any kind, chosen at run time.
///
/// Each method calls the same method of the device inside. If a stream, event or memory is of
/// another kind, [`owns`](Device::owns) returns `false`, and other methods return
/// [`Error::MixedDevices`].
///
/// # Examples
/// ```
/// use ts_streams::{AnyDevice, Device, DeviceKind, DeviceRegistry};
///
/// let device: AnyDevice = DeviceRegistry::builtin().open(Some("cpu"))?;
/// assert_eq!(device.info().kind, DeviceKind::Cpu);
/// # Ok::<(), ts_streams::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AnyDevice {
    /// The host.
    Cpu(CpuDevice),
    /// A simulated GPU.
    Sim(SimDevice),
    /// An NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(CudaDevice),
    /// An accelerator behind a library like CUDA's runtime.
    #[cfg(feature = "runtime")]
    Runtime(RuntimeDevice),
}

/// A stream of an [`AnyDevice`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AnyStream {
    /// A stream on the host.
    Cpu(CpuStream),
    /// A stream on a simulated GPU.
    Sim(SimStream),
    /// A stream on an NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(CudaStream),
    /// A stream on such an accelerator.
    #[cfg(feature = "runtime")]
    Runtime(RuntimeStream),
}

/// An event of an [`AnyDevice`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AnyEvent {
    /// An event on the host.
    Cpu(CpuEvent),
    /// An event on a simulated GPU.
    Sim(SimEvent),
    /// An event on an NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(CudaEvent),
    /// An event of such an accelerator.
    #[cfg(feature = "runtime")]
    Runtime(RuntimeEvent),
}

/// Memory of an [`AnyDevice`].
#[derive(Debug)]
#[non_exhaustive]
pub enum AnyMemory {
    /// Host memory of a [`CpuDevice`].
    Cpu(CpuMemory),
    /// Memory of a simulated GPU.
    Sim(SimMemory),
    /// Memory of an NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(CudaMemory),
    /// Memory of such an accelerator.
    #[cfg(feature = "runtime")]
    Runtime(RuntimeMemory),
}

/// Evaluates an expression for the value inside an enum, whatever its variant.
macro_rules! dispatch {
    ($of:ident, $value:expr, $inner:ident => $result:expr) => {
        match $value {
            $of::Cpu($inner) => $result,
            $of::Sim($inner) => $result,
            #[cfg(feature = "cuda")]
            $of::Cuda($inner) => $result,
            #[cfg(feature = "runtime")]
            $of::Runtime($inner) => $result,
        }
    };
}

/// Like `dispatch`, but wraps the value of the result in the same variant of another enum.
macro_rules! dispatch_into {
    ($of:ident, $value:expr, $inner:ident => $result:expr, $into:ident) => {
        match $value {
            $of::Cpu($inner) => $result.map($into::Cpu),
            $of::Sim($inner) => $result.map($into::Sim),
            #[cfg(feature = "cuda")]
            $of::Cuda($inner) => $result.map($into::Cuda),
            #[cfg(feature = "runtime")]
            $of::Runtime($inner) => $result.map($into::Runtime),
        }
    };
}

/// Evaluates an expression for two values of the same kind, or returns `Error::MixedDevices`.
macro_rules! dispatch_pair {
    (
        ($of:ident, $value:expr, $inner:ident),
        ($with:ident, $other:expr, $inner_other:ident) => $result:expr
    ) => {
        match ($value, $other) {
            ($of::Cpu($inner), $with::Cpu($inner_other)) => $result,
            ($of::Sim($inner), $with::Sim($inner_other)) => $result,
            #[cfg(feature = "cuda")]
            ($of::Cuda($inner), $with::Cuda($inner_other)) => $result,
            #[cfg(feature = "runtime")]
            ($of::Runtime($inner), $with::Runtime($inner_other)) => $result,
            (value, other) => Err(Error::MixedDevices {
                expected: value.device_kind(),
                actual: other.device_kind(),
            }),
        }
    };
}

macro_rules! device_kind {
    ($of:ident) => {
        impl $of {
            fn device_kind(&self) -> DeviceKind {
                match self {
                    $of::Cpu(_) => DeviceKind::Cpu,
                    $of::Sim(_) => DeviceKind::Sim,
                    #[cfg(feature = "cuda")]
                    $of::Cuda(_) => DeviceKind::Cuda,
                    #[cfg(feature = "runtime")]
                    $of::Runtime(_) => DeviceKind::Runtime,
                }
            }
        }
    };
}

impl AnyDevice {
    /// Returns the current and peak number of bytes allocated through this handle and its clones.
    pub fn memory(&self) -> MemoryMetrics {
        dispatch!(AnyDevice, self, device => device.memory())
    }

    /// Returns a stream that other code created, by the driver's handle of it, such as a
    /// `CUstream`. Work can be submitted to it, and it can wait for events. Dropping the result
    /// does not destroy the stream.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if streams of the device have no such handles.
    ///
    /// # Safety
    /// The handle must be that of a stream of this device, and the stream must exist as long as
    /// the result or a clone of it.
    pub unsafe fn external_stream(&self, handle: *mut c_void) -> Result<AnyStream, Error> {
        let _ = handle;
        match self {
            AnyDevice::Cpu(_) | AnyDevice::Sim(_) => Err(Error::Unsupported {
                device: self.info().name.clone(),
                what: "streams of other code",
            }),
            #[cfg(feature = "cuda")]
            AnyDevice::Cuda(device) => {
                // SAFETY: the caller guarantees that the handle is that of a stream of the device.
                Ok(AnyStream::Cuda(unsafe { device.external_stream(handle) }))
            }
            #[cfg(feature = "runtime")]
            AnyDevice::Runtime(device) => {
                // SAFETY: as above.
                Ok(AnyStream::Runtime(unsafe { device.external_stream(handle) }))
            }
        }
    }
}

device_kind!(AnyMemory);
device_kind!(AnyDevice);
device_kind!(AnyStream);
device_kind!(AnyEvent);

// SAFETY: each method calls the same method of the device inside, which implements `Device`.
// Streams, events and memory of another kind are refused.
unsafe impl Device for AnyDevice {
    type Stream = AnyStream;
    type Event = AnyEvent;
    type Memory = AnyMemory;

    fn owns(&self, stream: &AnyStream) -> bool {
        match (self, stream) {
            (AnyDevice::Cpu(device), AnyStream::Cpu(stream)) => device.owns(stream),
            (AnyDevice::Sim(device), AnyStream::Sim(stream)) => device.owns(stream),
            #[cfg(feature = "cuda")]
            (AnyDevice::Cuda(device), AnyStream::Cuda(stream)) => device.owns(stream),
            #[cfg(feature = "runtime")]
            (AnyDevice::Runtime(device), AnyStream::Runtime(stream)) => device.owns(stream),
            _ => false,
        }
    }

    fn info(&self) -> &DeviceInfo {
        dispatch!(AnyDevice, self, device => device.info())
    }

    fn available_bytes(&self) -> Result<Option<u64>, Error> {
        dispatch!(AnyDevice, self, device => device.available_bytes())
    }

    fn create_stream(&self, priority: StreamPriority) -> Result<AnyStream, Error> {
        dispatch_into!(AnyDevice, self, device => device.create_stream(priority), AnyStream)
    }

    fn create_event(&self) -> Result<AnyEvent, Error> {
        dispatch_into!(AnyDevice, self, device => device.create_event(), AnyEvent)
    }

    fn allocate(&self, layout: Layout, kind: MemoryKind) -> Result<AnyMemory, Error> {
        dispatch_into!(AnyDevice, self, device => device.allocate(layout, kind), AnyMemory)
    }

    unsafe fn register(&self, range: MemoryRange) -> Result<Registration, Error> {
        // SAFETY: the caller has the same obligations.
        dispatch!(AnyDevice, self, device => unsafe { device.register(range) })
    }

    fn allocate_async(&self, layout: Layout, stream: &AnyStream) -> Result<AnyMemory, Error> {
        dispatch_pair!((AnyDevice, self, device), (AnyStream, stream, stream) => {
            device.allocate_async(layout, stream).map(AnyMemory::from)
        })
    }

    fn free_async(&self, memory: AnyMemory, stream: &AnyStream) -> Result<(), Error> {
        match (self, memory, stream) {
            (AnyDevice::Cpu(device), AnyMemory::Cpu(memory), AnyStream::Cpu(stream)) => {
                device.free_async(memory, stream)
            }
            (AnyDevice::Sim(device), AnyMemory::Sim(memory), AnyStream::Sim(stream)) => {
                device.free_async(memory, stream)
            }
            #[cfg(feature = "cuda")]
            (AnyDevice::Cuda(device), AnyMemory::Cuda(memory), AnyStream::Cuda(stream)) => {
                device.free_async(memory, stream)
            }
            #[cfg(feature = "runtime")]
            (
                AnyDevice::Runtime(device),
                AnyMemory::Runtime(memory),
                AnyStream::Runtime(stream),
            ) => device.free_async(memory, stream),
            (device, memory, stream) => {
                let kinds = [memory.device_kind(), stream.device_kind()];
                let of = device.device_kind();
                let with = kinds.into_iter().find(|&kind| kind != of).unwrap_or(of);
                Err(Error::MixedDevices { expected: of, actual: with })
            }
        }
    }

    fn load(&self, kernel: &Kernel) -> Result<(), Error> {
        dispatch!(AnyDevice, self, device => device.load(kernel))
    }

    fn synchronize(&self) -> Result<(), Error> {
        dispatch!(AnyDevice, self, device => device.synchronize())
    }
}

impl Stream for AnyStream {
    type Event = AnyEvent;

    fn id(&self) -> StreamId {
        dispatch!(AnyStream, self, stream => stream.id())
    }

    fn level(&self) -> i32 {
        dispatch!(AnyStream, self, stream => stream.level())
    }

    fn record(&self, event: &AnyEvent) -> Result<(), Error> {
        dispatch_pair!((AnyStream, self, stream), (AnyEvent, event, event) => stream.record(event))
    }

    fn wait(&self, event: &AnyEvent) -> Result<(), Error> {
        dispatch_pair!((AnyStream, self, stream), (AnyEvent, event, event) => stream.wait(event))
    }

    fn wait_ignoring_failure(&self, event: &AnyEvent) -> Result<(), Error> {
        dispatch_pair!((AnyStream, self, stream), (AnyEvent, event, event) => {
            stream.wait_ignoring_failure(event)
        })
    }

    unsafe fn copy(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        // SAFETY: the caller meets the requirements of `Stream::copy` for the stream inside.
        dispatch!(AnyStream, self, stream => unsafe { stream.copy(to, from) })
    }

    unsafe fn fill(&self, to: MemoryRange, byte: u8) -> Result<(), Error> {
        // SAFETY: the caller meets the requirements of `Stream::fill` for the stream inside.
        dispatch!(AnyStream, self, stream => unsafe { stream.fill(to, byte) })
    }

    fn launch_host_fn(&self, work: HostFn) -> Result<(), Error> {
        dispatch!(AnyStream, self, stream => stream.launch_host_fn(work))
    }

    unsafe fn launch(&self, kernel: &Kernel, blocks: u32, arguments: &[u64]) -> Result<(), Error> {
        // SAFETY: the caller meets the requirements of `Stream::launch` for the stream inside.
        dispatch!(AnyStream, self, stream => unsafe { stream.launch(kernel, blocks, arguments) })
    }

    unsafe fn submit_foreign(&self, submit: &mut dyn FnMut(*mut c_void)) -> Result<(), Error> {
        // SAFETY: the caller meets the requirements of `Stream::submit_foreign`.
        dispatch!(AnyStream, self, stream => unsafe { stream.submit_foreign(submit) })
    }

    fn prefetch(&self, range: MemoryRange, to: MemoryLocation) -> Result<(), Error> {
        dispatch!(AnyStream, self, stream => stream.prefetch(range, to))
    }

    fn query(&self) -> Result<Status, Error> {
        dispatch!(AnyStream, self, stream => stream.query())
    }

    fn synchronize(&self) -> Result<(), Error> {
        dispatch!(AnyStream, self, stream => stream.synchronize())
    }

    fn take_error(&self) -> Option<Error> {
        dispatch!(AnyStream, self, stream => stream.take_error())
    }

    fn metrics(&self) -> StreamMetrics {
        dispatch!(AnyStream, self, stream => stream.metrics())
    }

    fn outstanding(&self) -> u64 {
        dispatch!(AnyStream, self, stream => stream.outstanding())
    }
}

impl Event for AnyEvent {
    fn query(&self) -> Result<Status, Error> {
        dispatch!(AnyEvent, self, event => event.query())
    }

    fn synchronize(&self) -> Result<(), Error> {
        dispatch!(AnyEvent, self, event => event.synchronize())
    }

    fn elapsed_since(&self, start: &Self) -> Result<Duration, Error> {
        dispatch_pair!((AnyEvent, self, end), (AnyEvent, start, start) => end.elapsed_since(start))
    }
}

// SAFETY: each method calls the same method of the memory inside, which implements `RawMemory`.
unsafe impl RawMemory for AnyMemory {
    fn range(&self) -> MemoryRange {
        dispatch!(AnyMemory, self, memory => memory.range())
    }

    fn kind(&self) -> MemoryKind {
        dispatch!(AnyMemory, self, memory => memory.kind())
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        // SAFETY: the caller guarantees that no stream writes to the copied part during the call.
        dispatch!(AnyMemory, self, memory => unsafe { memory.read(offset, bytes) })
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        // SAFETY: the caller guarantees that no stream accesses the overwritten part meanwhile.
        dispatch!(AnyMemory, self, memory => unsafe { memory.write(offset, bytes) })
    }
}

macro_rules! from {
    ($($(#[$feature:meta])? $one:ident => $any:ident::$variant:ident),* $(,)?) => {
        $($(#[$feature])? impl From<$one> for $any {
            fn from(one: $one) -> Self {
                Self::$variant(one)
            }
        })*
    };
}

from! {
    CpuDevice => AnyDevice::Cpu,
    CpuMemory => AnyMemory::Cpu,
    SimDevice => AnyDevice::Sim,
    SimMemory => AnyMemory::Sim,
    #[cfg(feature = "cuda")] CudaDevice => AnyDevice::Cuda,
    #[cfg(feature = "cuda")] CudaMemory => AnyMemory::Cuda,
    #[cfg(feature = "runtime")] RuntimeDevice => AnyDevice::Runtime,
    #[cfg(feature = "runtime")] RuntimeMemory => AnyMemory::Runtime,
}
