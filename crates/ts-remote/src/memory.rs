// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sources of memory for tensors.

use std::sync::Arc;

use ts_pool::ts_streams::Device;
use ts_pool::{
    BlockStats, DeviceBuffer, GpuMemoryPool, HostPool, PinnedMemoryPool, PooledBuffer,
    StreamOrderedPool, TensorBuffer, Upload,
};

use crate::{Error, Sink, TensorInfo};

/// A source of memory for the tensors of a [`TensorReceiver`](crate::TensorReceiver).
///
/// Closures `FnMut(&TensorInfo) -> Result<impl Sink, Error>` implement it.
pub trait Memory {
    /// The type of the memory that [`allocate`](Self::allocate) returns.
    type Sink: Sink;

    /// Allocates memory that has the length of the tensor's storage.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] if there is not enough memory.
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

/// Returns the length of the storage in bytes. If it does not fit a `usize`, returns `usize::MAX`,
/// which no allocation can have.
fn len_of(info: &TensorInfo) -> usize {
    usize::try_from(info.storage_len).unwrap_or(usize::MAX)
}

/// Host memory of the global allocator, up to a limit per tensor.
///
/// ```
/// use ts_remote::ts_format::Dtype;
/// use ts_remote::{HostMemory, Memory, TensorInfo};
///
/// let mut memory = HostMemory::new(1 << 20);
/// let info = TensorInfo::new("w", Dtype::F32, [2, 3])?;
/// assert_eq!(memory.allocate(&info)?.len(), 24);
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct HostMemory {
    /// The longest storage that is allocated, in bytes.
    pub limit_bytes: u64,
}

impl HostMemory {
    /// Creates a source that allocates at most `limit_bytes` bytes per tensor.
    pub fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes }
    }

    fn too_long(self, info: &TensorInfo) -> Error {
        let capacity_bytes = usize::try_from(self.limit_bytes).unwrap_or(usize::MAX);
        no_memory(info, ts_pool::Error::NeverFits { requested_bytes: len_of(info), capacity_bytes })
    }
}

impl Memory for HostMemory {
    type Sink = Vec<u8>;

    fn allocate(&mut self, info: &TensorInfo) -> Result<Vec<u8>, Error> {
        if info.storage_len > self.limit_bytes {
            return Err(self.too_long(info));
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len_of(info)).map_err(|_| self.too_long(info))?;
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

/// The memory of a GPU. If an allocation there fails, for example because there is no GPU,
/// allocates host memory instead.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct GpuMemory {
    /// The number of the GPU, from 0.
    pub ordinal: usize,
    /// The longest storage that is allocated, in bytes.
    pub limit_bytes: u64,
}

impl GpuMemory {
    /// The default of [`limit_bytes`](Self::limit_bytes): 64 GiB.
    pub const USUAL_LIMIT: u64 = 64 << 30;

    /// Creates a source of memory on GPU `ordinal`, with the default limit.
    pub fn new(ordinal: usize) -> Self {
        Self { ordinal, limit_bytes: Self::USUAL_LIMIT }
    }

    /// Sets [`limit_bytes`](Self::limit_bytes), the longest storage that is allocated.
    #[must_use]
    pub fn with_limit_bytes(mut self, limit_bytes: u64) -> Self {
        self.limit_bytes = limit_bytes;
        self
    }
}

/// A [`TensorBuffer`] that is being filled. Bytes for a GPU are copied through host memory.
#[derive(Debug)]
pub struct BufferSink {
    tensor: String,
    buffer: TensorBuffer,
    staging: Vec<u8>,
}

/// The maximum length of the host staging memory for one tensor on a GPU, in bytes.
const STAGING_LEN: usize = 4 << 20;

impl Memory for GpuMemory {
    type Sink = BufferSink;

