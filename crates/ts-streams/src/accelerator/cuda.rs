// SPDX-License-Identifier: MIT OR Apache-2.0
//! NVIDIA GPUs, through the CUDA driver, which is loaded at run time.
//!
//! The raw functions of cudarc look up their symbol on the first call and panic if it is missing.
//! No other function of this module may be called before [`load`] has found all symbols.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUfunction, CUmodule, CUresult};

use super::api::{Api, RawEvent, RawStream, host_call, take_back};
use super::{AcceleratorDevice, AcceleratorEvent, AcceleratorMemory, AcceleratorStream, lock};
use crate::device::DeviceInfo;
use crate::id::DeviceKind;
use crate::kernel::Kernel;
use crate::priority::PriorityRange;
use crate::range::MemoryRange;
use crate::{Error, GpuStatus, MemoryKind};

/// An NVIDIA GPU, used through its primary context. This code has not yet run on a GPU.
pub type CudaDevice = AcceleratorDevice<CudaApi>;
/// A [`Stream`](crate::Stream) of a [`CudaDevice`].
pub type CudaStream = AcceleratorStream<CudaApi>;
/// An [`Event`](crate::Event) of a [`CudaDevice`].
pub type CudaEvent = AcceleratorEvent<CudaApi>;
/// Memory that a [`CudaDevice`] allocated.
pub type CudaMemory = AcceleratorMemory<CudaApi>;

impl CudaDevice {
    /// Opens the GPU with index `ordinal`, counted from 0 among those that `CUDA_VISIBLE_DEVICES`
    /// makes visible. May block while the driver loads.
    ///
    /// # Errors
    /// Returns [`Error::NoGpu`] with the reason if there is no such GPU or no driver, and
    /// [`Error::Driver`] if a CUDA driver call fails.
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        status().require(ordinal)?;
        Self::open(CudaApi::new(ordinal)?)
    }
}

/// Implements [`GpuStatus::detect`].
pub(crate) fn status() -> GpuStatus {
    match load() {
        Ok(device_count) => GpuStatus::Available { device_count: *device_count },
        Err(Unavailable::NoDevices) => GpuStatus::NoDevices,
        Err(Unavailable::NoDriver(reason)) => GpuStatus::NoCuda(reason.clone()),
    }
}

/// The driver functions that this module calls, together with [`MORE_SYMBOLS`].
const SYMBOLS: [&str; 42] = [
    "cuInit",
    "cuCtxGetStreamPriorityRange",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
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
    "cuLaunchKernel",
    "cuMemAllocAsync",
    "cuMemAllocManaged",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemPoolSetAttribute",
    "cuMemPrefetchAsync",
    "cuMemcpy",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
];
/// Pinned memory that all contexts know.
const PORTABLE: u32 = 1;
const MORE_SYMBOLS: [&str; 2] = ["cuStreamQuery", "cuStreamSynchronize"];

/// Returns the number of devices. The first call loads and initializes the driver. Later calls
/// return the same result.
///
/// # Errors
/// Returns the reason why CUDA cannot be used.
fn load() -> &'static Result<usize, Unavailable> {
    static LOADED: OnceLock<Result<usize, Unavailable>> = OnceLock::new();
    LOADED.get_or_init(|| {
        // SAFETY: opening libcuda runs its initializers, which every CUDA program does.
        if !unsafe { sys::is_culib_present() } {
            return Err(Unavailable::NoDriver(
                "cannot load libcuda.so.1; install the NVIDIA driver".into(),
            ));
        }
        let missing = SYMBOLS.iter().chain(&MORE_SYMBOLS).find(|name| {
            // SAFETY: libcuda is loaded, and the symbol is only looked up.
            unsafe { sys::culib().get::<*const c_void>(name.as_bytes()) }.is_err()
        });
        if let Some(name) = missing {
            return Err(Unavailable::NoDriver(format!(
                "libcuda has no function {name}; install a newer NVIDIA driver"
            )));
        }
        // SAFETY: the call takes no pointers.
        match unsafe { sys::cuInit(0) } {
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_NO_DEVICE => return Err(Unavailable::NoDevices),
            other => return Err(Unavailable::NoDriver(format!("cuInit failed: {}", name(other)))),
        }
        let mut count = 0;
        // SAFETY: `count` is valid for writes.
        match unsafe { sys::cuDeviceGetCount(&raw mut count) } {
            CUresult::CUDA_SUCCESS if count > 0 => Ok(count as usize),
            CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NO_DEVICE => Err(Unavailable::NoDevices),
            other => {
                Err(Unavailable::NoDriver(format!("cuDeviceGetCount failed: {}", name(other))))
            }
        }
    })
}

