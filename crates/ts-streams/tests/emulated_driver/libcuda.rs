// SPDX-License-Identifier: MIT OR Apache-2.0
//! A CUDA driver that runs on the host, for tests. Compile it with
//! `rustc --crate-type cdylib` as `libcuda.so.1`. It has the functions that `CudaDevice` calls.
//!
//! It is stricter than a driver needs to be:
//! - Host code that touches device memory ends with a segmentation fault.
//! - Work that uses freed memory fails with `CUDA_ERROR_ILLEGAL_ADDRESS`, and so does every later
//!   call, as on a GPU.
//! - A call inside a host function fails with `CUDA_ERROR_NOT_PERMITTED`.
//! - Memory is freed at once, even if work that uses it is still queued.
//!
//! Kernels are the functions of `kernels.c`, which is compiled as `libkernels.so`.
//!
//! Each stream is a thread. [`emulatedControl`] injects faults, and [`emulatedCounters`] counts
//! what exists.

#![allow(non_snake_case, unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

mod kernels;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kernels::{Kernel, kernels, run_kernel};

type Code = i32;
type Task = Box<dyn FnOnce() + Send>;

const SUCCESS: Code = 0;
const INVALID_VALUE: Code = 1;
const OUT_OF_MEMORY: Code = 2;
const INVALID_DEVICE: Code = 101;
const INVALID_CONTEXT: Code = 201;
const INVALID_PTX: Code = 218;
const INVALID_HANDLE: Code = 400;
const NOT_FOUND: Code = 500;
const NOT_READY: Code = 600;
const ILLEGAL_ADDRESS: Code = 700;
const ALREADY_REGISTERED: Code = 712;
const NOT_REGISTERED: Code = 713;
const LAUNCH_FAILED: Code = 719;
const NOT_PERMITTED: Code = 800;

const DEVICES: usize = 2;
const TOTAL_BYTES: usize = 4 << 30;

/// Bytes that device addresses stand for.
struct Shadow {
    start: *mut u8,
    layout: std::alloc::Layout,
}

// SAFETY: the owner of the memory orders its uses, as on a GPU.
unsafe impl Send for Shadow {}
// SAFETY: as above.
unsafe impl Sync for Shadow {}

impl Shadow {
    fn new(bytes: usize) -> Option<Self> {
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).ok()?;
        // SAFETY: the size is not zero, because the callers refuse that.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        (!start.is_null()).then_some(Self { start, layout })
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with this layout.
        unsafe { std::alloc::dealloc(self.start, self.layout) };
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Device,
    Managed,
    Pinned,
}

struct Block {
    shadow: Arc<Shadow>,
    bytes: usize,
    kind: Kind,
    device: usize,
}

/// A point on a stream.
#[derive(Default)]
struct Point {
    reached: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Point {
    fn reach(&self) {
        *lock(&self.reached) = Some(Instant::now());
        self.changed.notify_all();
    }

    fn wait(&self) {
        let mut reached = lock(&self.reached);
        while reached.is_none() {
            reached = self.changed.wait(reached).unwrap();
        }
    }
}

struct Stream {
    queue: Sender<Task>,
    unfinished: Arc<AtomicU64>,
}

impl Stream {
    fn submit(&self, task: Task) {
        let unfinished = Arc::clone(&self.unfinished);
        unfinished.fetch_add(1, Ordering::SeqCst);
        let run = move || {
            task();
            unfinished.fetch_sub(1, Ordering::SeqCst);
        };
        self.queue.send(Box::new(run)).expect("the thread lives as long as the queue");
    }

