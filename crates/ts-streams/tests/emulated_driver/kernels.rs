// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the kernels of `libkernels.so`.

use std::ffi::{c_char, c_void};

use crate::{Code, break_device, with};

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: i32) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// A kernel of `libkernels.so`, as `struct kernel` in `kernels.c`.
#[repr(C)]
pub(crate) struct Kernel {
    name: *const c_char,
    pub(crate) parameters: i32,
    has_phases: i32,
    run: *const c_void,
}

pub(crate) type FindKernel = unsafe extern "C" fn(*const c_char) -> *const Kernel;
pub(crate) type RunKernel = unsafe extern "C" fn(*const Kernel, u32, u32, *const u64);

/// Returns the functions of `libkernels.so`, if it exists.
pub(crate) fn kernels() -> Option<(FindKernel, RunKernel)> {
    const NOW: i32 = 2;
    // SAFETY: the library has functions of these names and types, and is never closed.
    unsafe {
        let library = dlopen(c"libkernels.so".as_ptr(), NOW);
        if library.is_null() {
            return None;
        }
        let (find, run) =
            (dlsym(library, c"find_kernel".as_ptr()), dlsym(library, c"run_kernel".as_ptr()));
        Some((
            std::mem::transmute::<*mut c_void, FindKernel>(find),
            std::mem::transmute::<*mut c_void, RunKernel>(run),
        ))
    }
}

/// Runs a kernel. Device addresses among its arguments become those of the bytes.
pub(crate) fn run_kernel(kernel: usize, blocks: u32, threads: u32, arguments: &[u64]) {
    let (_, run) = kernels().expect("the kernel is from this library");
    let located = with(|state| {
        arguments.iter().map(|&at| state.locate(at as usize, 1)).collect::<Result<Vec<_>, Code>>()
    });
    match located {
        Ok(located) => {
            let values: Vec<u64> = located.iter().map(|(at, _)| *at as u64).collect();
            // SAFETY: the memory exists while the shadows do, and the program passes arguments with
            // which the kernel accesses only memory that it may access.
            unsafe { run(kernel as *const Kernel, blocks, threads, values.as_ptr()) };
        }
        Err(code) => break_device(code),
    }
}