/// The reason why CUDA cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Unavailable {
    NoDriver(String),
    NoDevices,
}

/// Returns the name of a result code, for example `CUDA_ERROR_INVALID_VALUE`.
fn name(code: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: `text` is valid for writes.
    let known = unsafe { sys::cuGetErrorName(code, &raw mut text) } == CUresult::CUDA_SUCCESS
        && !text.is_null();
    if !known {
        return format!("{code:?}");
    }
    // SAFETY: `text` is not null, so the driver set it to a static string that ends with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn check(call: &'static str, code: CUresult) -> Result<(), Error> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(Error::Driver { call, code: code as i32, name: name(code) }),
    }
}

/// Returns whether the queried work is done.
///
/// # Errors
/// Returns [`Error::Driver`] if `code` is neither `CUDA_SUCCESS` nor `CUDA_ERROR_NOT_READY`.
fn is_complete(call: &'static str, code: CUresult) -> Result<bool, Error> {
    match code {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => check(call, code).map(|()| true),
    }
}

/// A device and its primary context. Methods that need the context make it current during the
/// call. Dropping this value releases the context.
#[derive(Debug)]
pub struct CudaApi {
    device: CUdevice,
    ordinal: u32,
    raw: CUcontext,
    /// The loaded modules, by the address of their PTX.
    modules: Mutex<Vec<(usize, CUmodule)>>,
}

// SAFETY: a context may be current on several threads; the driver synchronizes its calls.
unsafe impl Send for CudaApi {}
// SAFETY: as above.
unsafe impl Sync for CudaApi {}

/// Makes the previous context of this thread current again when it is dropped.
struct Current;

impl Drop for Current {
    fn drop(&mut self) {
        let mut ours = null_mut();
        // SAFETY: `ours` is valid for writes. `make_current` has pushed the context.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut ours) };
    }
}

impl CudaApi {
    /// Retains the primary context of the device `ordinal`. [`load`] must have succeeded before.
    fn new(ordinal: usize) -> Result<Self, Error> {
        let (mut device, mut raw) = (0, null_mut());
        let number = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // SAFETY: both variables are valid for writes.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, number))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut raw, device))?;
        }
        Ok(Self { device, ordinal: ordinal as u32, raw, modules: Mutex::default() })
    }

    /// Returns the primary context, which is retained until this value is dropped.
    pub(super) fn context(&self) -> CUcontext {
        self.raw
    }

    /// Makes the context current on this thread until the result is dropped. PyTorch's current
    /// device is that of the current context, so it must not change.
    fn make_current(&self) -> Result<Current, Error> {
        // SAFETY: the context is retained until this value is dropped.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.raw) })?;
        Ok(Current)
    }

    fn name(&self) -> Result<String, Error> {
        let mut text = [0; 128];
        let len = text.len() as i32;
        // SAFETY: the driver writes at most `len` bytes, including a terminating zero.
        let code = unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), len, self.device) };
        check("cuDeviceGetName", code)?;
        // SAFETY: the driver wrote a string that ends with a zero.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    fn total_bytes(&self) -> Result<u64, Error> {
        let mut bytes = 0;
        // SAFETY: `bytes` is valid for writes.
        check("cuDeviceTotalMem", unsafe {
            sys::cuDeviceTotalMem_v2(&raw mut bytes, self.device)
        })?;
        Ok(bytes as u64)
    }

    /// Returns the function of a kernel. Loads its module if necessary. The context must be
    /// current.
    fn function(&self, kernel: &Kernel) -> Result<CUfunction, Error> {
        let address = kernel.module.as_ptr().addr();
        let mut modules = lock(&self.modules);
        let module = match modules.iter().find(|(of, _)| *of == address) {
            Some((_, module)) => *module,
            None => {
                let mut module = null_mut();
                // SAFETY: `module` is valid for writes, and PTX is text that ends with a zero.
                check("cuModuleLoadData", unsafe {
                    sys::cuModuleLoadData(&raw mut module, kernel.module.as_ptr().cast())
                })?;
                modules.push((address, module));
                module
            }
        };
        let mut function = null_mut();
        // SAFETY: `function` is valid for writes, and the module is loaded until `self` is dropped.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&raw mut function, module, kernel.name.as_ptr())
        })?;
        Ok(function)
    }

    /// Returns whether managed memory can migrate while host and device use it.
    fn supports_concurrent_managed_access(&self) -> Result<bool, Error> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
        let mut value = 0;
        // SAFETY: `value` is valid for writes.
        let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.device) };
        check("cuDeviceGetAttribute", code)?;
        Ok(value != 0)
    }

    /// Returns the least and the most urgent priority level, in this order.
    fn priority_range(&self) -> Result<(i32, i32), Error> {
        let _current = self.make_current()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both variables are valid for writes.
        let code = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", code)?;
        Ok((least, greatest))
    }

    /// Allocates device memory. Returns `None` if there is not enough memory.
    fn allocate_device(&self, bytes: usize) -> Result<Option<*mut u8>, Error> {
        let _current = self.make_current()?;
        let mut address = 0;
        // SAFETY: `address` is valid for writes.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) };
        memory("cuMemAlloc", code, address)
    }

    /// Allocates managed memory. Returns `None` if there is not enough memory.
    fn allocate_managed(&self, bytes: usize) -> Result<Option<*mut u8>, Error> {
        let _current = self.make_current()?;
        let mut address = 0;
        let flags = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: `address` is valid for writes.
        let code = unsafe { sys::cuMemAllocManaged(&raw mut address, bytes, flags) };
        memory("cuMemAllocManaged", code, address)
    }

    /// Allocates page-locked host memory that all devices can access. Returns `None` if there is
    /// not enough memory. The memory is not write-combined, because the host reads such memory
    /// slowly.
    fn allocate_pinned(&self, bytes: usize) -> Result<Option<*mut u8>, Error> {
        let _current = self.make_current()?;
        let mut start = null_mut();
        // SAFETY: `start` is valid for writes.
        let code = unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, PORTABLE) };
        memory("cuMemHostAlloc", code, start.addr() as u64)
    }
}

