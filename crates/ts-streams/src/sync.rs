// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads and synchronization primitives of the standard library. The model checks of
//! `cargo xtask ci` replace them with those of loom (every interleaving of a small model) or
//! shuttle (many interleavings of a large one).

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
