// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions of NVIDIA's cuFile library that this crate uses, loaded at run time. Names and
//! layouts match cufile.h 1.14, and have not changed since 1.0.

use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::OnceLock;

/// The declarations of cufile.h that this module uses.
mod raw {
    use super::{c_int, c_void};

    #[repr(C)]
    #[derive(Clone, Copy)]
    pub(super) struct Status {
        pub(super) cufile: c_int,
        pub(super) cuda: c_int,
    }

    #[repr(C)]
    pub(super) struct Descriptor {
        pub(super) kind: c_int,
        /// In C, this is a union of a file descriptor and a pointer.
        pub(super) handle: usize,
        pub(super) operations: *const c_void,
    }

    /// `CUfileDrvProps_t`, with space for fields that later versions may append.
    #[repr(C)]
    pub(super) struct Properties {
        pub(super) major_version: u32,
        pub(super) minor_version: u32,
        pub(super) poll_threshold: usize,
        pub(super) max_direct_io_size: usize,
        pub(super) status_flags: u32,
        pub(super) control_flags: u32,
        pub(super) rest: [u64; 64],
    }

    pub(super) const OPAQUE_FD: c_int = 1;
    /// The bit of `status_flags` for PCI peer-to-peer transfers to NVMe, which need no nvidia-fs.
    pub(super) const NVME_P2P: u32 = 1 << 11;

    pub(super) type DriverOpen = unsafe extern "C" fn() -> Status;
    pub(super) type DriverProperties = unsafe extern "C" fn(*mut Properties) -> Status;
    pub(super) type HandleRegister =
        unsafe extern "C" fn(*mut *mut c_void, *mut Descriptor) -> Status;
    pub(super) type HandleDeregister = unsafe extern "C" fn(*mut c_void);
    pub(super) type Read = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, i64, i64) -> isize;
    pub(super) type ReadAsync = unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        *mut usize,
        *mut i64,
        *mut i64,
        *mut isize,
        *mut c_void,
    ) -> Status;
}

/// The loaded library, with its driver open. Both stay open until the process ends.
pub(crate) struct CuFile {
    register: raw::HandleRegister,
    deregister: raw::HandleDeregister,
    read: raw::Read,
    /// `None` before version 1.7 of the library (CUDA 12.2).
    read_async: Option<raw::ReadAsync>,
    properties: raw::Properties,
}

impl CuFile {
    /// Returns the library, or the reason why it cannot be used. The first call loads the library.
    pub(crate) fn get() -> Result<&'static CuFile, String> {
        static LIBRARY: OnceLock<Result<CuFile, String>> = OnceLock::new();
        LIBRARY.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, String> {
        // Without NVIDIA's driver, cuFileDriverOpen never returns.
        check_driver()?;
        let mode = libc::RTLD_NOW | libc::RTLD_LOCAL;
        // SAFETY: the name is a C string, and the initializers of NVIDIA's library have no
        // preconditions. The library is never closed.
        let library = unsafe { libc::dlopen(c"libcufile.so.0".as_ptr(), mode) };
        if library.is_null() {
            return Err(
                "cannot load libcufile.so.0; install GPUDirect Storage, or add the directory of \
                        the library to LD_LIBRARY_PATH"
                    .into(),
            );
        }
        let symbol = |name: &CStr| {
            // SAFETY: the library is open, and the name is a C string.
            let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
            if symbol.is_null() {
                Err(format!("libcufile.so.0 does not export {}", name.to_string_lossy()))
            } else {
                Ok(symbol)
            }
        };
        // SAFETY: cufile.h declares functions of these names with these types.
        let (open, properties, register, deregister, read) = unsafe {
            (
                std::mem::transmute::<*mut c_void, raw::DriverOpen>(symbol(c"cuFileDriverOpen")?),
                std::mem::transmute::<*mut c_void, raw::DriverProperties>(symbol(
                    c"cuFileDriverGetProperties",
                )?),
                std::mem::transmute::<*mut c_void, raw::HandleRegister>(symbol(
                    c"cuFileHandleRegister",
                )?),
                std::mem::transmute::<*mut c_void, raw::HandleDeregister>(symbol(
                    c"cuFileHandleDeregister",
                )?),
                std::mem::transmute::<*mut c_void, raw::Read>(symbol(c"cuFileRead")?),
            )
        };
        let read_async = symbol(c"cuFileReadAsync").ok();
        // SAFETY: as above.
        let read_async = read_async
            .map(|symbol| unsafe { std::mem::transmute::<*mut c_void, raw::ReadAsync>(symbol) });
        // SAFETY: `cuFileDriverOpen` has no preconditions.
        check("cuFileDriverOpen", unsafe { open() })?;
        // SAFETY: `Properties` consists of integers, so all zeros are a valid value.
        let mut found: raw::Properties = unsafe { std::mem::zeroed() };
        // SAFETY: the driver is open, and `found` is writable and larger than the structure that
        // the call writes.
        check("cuFileDriverGetProperties", unsafe { properties(&raw mut found) })?;
        Ok(Self { register, deregister, read, read_async, properties: found })
    }

