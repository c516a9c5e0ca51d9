// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accelerators whose runtime library has the functions of CUDA's runtime under another prefix.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;

use super::api::{Api, RawEvent, RawStream, host_call, take_back};
use super::{AcceleratorDevice, AcceleratorEvent, AcceleratorMemory, AcceleratorStream};
use crate::device::DeviceInfo;
use crate::id::DeviceKind;
use crate::priority::PriorityRange;
use crate::range::MemoryRange;
use crate::{Error, MemoryKind};

/// An accelerator behind a [`RuntimeLibrary`].
pub type RuntimeDevice = AcceleratorDevice<RuntimeApi>;
/// A [`Stream`](crate::Stream) of a [`RuntimeDevice`].
pub type RuntimeStream = AcceleratorStream<RuntimeApi>;
/// An [`Event`](crate::Event) of a [`RuntimeDevice`].
pub type RuntimeEvent = AcceleratorEvent<RuntimeApi>;
/// Memory that a [`RuntimeDevice`] allocated.
pub type RuntimeMemory = AcceleratorMemory<RuntimeApi>;

impl RuntimeDevice {
    /// Opens the device with index `ordinal`, counted from 0.
    ///
    /// # Errors
    /// Returns [`Error::DeviceUnavailable`] if there is no such device, and [`Error::Driver`] if a
    /// call of the library fails.
    pub fn new(library: &RuntimeLibrary, ordinal: usize) -> Result<Self, Error> {
        let count = library.device_count()?;
        if ordinal >= count {
            return Err(Error::DeviceUnavailable {
                device: format!("{}:{ordinal}", library.name()),
                reason: format!("the library has {count} device(s), numbered from 0"),
            });
        }
        Self::open(RuntimeApi { library: library.clone(), ordinal: ordinal as c_int })
    }
}

type Code = c_int;
type Handle = *mut c_void;
type HostFunction = unsafe extern "C" fn(*mut c_void);

const SUCCESS: Code = 0;
/// The code of an allocation if there is not enough memory.
const OUT_OF_MEMORY: Code = 2;
/// The code of a query while work is pending.
const NOT_READY: Code = 600;
/// The direction of a copy that the library finds out from the addresses.
const COPY_DEFAULT: c_int = 4;
/// The flag of registered memory that all devices know.
const PORTABLE: c_uint = 1;
/// The flag of streams that do not wait for the default stream.
const NON_BLOCKING: c_uint = 1;

/// Declares the functions of a library, with the names that they have after the prefix.
macro_rules! functions {
    ($($(#[$optional:ident])? $field:ident: $name:literal, fn($($argument:ty),*);)*) => {
        /// The functions of a library.
        struct Functions {
            $($field: functions!(@type $($optional)? fn($($argument),*)),)*
        }

        impl Functions {
            /// Looks up all functions.
            ///
            /// # Safety
            /// The functions of the library must have the signatures that [`RuntimeLibrary`]
            /// describes.
            unsafe fn of(library: &libloading::Library, prefix: &str) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        let name = format!("{prefix}{}", $name);
                        // SAFETY: the caller guarantees that the symbol has this signature.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> Code>(
                                name.as_bytes(),
                            )
                        };
                        functions!(@take $($optional)? found.ok().map(|symbol| *symbol), name)
                    },)*
                })
            }
        }
    };
    (@type optional fn($($argument:ty),*)) => {
        Option<unsafe extern "C" fn($($argument),*) -> Code>
    };
    (@type fn($($argument:ty),*)) => { unsafe extern "C" fn($($argument),*) -> Code };
    (@take optional $found:expr, $name:ident) => { $found };
    (@take $found:expr, $name:ident) => { $found.ok_or($name)? };
}

