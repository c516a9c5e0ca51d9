// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls of the CUDA driver, checked. The raw ones are cudarc's, which looks each up in libcuda
//! when it is first called and panics when it is not there: nothing here is called before [`load`]
//! has found them all.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUresult, CUstream};

use crate::Error;
use crate::memory::MemoryRange;

/// What this module calls.
const SYMBOLS: [&str; 34] = [
    "cuInit",
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorName",
    "cuLaunchHostFunc",
    "cuMemAllocAsync",
    "cuMemAllocManaged",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemPoolSetAttribute",
    "cuMemPrefetchAsync",
    "cuMemcpy",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
];
const MORE_SYMBOLS: [&str; 2] = ["cuStreamQuery", "cuStreamSynchronize"];

/// Finds the driver and has it look for devices, once. How many there are.
///
/// # Errors
/// Why there is no driver, or what it answered and what that is called.
pub(super) fn load() -> &'static Result<usize, Absent> {
    static LOADED: OnceLock<Result<usize, Absent>> = OnceLock::new();
    LOADED.get_or_init(|| {
        // SAFETY: opening libcuda runs its initialisers, which every program that uses CUDA does.
        if !unsafe { sys::is_culib_present() } {
            return Err(Absent::NoDriver("there is no libcuda.so.1".into()));
        }
        let missing = SYMBOLS.iter().chain(&MORE_SYMBOLS).find(|name| {
            // SAFETY: libcuda is there, as just seen, and a symbol is looked for and not used.
            unsafe { sys::culib().get::<*const c_void>(name.as_bytes()) }.is_err()
        });
        if let Some(name) = missing {
            return Err(Absent::NoDriver(format!("libcuda has no {name}: the driver is too old")));
        }
        // SAFETY: no pointers.
        match unsafe { sys::cuInit(0) } {
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_NO_DEVICE => return Err(Absent::NoDevices),
            other => return Err(Absent::NoDriver(format!("cuInit: {}", name(other)))),
        }
        let mut count = 0;
        // SAFETY: `count` is there to be written to.
        match unsafe { sys::cuDeviceGetCount(&raw mut count) } {
            CUresult::CUDA_SUCCESS if count > 0 => Ok(count as usize),
            CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NO_DEVICE => Err(Absent::NoDevices),
            other => Err(Absent::NoDriver(format!("cuDeviceGetCount: {}", name(other)))),
        }
    })
}

/// Why nothing can be done with CUDA here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Absent {
    NoDriver(String),
    NoDevices,
}

/// What the driver calls an answer.
fn name(code: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: `text` is there to be written to.
    let known = unsafe { sys::cuGetErrorName(code, &raw mut text) } == CUresult::CUDA_SUCCESS
        && !text.is_null();
    if !known {
        return format!("{code:?}");
    }
    // SAFETY: the driver gives a string of its own that is never freed.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn check(call: &'static str, code: CUresult) -> Result<(), Error> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(Error::Driver { call, code: code as i32, name: name(code) }),
    }
}

/// Whether it is done; an answer that says "not yet" is none that says what went wrong.
fn done(call: &'static str, code: CUresult) -> Result<bool, Error> {
    match code {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => check(call, code).map(|()| true),
    }
}

/// A device and its primary context, which is current for the thread that calls a method. Kept
/// until dropped.
#[derive(Debug)]
pub(super) struct Context {
    device: CUdevice,
    raw: CUcontext,
}

