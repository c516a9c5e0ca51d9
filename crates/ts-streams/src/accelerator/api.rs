// SPDX-License-Identifier: MIT OR Apache-2.0
//! The calls to a driver that a device needs.

use std::ffi::c_void;
use std::fmt;

use crate::device::DeviceInfo;
use crate::id::DeviceKind;
use crate::kernel::Kernel;
use crate::range::MemoryRange;
use crate::{Error, MemoryKind};

/// The driver's handle to a stream.
#[derive(Debug)]
pub struct RawStream(pub(super) *mut c_void);

/// The driver's handle to an event.
#[derive(Debug)]
pub struct RawEvent(pub(super) *mut c_void);

macro_rules! handle {
    ($name:ident) => {
        // SAFETY: this is only a handle, which the driver accepts from any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl $name {
            /// Takes the handle, and leaves none.
            pub(super) fn take(&mut self) -> Self {
                Self(std::mem::replace(&mut self.0, std::ptr::null_mut()))
            }
        }
    };
}

handle!(RawStream);
handle!(RawEvent);

/// The calls to a driver with checked results, for one device. Dropping the value releases the
/// device.
///
/// Streams and events that are passed to a method must exist, and must come from an API that
/// [combines](Self::combines_with) with this one. A call leaves the current device of the thread
/// unchanged.
pub trait Api: fmt::Debug + Send + Sync + 'static {
    /// The kind of the device.
    const KIND: DeviceKind;

    /// Returns the properties of the device.
    fn info(&self) -> Result<DeviceInfo, Error>;

    /// Returns how many bytes of the device's memory no program uses now, if this is known.
    fn available_bytes(&self) -> Result<Option<u64>, Error>;

    /// Returns whether streams of this API can wait for events of the other one.
    fn combines_with(&self, other: &Self) -> bool;

    /// Allocates memory of a kind that is not [`MemoryKind::Host`]. Returns `None` if there is not
    /// enough memory.
    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Option<*mut u8>, Error>;

    /// Locks the pages of host memory.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the driver cannot.
    ///
    /// # Safety
    /// The memory must be valid until [`unregister`](Self::unregister), and not pinned.
    unsafe fn register(&self, range: MemoryRange) -> Result<(), Error>;

    /// Ends [`register`](Self::register).
    ///
    /// # Safety
    /// The memory must be registered, and nothing may copy it any more.
    unsafe fn unregister(&self, start: *mut u8);

    /// Makes stream-ordered allocation keep freed memory.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if there is no stream-ordered allocation.
    fn keep_freed_memory(&self) -> Result<(), Error>;

    /// Allocates device memory for later work on the stream. Returns `None` if there is not enough
    /// memory.
    fn allocate_async(&self, bytes: usize, stream: &RawStream) -> Result<Option<*mut u8>, Error>;

    /// Frees memory after the work submitted to the stream so far.
    ///
    /// # Safety
    /// The memory must come from [`allocate_async`](Self::allocate_async). Only work that was
    /// submitted to the stream before this call may use it.
    unsafe fn free_async(&self, start: *mut u8, stream: &RawStream) -> Result<(), Error>;

    /// Frees device or managed memory.
    ///
    /// # Safety
    /// The memory must come from [`allocate`](Self::allocate) or
    /// [`allocate_async`](Self::allocate_async), must not be pinned, and nothing may use it any
    /// more.
    unsafe fn free(&self, start: *mut u8);

    /// Frees page-locked memory.
    ///
    /// # Safety
    /// The memory must come from [`allocate`](Self::allocate) with [`MemoryKind::PinnedHost`], and
    /// nothing may use it any more.
    unsafe fn free_pinned(&self, start: *mut u8);

    /// Copies `from` to `to`, and blocks until the copy is done.
    ///
    /// # Safety
    /// The requirements of [`Stream::copy`](crate::Stream::copy) must hold during the call, and
    /// the ranges must have equal lengths.
    unsafe fn copy_now(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error>;

    /// Creates a stream that does not wait for the default stream.
    fn create_stream(&self, level: i32) -> Result<RawStream, Error>;

    /// Creates an event that measures times.
    fn create_event(&self) -> Result<RawEvent, Error>;

    /// Records an event after all work submitted to the stream so far.
    fn record(&self, stream: &RawStream, event: &RawEvent) -> Result<(), Error>;

    /// Makes a stream wait for the point that an event marks now.
    fn wait(&self, stream: &RawStream, event: &RawEvent) -> Result<(), Error>;

    /// Submits a copy of `from` to `to`.
    ///
    /// # Safety
    /// The requirements of [`Stream::copy`](crate::Stream::copy) must hold, and the ranges must
    /// have equal lengths.
    unsafe fn copy(
        &self,
        stream: &RawStream,
        to: MemoryRange,
        from: MemoryRange,
    ) -> Result<(), Error>;

    /// Submits a fill, which sets every byte of `to` to `byte`.
    ///
    /// # Safety
    /// The requirements of [`Stream::fill`](crate::Stream::fill) must hold.
    unsafe fn fill(&self, stream: &RawStream, to: MemoryRange, byte: u8) -> Result<(), Error>;

    /// Loads the module of a kernel, unless it is loaded already.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the driver loads no PTX.
    fn load(&self, kernel: &Kernel) -> Result<(), Error> {
        let _ = kernel;
        Err(Error::Unsupported { device: self.info()?.name, what: "kernels" })
    }

    /// Submits a kernel. Loads its module if necessary.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load).
    ///
    /// # Safety
    /// The requirements of [`Stream::launch`](crate::Stream::launch) must hold, and the number of
    /// arguments must be that of the kernel's parameters.
    unsafe fn launch(
        &self,
        stream: &RawStream,
        kernel: &Kernel,
        blocks: u32,
        arguments: &[u64],
    ) -> Result<(), Error> {
        let _ = (stream, blocks, arguments);
        self.load(kernel)
    }

    /// Calls a function while the device is the current one of the thread.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the driver has no current device.
    fn with_current(&self, run: &mut dyn FnMut()) -> Result<(), Error> {
        let _ = run;
        Err(Error::Unsupported { device: self.info()?.name, what: "work of other libraries" })
    }

    /// Submits a migration of managed memory, to the device or to the host.
    fn prefetch(
        &self,
        stream: &RawStream,
        range: MemoryRange,
        to_device: bool,
    ) -> Result<(), Error>;

    /// Submits a function that the driver calls on one of its threads after the work submitted so
    /// far. The function must not panic.
    fn launch_host_fn(
        &self,
        stream: &RawStream,
        run: Box<dyn FnOnce() + Send>,
    ) -> Result<(), Error>;

    /// Returns whether all work submitted to a stream is done.
    fn is_done(&self, stream: &RawStream) -> Result<bool, Error>;

    /// Blocks until all work submitted to a stream is done.
    fn synchronize(&self, stream: &RawStream) -> Result<(), Error>;

    /// Returns whether a recorded event is reached.
    fn is_reached(&self, event: &RawEvent) -> Result<bool, Error>;

    /// Blocks until a recorded event is reached.
    fn wait_for_event(&self, event: &RawEvent) -> Result<(), Error>;

    /// Returns the milliseconds between two recorded events, or `None` if one is not reached yet.
    fn elapsed_ms(&self, start: &RawEvent, end: &RawEvent) -> Result<Option<f32>, Error>;

    /// Destroys a stream.
    ///
    /// # Safety
    /// The API must have created the stream, which must not be used after this call.
    unsafe fn destroy_stream(&self, stream: &RawStream);

    /// Destroys an event.
    ///
    /// # Safety
    /// The API must have created the event, which must not be used after this call.
    unsafe fn destroy_event(&self, event: &RawEvent);
}