functions! {
    device_count: "GetDeviceCount", fn(*mut c_int);
    get_device: "GetDevice", fn(*mut c_int);
    set_device: "SetDevice", fn(c_int);
    priority_range: "DeviceGetStreamPriorityRange", fn(*mut c_int, *mut c_int);
    malloc: "Malloc", fn(*mut Handle, usize);
    free: "Free", fn(Handle);
    malloc_host: "MallocHost", fn(*mut Handle, usize);
    free_host: "FreeHost", fn(Handle);
    #[optional] host_register: "HostRegister", fn(Handle, usize, c_uint);
    #[optional] host_unregister: "HostUnregister", fn(Handle);
    #[optional] mem_info: "MemGetInfo", fn(*mut usize, *mut usize);
    memcpy: "Memcpy", fn(Handle, *const c_void, usize, c_int);
    memcpy_async: "MemcpyAsync", fn(Handle, *const c_void, usize, c_int, Handle);
    #[optional] memset_async: "MemsetAsync", fn(Handle, c_int, usize, Handle);
    stream_create: "StreamCreateWithPriority", fn(*mut Handle, c_uint, c_int);
    stream_destroy: "StreamDestroy", fn(Handle);
    stream_query: "StreamQuery", fn(Handle);
    stream_synchronize: "StreamSynchronize", fn(Handle);
    stream_wait_event: "StreamWaitEvent", fn(Handle, Handle, c_uint);
    event_create: "EventCreateWithFlags", fn(*mut Handle, c_uint);
    event_destroy: "EventDestroy", fn(Handle);
    event_record: "EventRecord", fn(Handle, Handle);
    event_query: "EventQuery", fn(Handle);
    event_synchronize: "EventSynchronize", fn(Handle);
    event_elapsed: "EventElapsedTime", fn(*mut f32, Handle, Handle);
    #[optional] launch_host_fn: "LaunchHostFunc", fn(Handle, HostFunction, *mut c_void);
    #[optional] get_last_error: "GetLastError", fn();
}

/// A library that has the functions of CUDA's runtime under another prefix. Clones are handles to
/// the same library.
///
/// The library must have these functions, with the signatures, the constants and the rules of
/// those whose names begin with `cuda`: `GetDeviceCount`, `GetDevice`, `SetDevice`,
/// `DeviceGetStreamPriorityRange`, `Malloc`, `Free`, `MallocHost`, `FreeHost`, `Memcpy`,
/// `MemcpyAsync`, `StreamCreateWithPriority`, `StreamDestroy`, `StreamQuery`, `StreamSynchronize`,
/// `StreamWaitEvent`, `EventCreateWithFlags`, `EventDestroy`, `EventRecord`, `EventQuery`,
/// `EventSynchronize`, and `EventElapsedTime`. It may have `MemGetInfo`, `MemsetAsync`,
/// `LaunchHostFunc`, `HostRegister` and `HostUnregister`. Without them, the operations that need
/// them return [`Error::Unsupported`]. It may also have `GetErrorName` and `GetLastError`. The
/// latter is called after an error, so that later calls of the program do not report the error.
///
/// An error is a number: 0 is success, 2 is too little memory, and 600 is pending work. The
/// library is never unloaded.
#[derive(Clone)]
pub struct RuntimeLibrary {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    prefix: String,
    functions: Functions,
    error_name: Option<unsafe extern "C" fn(Code) -> *const c_char>,
}

impl fmt::Debug for RuntimeLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RuntimeLibrary({}, {:?})", self.inner.path.display(), self.inner.prefix)
    }
}

impl RuntimeLibrary {
    /// Loads a library. `path` is a file, or a name that the dynamic linker searches for. `prefix`
    /// is what the names of the functions begin with, for example `musa`.
    ///
    /// # Errors
    /// Returns [`Error::DeviceUnavailable`] if the library cannot be loaded or lacks a function.
    ///
    /// # Safety
    /// Loading runs the initializers of the library. Its functions must have the signatures and
    /// the rules that this type describes.
    pub unsafe fn load(path: impl AsRef<OsStr>, prefix: &str) -> Result<Self, Error> {
        let path = Path::new(path.as_ref());
        let unavailable = |reason: String| Error::DeviceUnavailable {
            device: path.display().to_string(),
            reason,
        };
        // SAFETY: the caller guarantees that the initializers may run.
        let library = unsafe { libloading::Library::new(path) };
        let library = library.map_err(|error| unavailable(error.to_string()))?;
        // The functions are called until the process ends.
        let library = Box::leak(Box::new(library));
        // SAFETY: the caller guarantees the signatures.
        let functions = unsafe { Functions::of(library, prefix) };
        let functions = functions.map_err(|name| {
            unavailable(format!("it has no function {name}; check the prefix {prefix:?}"))
        })?;
        // SAFETY: as above.
        let error_name = unsafe { library.get(format!("{prefix}GetErrorName").as_bytes()) };
        let error_name = error_name.ok().map(|symbol| *symbol);
        let (path, prefix) = (path.to_owned(), prefix.to_owned());
        Ok(Self { inner: Arc::new(Inner { path, prefix, functions, error_name }) })
    }

