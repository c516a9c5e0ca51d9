// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where memory for tensors is from.

use std::sync::Arc;

use ts_pool::ts_streams::Device;
use ts_pool::{
    BlockStats, GpuMemoryPool, HostPool, PinnedMemoryPool, PooledBuffer, TensorBuffer, Upload,
};

use crate::{Error, Sink, TensorInfo};

/// Gives tensors their memory as they are announced.
pub trait Memory {
    /// What payloads are received to.
    type Sink: Sink;

    /// Memory for a tensor's storage: as many bytes as that has.
    ///
    /// # Errors
    /// [`Error::Memory`] when there is none.
    fn allocate(&mut self, info: &TensorInfo) -> Result<Self::Sink, Error>;
}

impl<S: Sink, F: FnMut(&TensorInfo) -> Result<S, Error>> Memory for F {
    type Sink = S;

    fn allocate(&mut self, info: &TensorInfo) -> Result<S, Error> {
        self(info)
    }
}

fn no_memory(info: &TensorInfo, source: ts_pool::Error) -> Error {
    Error::Memory { tensor: info.name.clone(), bytes: info.storage_len, source: Arc::new(source) }
}

/// The length of a storage in memory.
fn len_of(info: &TensorInfo) -> usize {
    usize::try_from(info.storage_len).unwrap_or(usize::MAX)
}

/// The host's memory, as the system gives it, up to a limit for each tensor.
#[derive(Debug, Clone, Copy)]
pub struct HostMemory {
    /// Longer storages are refused, in bytes.
    pub limit_bytes: u64,
}

impl HostMemory {
    fn never(self, info: &TensorInfo) -> Error {
        let capacity_bytes = usize::try_from(self.limit_bytes).unwrap_or(usize::MAX);
        no_memory(info, ts_pool::Error::NeverFits { requested_bytes: len_of(info), capacity_bytes })
    }
}

impl Memory for HostMemory {
    type Sink = Vec<u8>;

    fn allocate(&mut self, info: &TensorInfo) -> Result<Vec<u8>, Error> {
        if info.storage_len > self.limit_bytes {
            return Err(self.never(info));
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len_of(info)).map_err(|_| self.never(info))?;
        bytes.resize(len_of(info), 0);
        Ok(bytes)
    }
}

impl Memory for HostPool {
    type Sink = ts_pool::Buffer;

    fn allocate(&mut self, info: &TensorInfo) -> Result<ts_pool::Buffer, Error> {
        HostPool::allocate(self, len_of(info)).map_err(|error| no_memory(info, error))
    }
}

/// The memory of a GPU, or the host's where there is none.
#[derive(Debug, Clone, Copy)]
pub struct GpuMemory {
    /// Which GPU.
    pub ordinal: usize,
    /// Longer storages are refused, in bytes.
    pub limit_bytes: u64,
}

impl GpuMemory {
    /// The most that a storage has if nothing else is said: 64 GiB.
    pub const USUAL_LIMIT: u64 = 64 << 30;

    /// That of this GPU.
    pub fn new(ordinal: usize) -> Self {
        Self { ordinal, limit_bytes: Self::USUAL_LIMIT }
    }
}

/// A [`TensorBuffer`] that is filled. Bytes for a GPU go by way of the host.
#[derive(Debug)]
pub struct BufferSink {
    tensor: String,
    buffer: TensorBuffer,
    staging: Vec<u8>,
}

/// What goes to a device at a time, in bytes.
const PIECE: usize = 4 << 20;

impl Memory for GpuMemory {
    type Sink = BufferSink;

    fn allocate(&mut self, info: &TensorInfo) -> Result<BufferSink, Error> {
        let host = HostMemory { limit_bytes: self.limit_bytes };
        if info.storage_len > self.limit_bytes {
            return Err(host.never(info));
        }
        let buffer = match TensorBuffer::allocate_gpu(len_of(info), self.ordinal) {
            Ok(buffer) => buffer,
            Err(_) => TensorBuffer::cpu({ host }.allocate(info)?),
        };
        let staging = if buffer.is_gpu() { vec![0; PIECE.min(buffer.len())] } else { Vec::new() };
        Ok(BufferSink { tensor: info.name.clone(), buffer, staging })
    }
}

impl Sink for BufferSink {
    type Full = TensorBuffer;

