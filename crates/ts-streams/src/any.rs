// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices whose kind is known only when the program runs.

use std::alloc::Layout;
use std::time::Duration;

use crate::cpu::{CpuDevice, CpuEvent, CpuMemory, CpuStream};
#[cfg(feature = "cuda")]
use crate::cuda::{CudaDevice, CudaEvent, CudaMemory, CudaStream};
use crate::device::{
    Device, DeviceInfo, Event, HostFn, MemoryLocation, RawMemory, Status, Stream, StreamId,
};
use crate::memory::{MemoryKind, MemoryRange};
use crate::priority::StreamPriority;
use crate::sim::{SimDevice, SimEvent, SimMemory, SimStream};
use crate::{DeviceKind, Error, MemoryMetrics, StreamMetrics};

/// A device of any kind. Code that is written for a [`Device`] runs on it as on the device inside;
/// events and streams of different kinds do not go together, which is [`Error::MixedDevices`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AnyDevice {
    /// The host.
    Cpu(CpuDevice),
    /// A simulation.
    Sim(SimDevice),
    /// A GPU of NVIDIA.
    #[cfg(feature = "cuda")]
    Cuda(CudaDevice),
}

/// A stream of an [`AnyDevice`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AnyStream {
    /// Of the host.
    Cpu(CpuStream),
    /// Of a simulation.
    Sim(SimStream),
    /// Of a GPU of NVIDIA.
    #[cfg(feature = "cuda")]
    Cuda(CudaStream),
}

/// An event of an [`AnyDevice`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AnyEvent {
    /// Of the host.
    Cpu(CpuEvent),
    /// Of a simulation.
    Sim(SimEvent),
    /// Of a GPU of NVIDIA.
    #[cfg(feature = "cuda")]
    Cuda(CudaEvent),
}

/// Memory of an [`AnyDevice`].
#[derive(Debug)]
#[non_exhaustive]
pub enum AnyMemory {
    /// For the host.
    Cpu(CpuMemory),
    /// For a simulation.
    Sim(SimMemory),
    /// For a GPU of NVIDIA.
    #[cfg(feature = "cuda")]
    Cuda(CudaMemory),
}

/// Does the same with what is inside, whatever it is.
macro_rules! each {
    ($of:ident, $value:expr, $inner:ident => $result:expr) => {
        match $value {
            $of::Cpu($inner) => $result,
            $of::Sim($inner) => $result,
            #[cfg(feature = "cuda")]
            $of::Cuda($inner) => $result,
        }
    };
}

/// As `each`, and the result is inside again.
macro_rules! each_into {
    ($of:ident, $value:expr, $inner:ident => $result:expr, $into:ident) => {
        match $value {
            $of::Cpu($inner) => $result.map($into::Cpu),
            $of::Sim($inner) => $result.map($into::Sim),
            #[cfg(feature = "cuda")]
            $of::Cuda($inner) => $result.map($into::Cuda),
        }
    };
}

/// Does the same with two things of one kind.
macro_rules! both {
    (
        ($of:ident, $value:expr, $inner:ident),
        ($with:ident, $other:expr, $inner_other:ident) => $result:expr
    ) => {
        match ($value, $other) {
            ($of::Cpu($inner), $with::Cpu($inner_other)) => $result,
            ($of::Sim($inner), $with::Sim($inner_other)) => $result,
            #[cfg(feature = "cuda")]
            ($of::Cuda($inner), $with::Cuda($inner_other)) => $result,
            (value, other) => {
                Err(Error::MixedDevices { of: value.device_kind(), with: other.device_kind() })
            }
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
                }
            }
        }
    };
}

impl AnyDevice {
    /// How much of its memory is allocated.
    pub fn memory(&self) -> MemoryMetrics {
        each!(AnyDevice, self, device => device.memory())
    }
}

device_kind!(AnyMemory);
device_kind!(AnyDevice);
device_kind!(AnyStream);
device_kind!(AnyEvent);

impl Device for AnyDevice {
    type Stream = AnyStream;
    type Event = AnyEvent;
    type Memory = AnyMemory;

    fn owns(&self, stream: &AnyStream) -> bool {
        match (self, stream) {
            (AnyDevice::Cpu(device), AnyStream::Cpu(stream)) => device.owns(stream),
            (AnyDevice::Sim(device), AnyStream::Sim(stream)) => device.owns(stream),
            #[cfg(feature = "cuda")]
            (AnyDevice::Cuda(device), AnyStream::Cuda(stream)) => device.owns(stream),
            _ => false,
        }
    }

    fn info(&self) -> &DeviceInfo {
        each!(AnyDevice, self, device => device.info())
    }

    fn create_stream(&self, priority: StreamPriority) -> Result<AnyStream, Error> {
        each_into!(AnyDevice, self, device => device.create_stream(priority), AnyStream)
    }