    /// Returns the number of devices.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] if the library fails.
    pub fn device_count(&self) -> Result<usize, Error> {
        let mut count = 0;
        // SAFETY: `count` is valid for writes.
        self.check("GetDeviceCount", unsafe { (self.functions().device_count)(&raw mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    fn name(&self) -> String {
        self.inner.path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
    }

    fn functions(&self) -> &Functions {
        &self.inner.functions
    }

    fn check(&self, call: &'static str, code: Code) -> Result<(), Error> {
        if code == SUCCESS {
            return Ok(());
        }
        self.clear_error();
        let text = self.inner.error_name.map(|name| {
            // SAFETY: the function takes a number and returns a static string, or null.
            let text = unsafe { name(code) };
            // SAFETY: as above.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into())
        });
        let name = text.flatten().unwrap_or_else(|| format!("error of {}", self.name()));
        Err(Error::Driver { call, code, name })
    }

    /// Clears the error that the library remembers for this thread.
    fn clear_error(&self) {
        if let Some(get) = self.functions().get_last_error {
            // SAFETY: the call takes no arguments.
            let _ = unsafe { get() };
        }
    }

    /// Returns whether the queried work is done.
    fn is_complete(&self, call: &'static str, code: Code) -> Result<bool, Error> {
        if code == NOT_READY {
            self.clear_error();
            return Ok(false);
        }
        self.check(call, code).map(|()| true)
    }
}

/// A device of a library. Methods that need the device make it the current one during the call.
#[derive(Debug)]
pub struct RuntimeApi {
    library: RuntimeLibrary,
    ordinal: c_int,
}

/// Makes the previous device of this thread current again when it is dropped.
struct Current<'a> {
    library: &'a RuntimeLibrary,
    before: c_int,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        // SAFETY: the call takes no pointers.
        let _ = unsafe { (self.library.functions().set_device)(self.before) };
    }
}

impl RuntimeApi {
    /// Makes the device current on this thread until the result is dropped. PyTorch's current
    /// device is that of the library, so it must not change.
    fn make_current(&self) -> Result<Option<Current<'_>>, Error> {
        let (library, functions) = (&self.library, self.functions());
        let mut before = 0;
        // SAFETY: `before` is valid for writes.
        library.check("GetDevice", unsafe { (functions.get_device)(&raw mut before) })?;
        if before == self.ordinal {
            return Ok(None);
        }
        // SAFETY: the call takes no pointers.
        library.check("SetDevice", unsafe { (functions.set_device)(self.ordinal) })?;
        Ok(Some(Current { library, before }))
    }

    fn functions(&self) -> &Functions {
        self.library.functions()
    }

    /// Returns how many bytes of memory are available, and how many there are, if this is known.
    fn memory_bytes(&self) -> Result<Option<(u64, u64)>, Error> {
        let Some(mem_info) = self.functions().mem_info else { return Ok(None) };
        let _current = self.make_current()?;
        let (mut available, mut total) = (0, 0);
        // SAFETY: both variables are valid for writes.
        let code = unsafe { mem_info(&raw mut available, &raw mut total) };
        self.check("MemGetInfo", code).map(|()| Some((available as u64, total as u64)))
    }

    fn check(&self, call: &'static str, code: Code) -> Result<(), Error> {
        self.library.check(call, code)
    }

    fn unsupported(&self, what: &'static str) -> Error {
        Error::Unsupported { device: format!("{}:{}", self.library.name(), self.ordinal), what }
    }
}

impl Api for RuntimeApi {
    const KIND: DeviceKind = DeviceKind::Runtime;