impl Api for CudaApi {
    const KIND: DeviceKind = DeviceKind::Cuda;

    fn info(&self) -> Result<DeviceInfo, Error> {
        let (least, greatest) = self.priority_range()?;
        Ok(DeviceInfo {
            kind: DeviceKind::Cuda,
            name: self.name()?,
            ordinal: self.ordinal,
            total_bytes: Some(self.total_bytes()?),
            priorities: PriorityRange { least, greatest },
            host_memory: false,
            runs_by_itself: true,
            can_prefetch: self.supports_concurrent_managed_access()?,
        })
    }

    fn available_bytes(&self) -> Result<Option<u64>, Error> {
        let _current = self.make_current()?;
        let (mut available, mut total) = (0, 0);
        // SAFETY: both variables are valid for writes.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut available, &raw mut total) })?;
        Ok(Some(available as u64))
    }

    fn combines_with(&self, _: &Self) -> bool {
        true
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Option<*mut u8>, Error> {
        match kind {
            MemoryKind::Device => self.allocate_device(bytes),
            MemoryKind::Managed => self.allocate_managed(bytes),
            MemoryKind::PinnedHost => self.allocate_pinned(bytes),
            MemoryKind::Host => unreachable!("`HostBlock` allocates this kind, not the driver"),
        }
    }

    unsafe fn register(&self, range: MemoryRange) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that the memory is valid until `unregister`.
        check("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(range.as_ptr().cast(), range.len(), PORTABLE)
        })
    }

    unsafe fn unregister(&self, start: *mut u8) {
        if let Ok(_current) = self.make_current() {
            // SAFETY: the caller guarantees that the memory is registered and no longer copied.
            let _ = unsafe { sys::cuMemHostUnregister(start.cast()) };
        }
    }

    fn keep_freed_memory(&self) -> Result<(), Error> {
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let (mut pool, mut threshold) = (null_mut(), u64::MAX);
        // SAFETY: `pool` is valid for writes, and `threshold` for reads of 64 bits, the size of the
        // attribute.
        unsafe {
            let code = sys::cuDeviceGetDefaultMemPool(&raw mut pool, self.device);
            if code == CUresult::CUDA_ERROR_NOT_SUPPORTED {
                let what = "stream-ordered allocation";
                return Err(Error::Unsupported { device: self.name()?, what });
            }
            check("cuDeviceGetDefaultMemPool", code)?;
            let code = sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast());
            check("cuMemPoolSetAttribute", code)
        }
    }

    fn allocate_async(&self, bytes: usize, stream: &RawStream) -> Result<Option<*mut u8>, Error> {
        let _current = self.make_current()?;
        let mut address = 0;
        // SAFETY: `address` is valid for writes. The stream exists, because only the drop of its
        // last handle destroys it.
        let code = unsafe { sys::cuMemAllocAsync(&raw mut address, bytes, stream.0.cast()) };
        memory("cuMemAllocAsync", code, address)
    }

    unsafe fn free_async(&self, start: *mut u8, stream: &RawStream) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that `start` comes from `allocate_async`, and that only
        // earlier work on the stream uses the memory.
        check("cuMemFreeAsync", unsafe {
            sys::cuMemFreeAsync(start.addr() as u64, stream.0.cast())
        })
    }

    unsafe fn free(&self, start: *mut u8) {
        if let Ok(_current) = self.make_current() {
            // SAFETY: the caller guarantees that `start` comes from a function that `cuMemFree`
            // accepts, and that nothing uses the memory any more.
            let _ = unsafe { sys::cuMemFree_v2(start.addr() as u64) };
        }
    }

    unsafe fn free_pinned(&self, start: *mut u8) {
        if let Ok(_current) = self.make_current() {
            // SAFETY: the caller guarantees that `start` comes from `allocate_pinned`, and that
            // nothing uses the memory any more.
            let _ = unsafe { sys::cuMemFreeHost(start.cast()) };
        }
    }

    unsafe fn copy_now(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that both ranges are valid, equally long and not changed by
        // other code during the call.
        check("cuMemcpy", unsafe {
            sys::cuMemcpy(to.address() as u64, from.address() as u64, to.len())
        })
    }

    fn create_stream(&self, level: i32) -> Result<RawStream, Error> {
        const NON_BLOCKING: u32 = 1;
        let _current = self.make_current()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for writes.
        let code = unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, NON_BLOCKING, level) };
        check("cuStreamCreateWithPriority", code)?;
        Ok(RawStream(raw.cast()))
    }

    fn create_event(&self) -> Result<RawEvent, Error> {
        let _current = self.make_current()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for writes.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, 0) })?;
        Ok(RawEvent(raw.cast()))
    }

    fn record(&self, stream: &RawStream, event: &RawEvent) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the stream and the event exist, because only the drop of the last handle destroys
        // each of them.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.0.cast(), stream.0.cast()) })
    }

    fn wait(&self, stream: &RawStream, event: &RawEvent) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the stream and the event exist, because only the drop of the last handle destroys
        // each of them.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(stream.0.cast(), event.0.cast(), 0)
        })
    }

    unsafe fn copy(
        &self,
        stream: &RawStream,
        to: MemoryRange,
        from: MemoryRange,
    ) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that both ranges are equally long, and that they are valid
        // and not changed by other code until the copy is done.
        let code = unsafe {
            sys::cuMemcpyAsync(
                to.address() as u64,
                from.address() as u64,
                to.len(),
                stream.0.cast(),
            )
        };
        check("cuMemcpyAsync", code)
    }

    unsafe fn fill(&self, stream: &RawStream, to: MemoryRange, byte: u8) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that `to` is valid and not used by other code until the
        // fill is done.
        let code =
            unsafe { sys::cuMemsetD8Async(to.address() as u64, byte, to.len(), stream.0.cast()) };
        check("cuMemsetD8Async", code)
    }

    fn with_current(&self, run: &mut dyn FnMut()) -> Result<(), Error> {
        let _current = self.make_current()?;
        run();
        Ok(())
    }

    fn load(&self, kernel: &Kernel) -> Result<(), Error> {
        let _current = self.make_current()?;
        self.function(kernel).map(drop)
    }

    unsafe fn launch(
        &self,
        stream: &RawStream,
        kernel: &Kernel,
        blocks: u32,
        arguments: &[u64],
    ) -> Result<(), Error> {
        let _current = self.make_current()?;
        let function = self.function(kernel)?;
        let mut values: Vec<*mut c_void> =
            arguments.iter().map(|value| std::ptr::from_ref(value).cast_mut().cast()).collect();
        // SAFETY: the caller guarantees that there is a value of 64 bits for each parameter, which
        // the driver copies during the call, and that the kernel may access what it accesses.
        let code = unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                kernel.block_threads,
                1,
                1,
                0,
                stream.0.cast(),
                values.as_mut_ptr(),
                null_mut(),
            )
        };
        check("cuLaunchKernel", code)
    }

    fn prefetch(
        &self,
        stream: &RawStream,
        range: MemoryRange,
        to_device: bool,
    ) -> Result<(), Error> {
        const HOST: CUdevice = -1;
        let _current = self.make_current()?;
        let to = if to_device { self.device } else { HOST };
        let (address, len) = (range.address() as u64, range.len());
        // SAFETY: the stream exists, because only the drop of its last handle destroys it. The
        // driver returns an error for addresses outside managed memory.
        let code = unsafe { sys::cuMemPrefetchAsync(address, len, to, stream.0.cast()) };
        check("cuMemPrefetchAsync", code)
    }

    fn launch_host_fn(
        &self,
        stream: &RawStream,
        run: Box<dyn FnOnce() + Send>,
    ) -> Result<(), Error> {
        let _current = self.make_current()?;
        let (call, run) = host_call(run);
        // SAFETY: `call` takes ownership of `run`, and the driver calls it at most once.
        let code = unsafe { sys::cuLaunchHostFunc(stream.0.cast(), Some(call), run) };
        if code != CUresult::CUDA_SUCCESS {
            // SAFETY: the driver did not accept the function, so it never calls it.
            unsafe { take_back(run) };
        }
        check("cuLaunchHostFunc", code)
    }

    fn is_done(&self, stream: &RawStream) -> Result<bool, Error> {
        let _current = self.make_current()?;
        // SAFETY: the stream exists, because only the drop of its last handle destroys it.
        is_complete("cuStreamQuery", unsafe { sys::cuStreamQuery(stream.0.cast()) })
    }

    fn synchronize(&self, stream: &RawStream) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the stream exists, because only the drop of its last handle destroys it.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream.0.cast()) })
    }

    fn is_reached(&self, event: &RawEvent) -> Result<bool, Error> {
        let _current = self.make_current()?;
        // SAFETY: the event exists, because only the drop of its last handle destroys it.
        is_complete("cuEventQuery", unsafe { sys::cuEventQuery(event.0.cast()) })
    }

    fn wait_for_event(&self, event: &RawEvent) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the event exists, because only the drop of its last handle destroys it.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event.0.cast()) })
    }

    fn elapsed_ms(&self, start: &RawEvent, end: &RawEvent) -> Result<Option<f32>, Error> {
        let _current = self.make_current()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events exist, because only the drop of the last handle destroys each of
        // them. `milliseconds` is valid for writes.
        let code =
            unsafe { sys::cuEventElapsedTime(&raw mut milliseconds, start.0.cast(), end.0.cast()) };
        Ok(is_complete("cuEventElapsedTime", code)?.then_some(milliseconds))
    }

    unsafe fn destroy_stream(&self, stream: &RawStream) {
        if let Ok(_current) = self.make_current() {
            // SAFETY: the caller guarantees that the stream belongs to this context and is not used
            // again. The driver itself keeps the resources of pending work.
            let _ = unsafe { sys::cuStreamDestroy_v2(stream.0.cast()) };
        }
    }

    unsafe fn destroy_event(&self, event: &RawEvent) {
        if let Ok(_current) = self.make_current() {
            // SAFETY: the caller guarantees that the event belongs to this context and is not used
            // again. The driver itself keeps the resources of pending waits.
            let _ = unsafe { sys::cuEventDestroy_v2(event.0.cast()) };
        }
    }
}

impl Drop for CudaApi {
    fn drop(&mut self) {
        let modules = std::mem::take(&mut *lock(&self.modules));
        if let Ok(_current) = self.make_current() {
            for (_, module) in modules {
                // SAFETY: the module belongs to this context. Streams keep this value alive, so
                // none of its functions is launched any more.
                let _ = unsafe { sys::cuModuleUnload(module) };
            }
        }
        // SAFETY: `new` retained the context once. Streams, events and memory keep this value
        // alive, so none of them exists any more.
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
