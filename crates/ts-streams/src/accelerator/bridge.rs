// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams and memory that this crate and cudarc use together.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{self, CudaContext, CudaSlice, DeviceRepr};

use super::api::RawStream;
use super::shared_stream::SharedStream;
use super::stream::Ownership;
use super::{CudaDevice, CudaStream};
use crate::Error;
use crate::device::Device;
use crate::range::MemoryRange;

impl CudaDevice {
    /// Returns cudarc's context of the device, which is its primary context.
    ///
    /// cudarc makes the context current on the calling thread, and does not restore the previous
    /// one. Work that this crate submits leaves the current context as it is.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] if the driver fails.
    pub fn cudarc_context(&self) -> Result<Arc<CudaContext>, Error> {
        CudaContext::new(self.info().ordinal as usize).map_err(failed)
    }

    /// Returns a stream that submits to the same queue as a stream of cudarc, and keeps that stream
    /// alive. Work runs in the order in which both submit it.
    ///
    /// ```no_run
    /// use ts_streams::{CudaDevice, Error};
    ///
    /// let device = CudaDevice::new(0)?;
    /// let theirs = device.cudarc_context()?.new_stream().expect("a stream");
    /// let ours = device.stream_from_cudarc(&theirs)?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the stream belongs to another context than the primary
    /// context of this device, or is another queue in each thread
    /// ([`per_thread_stream`](CudaContext::per_thread_stream)).
    pub fn stream_from_cudarc(
        &self,
        stream: &Arc<driver::CudaStream>,
    ) -> Result<CudaStream, Error> {
        if stream.context().cu_ctx() != self.shared.api.context() {
            let device = self.info().name.clone();
            return Err(Error::Unsupported { device, what: "streams of another context" });
        }
        // `CU_STREAM_PER_THREAD`
        if stream.cu_stream().addr() == 2 {
            let what = "the stream of cudarc that is another one in each thread";
            return Err(Error::Unsupported { device: self.info().name.clone(), what });
        }
        let raw = RawStream(stream.cu_stream().cast());
        Ok(self.stream(raw, 0, Ownership::Shared(SharedStream::new(Arc::clone(stream)))))
    }
}

impl CudaStream {
    /// Returns the stream as one of cudarc. Dropping the result does not destroy the stream.
    ///
    /// Without `unsafe`, create the stream with cudarc and call
    /// [`stream_from_cudarc`](CudaDevice::stream_from_cudarc).
    ///
    /// # Safety
    /// This stream, or a clone of it, must exist as long as the result, its clones, and everything
    /// that cudarc allocates with them.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] if the driver fails.
    pub unsafe fn to_cudarc(&self) -> Result<Arc<driver::CudaStream>, Error> {
        let device = CudaDevice { shared: Arc::clone(&self.handle.shared) };
        let context = device.cudarc_context()?;
        // SAFETY: the stream belongs to the primary context, and the caller keeps it alive.
        Ok(unsafe { context.wrap_borrowed_stream(self.handle.raw.0.cast()) })
    }
}

/// Device memory of this crate as a slice of cudarc, which gives
/// [`CudaView`](driver::CudaView)s. Dropping it does not free the memory.
///
/// ```no_run
/// use std::alloc::Layout;
///
/// use ts_streams::{CudaDevice, CudarcSlice, Device, MemoryKind, RawMemory};
///
/// let device = CudaDevice::new(0)?;
/// let memory = device.allocate(Layout::new::<[f32; 64]>(), MemoryKind::Device)?;
/// let stream = device.cudarc_context()?.new_stream()?;
/// // SAFETY: the memory outlives the slice, all work on it is submitted to this stream.
/// let slice = unsafe { CudarcSlice::<f32>::new(memory.range(), &stream) }.expect("64 floats");
/// let view = slice.slice(10..20); // an argument of kernels
/// let values = stream.clone_dtoh(&view)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CudarcSlice<'a, T> {
    /// Taken only by `drop`.
    slice: ManuallyDrop<CudaSlice<T>>,
    memory: PhantomData<&'a [T]>,
}

impl<T: DeviceRepr> CudarcSlice<'_, T> {
    /// Wraps the memory of a range. Returns `None` if the range is not aligned for `T`, or not a
    /// whole number of values.
    ///
    /// # Safety
    /// The range must be device or managed memory of the context of `stream`, which lives for the
    /// lifetime of the result and until the work that uses it is done. It must contain valid values
    /// of `T` before they are read. cudarc orders its own accesses, but not those that are
    /// submitted through this crate, except on the same stream.
    ///
    /// # Panics
    /// Panics in cudarc if the driver cannot create events.
    pub unsafe fn new(range: MemoryRange, stream: &Arc<driver::CudaStream>) -> Option<Self> {
        let size = size_of::<T>();
        let fits = size > 0 && range.len().is_multiple_of(size);
        if !fits || !range.address().is_multiple_of(align_of::<T>()) {
            return None;
        }
        let (address, len) = (range.address() as u64, range.len() / size);
        // SAFETY: the caller guarantees that the memory is valid. `drop` leaks the slice, so cudarc
        // never frees the memory.
        let slice = ManuallyDrop::new(unsafe { stream.upgrade_device_ptr(address, len) });
        Some(Self { slice, memory: PhantomData })
    }
}

impl<T> Deref for CudarcSlice<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> Drop for CudarcSlice<'_, T> {
    fn drop(&mut self) {
        // SAFETY: nothing uses the field afterwards.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        let _ = slice.leak();
    }
}

fn failed(error: driver::DriverError) -> Error {
    Error::Driver { call: "cudarc", code: error.0 as i32, name: format!("{:?}", error.0) }
}