    fn info(&self) -> Result<DeviceInfo, Error> {
        let _current = self.make_current()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both variables are valid for writes.
        self.check("DeviceGetStreamPriorityRange", unsafe {
            (self.functions().priority_range)(&raw mut least, &raw mut greatest)
        })?;
        let total_bytes = self.memory_bytes()?.map(|(_, total)| total);
        Ok(DeviceInfo {
            kind: DeviceKind::Runtime,
            name: format!("{}:{}", self.library.name(), self.ordinal),
            ordinal: self.ordinal as u32,
            total_bytes,
            priorities: PriorityRange { least, greatest },
            host_memory: false,
            runs_by_itself: true,
            can_prefetch: false,
        })
    }

    fn available_bytes(&self) -> Result<Option<u64>, Error> {
        Ok(self.memory_bytes()?.map(|(available, _)| available))
    }

    fn combines_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.library.inner, &other.library.inner)
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Option<*mut u8>, Error> {
        let functions = self.functions();
        let (call, function) = match kind {
            MemoryKind::Device => ("Malloc", functions.malloc),
            MemoryKind::PinnedHost => ("MallocHost", functions.malloc_host),
            MemoryKind::Managed => return Err(self.unsupported("managed memory")),
            MemoryKind::Host => unreachable!("`HostBlock` allocates this kind, not the library"),
        };
        let _current = self.make_current()?;
        let mut start = null_mut();
        // SAFETY: `start` is valid for writes.
        match unsafe { function(&raw mut start, bytes) } {
            OUT_OF_MEMORY => {
                self.library.clear_error();
                Ok(None)
            }
            code => self.check(call, code).map(|()| Some(start.cast())),
        }
    }

    unsafe fn register(&self, range: MemoryRange) -> Result<(), Error> {
        let functions = self.functions();
        let (Some(register), Some(_)) = (functions.host_register, functions.host_unregister) else {
            return Err(self.unsupported("registering host memory"));
        };
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that the memory is valid until `unregister`.
        self.check("HostRegister", unsafe {
            register(range.as_ptr().cast(), range.len(), PORTABLE)
        })
    }

    unsafe fn unregister(&self, start: *mut u8) {
        if let (Some(unregister), Ok(_current)) =
            (self.functions().host_unregister, self.make_current())
        {
            // SAFETY: the caller guarantees that the memory is registered and no longer copied.
            let _ = unsafe { unregister(start.cast()) };
        }
    }

    fn keep_freed_memory(&self) -> Result<(), Error> {
        Err(self.unsupported("stream-ordered allocation"))
    }

    fn allocate_async(&self, _: usize, _: &RawStream) -> Result<Option<*mut u8>, Error> {
        Err(self.unsupported("stream-ordered allocation"))
    }

    unsafe fn free_async(&self, _: *mut u8, _: &RawStream) -> Result<(), Error> {
        Err(self.unsupported("stream-ordered allocation"))
    }

    unsafe fn free(&self, start: *mut u8) {
        if let Ok(_current) = self.make_current() {
            // SAFETY: the caller guarantees that `start` comes from `Malloc`, and that nothing
            // uses the memory any more.
            let _ = unsafe { (self.functions().free)(start.cast()) };
        }
    }

    unsafe fn free_pinned(&self, start: *mut u8) {
        // SAFETY: the caller guarantees that `start` comes from `MallocHost`, and that nothing
        // uses the memory any more.
        let _ = unsafe { (self.functions().free_host)(start.cast()) };
    }

    unsafe fn copy_now(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        let (to_start, from_start) = (to.as_ptr().cast(), from.as_ptr().cast_const().cast());
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that both ranges are valid, equally long and not changed
        // by other code during the call.
        self.check("Memcpy", unsafe {
            (self.functions().memcpy)(to_start, from_start, to.len(), COPY_DEFAULT)
        })
    }

    fn create_stream(&self, level: i32) -> Result<RawStream, Error> {
        let _current = self.make_current()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for writes.
        self.check("StreamCreateWithPriority", unsafe {
            (self.functions().stream_create)(&raw mut raw, NON_BLOCKING, level)
        })?;
        Ok(RawStream(raw))
    }

    fn create_event(&self) -> Result<RawEvent, Error> {
        let _current = self.make_current()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for writes.
        self.check("EventCreateWithFlags", unsafe {
            (self.functions().event_create)(&raw mut raw, 0)
        })?;
        Ok(RawEvent(raw))
    }