    fn allocate(&mut self, info: &TensorInfo) -> Result<BufferSink, Error> {
        let host = HostMemory { limit_bytes: self.limit_bytes };
        if info.storage_len > self.limit_bytes {
            return Err(host.too_long(info));
        }
        let buffer = match TensorBuffer::allocate_gpu(len_of(info), self.ordinal) {
            Ok(buffer) => buffer,
            Err(_) => { host }.allocate(info)?.into(),
        };
        let staging =
            if buffer.is_gpu() { vec![0; STAGING_LEN.min(buffer.len())] } else { Vec::new() };
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
                let len = len.min(self.staging.len());
                Ok(&mut self.staging[..len])
            }
        }
    }

    fn filled(&mut self, offset: u64, len: usize) -> Result<(), Error> {
        if self.buffer.is_cpu() {
            return Ok(());
        }
        let written = self.buffer.write(offset as usize, &self.staging[..len]);
        written.map_err(|error| copy_failed(&self.tensor, self.buffer.len(), error))
    }

    fn finish(self) -> Result<TensorBuffer, Error> {
        Ok(self.buffer)
    }
}

fn copy_failed(tensor: &str, bytes: usize, error: ts_pool::Error) -> Error {
    Error::Memory { tensor: tensor.into(), bytes: bytes as u64, source: Arc::new(error) }
}

/// A source of blocks from memory pools. With a pool of device memory, tensors get device blocks,
/// which are filled through pinned memory. Without one, they get blocks of pinned memory.
#[derive(Debug, Clone)]
pub struct PooledMemory<D: Device> {
    pinned: PinnedMemoryPool<D>,
    gpu: Option<(GpuMemoryPool<D>, D::Stream)>,
}

impl<D: Device> PooledMemory<D> {
    /// Creates a source of blocks. With `gpu`, the blocks come from its pool, and are filled
    /// through `pinned` on its stream. Without `gpu`, the blocks come from `pinned`.
    pub fn new(pinned: PinnedMemoryPool<D>, gpu: Option<(GpuMemoryPool<D>, D::Stream)>) -> Self {
        Self { pinned, gpu }
    }

    /// Returns the statistics of the pool of pinned memory.
    pub fn pinned_pool_stats(&self) -> BlockStats {
        self.pinned.stats()
    }

    /// Returns the statistics of the pool of device memory, or `None` if there is no such pool.
    pub fn gpu_pool_stats(&self) -> Option<BlockStats> {
        self.gpu.as_ref().map(|(pool, _)| pool.stats())
    }
}

/// A block that is being filled. It comes from a memory pool.
#[derive(Debug)]
pub struct PooledSink<D: Device> {
    tensor: String,
    target: FillTarget<D>,
}

#[derive(Debug)]
enum FillTarget<D: Device> {
    Pinned(PooledBuffer<D>),
    Device(Upload<D>),
}

impl<D: Device> Memory for PooledMemory<D> {
    type Sink = PooledSink<D>;

    fn allocate(&mut self, info: &TensorInfo) -> Result<PooledSink<D>, Error> {
        let (tensor, len) = (info.name.clone(), len_of(info));
        let target = match &self.gpu {
            None => self.pinned.acquire(len).map(FillTarget::Pinned),
            Some((pool, stream)) => {
                let staging = STAGING_LEN.min(len.max(1));
                let upload = |to| Upload::new(to, &self.pinned, staging, stream);
                pool.acquire(len).and_then(upload).map(FillTarget::Device)
            }
        };
        Ok(PooledSink { tensor, target: target.map_err(|error| no_memory(info, error))? })
    }
}

impl<D: Device> Sink for PooledSink<D> {
    type Full = PooledBuffer<D>;