    fn create_event(&self) -> Result<AnyEvent, Error> {
        each_into!(AnyDevice, self, device => device.create_event(), AnyEvent)
    }

    fn allocate(&self, layout: Layout, kind: MemoryKind) -> Result<AnyMemory, Error> {
        each_into!(AnyDevice, self, device => device.allocate(layout, kind), AnyMemory)
    }

    fn allocate_in_order(&self, layout: Layout, stream: &AnyStream) -> Result<AnyMemory, Error> {
        both!((AnyDevice, self, device), (AnyStream, stream, stream) => {
            device.allocate_in_order(layout, stream).map(AnyMemory::from)
        })
    }

    fn free_in_order(&self, memory: AnyMemory, stream: &AnyStream) -> Result<(), Error> {
        match (self, memory, stream) {
            (AnyDevice::Cpu(device), AnyMemory::Cpu(memory), AnyStream::Cpu(stream)) => {
                device.free_in_order(memory, stream)
            }
            (AnyDevice::Sim(device), AnyMemory::Sim(memory), AnyStream::Sim(stream)) => {
                device.free_in_order(memory, stream)
            }
            #[cfg(feature = "cuda")]
            (AnyDevice::Cuda(device), AnyMemory::Cuda(memory), AnyStream::Cuda(stream)) => {
                device.free_in_order(memory, stream)
            }
            (device, memory, stream) => {
                let kinds = [memory.device_kind(), stream.device_kind()];
                let of = device.device_kind();
                let with = kinds.into_iter().find(|&kind| kind != of).unwrap_or(of);
                Err(Error::MixedDevices { of, with })
            }
        }
    }

    fn synchronize(&self) -> Result<(), Error> {
        each!(AnyDevice, self, device => device.synchronize())
    }
}

impl Stream for AnyStream {
    type Event = AnyEvent;

    fn id(&self) -> StreamId {
        each!(AnyStream, self, stream => stream.id())
    }

    fn level(&self) -> i32 {
        each!(AnyStream, self, stream => stream.level())
    }

    fn record(&self, event: &AnyEvent) -> Result<(), Error> {
        both!((AnyStream, self, stream), (AnyEvent, event, event) => stream.record(event))
    }

    fn wait(&self, event: &AnyEvent) -> Result<(), Error> {
        both!((AnyStream, self, stream), (AnyEvent, event, event) => stream.wait(event))
    }

    fn follow(&self, event: &AnyEvent) -> Result<(), Error> {
        both!((AnyStream, self, stream), (AnyEvent, event, event) => stream.follow(event))
    }

    unsafe fn copy(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        // SAFETY: the caller's promise is the same.
        each!(AnyStream, self, stream => unsafe { stream.copy(to, from) })
    }

    unsafe fn fill(&self, to: MemoryRange, byte: u8) -> Result<(), Error> {
        // SAFETY: the caller's promise is the same.
        each!(AnyStream, self, stream => unsafe { stream.fill(to, byte) })
    }

    fn launch_host_fn(&self, work: HostFn) -> Result<(), Error> {
        each!(AnyStream, self, stream => stream.launch_host_fn(work))
    }

    fn prefetch(&self, range: MemoryRange, to: MemoryLocation) -> Result<(), Error> {
        each!(AnyStream, self, stream => stream.prefetch(range, to))
    }

    fn query(&self) -> Result<Status, Error> {
        each!(AnyStream, self, stream => stream.query())
    }

    fn synchronize(&self) -> Result<(), Error> {
        each!(AnyStream, self, stream => stream.synchronize())
    }

    fn take_error(&self) -> Option<Error> {
        each!(AnyStream, self, stream => stream.take_error())
    }

    fn metrics(&self) -> StreamMetrics {
        each!(AnyStream, self, stream => stream.metrics())
    }
}

impl Event for AnyEvent {
    fn query(&self) -> Result<Status, Error> {
        each!(AnyEvent, self, event => event.query())
    }

    fn synchronize(&self) -> Result<(), Error> {
        each!(AnyEvent, self, event => event.synchronize())
    }

    fn elapsed_since(&self, start: &Self) -> Result<Duration, Error> {
        both!((AnyEvent, self, event), (AnyEvent, start, start) => event.elapsed_since(start))
    }
}

// SAFETY: what is inside says so.
unsafe impl RawMemory for AnyMemory {
    fn range(&self) -> MemoryRange {
        each!(AnyMemory, self, memory => memory.range())
    }

    fn kind(&self) -> MemoryKind {
        each!(AnyMemory, self, memory => memory.kind())
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        // SAFETY: the caller's promise is the same.
        each!(AnyMemory, self, memory => unsafe { memory.read(offset, bytes) })
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        // SAFETY: the caller's promise is the same.
        each!(AnyMemory, self, memory => unsafe { memory.write(offset, bytes) })
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
}