    fn record(&self, stream: &RawStream, event: &RawEvent) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that the stream and the event exist.
        self.check("EventRecord", unsafe { (self.functions().event_record)(event.0, stream.0) })
    }

    fn wait(&self, stream: &RawStream, event: &RawEvent) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that the stream and the event exist.
        self.check("StreamWaitEvent", unsafe {
            (self.functions().stream_wait_event)(stream.0, event.0, 0)
        })
    }

    unsafe fn copy(
        &self,
        stream: &RawStream,
        to: MemoryRange,
        from: MemoryRange,
    ) -> Result<(), Error> {
        let (to_start, from_start) = (to.as_ptr().cast(), from.as_ptr().cast_const().cast());
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that both ranges are equally long, and that they are valid
        // and not changed by other code until the copy is done.
        self.check("MemcpyAsync", unsafe {
            let copy = self.functions().memcpy_async;
            copy(to_start, from_start, to.len(), COPY_DEFAULT, stream.0)
        })
    }

    unsafe fn fill(&self, stream: &RawStream, to: MemoryRange, byte: u8) -> Result<(), Error> {
        let fill = self.functions().memset_async;
        let fill = fill.ok_or_else(|| self.unsupported("fills"))?;
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that `to` is valid and not used by other code until the
        // fill is done.
        let code = unsafe { fill(to.as_ptr().cast(), c_int::from(byte), to.len(), stream.0) };
        self.check("MemsetAsync", code)
    }

    fn prefetch(&self, _: &RawStream, _: MemoryRange, _: bool) -> Result<(), Error> {
        Err(self.unsupported("prefetching managed memory"))
    }

    fn launch_host_fn(
        &self,
        stream: &RawStream,
        run: Box<dyn FnOnce() + Send>,
    ) -> Result<(), Error> {
        let launch = self.functions().launch_host_fn;
        let launch = launch.ok_or_else(|| self.unsupported("host functions"))?;
        let _current = self.make_current()?;
        let (call, run) = host_call(run);
        // SAFETY: `call` takes ownership of `run`, and the library calls it at most once.
        let code = unsafe { launch(stream.0, call, run) };
        if code != SUCCESS {
            // SAFETY: the library did not accept the function, so it never calls it.
            unsafe { take_back(run) };
        }
        self.check("LaunchHostFunc", code)
    }

    fn is_done(&self, stream: &RawStream) -> Result<bool, Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that the stream exists.
        let code = unsafe { (self.functions().stream_query)(stream.0) };
        self.library.is_complete("StreamQuery", code)
    }

    fn synchronize(&self, stream: &RawStream) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that the stream exists.
        let code = unsafe { (self.functions().stream_synchronize)(stream.0) };
        self.check("StreamSynchronize", code)
    }

    fn is_reached(&self, event: &RawEvent) -> Result<bool, Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that the event exists.
        let code = unsafe { (self.functions().event_query)(event.0) };
        self.library.is_complete("EventQuery", code)
    }

    fn wait_for_event(&self, event: &RawEvent) -> Result<(), Error> {
        let _current = self.make_current()?;
        // SAFETY: the caller guarantees that the event exists.
        let code = unsafe { (self.functions().event_synchronize)(event.0) };
        self.check("EventSynchronize", code)
    }

    fn elapsed_ms(&self, start: &RawEvent, end: &RawEvent) -> Result<Option<f32>, Error> {
        let _current = self.make_current()?;
        let mut milliseconds = 0.0;
        // SAFETY: the caller guarantees that both events exist. `milliseconds` is valid for writes.
        let code =
            unsafe { (self.functions().event_elapsed)(&raw mut milliseconds, start.0, end.0) };
        let done = self.library.is_complete("EventElapsedTime", code)?;
        Ok(done.then_some(milliseconds))
    }

    unsafe fn destroy_stream(&self, stream: &RawStream) {
        if let Ok(_current) = self.make_current() {
            // SAFETY: the caller guarantees that the library created the stream, and that it is
            // not used again.
            let _ = unsafe { (self.functions().stream_destroy)(stream.0) };
        }
    }

    unsafe fn destroy_event(&self, event: &RawEvent) {
        if let Ok(_current) = self.make_current() {
            // SAFETY: the caller guarantees that the library created the event, and that it is not
            // used again.
            let _ = unsafe { (self.functions().event_destroy)(event.0) };
        }
    }
}