    fn byte_len(&self) -> u64 {
        match &self.target {
            FillTarget::Pinned(buffer) => buffer.len() as u64,
            FillTarget::Device(upload) => upload.byte_len() as u64,
        }
    }

    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], Error> {
        let bytes = self.byte_len() as usize;
        match &mut self.target {
            FillTarget::Pinned(buffer) => {
                let bytes = buffer.host_bytes_mut().expect("pinned memory is host memory");
                Ok(&mut bytes[offset as usize..][..len])
            }
            FillTarget::Device(upload) => {
                let space =
                    upload.space().map_err(|error| copy_failed(&self.tensor, bytes, error))?;
                let len = len.min(space.len());
                Ok(&mut space[..len])
            }
        }
    }

    fn filled(&mut self, _: u64, len: usize) -> Result<(), Error> {
        let bytes = self.byte_len() as usize;
        match &mut self.target {
            FillTarget::Pinned(_) => Ok(()),
            FillTarget::Device(upload) => {
                upload.written(len).map_err(|error| copy_failed(&self.tensor, bytes, error))
            }
        }
    }

    fn finish(self) -> Result<PooledBuffer<D>, Error> {
        match self.target {
            FillTarget::Pinned(buffer) => Ok(buffer),
            FillTarget::Device(upload) => {
                let bytes = upload.byte_len();
                upload.finish().map_err(|error| copy_failed(&self.tensor, bytes, error))
            }
        }
    }
}

/// A source of device memory that is allocated and freed in stream order. Tensors get buffers of a
/// [`StreamOrderedPool`], of exactly their size, which are filled through pinned memory.
#[derive(Debug, Clone)]
pub struct OrderedMemory<D: Device> {
    pinned: PinnedMemoryPool<D>,
    pool: StreamOrderedPool<D>,
    stream: D::Stream,
}

impl<D: Device> OrderedMemory<D> {
    /// Creates a source of buffers from `pool`. They belong to `stream`, on which they are filled
    /// through `pinned`.
    pub fn new(pinned: PinnedMemoryPool<D>, pool: StreamOrderedPool<D>, stream: D::Stream) -> Self {
        Self { pinned, pool, stream }
    }

    /// Returns the pool of the buffers.
    pub fn pool(&self) -> &StreamOrderedPool<D> {
        &self.pool
    }
}

/// A buffer of a [`StreamOrderedPool`] that is being filled.
#[derive(Debug)]
pub struct OrderedSink<D: Device> {
    tensor: String,
    upload: Upload<D, DeviceBuffer<D>>,
}

impl<D: Device> Memory for OrderedMemory<D> {
    type Sink = OrderedSink<D>;

    fn allocate(&mut self, info: &TensorInfo) -> Result<OrderedSink<D>, Error> {
        let len = len_of(info);
        let buffer = self.pool.allocate_for_stream(len, &self.stream);
        let staging = STAGING_LEN.min(len.max(1));
        let upload = buffer.and_then(|to| Upload::to_buffer(to, &self.pinned, staging));
        let upload = upload.map_err(|error| no_memory(info, error))?;
        Ok(OrderedSink { tensor: info.name.clone(), upload })
    }
}

impl<D: Device> OrderedSink<D> {
    /// Returns the name of the tensor.
    pub fn tensor(&self) -> &str {
        &self.tensor
    }
}

impl<D: Device> Sink for OrderedSink<D> {
    type Full = DeviceBuffer<D>;

    fn byte_len(&self) -> u64 {
        self.upload.byte_len() as u64
    }

    fn space(&mut self, _: u64, len: usize) -> Result<&mut [u8], Error> {
        let bytes = self.upload.byte_len();
        let space = self.upload.space().map_err(|error| copy_failed(&self.tensor, bytes, error))?;
        let len = len.min(space.len());
        Ok(&mut space[..len])
    }

    fn filled(&mut self, _: u64, len: usize) -> Result<(), Error> {
        let bytes = self.upload.byte_len();
        self.upload.written(len).map_err(|error| copy_failed(&self.tensor, bytes, error))
    }

    /// Blocks until all copies are done, so that any stream may use the buffer afterwards.
    fn finish(self) -> Result<DeviceBuffer<D>, Error> {
        let (tensor, bytes) = (self.tensor, self.upload.byte_len());
        self.upload.finish().map_err(|error| copy_failed(&tensor, bytes, error))
    }
}