    fn byte_len(&self) -> u64 {
        self.buffer.len() as u64
    }

    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], Error> {
        match self.buffer.as_mut_slice() {
            Some(bytes) => Ok(&mut bytes[offset as usize..][..len]),
            None => {
                let most = len.min(self.staging.len());
                Ok(&mut self.staging[..most])
            }
        }
    }

    fn filled(&mut self, offset: u64, len: usize) -> Result<(), Error> {
        if self.buffer.is_cpu() {
            return Ok(());
        }
        let written = self.buffer.write(offset as usize, &self.staging[..len]);
        written.map_err(|error| failed(&self.tensor, self.buffer.len(), error))
    }

    fn finish(self) -> Result<TensorBuffer, Error> {
        Ok(self.buffer)
    }
}

fn failed(tensor: &str, bytes: usize, error: ts_pool::Error) -> Error {
    Error::Memory { tensor: tensor.into(), bytes: bytes as u64, source: Arc::new(error) }
}

/// Blocks of pools: a device's, which are filled by way of pinned memory, or the pinned memory's
/// own.
#[derive(Debug, Clone)]
pub struct PooledMemory<D: Device> {
    pinned: PinnedMemoryPool<D>,
    gpu: Option<(GpuMemoryPool<D>, D::Stream)>,
}

impl<D: Device> PooledMemory<D> {
    /// Blocks of `gpu`, filled on a stream by way of `pinned`; without it blocks of `pinned`.
    pub fn new(pinned: PinnedMemoryPool<D>, gpu: Option<(GpuMemoryPool<D>, D::Stream)>) -> Self {
        Self { pinned, gpu }
    }

    /// Statistics of the pinned memory.
    pub fn pinned_pool_stats(&self) -> BlockStats {
        self.pinned.stats()
    }

    /// Statistics of the device's memory, if there is some.
    pub fn gpu_pool_stats(&self) -> Option<BlockStats> {
        self.gpu.as_ref().map(|(pool, _)| pool.stats())
    }
}

/// A block of a pool that is filled.
#[derive(Debug)]
pub struct PooledSink<D: Device> {
    tensor: String,
    place: Place<D>,
}

#[derive(Debug)]
enum Place<D: Device> {
    Host(PooledBuffer<D>),
    Device(Upload<D>),
}

impl<D: Device> Memory for PooledMemory<D> {
    type Sink = PooledSink<D>;

    fn allocate(&mut self, info: &TensorInfo) -> Result<PooledSink<D>, Error> {
        let (tensor, len) = (info.name.clone(), len_of(info));
        let place = match &self.gpu {
            None => self.pinned.acquire(len).map(Place::Host),
            Some((pool, stream)) => {
                let piece = PIECE.min(len.max(1));
                let upload = |to| Upload::new(to, &self.pinned, piece, stream);
                pool.acquire(len).and_then(upload).map(Place::Device)
            }
        };
        Ok(PooledSink { tensor, place: place.map_err(|error| no_memory(info, error))? })
    }
}

impl<D: Device> Sink for PooledSink<D> {
    type Full = PooledBuffer<D>;

    fn byte_len(&self) -> u64 {
        match &self.place {
            Place::Host(buffer) => buffer.len() as u64,
            Place::Device(upload) => upload.byte_len() as u64,
        }
    }

    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], Error> {
        let bytes = self.byte_len() as usize;
        match &mut self.place {
            Place::Host(buffer) => {
                let bytes = buffer.host_bytes_mut().expect("the pool is of the host's memory");
                Ok(&mut bytes[offset as usize..][..len])
            }
            Place::Device(upload) => {
                let space = upload.space().map_err(|error| failed(&self.tensor, bytes, error))?;
                let most = len.min(space.len());
                Ok(&mut space[..most])
            }
        }
    }

    fn filled(&mut self, _: u64, len: usize) -> Result<(), Error> {
        let bytes = self.byte_len() as usize;
        match &mut self.place {
            Place::Host(_) => Ok(()),
            Place::Device(upload) => {
                upload.written(len).map_err(|error| failed(&self.tensor, bytes, error))
            }
        }
    }

    fn finish(self) -> Result<PooledBuffer<D>, Error> {
        match self.place {
            Place::Host(buffer) => Ok(buffer),
            Place::Device(upload) => {
                let bytes = upload.byte_len();
                upload.finish().map_err(|error| failed(&self.tensor, bytes, error))
            }
        }
    }
}