    /// Adds a point. Once it is reached, all earlier work counts as finished.
    fn submit_point(&self, point: Arc<Point>) {
        self.queue.send(Box::new(move || point.reach())).expect("as above");
    }
}

#[derive(Default)]
struct State {
    /// The allocated blocks by address.
    blocks: BTreeMap<usize, Block>,
    /// The lengths of registered host memory by address.
    registered: BTreeMap<usize, usize>,
    /// The device addresses that were freed. They are never used again.
    freed: BTreeMap<usize, usize>,
    used: [usize; DEVICES],
    limit: Option<usize>,
    streams: HashMap<usize, Arc<Stream>>,
    events: HashMap<usize, Arc<Mutex<Option<Arc<Point>>>>>,
    /// The PTX of the loaded modules.
    modules: HashMap<usize, String>,
    next_handle: usize,
    retained: [u64; DEVICES],
    /// The error that all calls return.
    broken: Option<Code>,
    /// The number of calls until the device is lost.
    calls_left: Option<u64>,
    /// The number of allocations until one fails.
    allocations_left: Option<u64>,
    /// The number of streams until one is created that does not wait for events, and that stream.
    streams_left: Option<u64>,
    deaf: Option<usize>,
    /// How long each kernel and each copy takes longer than it has to.
    kernel_delay: Duration,
    copy_delay: Duration,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

thread_local! {
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static IN_HOST_FN: Cell<bool> = const { Cell::new(false) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn with<T>(use_state: impl FnOnce(&mut State) -> T) -> T {
    use_state(lock(&STATE).get_or_insert_with(State::default))
}

/// Runs a call, unless calls are forbidden or the device is broken.
fn call(run: impl FnOnce(&mut State) -> Result<(), Code>) -> Code {
    if IN_HOST_FN.get() {
        return NOT_PERMITTED;
    }
    with(|state| {
        if let Some(left) = &mut state.calls_left {
            match left.checked_sub(1) {
                Some(fewer) => *left = fewer,
                None => state.broken = Some(LAUNCH_FAILED),
            }
        }
        match state.broken {
            Some(code) => code,
            None => run(state).err().unwrap_or(SUCCESS),
        }
    })
}

/// Like `call`, for a call that needs a context. Passes the device of the context.
fn device_call(run: impl FnOnce(&mut State, usize) -> Result<(), Code>) -> Code {
    let current = CONTEXTS.with_borrow(|contexts| contexts.last().copied());
    call(|state| match current {
        Some(context) if context > 0 => run(state, context - 1),
        _ => Err(INVALID_CONTEXT),
    })
}

impl State {
    fn handle(&mut self) -> usize {
        self.next_handle += 1;
        self.next_handle
    }

    fn stream(&self, handle: usize) -> Result<Arc<Stream>, Code> {
        self.streams.get(&handle).cloned().ok_or(INVALID_HANDLE)
    }

    fn point(&self, handle: usize) -> Result<Option<Arc<Point>>, Code> {
        let event = self.events.get(&handle).ok_or(INVALID_HANDLE)?;
        Ok(lock(event).clone())
    }

    fn allocate(&mut self, bytes: usize, kind: Kind, device: usize) -> Result<usize, Code> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if let Some(left) = &mut self.allocations_left {
            match left.checked_sub(1) {
                Some(fewer) => *left = fewer,
                None => return Err(OUT_OF_MEMORY),
            }
        }
        let limit = self.limit.unwrap_or(TOTAL_BYTES);
        if kind != Kind::Pinned && bytes > limit.saturating_sub(self.used[device]) {
            return Err(OUT_OF_MEMORY);
        }
        let shadow = Arc::new(Shadow::new(bytes).ok_or(OUT_OF_MEMORY)?);
        let address = match kind {
            Kind::Device => reserve(bytes).ok_or(OUT_OF_MEMORY)?,
            Kind::Managed | Kind::Pinned => shadow.start as usize,
        };
        if kind != Kind::Pinned {
            self.used[device] += bytes;
        }
        self.blocks.insert(address, Block { shadow, bytes, kind, device });
        Ok(address)
    }

    fn free(&mut self, address: usize, pinned: bool) -> Result<(), Code> {
        match self.blocks.get(&address) {
            Some(block) if (block.kind == Kind::Pinned) == pinned => {}
            _ => return Err(INVALID_VALUE),
        }
        let block = self.blocks.remove(&address).expect("it was found above");
        if block.kind != Kind::Pinned {
            self.used[block.device] -= block.bytes;
        }
        if block.kind == Kind::Device {
            self.freed.insert(address, block.bytes);
        }
        Ok(())
    }

    /// Returns where the bytes at an address are, and what keeps them alive. Addresses outside of
    /// the driver's memory are those of host memory.
    fn locate(
        &self,
        address: usize,
        bytes: usize,
    ) -> Result<(*mut u8, Option<Arc<Shadow>>), Code> {
        let within = |(&start, len): (&usize, usize)| {
            (address < start + len).then(|| (start, address + bytes <= start + len))
        };
        let block = self.blocks.range(..=address).next_back();
        if let Some((start, fits)) = block.and_then(|(start, b)| within((start, b.bytes))) {
            if !fits {
                return Err(ILLEGAL_ADDRESS);
            }
            let shadow = Arc::clone(&self.blocks[&start].shadow);
            return Ok((shadow.start.wrapping_add(address - start), Some(shadow)));
        }
        let freed = self.freed.range(..=address).next_back();
        match freed.and_then(|(start, &len)| within((start, len))) {
            Some(_) => Err(ILLEGAL_ADDRESS),
            None => Ok((address as *mut u8, None)),
        }
    }

    fn register(&mut self, start: usize, bytes: usize) -> Result<(), Code> {
        if bytes == 0 || self.is_known(start) {
            return Err(ALREADY_REGISTERED);
        }
        if self.registered.range(start..start + bytes).next().is_some() {
            return Err(ALREADY_REGISTERED);
        }
        if let Some(left) = &mut self.allocations_left {
            match left.checked_sub(1) {
                Some(fewer) => *left = fewer,
                None => return Err(OUT_OF_MEMORY),
            }
        }
        self.registered.insert(start, bytes);
        Ok(())
    }

    /// Returns whether the driver knows the memory, so that copies of it do not block.
    fn is_known(&self, address: usize) -> bool {
        let registered = self.registered.range(..=address).next_back();
        if registered.is_some_and(|(start, bytes)| address < start + bytes) {
            return true;
        }
        let block = self.blocks.range(..=address).next_back();
        block.is_some_and(|(start, block)| address < start + block.bytes)
    }
}

/// Reserves addresses that host code cannot access.
fn reserve(bytes: usize) -> Option<usize> {
    unsafe extern "C" {
        fn mmap(at: *mut c_void, len: usize, protection: i32, flags: i32, file: i32, offset: i64)
        -> *mut c_void;
    }
    const PRIVATE_ANONYMOUS_NORESERVE: i32 = 0x2 | 0x20 | 0x4000;
    // SAFETY: a new mapping without access.
    let start =
        unsafe { mmap(std::ptr::null_mut(), bytes, 0, PRIVATE_ANONYMOUS_NORESERVE, -1, 0) };
    (start as isize != -1).then_some(start as usize)
}

/// Copies bytes. If an address is invalid, the device is broken from now on.
fn copy(to: usize, from: usize, bytes: usize) {
    let located = with(|state| Ok((state.locate(to, bytes)?, state.locate(from, bytes)?)));
    match located {
        // SAFETY: the memory exists while the shadows do, and the program orders its accesses.
        Ok(((to, _keep_to), (from, _keep_from))) => unsafe { std::ptr::copy(from, to, bytes) },
        Err(code) => break_device(code),
    }
}

fn break_device(code: Code) {
    with(|state| _ = state.broken.get_or_insert(code));
}

/// Returns where the bytes at a device address are, for other emulated libraries. They exist as
/// long as the memory is not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn emulatedLocate(address: usize, bytes: usize) -> *mut u8 {
    with(|state| state.locate(address, bytes)).map_or(std::ptr::null_mut(), |(at, _)| at)
}

macro_rules! driver {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block
    )*) => {
        $($(#[$attribute])* #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> Code $body)*
    };
}

driver! {
    fn cuInit(_flags: u32) {
        SUCCESS
    }

    fn cuDeviceGetCount(count: *mut i32) {
        *count = DEVICES as i32;
        SUCCESS
    }

    fn cuDeviceGet(device: *mut i32, ordinal: i32) {
        *device = ordinal;
        if (0..DEVICES as i32).contains(&ordinal) { SUCCESS } else { INVALID_DEVICE }
    }

    fn cuDeviceGetName(name: *mut c_char, len: i32, device: i32) {
        let text = format!("Emulated GPU {device}\0");
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len().min(len as usize));
        SUCCESS
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: i32) {
        call(|state| {
            *bytes = state.limit.unwrap_or(TOTAL_BYTES);
            Ok(())
        })
    }

    fn cuDeviceGetAttribute(value: *mut i32, _attribute: i32, _device: i32) {
        *value = 1;
        SUCCESS
    }

    fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: i32) {
        *pool = device as usize + 1;
        SUCCESS
    }