// SAFETY: a context may be current for any number of threads; the driver locks what it has to.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// After [`load`] has said how many there are.
    pub(super) fn new(ordinal: usize) -> Result<Self, Error> {
        let (mut device, mut raw) = (0, null_mut());
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // SAFETY: both are there to be written to.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut raw, device))?;
        }
        Ok(Self { device, raw })
    }

    fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained until this is dropped.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    pub(super) fn name(&self) -> Result<String, Error> {
        let mut text = [0; 128];
        // SAFETY: the driver writes at most so many bytes, a zero at their end.
        let code =
            unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as i32, self.device) };
        check("cuDeviceGetName", code)?;
        // SAFETY: as above.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    pub(super) fn total_bytes(&self) -> Result<u64, Error> {
        let mut bytes = 0;
        // SAFETY: `bytes` is there to be written to.
        check("cuDeviceTotalMem", unsafe {
            sys::cuDeviceTotalMem_v2(&raw mut bytes, self.device)
        })?;
        Ok(bytes as u64)
    }

    /// Whether managed memory moves while host and device use it.
    pub(super) fn moves_memory(&self) -> Result<bool, Error> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
        let mut value = 0;
        // SAFETY: `value` is there to be written to.
        let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.device) };
        check("cuDeviceGetAttribute", code)?;
        Ok(value != 0)
    }

    /// The least urgent level and the most urgent.
    pub(super) fn priorities(&self) -> Result<(i32, i32), Error> {
        self.make_current()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both are there to be written to.
        let code = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", code)?;
        Ok((least, greatest))
    }

    /// Memory of the device; `None` when there is not so much.
    pub(super) fn allocate_device(&self, bytes: usize) -> Result<Option<*mut u8>, Error> {
        self.make_current()?;
        let mut address = 0;
        // SAFETY: `address` is there to be written to.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) };
        memory("cuMemAlloc", code, address)
    }

    /// Has the driver's own pool keep what is freed, where it would give it back whenever a stream
    /// is waited for.
    pub(super) fn keep_freed_memory(&self) -> Result<(), Error> {
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let (mut pool, mut threshold) = (null_mut(), u64::MAX);
        // SAFETY: `pool` is there to be written to, `threshold` to be read from: 64 bits, as the
        // attribute is.
        unsafe {
            check(
                "cuDeviceGetDefaultMemPool",
                sys::cuDeviceGetDefaultMemPool(&raw mut pool, self.device),
            )?;
            let code = sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast());
            check("cuMemPoolSetAttribute", code)
        }
    }

    /// Memory of the device from the driver's pool, for work behind this on the stream; `None` when
    /// there is not so much.
    pub(super) fn allocate_in_order(
        &self,
        bytes: usize,
        stream: &RawStream,
    ) -> Result<Option<*mut u8>, Error> {
        self.make_current()?;
        let mut address = 0;
        // SAFETY: `address` is there to be written to, the stream until it is dropped.
        let code = unsafe { sys::cuMemAllocAsync(&raw mut address, bytes, stream.0) };
        memory("cuMemAllocAsync", code, address)
    }

    /// # Safety
    /// It came from [`allocate_in_order`](Self::allocate_in_order), and nothing will use it but
    /// what is before this on the stream.
    pub(super) unsafe fn free_in_order(
        &self,
        start: *mut u8,
        stream: &RawStream,
    ) -> Result<(), Error> {
        self.make_current()?;
        // SAFETY: the caller's promise.
        check("cuMemFreeAsync", unsafe { sys::cuMemFreeAsync(start.addr() as u64, stream.0) })
    }

    /// Memory that moves.
    pub(super) fn allocate_managed(&self, bytes: usize) -> Result<Option<*mut u8>, Error> {
        self.make_current()?;
        let mut address = 0;
        let flags = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: `address` is there to be written to.
        let code = unsafe { sys::cuMemAllocManaged(&raw mut address, bytes, flags) };
        memory("cuMemAllocManaged", code, address)
    }

    /// Memory of the host that all devices reach. Not write-combined: that is slow to read.
    pub(super) fn allocate_pinned(&self, bytes: usize) -> Result<Option<*mut u8>, Error> {
        const PORTABLE: u32 = 1;
        self.make_current()?;
        let mut start = null_mut();
        // SAFETY: `start` is there to be written to.
        let code = unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, PORTABLE) };
        memory("cuMemHostAlloc", code, start.addr() as u64)
    }

    /// # Safety
    /// It came from [`allocate_device`](Self::allocate_device),
    /// [`allocate_in_order`](Self::allocate_in_order) or
    /// [`allocate_managed`](Self::allocate_managed), and nobody will use it.
    pub(super) unsafe fn free(&self, start: *mut u8) {
        if self.make_current().is_ok() {
            // SAFETY: the caller's promise.
            let _ = unsafe { sys::cuMemFree_v2(start.addr() as u64) };
        }
    }

    /// # Safety
    /// It came from [`allocate_pinned`](Self::allocate_pinned), and nobody will use it.
    pub(super) unsafe fn free_pinned(&self, start: *mut u8) {
        if self.make_current().is_ok() {
            // SAFETY: the caller's promise.
            let _ = unsafe { sys::cuMemFreeHost(start.cast()) };
        }
    }

    /// Copies, and waits until that is done.
    ///
    /// # Safety
    /// As [`Stream::copy`](crate::Stream::copy), now; the ranges are of the same length.
    pub(super) unsafe fn copy_now(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        self.make_current()?;
        // SAFETY: the caller's promise.
        check("cuMemcpy", unsafe {
            sys::cuMemcpy(to.address() as u64, from.address() as u64, to.len())
        })
    }

    pub(super) fn create_stream(&self, level: i32) -> Result<RawStream, Error> {
        const NON_BLOCKING: u32 = 1;
        self.make_current()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is there to be written to.
        let code = unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, NON_BLOCKING, level) };
        check("cuStreamCreateWithPriority", code)?;
        Ok(RawStream(raw))
    }

    pub(super) fn create_event(&self) -> Result<RawEvent, Error> {
        self.make_current()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is there to be written to.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, 0) })?;
        Ok(RawEvent(raw))
    }

    pub(super) fn record(&self, stream: &RawStream, event: &RawEvent) -> Result<(), Error> {
        self.make_current()?;
        // SAFETY: both are there until they are dropped.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.0, stream.0) })
    }

    pub(super) fn wait(&self, stream: &RawStream, event: &RawEvent) -> Result<(), Error> {
        self.make_current()?;
        // SAFETY: both are there until they are dropped.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.0, event.0, 0) })
    }

    /// # Safety
    /// As [`Stream::copy`](crate::Stream::copy); the ranges are of the same length.
    pub(super) unsafe fn copy(
        &self,
        stream: &RawStream,
        to: MemoryRange,
        from: MemoryRange,
    ) -> Result<(), Error> {
        self.make_current()?;
        // SAFETY: the caller's promise.
        let code = unsafe {
            sys::cuMemcpyAsync(to.address() as u64, from.address() as u64, to.len(), stream.0)
        };
        check("cuMemcpyAsync", code)
    }

    /// # Safety
    /// As [`Stream::fill`](crate::Stream::fill).
    pub(super) unsafe fn fill(
        &self,
        stream: &RawStream,
        to: MemoryRange,
        byte: u8,
    ) -> Result<(), Error> {
        self.make_current()?;
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuMemsetD8Async(to.address() as u64, byte, to.len(), stream.0) };
        check("cuMemsetD8Async", code)
    }

    /// Moves managed memory: to the device, or to the host.
    pub(super) fn prefetch(
        &self,
        stream: &RawStream,
        range: MemoryRange,
        to_device: bool,
    ) -> Result<(), Error> {
        const HOST: CUdevice = -1;
        self.make_current()?;
        let to = if to_device { self.device } else { HOST };
        // SAFETY: an address that is not managed memory's is an error of the driver's.
        let code =
            unsafe { sys::cuMemPrefetchAsync(range.address() as u64, range.len(), to, stream.0) };
        check("cuMemPrefetchAsync", code)
    }

    /// Has the driver call a function on a thread of its own when all before it on the stream is
    /// done.
    pub(super) fn launch_host_fn(
        &self,
        stream: &RawStream,
        run: Box<dyn FnOnce() + Send>,
    ) -> Result<(), Error> {
        /// # Safety
        /// `run` is from the `Box::into_raw` below, and this is called once.
        unsafe extern "C" fn call(run: *mut c_void) {
            // SAFETY: the caller's promise.
            let run = unsafe { Box::from_raw(run.cast::<Box<dyn FnOnce() + Send>>()) };
            // Unwinding into the driver would end the process; the functions given here catch their
            // panics themselves.
            run();
        }
        self.make_current()?;
        let run = Box::into_raw(Box::new(run));
        // SAFETY: `call` takes what it is given, once.
        let code = unsafe { sys::cuLaunchHostFunc(stream.0, Some(call), run.cast()) };
        if code != CUresult::CUDA_SUCCESS {
            // SAFETY: the driver did not take it.
            drop(unsafe { Box::from_raw(run) });
        }
        check("cuLaunchHostFunc", code)
    }

    pub(super) fn is_done(&self, stream: &RawStream) -> Result<bool, Error> {
        self.make_current()?;
        // SAFETY: it is there until it is dropped.
        done("cuStreamQuery", unsafe { sys::cuStreamQuery(stream.0) })
    }

    pub(super) fn synchronize(&self, stream: &RawStream) -> Result<(), Error> {
        self.make_current()?;
        // SAFETY: it is there until it is dropped.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream.0) })
    }

    pub(super) fn is_reached(&self, event: &RawEvent) -> Result<bool, Error> {
        self.make_current()?;
        // SAFETY: it is there until it is dropped.
        done("cuEventQuery", unsafe { sys::cuEventQuery(event.0) })
    }

    pub(super) fn reach(&self, event: &RawEvent) -> Result<(), Error> {
        self.make_current()?;
        // SAFETY: it is there until it is dropped.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event.0) })
    }

    /// Milliseconds between two events that were recorded; `None` when one is not reached.
    pub(super) fn elapsed_ms(
        &self,
        start: &RawEvent,
        end: &RawEvent,
    ) -> Result<Option<f32>, Error> {
        self.make_current()?;
        let mut milliseconds = 0.0;
        // SAFETY: both are there until they are dropped; `milliseconds` is there to be written to.
        let code = unsafe { sys::cuEventElapsedTime(&raw mut milliseconds, start.0, end.0) };
        Ok(done("cuEventElapsedTime", code)?.then_some(milliseconds))
    }

    /// # Safety
    /// It is of this context, and is used no more.
    pub(super) unsafe fn destroy_stream(&self, stream: &RawStream) {
        if self.make_current().is_ok() {
            // SAFETY: the caller's promise. The driver keeps what is left of it until its work is
            // done.
            let _ = unsafe { sys::cuStreamDestroy_v2(stream.0) };
        }
    }

    /// # Safety
    /// It is of this context, and is used no more.
    pub(super) unsafe fn destroy_event(&self, event: &RawEvent) {
        if self.make_current().is_ok() {
            // SAFETY: the caller's promise. The driver keeps what is left of it until streams have
            // passed it.
            let _ = unsafe { sys::cuEventDestroy_v2(event.0) };
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once, and all that is of it is gone: whatever has a handle keeps
        // this.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

fn memory(call: &'static str, code: CUresult, address: u64) -> Result<Option<*mut u8>, Error> {
    match code {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(None),
        code => check(call, code)
            .map(|()| Some(std::ptr::with_exposed_provenance_mut(address as usize))),
    }
}

/// A stream of a [`Context`].
#[derive(Debug)]
pub(super) struct RawStream(CUstream);

// SAFETY: a handle, which the driver takes from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    pub(super) fn as_ptr(&self) -> *mut c_void {
        self.0.cast()
    }
}

/// An event of a [`Context`].
#[derive(Debug)]
pub(super) struct RawEvent(CUevent);

// SAFETY: a handle, which the driver takes from any thread.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}
