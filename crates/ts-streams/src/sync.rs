// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads and what they wait with: the standard library's, or, where `cargo xtask ci` tries the
//! orders in which threads can run, what loom (all orders of a small model) and shuttle (many of a
//! large one) have in their place.

#[cfg(loom)]
pub(crate) use loom::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread, thread_local,
};
#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread, thread_local,
};
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread, thread_local,
};
