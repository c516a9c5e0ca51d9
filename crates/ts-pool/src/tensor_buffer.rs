// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes in host memory or on a GPU.

use std::alloc::Layout;
use std::collections::HashMap;
use std::sync::Once;

use bytes::Bytes;
use parking_lot::Mutex;
use ts_streams::{AnyDevice, AnyStream, Device, DeviceRegistry, GpuStatus, StreamPriority};

use crate::error::range_in;
use crate::{DeviceBuffer, Error, OrderedOptions, StreamOrderedPool};

/// The bytes of a tensor, in host memory or in device memory.
///
/// All copies are explicit and block until they are done. If the caller passes no pool, a GPU
/// buffer comes from one [`StreamOrderedPool`] per GPU, which lives until the process exits.
///
/// # Examples
/// ```
/// use ts_pool::TensorBuffer;
///
/// // Falls back to host memory if there is no GPU 0.
/// let mut buffer = TensorBuffer::try_allocate_gpu(4, 0);
/// buffer.copy_from_slice(&[1, 2, 3, 4])?;
/// assert_eq!(buffer.to_host()?, [1, 2, 3, 4]);
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorBuffer {
    storage: Storage,
}

#[derive(Debug)]
enum Storage {
    Host(Vec<u8>),
    /// Bytes that others may share. They become `Host` before they are written to.
    Shared(Bytes),
    Device(DeviceBuffer<AnyDevice>),
}

impl TensorBuffer {
    /// Creates a buffer in host memory of a `Vec<u8>`, of [`Bytes`], or of anything that
    /// [`Bytes::from_owner`] takes. Copies nothing.
    ///
    /// The first access for writing copies bytes that another owner shares.
    pub fn cpu(bytes: impl Into<Bytes>) -> Self {
        Self { storage: Storage::Shared(bytes.into()) }
    }

    /// Allocates `len` zero bytes in host memory.
    pub fn cpu_zeros(len: usize) -> Self {
        vec![0; len].into()
    }

    /// Allocates `len` zero bytes in host memory.
    ///
    /// # Errors
    /// Returns [`Error::Map`] if there is too little memory.
    pub fn try_cpu_zeros(len: usize) -> Result<Self, Error> {
        let failed = || Error::Map { bytes: len, source: std::io::ErrorKind::OutOfMemory.into() };
        if len == 0 {
            return Ok(Vec::new().into());
        }
        let layout = Layout::array::<u8>(len).map_err(|_| failed())?;
        // SAFETY: the size of the layout is not zero.
        let data = unsafe { std::alloc::alloc_zeroed(layout) };
        if data.is_null() {
            return Err(failed());
        }
        // SAFETY: the global allocator returned `data` for the layout of `len` bytes, all of which
        // are initialised, and nothing else owns it.
        Ok(unsafe { Vec::from_raw_parts(data, len, len) }.into())
    }

    /// Allocates `len` bytes with undefined contents on GPU `ordinal`, or `len` zero bytes in host
    /// memory if that fails.
    ///
    /// The first fallback in the process logs a warning with the cause.
    pub fn try_allocate_gpu(len: usize, ordinal: usize) -> Self {
        static WARN: Once = Once::new();
        Self::allocate_gpu(len, ordinal).unwrap_or_else(|error| {
            WARN.call_once(|| {
                log::warn!("using host memory instead of GPU {ordinal} for {len} bytes: {error}");
            });
            Self::cpu_zeros(len)
        })
    }

    /// Allocates `len` bytes on GPU `ordinal`. Their contents are undefined.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the GPU does not exist ([`ts_streams::Error::NoGpu`]) or its
    /// driver fails. Also returns the same errors as [`allocate_in`](Self::allocate_in), for
    /// example [`Error::OutOfMemory`] if the memory of the GPU is full.
    pub fn allocate_gpu(len: usize, ordinal: usize) -> Result<Self, Error> {
        let (pool, stream) = gpu(ordinal)?;
        Self::allocate_in(&pool, &stream, len)
    }

