// SPDX-License-Identifier: MIT OR Apache-2.0
//! NVIDIA's cuFile, as far as reads need it: found at run time, in three layers. Names and layouts
//! are those of cufile.h 1.14, which has kept them since 1.0.

use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::OnceLock;

/// Raw symbols.
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
        /// A union of a descriptor and a pointer.
        pub(super) handle: usize,
        pub(super) operations: *const c_void,
    }

    /// `CUfileDrvProps_t`, with room for what later versions append.
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
    /// Bit of `status_flags`: PCI peer-to-peer to NVMe, which needs no nvidia-fs.
    pub(super) const NVME_P2P: u32 = 1 << 11;

    pub(super) type DriverOpen = unsafe extern "C" fn() -> Status;
    pub(super) type DriverProperties = unsafe extern "C" fn(*mut Properties) -> Status;
    pub(super) type HandleRegister =
        unsafe extern "C" fn(*mut *mut c_void, *mut Descriptor) -> Status;
    pub(super) type HandleDeregister = unsafe extern "C" fn(*mut c_void);
    pub(super) type Read = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, i64, i64) -> isize;
}

/// The library, opened once for the life of the process, as its driver is.
pub(crate) struct CuFile {
    register: raw::HandleRegister,
    deregister: raw::HandleDeregister,
    read: raw::Read,
    properties: raw::Properties,
}

impl CuFile {
    /// The library with its driver open, or why there is none.
    pub(crate) fn get() -> Result<&'static CuFile, String> {
        static LIBRARY: OnceLock<Result<CuFile, String>> = OnceLock::new();
        LIBRARY.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, String> {
        // Without a driver cuFileDriverOpen never returns.
        driver_below(Path::new("/"))?;
        // SAFETY: the names are C strings; a library that is found is never closed. Its
        // initialisers are NVIDIA's.
        let library =
            unsafe { libc::dlopen(c"libcufile.so.0".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err("libcufile.so.0 (GPUDirect Storage) is not installed".into());
        }
        let symbol = |name: &CStr| {
            // SAFETY: the library is open and the name a C string.
            let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
            if symbol.is_null() {
                Err(format!("libcufile.so.0 has no {}", name.to_string_lossy()))
            } else {
                Ok(symbol)
            }
        };
        // SAFETY: these are the functions of these names in cufile.h, with the types it gives them.
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
        // SAFETY: it has no preconditions.
        check("cuFileDriverOpen", unsafe { open() })?;
        // SAFETY: all-zero bytes are a valid `Properties`, which is plain integers.
        let mut found: raw::Properties = unsafe { std::mem::zeroed() };
        // SAFETY: the driver is open, and `found` is as large as the structure and larger.
        check("cuFileDriverGetProperties", unsafe { properties(&raw mut found) })?;
        Ok(Self { register, deregister, read, properties: found })
    }

    /// Whether storage and GPU talk to each other, by nvidia-fs or PCI peer-to-peer; else the
    /// library reads through the host and copies ("compatibility mode").
    pub(crate) fn is_direct(&self) -> bool {
        (self.properties.major_version, self.properties.minor_version) != (0, 0)
            || self.properties.status_flags & raw::NVME_P2P != 0
    }
}

/// Whether NVIDIA's driver is loaded: the system below `root` shows it in at least one of these
/// places.
fn driver_below(root: &Path) -> Result<(), String> {
    const PLACES: [&str; 2] = ["proc/driver/nvidia/version", "dev/nvidiactl"];
    if PLACES.iter().any(|place| root.join(place).exists()) {
        return Ok(());
    }
    let reason = "cuFile (GPUDirect Storage) needs NVIDIA's driver, which is not loaded: neither \
                  /proc/driver/nvidia/version nor /dev/nvidiactl exists";
    Err(reason.into())
}

/// A file as the library knows it. It knows each descriptor once, so there is one for all threads.
pub(crate) struct CuFileHandle {
    library: &'static CuFile,
    handle: *mut c_void,
    /// What is registered; open until the handle is gone.
    _file: File,
}

// SAFETY: the library lets any number of threads use a handle (the GPUDirect Storage API reference,
// "Thread safety").
unsafe impl Send for CuFileHandle {}
// SAFETY: as above.
unsafe impl Sync for CuFileHandle {}

impl std::fmt::Debug for CuFileHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CuFileHandle")
    }
}

impl CuFileHandle {
    /// Makes a file that was opened past the page cache known to the library, or says why not.
    pub(crate) fn new(file: &File) -> Result<Self, String> {
        let library = CuFile::get()?;
        let file = file.try_clone().map_err(|e| e.to_string())?;
        let mut handle = std::ptr::null_mut();
        let mut descriptor = raw::Descriptor {
            kind: raw::OPAQUE_FD,
            handle: file.as_raw_fd() as usize,
            operations: std::ptr::null(),
        };
        // SAFETY: both pointers are valid for the call, and the descriptor is open as long as the
        // handle is known.
        let status = unsafe { (library.register)(&raw mut handle, &raw mut descriptor) };
        check("cuFileHandleRegister", status)?;
        Ok(Self { library, handle, _file: file })
    }

    /// Reads into host memory, at least a byte unless the file ends at `offset`.
    pub(crate) fn read_at(&self, memory: &mut [u8], offset: u64) -> io::Result<usize> {
        let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the handle is registered, the memory is exclusively borrowed and as long as is
        // said, and the call returns when it no longer touches it.
        let read = unsafe {
            (self.library.read)(self.handle, memory.as_mut_ptr().cast(), memory.len(), offset, 0)
        };
        match read {
            -1 => Err(io::Error::last_os_error()),
            read => usize::try_from(read).map_err(|_| {
                io::Error::other(format!("cuFileRead failed with cuFile error {}", -read))
            }),
        }
    }
}

impl Drop for CuFileHandle {
    fn drop(&mut self) {
        // SAFETY: it was registered when this was made, and nobody reads by it any more.
        unsafe { (self.library.deregister)(self.handle) };
    }
}

fn check(call: &str, status: raw::Status) -> Result<(), String> {
    match status {
        raw::Status { cufile: 0, .. } => Ok(()),
        raw::Status { cufile, cuda } => Err(format!(
            "{call} failed with cuFile error {cufile}, CUDA error {cuda}: is there a GPU and its \
             driver?"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_is_found_where_the_system_shows_it() {
        let root = tempfile::tempdir().expect("a directory");
        let missing = driver_below(root.path()).expect_err("there is none yet");
        assert!(missing.contains("NVIDIA's driver, which is not loaded"), "{missing}");
        std::fs::create_dir(root.path().join("dev")).expect("a directory");
        std::fs::write(root.path().join("dev/nvidiactl"), "").expect("a file");
        assert_eq!(driver_below(root.path()), Ok(()));
    }
}
