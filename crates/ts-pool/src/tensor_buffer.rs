// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes that are on the host or on a GPU.

use std::collections::HashMap;
use std::sync::{Mutex, Once, PoisonError};

use ts_streams::{AnyDevice, AnyStream, Device, DeviceRegistry, GpuStatus, StreamPriority};

use crate::error::range_in;
use crate::{DeviceBuffer, Error, OrderedOptions, StreamOrderedPool};

/// The bytes of a tensor, on the host or on a device. Not `Clone`: copies are asked for.
///
/// All copies block until they are done. Those that are on a GPU are of a pool that this process
/// has for each.
///
/// ```
/// use ts_pool::TensorBuffer;
///
/// // on the host where there is no GPU
/// let mut buffer = TensorBuffer::try_allocate_gpu(4, 0);
/// buffer.copy_from_slice(&[1, 2, 3, 4])?;
/// assert_eq!(buffer.to_host()?, [1, 2, 3, 4]);
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorBuffer {
    place: Place,
}

#[derive(Debug)]
enum Place {
    Host(Vec<u8>),
    Device(DeviceBuffer<AnyDevice>),
}

impl TensorBuffer {
    /// These bytes, on the host. Copies nothing.
    pub fn cpu(bytes: Vec<u8>) -> Self {
        Self { place: Place::Host(bytes) }
    }

    /// So many zeros, on the host.
    pub fn cpu_zeros(len: usize) -> Self {
        Self::cpu(vec![0; len])
    }

    /// So many bytes on the GPU of this number, or else zeros on the host: the first time with a
    /// warning in the log that says why.
    pub fn try_allocate_gpu(len: usize, ordinal: usize) -> Self {
        static WARN: Once = Once::new();
        Self::allocate_gpu(len, ordinal).unwrap_or_else(|error| {
            WARN.call_once(|| log::warn!("{len} bytes for a GPU are on the host: {error}"));
            Self::cpu_zeros(len)
        })
    }

    /// So many bytes on the GPU of this number. What they hold is undefined.
    ///
    /// # Errors
    /// [`Error::Device`] with [`ts_streams::Error::NoGpu`] when there is none;
    /// [`Error::OutOfMemory`].
    pub fn allocate_gpu(len: usize, ordinal: usize) -> Result<Self, Error> {
        let (pool, stream) = gpu(ordinal)?;
        Self::allocate_in(&pool, &stream, len)
    }

    /// So many bytes of a pool, for work on a stream. What they hold is undefined.
    ///
    /// # Errors
    /// As [`StreamOrderedPool::allocate_for_stream`].
    pub fn allocate_in(
        pool: &StreamOrderedPool<AnyDevice>,
        stream: &AnyStream,
        len: usize,
    ) -> Result<Self, Error> {
        Ok(Self { place: Place::Device(pool.allocate_for_stream(len, stream)?) })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        match &self.place {
            Place::Host(bytes) => bytes.len(),
            Place::Device(buffer) => buffer.len(),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it is on the host.
    pub fn is_cpu(&self) -> bool {
        self.as_slice().is_some()
    }

    /// Whether it is on a device.
    pub fn is_gpu(&self) -> bool {
        !self.is_cpu()
    }

    /// Its bytes, if they are on the host.
    pub fn as_slice(&self) -> Option<&[u8]> {
        match &self.place {
            Place::Host(bytes) => Some(bytes),
            Place::Device(_) => None,
        }
    }

    /// Its bytes, if they are on the host, to write to.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        match &mut self.place {
            Place::Host(bytes) => Some(bytes),
            Place::Device(_) => None,
        }
    }

    /// Its memory, if it is on a device.
    pub fn as_device(&self) -> Option<&DeviceBuffer<AnyDevice>> {
        match &self.place {
            Place::Host(_) => None,
            Place::Device(buffer) => Some(buffer),
        }
    }

    /// A copy of its bytes.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn to_host(&self) -> Result<Vec<u8>, Error> {
        match &self.place {
            Place::Host(bytes) => Ok(bytes.clone()),
            Place::Device(buffer) => {
                let mut bytes = vec![0; buffer.len()];
                buffer.read(0, &mut bytes)?;
                Ok(bytes)
            }
        }
    }

    /// A copy on the host.
    ///
    /// # Errors
    /// As [`to_host`](Self::to_host).
    pub fn to_cpu(&self) -> Result<Self, Error> {
        Ok(Self::cpu(self.to_host()?))
    }

    /// A copy on the GPU of this number: from another GPU by way of the host.
    ///
    /// # Errors
    /// As [`allocate_gpu`](Self::allocate_gpu); [`Error::Device`].
    pub fn to_gpu(&self, ordinal: usize) -> Result<Self, Error> {
        let (pool, stream) = gpu(ordinal)?;
        self.to_pool(&pool, &stream)
    }

    /// A copy in a pool, for work on a stream.
    ///
    /// # Errors
    /// As [`allocate_in`](Self::allocate_in); [`Error::Device`].
    pub fn to_pool(
        &self,
        pool: &StreamOrderedPool<AnyDevice>,
        stream: &AnyStream,
    ) -> Result<Self, Error> {
        let mut copy = pool.allocate_for_stream(self.len(), stream)?;
        match &self.place {
            Place::Host(bytes) => copy.write(0, bytes)?,
            Place::Device(buffer) => copy.copy_from(buffer)?,
        }
        Ok(Self { place: Place::Device(copy) })
    }

    /// Overwrites all of it.
    ///
    /// # Errors
    /// [`Error::WrongLength`] when there are not as many bytes; [`Error::Device`].
    pub fn copy_from_slice(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.len() != self.len() {
            return Err(Error::WrongLength { given_bytes: bytes.len(), buffer_bytes: self.len() });
        }
        self.write(0, bytes)
    }

    /// Overwrites a part of it.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when the bytes are not all inside; [`Error::Device`].
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        match &mut self.place {
            Place::Host(own) => {
                let part = range_in(own.len(), offset, bytes.len())?;
                own[part].copy_from_slice(bytes);
                Ok(())
            }
            Place::Device(buffer) => buffer.write(offset, bytes),
        }
    }
}

impl From<Vec<u8>> for TensorBuffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self::cpu(bytes)
    }
}

type Gpu = (StreamOrderedPool<AnyDevice>, AnyStream);

/// The pool of a GPU, and the stream for its copies. They stay for as long as the process does.
fn gpu(ordinal: usize) -> Result<Gpu, Error> {
    static GPUS: Mutex<Option<HashMap<usize, Gpu>>> = Mutex::new(None);
    GpuStatus::detect().require(ordinal)?;
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
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
