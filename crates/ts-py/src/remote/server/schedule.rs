// SPDX-License-Identifier: MIT OR Apache-2.0
//! How Linux divides the CPU time among the processes of sessions.

use pyo3::prelude::*;

/// Sets the niceness and the time slice of a process's threads. Threads that they start later
/// inherit both.
///
/// Ignores errors: a thread may have ended, and only some users may lower a niceness. Linux before
/// 6.12 ignores the time slice.
///
/// Args:
///     process: The ID of the process.
///     niceness: From 0 to 19.
///     slice: The time slice in seconds. A thread that wakes up interrupts those with longer ones.
#[pyfunction]
pub(crate) fn set_share(process: u32, niceness: i32, slice: f64) {
    system::set_share(process, niceness, (slice * 1e9) as u64);
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub(super) fn set_share(_: u32, _: i32, _: u64) {}
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs;

    use libc::{c_int, id_t};

    /// The structure `sched_attr` of sched_setattr(2).
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        niceness: i32,
        priority: u32,
        /// For the policy SCHED_OTHER, which is 0: the time slice in nanoseconds.
        runtime: u64,
        deadline: u64,
        period: u64,
    }

    pub(super) fn set_share(process: u32, niceness: i32, slice: u64) {
        let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return };
        for thread in threads.flatten() {
            if let Some(id) = thread.file_name().to_str().and_then(|name| name.parse().ok()) {
                set_share_of_thread(id, niceness, slice);
            }
        }
    }

    fn set_share_of_thread(thread: id_t, niceness: c_int, slice: u64) {
        let size = size_of::<Attributes>() as u32;
        let attributes = Attributes { size, niceness, runtime: slice, ..Attributes::default() };
        // SAFETY: the structure is valid for the call, and has the size that it states.
        let set =
            unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attributes, 0) };
        if set != 0 {
            // SAFETY: the call has no pointers. It fails for a thread that does not exist.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, niceness) };
        }
    }
}
