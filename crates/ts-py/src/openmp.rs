// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes idle OpenMP threads of PyTorch sleep at once, so that reading gets their processor time.
//!
//! PyTorch computes with the OpenMP library libgomp. Its idle threads spin for about 3 ms before
//! they sleep, except while libgomp has more threads than there are processors: then they spin for
//! a microsecond. While weights are streamed, an [`IdleTeam`] adds threads that do nothing, which
//! is enough to get this behaviour. libgomp reads its environment variables only when it is loaded,
//! which is usually before TensorStream is.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use parking_lot::Mutex;

/// The variables by which users choose how idle threads wait.
const USER_SETTINGS: [&str; 2] = ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"];

/// Threads of libgomp that sleep until this value is dropped.
pub(crate) struct IdleTeam {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// The id of the process that started the threads.
    process: u32,
}

static CURRENT: Mutex<Weak<IdleTeam>> = Mutex::new(Weak::new());

impl IdleTeam {
    /// Returns the team, which is started if there is none. Returns `None` if PyTorch does not use
    /// libgomp, if its threads leave half of the processors free, or if the user has chosen how
    /// idle threads wait.
    pub(crate) fn shared() -> Option<Arc<Self>> {
        if USER_SETTINGS.iter().any(|name| std::env::var_os(name).is_some()) {
            return None;
        }
        let mut current = CURRENT.lock();
        let usable = current.upgrade().filter(|team| team.process == std::process::id());
        if usable.is_some() {
            return usable;
        }
        let library = Gomp::loaded()?;
        let team = Arc::new(Self::start(&library)?);
        *current = Arc::downgrade(&team);
        Some(team)
    }

    fn start(library: &Gomp) -> Option<Self> {
        // SAFETY: the functions have these signatures, and return a setting of the calling thread.
        let (processors, threads) = unsafe { ((library.processors)(), (library.max_threads)()) };
        if threads > processors || threads <= processors / 2 {
            return None;
        }
        // The threads of the team besides the one that starts it.
        let idle = (processors - threads + 1).unsigned_abs();
        let parallel = library.parallel;
        let (stop, stopped) = channel::<()>();
        let work = move || {
            // SAFETY: `GOMP_parallel` calls the function on each thread of the team, with the null
            // pointer, and returns when all of them have returned.
            unsafe { parallel(nothing, std::ptr::null_mut(), idle + 1, 0) };
            // libgomp keeps the team until this thread ends.
            let _ = stopped.recv();
        };
        let thread = std::thread::Builder::new().name("ts-openmp".into()).spawn(work).ok()?;
        Some(Self { stop: Some(stop), thread: Some(thread), process: std::process::id() })
    }
}

impl Drop for IdleTeam {
    fn drop(&mut self) {
        let (stop, thread) = (self.stop.take(), self.thread.take());
        if self.process != std::process::id() {
            // The thread does not exist in a forked child.
            std::mem::forget((stop, thread));
            return;
        }
        drop(stop);
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

extern "C" fn nothing(_: *mut c_void) {}

type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);
type Setting = unsafe extern "C" fn() -> c_int;

/// The functions of the libgomp that PyTorch has loaded.
struct Gomp {
    parallel: Parallel,
    processors: Setting,
    max_threads: Setting,
}

impl Gomp {
    fn loaded() -> Option<Self> {
        let maps = std::fs::read("/proc/self/maps").ok()?;
        let path = |line: &[u8]| {
            let start = line.iter().position(|&byte| byte == b'/')?;
            Some(std::ffi::OsStr::from_bytes(&line[start..]).to_owned())
        };
        let mut found: Vec<_> = maps
            .split(|&byte| byte == b'\n')
            .filter_map(path)
            .filter(|path| {
                let name = std::path::Path::new(path).file_name();
                name.is_some_and(|name| name.as_bytes().starts_with(b"libgomp"))
            })
            .collect();
        // Other packages may have loaded their own copies.
        found.sort_by_key(|path| !path.as_bytes().windows(5).any(|part| part == b"torch"));
        let library = CString::new(found.first()?.as_bytes()).ok()?;
        // SAFETY: `RTLD_NOLOAD` loads nothing, so this runs no code of the library. The handle is
        // never closed, so the functions stay valid.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return None;
        }
        let symbol = |name: &CStr| {
            // SAFETY: the handle is valid.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
            (!address.is_null()).then_some(address)
        };
        let (parallel, processors, max_threads) = (
            symbol(c"GOMP_parallel")?,
            symbol(c"omp_get_num_procs")?,
            symbol(c"omp_get_max_threads")?,
        );
        // SAFETY: these are the signatures of the functions, which are part of libgomp's ABI.
        Some(unsafe {
            Self {
                parallel: std::mem::transmute::<*mut c_void, Parallel>(parallel),
                processors: std::mem::transmute::<*mut c_void, Setting>(processors),
                max_threads: std::mem::transmute::<*mut c_void, Setting>(max_threads),
            }
        })
    }
}
