// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions that run on a device.

use std::ffi::CStr;

/// A function that runs on a GPU, in many threads.
///
/// All parameters of the function are numbers of 64 bits, among them addresses.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    /// The name of the function.
    pub name: &'static CStr,
    /// The module with the function, as PTX. A device compiles each module once, so use the same
    /// static for all functions of a module.
    pub module: &'static CStr,
    /// The number of threads in a block.
    pub block_threads: u32,
    /// The number of parameters.
    pub parameters: usize,
}