    /// Allocates `len` bytes from `pool` for work on `stream`. Their contents are undefined.
    ///
    /// # Errors
    /// The same as [`StreamOrderedPool::allocate_for_stream`].
    pub fn allocate_in(
        pool: &StreamOrderedPool<AnyDevice>,
        stream: &AnyStream,
        len: usize,
    ) -> Result<Self, Error> {
        Ok(Self { storage: Storage::Device(pool.allocate_for_stream(len, stream)?) })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        match &self.storage {
            Storage::Host(bytes) => bytes.len(),
            Storage::Shared(bytes) => bytes.len(),
            Storage::Device(buffer) => buffer.len(),
        }
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the bytes are in host memory.
    pub fn is_cpu(&self) -> bool {
        self.as_slice().is_some()
    }

    /// Returns whether the bytes are in device memory.
    pub fn is_gpu(&self) -> bool {
        !self.is_cpu()
    }

    /// Returns the bytes if they are in host memory.
    pub fn as_slice(&self) -> Option<&[u8]> {
        match &self.storage {
            Storage::Host(bytes) => Some(bytes),
            Storage::Shared(bytes) => Some(bytes),
            Storage::Device(_) => None,
        }
    }

    /// Returns the bytes for writing if they are in host memory. Copies them first if they came as
    /// [`Bytes`] that another owner shares.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        if let Storage::Shared(bytes) = &mut self.storage {
            self.storage = Storage::Host(std::mem::take(bytes).into());
        }
        match &mut self.storage {
            Storage::Host(bytes) => Some(bytes),
            Storage::Shared(_) | Storage::Device(_) => None,
        }
    }

    /// Returns bytes that others may share, and which are not to be written to.
    #[cfg(feature = "dlpack")]
    pub(crate) fn as_shared(&self) -> Option<&[u8]> {
        match &self.storage {
            Storage::Shared(bytes) => Some(bytes),
            Storage::Host(_) | Storage::Device(_) => None,
        }
    }

    /// Returns the device buffer if the bytes are in device memory.
    pub fn as_device(&self) -> Option<&DeviceBuffer<AnyDevice>> {
        match &self.storage {
            Storage::Host(_) | Storage::Shared(_) => None,
            Storage::Device(buffer) => Some(buffer),
        }
    }

    /// Copies the bytes to a vector in host memory.
    ///
    /// # Errors
    /// The same as [`DeviceBuffer::read`], if the bytes are in device memory.
    pub fn to_host(&self) -> Result<Vec<u8>, Error> {
        match &self.storage {
            Storage::Host(bytes) => Ok(bytes.clone()),
            Storage::Shared(bytes) => Ok(bytes.to_vec()),
            Storage::Device(buffer) => {
                let mut bytes = vec![0; buffer.len()];
                buffer.read(0, &mut bytes)?;
                Ok(bytes)
            }
        }
    }

    /// Copies the bytes to a new buffer in host memory.
    ///
    /// # Errors
    /// The same as [`to_host`](Self::to_host).
    pub fn to_cpu(&self) -> Result<Self, Error> {
        Ok(self.to_host()?.into())
    }

    /// Copies the bytes to a new buffer on GPU `ordinal`. A copy from another GPU goes through host
    /// memory.
    ///
    /// # Errors
    /// The same as [`allocate_gpu`](Self::allocate_gpu). Also returns [`Error::Device`] or
    /// [`Error::Stale`] if the copy fails.
    pub fn to_gpu(&self, ordinal: usize) -> Result<Self, Error> {
        let (pool, stream) = gpu(ordinal)?;
        self.to_pool(&pool, &stream)
    }

    /// Copies the bytes to a new buffer from `pool`, for work on `stream`.
    ///
    /// # Errors
    /// The same as [`allocate_in`](Self::allocate_in). Also returns [`Error::Device`] or
    /// [`Error::Stale`] if the copy fails.
    pub fn to_pool(
        &self,
        pool: &StreamOrderedPool<AnyDevice>,
        stream: &AnyStream,
    ) -> Result<Self, Error> {
        let mut copy = pool.allocate_for_stream(self.len(), stream)?;
        match &self.storage {
            Storage::Host(bytes) => copy.write(0, bytes)?,
            Storage::Shared(bytes) => copy.write(0, bytes)?,
            Storage::Device(buffer) => copy.copy_from(buffer)?,
        }
        Ok(Self { storage: Storage::Device(copy) })
    }

    /// Overwrites the whole buffer with `bytes`.
    ///
    /// # Errors
    /// Returns [`Error::WrongLength`] if the lengths differ, and [`Error::Device`] or
    /// [`Error::Stale`] if the copy fails.
    pub fn copy_from_slice(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.len() != self.len() {
            return Err(Error::WrongLength { given_bytes: bytes.len(), buffer_bytes: self.len() });
        }
        self.write(0, bytes)
    }

    /// Overwrites a part of the buffer, starting at byte `offset`.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if the bytes are not completely inside the buffer, and
    /// [`Error::Device`] or [`Error::Stale`] if the copy fails.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        if let Storage::Device(buffer) = &mut self.storage {
            return buffer.write(offset, bytes);
        }
        let range = range_in(self.len(), offset, bytes.len())?;
        let host = self.as_mut_slice().expect("the bytes are not on a device");
        host[range].copy_from_slice(bytes);
        Ok(())
    }
}

impl From<Bytes> for TensorBuffer {
    fn from(bytes: Bytes) -> Self {
        Self::cpu(bytes)
    }
}

impl From<Vec<u8>> for TensorBuffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self { storage: Storage::Host(bytes) }
    }
}

type Gpu = (StreamOrderedPool<AnyDevice>, AnyStream);

/// Returns the pool of a GPU and the stream for its copies. Both live until the process exits.
fn gpu(ordinal: usize) -> Result<Gpu, Error> {
    static GPUS: Mutex<Option<HashMap<usize, Gpu>>> = Mutex::new(None);
    GpuStatus::detect().require(ordinal)?;
    let mut gpus = GPUS.lock();
    let gpus = gpus.get_or_insert_default();
    if let Some(gpu) = gpus.get(&ordinal) {
        return Ok(gpu.clone());
    }
    let device = DeviceRegistry::builtin().choose(Some("cuda"))?.provider.create(ordinal)?;
    let stream = device.create_stream(StreamPriority::Normal)?;
    let gpu = (StreamOrderedPool::new(device, OrderedOptions::default()), stream);
    gpus.insert(ordinal, gpu.clone());
    Ok(gpu)
}