    fn cuMemPoolSetAttribute(_pool: usize, _attribute: i32, _value: *mut c_void) {
        call(|_| Ok(()))
    }

    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) {
        call(|state| {
            *context = device as usize + 1;
            state.retained[device as usize] += 1;
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        with(|state| state.retained[device as usize] -= 1);
        SUCCESS
    }

    fn cuCtxPushCurrent_v2(context: usize) {
        if IN_HOST_FN.get() {
            return NOT_PERMITTED;
        }
        CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
        SUCCESS
    }

    fn cuCtxPopCurrent_v2(context: *mut usize) {
        match CONTEXTS.with_borrow_mut(Vec::pop) {
            Some(popped) => {
                *context = popped;
                SUCCESS
            }
            None => INVALID_CONTEXT,
        }
    }

    fn cuCtxGetCurrent(context: *mut usize) {
        *context = CONTEXTS.with_borrow(|contexts| contexts.last().copied().unwrap_or(0));
        SUCCESS
    }

    fn cuCtxSetCurrent(context: usize) {
        CONTEXTS.with_borrow_mut(|contexts| {
            contexts.pop();
            contexts.push(context);
        });
        SUCCESS
    }

    fn cuCtxSynchronize() {
        let streams = with(|state| state.streams.values().cloned().collect::<Vec<_>>());
        for stream in streams {
            let point = Arc::new(Point::default());
            stream.submit_point(Arc::clone(&point));
            point.wait();
        }
        device_call(|_, _| Ok(()))
    }

    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        (*least, *greatest) = (0, -5);
        SUCCESS
    }

    fn cuMemGetInfo_v2(available: *mut usize, total: *mut usize) {
        device_call(|state, device| {
            *total = state.limit.unwrap_or(TOTAL_BYTES);
            *available = *total - state.used[device];
            Ok(())
        })
    }

    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        device_call(|state, device| {
            *address = state.allocate(bytes, Kind::Device, device)? as u64;
            Ok(())
        })
    }

    fn cuMemAllocManaged(address: *mut u64, bytes: usize, _flags: u32) {
        device_call(|state, device| {
            *address = state.allocate(bytes, Kind::Managed, device)? as u64;
            Ok(())
        })
    }

    fn cuMemHostAlloc(start: *mut usize, bytes: usize, _flags: u32) {
        device_call(|state, device| {
            *start = state.allocate(bytes, Kind::Pinned, device)?;
            Ok(())
        })
    }

    fn cuMemHostRegister_v2(start: usize, bytes: usize, _flags: u32) {
        device_call(|state, _| state.register(start, bytes))
    }

    fn cuMemHostUnregister(start: usize) {
        device_call(|state, _| state.registered.remove(&start).map(|_| ()).ok_or(NOT_REGISTERED))
    }

    fn cuMemFree_v2(address: u64) {
        device_call(|state, _| state.free(address as usize, false))
    }

    fn cuMemFreeHost(start: usize) {
        device_call(|state, _| state.free(start, true))
    }

    #[cfg(not(without_memory_pools))]
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: usize) {
        device_call(|state, device| {
            state.stream(stream)?;
            *address = state.allocate(bytes, Kind::Device, device)? as u64;
            Ok(())
        })
    }

    fn cuMemFreeAsync(address: u64, stream: usize) {
        device_call(|state, _| {
            let free = move || {
                if let Err(code) = with(|state| state.free(address as usize, false)) {
                    break_device(code);
                }
            };
            state.stream(stream)?.submit(Box::new(free));
            Ok(())
        })
    }

    fn cuMemPrefetchAsync(address: u64, bytes: usize, _device: i32, stream: usize) {
        device_call(|state, _| {
            state.locate(address as usize, bytes)?;
            state.stream(stream).map(|_| ())
        })
    }

    fn cuMemcpy(to: u64, from: u64, bytes: usize) {
        let code = device_call(|_, _| Ok(()));
        if code == SUCCESS {
            copy(to as usize, from as usize, bytes);
        }
        code
    }

    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize) {
        let (to, from) = (to as usize, from as usize);
        let mut waits = None;
        let code = device_call(|state, _| {
            let is_pinned = state.is_known(to) && state.is_known(from);
            let stream = state.stream(stream)?;
            let delay = state.copy_delay;
            let run = move || {
                std::thread::sleep(delay);
                copy(to, from, bytes);
            };
            stream.submit(Box::new(run));
            if !is_pinned {
                let point = Arc::new(Point::default());
                stream.submit_point(Arc::clone(&point));
                waits = Some(point);
            }
            Ok(())
        });
        if let Some(point) = waits {
            point.wait();
        }
        code
    }

    fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, bytes: usize, stream: usize) {
        cuMemcpyAsync(to as u64, from, bytes, stream)
    }

    fn cuMemsetD8Async(to: u64, byte: u8, bytes: usize, stream: usize) {
        device_call(|state, _| {
            let fill = move || match with(|state| state.locate(to as usize, bytes)) {
                // SAFETY: as in `copy`.
                Ok((to, _keep)) => unsafe { std::ptr::write_bytes(to, byte, bytes) },
                Err(code) => break_device(code),
            };
            state.stream(stream)?.submit(Box::new(fill));
            Ok(())
        })
    }

    fn cuLaunchHostFunc(
        stream: usize,
        function: unsafe extern "C" fn(*mut c_void),
        argument: usize,
    ) {
        device_call(|state, _| {
            let run = move || {
                IN_HOST_FN.set(true);
                // SAFETY: the caller passed the argument for this function.
                unsafe { function(argument as *mut c_void) };
                IN_HOST_FN.set(false);
            };
            state.stream(stream)?.submit(Box::new(run));
            Ok(())
        })
    }

    fn cuModuleLoadData(module: *mut usize, ptx: *const c_char) {
        device_call(|state, _| {
            // SAFETY: the caller passes text that ends with a zero.
            let text = unsafe { CStr::from_ptr(ptx) }.to_str().map_err(|_| INVALID_PTX)?;
            if !text.contains(".version") {
                return Err(INVALID_PTX);
            }
            *module = state.handle();
            state.modules.insert(*module, text.to_owned());
            Ok(())
        })
    }

    fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        device_call(|state, _| {
            let text = state.modules.get(&module).ok_or(INVALID_HANDLE)?;
            // SAFETY: the caller passes text that ends with a zero.
            let entry = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
            let (find, _) = kernels().ok_or(NOT_FOUND)?;
            // SAFETY: as above.
            let kernel = unsafe { find(name) };
            if kernel.is_null() || !text.contains(&format!(".visible .entry {entry}(")) {
                return Err(NOT_FOUND);
            }
            *function = kernel as usize;
            Ok(())
        })
    }

    fn cuModuleUnload(module: usize) {
        device_call(|state, _| state.modules.remove(&module).map(|_| ()).ok_or(INVALID_HANDLE))
    }

    fn cuLaunchKernel(
        function: usize,
        blocks: u32,
        _blocks_y: u32,
        _blocks_z: u32,
        threads: u32,
        _threads_y: u32,
        _threads_z: u32,
        _shared_bytes: u32,
        stream: usize,
        arguments: *const *const u64,
        _extra: *mut c_void,
    ) {
        device_call(|state, _| {
            if blocks == 0 || threads == 0 || threads > 1024 {
                return Err(INVALID_VALUE);
            }
            // SAFETY: the function is a kernel, and the caller passes its arguments.
            let values: Vec<u64> = unsafe {
                let count = (*(function as *const Kernel)).parameters as usize;
                (0..count).map(|i| **arguments.add(i)).collect()
            };
            let delay = state.kernel_delay;
            let run = move || {
                std::thread::sleep(delay);
                run_kernel(function, blocks, threads, &values);
            };
            state.stream(stream)?.submit(Box::new(run));
            Ok(())
        })
    }

    fn cuStreamCreateWithPriority(stream: *mut usize, _flags: u32, _priority: i32) {
        device_call(|state, _| {
            let (queue, tasks) = channel::<Task>();
            std::thread::Builder::new()
                .name("emulated-stream".into())
                .spawn(move || tasks.into_iter().for_each(|task| task()))
                .map_err(|_| OUT_OF_MEMORY)?;
            *stream = state.handle();
            if let Some(left) = state.streams_left.take() {
                match left.checked_sub(1) {
                    Some(fewer) => state.streams_left = Some(fewer),
                    None => state.deaf = Some(*stream),
                }
            }
            let unfinished = Arc::default();
            state.streams.insert(*stream, Arc::new(Stream { queue, unfinished }));
            Ok(())
        })
    }

    fn cuStreamDestroy_v2(stream: usize) {
        device_call(|state, _| state.streams.remove(&stream).map(|_| ()).ok_or(INVALID_HANDLE))
    }

    fn cuStreamQuery(stream: usize) {
        device_call(|state, _| {
            let unfinished = state.stream(stream)?.unfinished.load(Ordering::SeqCst);
            if unfinished == 0 { Ok(()) } else { Err(NOT_READY) }
        })
    }

    fn cuStreamSynchronize(stream: usize) {
        let point = Arc::new(Point::default());
        let code = device_call(|state, _| {
            state.stream(stream)?.submit_point(Arc::clone(&point));
            Ok(())
        });
        if code != SUCCESS {
            return code;
        }
        point.wait();
        device_call(|_, _| Ok(()))
    }

    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: u32) {
        device_call(|state, _| {
            let handle = stream;
            let (stream, point) = (state.stream(stream)?, state.point(event)?);
            if let Some(point) = point.filter(|_| state.deaf != Some(handle)) {
                stream.submit(Box::new(move || point.wait()));
            }
            Ok(())
        })
    }

    fn cuEventCreate(event: *mut usize, _flags: u32) {
        device_call(|state, _| {
            *event = state.handle();
            state.events.insert(*event, Arc::default());
            Ok(())
        })
    }

    fn cuEventDestroy_v2(event: usize) {
        device_call(|state, _| state.events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE))
    }

    fn cuEventRecord(event: usize, stream: usize) {
        device_call(|state, _| {
            let point = Arc::new(Point::default());
            let stream = state.stream(stream)?;
            *lock(state.events.get(&event).ok_or(INVALID_HANDLE)?) = Some(Arc::clone(&point));
            stream.submit_point(point);
            Ok(())
        })
    }

    fn cuEventQuery(event: usize) {
        device_call(|state, _| match state.point(event)? {
            Some(point) if lock(&point.reached).is_none() => Err(NOT_READY),
            _ => Ok(()),
        })
    }

    fn cuEventSynchronize(event: usize) {
        let mut found = None;
        let code = device_call(|state, _| {
            found = state.point(event)?;
            Ok(())
        });
        if let Some(point) = found {
            point.wait();
        }
        if code == SUCCESS { device_call(|_, _| Ok(())) } else { code }
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) {
        device_call(|state, _| {
            let at = |event| {
                let point = state.point(event)?.ok_or(INVALID_HANDLE)?;
                let reached = *lock(&point.reached);
                reached.ok_or(NOT_READY)
            };
            let (start, end): (Instant, Instant) = (at(start)?, at(end)?);
            *milliseconds = end.saturating_duration_since(start).as_secs_f32() * 1e3;
            Ok(())
        })
    }

    fn cuGetErrorName(code: Code, name: *mut *const c_char) {
        let text = match code {
            INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
            OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
            INVALID_PTX => c"CUDA_ERROR_INVALID_PTX",
            NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
            INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
            ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
            NOT_PERMITTED => c"CUDA_ERROR_NOT_PERMITTED",
            _ => c"CUDA_ERROR_UNKNOWN",
        };
        *name = text.as_ptr();
        SUCCESS
    }

    /// Injects a fault. `what` is 0 for the memory of each device in bytes, 1 for the number of
    /// calls until the device is lost, 2 for the number of allocations until one fails, 3 for the
    /// number of streams until one is created that does not wait for events, and 4 and 5 for how
    /// many microseconds each kernel and each copy takes longer.
    fn emulatedControl(what: i32, value: u64) {
        with(|state| match what {
            0 => state.limit = Some(value as usize),
            1 => state.calls_left = Some(value),
            2 => state.allocations_left = Some(value),
            3 => state.streams_left = Some(value),
            4 => state.kernel_delay = Duration::from_micros(value),
            _ => state.copy_delay = Duration::from_micros(value),
        });
        SUCCESS
    }

    /// Returns the numbers of retained contexts, streams, events, blocks, device bytes, current
    /// contexts of this thread, and modules.
    fn emulatedCounters(counters: *mut u64) {
        let values = with(|state| {
            [
                state.retained.iter().sum(),
                state.streams.len() as u64,
                state.events.len() as u64,
                (state.blocks.len() + state.registered.len()) as u64,
                state.used.iter().sum::<usize>() as u64,
                CONTEXTS.with_borrow(Vec::len) as u64,
                state.modules.len() as u64,
            ]
        });
        std::ptr::copy_nonoverlapping(values.as_ptr(), counters, values.len());
        SUCCESS
    }
}