    /// Returns whether data goes directly between storage and GPU, through nvidia-fs or PCI
    /// peer-to-peer. Otherwise the library reads into host memory and copies ("compatibility
    /// mode").
    pub(crate) fn is_direct(&self) -> bool {
        (self.properties.major_version, self.properties.minor_version) != (0, 0)
            || self.properties.status_flags & raw::NVME_P2P != 0
    }
}

/// Checks that NVIDIA's driver works, by initializing its library.
fn check_driver() -> Result<(), String> {
    let missing = |why: &str| {
        Err(format!("cuFile (GPUDirect Storage) needs NVIDIA's driver, which is not loaded: {why}"))
    };
    let mode = libc::RTLD_NOW | libc::RTLD_LOCAL;
    // SAFETY: the name is a C string, and the initializers of the driver's library have no
    // preconditions. The library is never closed.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), mode) };
    if library.is_null() {
        return missing("cannot load libcuda.so.1");
    }
    // SAFETY: the library is open, and the name is a C string.
    let init = unsafe { libc::dlsym(library, c"cuInit".as_ptr()) };
    if init.is_null() {
        return missing("libcuda.so.1 does not export cuInit");
    }
    // SAFETY: cuda.h declares `cuInit` with this type.
    let init =
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u32) -> c_int>(init) };
    // SAFETY: the function has no preconditions.
    match unsafe { init(0) } {
        0 => Ok(()),
        code => missing(&format!("cuInit failed with CUDA error {code} (see CUresult in cuda.h)")),
    }
}

/// A file that is registered with cuFile. A descriptor can be registered only once, so all threads
/// share the handle.
pub(crate) struct CuFileHandle {
    library: &'static CuFile,
    handle: *mut c_void,
    /// The registered file. It must stay open until the handle is deregistered.
    _file: File,
}

// SAFETY: any number of threads may use a handle (GPUDirect Storage API reference, "Thread
// safety").
unsafe impl Send for CuFileHandle {}
// SAFETY: any number of threads may use a handle at the same time, as for `Send`.
unsafe impl Sync for CuFileHandle {}

impl std::fmt::Debug for CuFileHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CuFileHandle")
    }
}

impl CuFileHandle {
    /// Registers a file that was opened with O_DIRECT. Returns the reason if that fails.
    pub(crate) fn new(file: &File) -> Result<Self, String> {
        let library = CuFile::get()?;
        let file = file.try_clone().map_err(|e| e.to_string())?;
        let mut handle = std::ptr::null_mut();
        let mut descriptor = raw::Descriptor {
            kind: raw::OPAQUE_FD,
            handle: file.as_raw_fd() as usize,
            operations: std::ptr::null(),
        };
        // SAFETY: both pointers are valid during the call, and the descriptor stays open until the
        // handle is deregistered.
        let status = unsafe { (library.register)(&raw mut handle, &raw mut descriptor) };
        check("cuFileHandleRegister", status)?;
        Ok(Self { library, handle, _file: file })
    }