/// A function in the form that drivers call: a C function, and a pointer to pass to it.
pub(super) type HostCall = (unsafe extern "C" fn(*mut c_void), *mut c_void);

/// Converts a function to the form that drivers call. The C function frees the function.
///
/// If the driver does not accept it, call [`take_back`].
pub(super) fn host_call(run: Box<dyn FnOnce() + Send>) -> HostCall {
    /// Calls and frees the function.
    ///
    /// # Safety
    /// `run` must come from the `Box::into_raw` below. Each pointer may be passed only once.
    unsafe extern "C" fn call(run: *mut c_void) {
        // SAFETY: the caller guarantees that `run` comes from `Box::into_raw` and is passed only
        // once, so no other code owns the box.
        let run = unsafe { Box::from_raw(run.cast::<Box<dyn FnOnce() + Send>>()) };
        // A panic here would abort the process, because it cannot unwind into the driver.
        run();
    }
    (call, Box::into_raw(Box::new(run)).cast())
}

/// Drops a function without a call.
///
/// # Safety
/// `run` must be the pointer of [`host_call`], and the C function must never be called with it.
pub(super) unsafe fn take_back(run: *mut c_void) {
    // SAFETY: the caller guarantees that no other code owns the box.
    drop(unsafe { Box::from_raw(run.cast::<Box<dyn FnOnce() + Send>>()) });
}