    /// Reads into host memory: at least one byte, unless the file ends at `offset`.
    pub(crate) fn read_at(&self, memory: &mut [u8], offset: u64) -> io::Result<usize> {
        let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the handle is registered, the memory is exclusively borrowed and has the given
        // length, and the library does not access it after the call.
        let read = unsafe {
            (self.library.read)(self.handle, memory.as_mut_ptr().cast(), memory.len(), offset, 0)
        };
        match read {
            -1 => Err(io::Error::last_os_error()),
            read => usize::try_from(read).map_err(|_| {
                io::Error::other(format!(
                    "cuFileRead failed: cuFile error {} (see CUfileOpError in cufile.h)",
                    -read
                ))
            }),
        }
    }
}

/// A read of a file into memory of a GPU, which may still be running.
#[derive(Debug)]
pub(crate) struct CuFileRead(NonNull<Parameters>);

// SAFETY: the value owns the parameters.
unsafe impl Send for CuFileRead {}

impl Drop for CuFileRead {
    fn drop(&mut self) {
        // SAFETY: `begin_read` has made the box, and the library no longer uses it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// What the library reads when it begins a read, and writes at its end.
#[derive(Debug)]
struct Parameters {
    len: usize,
    file_offset: i64,
    memory_offset: i64,
    read: isize,
}

impl CuFileHandle {
    /// Submits a read of `len` bytes at `offset` to a CUDA stream.
    ///
    /// # Errors
    /// Returns the reason if the library does not accept the read.
    ///
    /// # Safety
    /// `stream` must be a stream of the current context, and `memory` valid for writes of `len`
    /// bytes by its work. This value and the result must exist until the stream has done the read.
    pub(crate) unsafe fn begin_read(
        &self,
        memory: *mut u8,
        len: usize,
        offset: u64,
        stream: *mut c_void,
    ) -> Result<CuFileRead, String> {
        let read = self.library.read_async.ok_or(NO_ASYNC)?;
        let file_offset = i64::try_from(offset).map_err(|_| "the offset is too large")?;
        let parameters = Box::new(Parameters { len, file_offset, memory_offset: 0, read: 0 });
        let parameters = CuFileRead(NonNull::from(Box::leak(parameters)));
        let of = parameters.0.as_ptr();
        // SAFETY: the handle is registered, and the pointers are valid until the read has ended,
        // because the caller keeps the result.
        let status = unsafe {
            read(
                self.handle,
                memory.cast(),
                &raw mut (*of).len,
                &raw mut (*of).file_offset,
                &raw mut (*of).memory_offset,
                &raw mut (*of).read,
                stream,
            )
        };
        check("cuFileReadAsync", status)?;
        Ok(parameters)
    }
}

/// Why the library cannot read to GPUs in the order of streams.
pub(crate) const NO_ASYNC: &str = "libcufile.so.0 does not export cuFileReadAsync; install \
                                   GPUDirect Storage of CUDA 12.2 or later";

impl CuFile {
    /// Returns whether the library has [`CuFileHandle::begin_read`].
    pub(crate) fn reads_in_streams(&self) -> bool {
        self.read_async.is_some()
    }
}

impl CuFileRead {
    /// Returns how many bytes were read. The stream must have done the read.
    pub(crate) fn end(self) -> io::Result<usize> {
        // SAFETY: the library has written the field, and no longer uses it.
        let read = unsafe { (&raw const (*self.0.as_ptr()).read).read_volatile() };
        usize::try_from(read).map_err(|_| match read {
            -1 => io::Error::other("cuFileReadAsync failed in the file system"),
            code => io::Error::other(format!(
                "cuFileReadAsync failed: cuFile error {} (see CUfileOpError in cufile.h)",
                -code
            )),
        })
    }
}

impl Drop for CuFileHandle {
    fn drop(&mut self) {
        // SAFETY: `new` has registered the handle. No read uses it, because reads borrow `self` or
        // own the source.
        unsafe { (self.library.deregister)(self.handle) };
    }
}

fn check(call: &str, status: raw::Status) -> Result<(), String> {
    match status {
        raw::Status { cufile: 0, .. } => Ok(()),
        raw::Status { cufile, cuda: 0 } => {
            Err(format!("{call} failed: cuFile error {cufile} (see CUfileOpError in cufile.h)"))
        }
        raw::Status { cufile, cuda } => Err(format!(
            "{call} failed: cuFile error {cufile} (see CUfileOpError in cufile.h), CUDA error \
             {cuda} (see CUresult in cuda.h)"
        )),
    }
}
