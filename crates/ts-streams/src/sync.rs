// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads and synchronization primitives, by default those of the standard library.
//!
//! The model checks of `cargo xtask ci` replace them. The primitives of loom explore a small model
//! under all interleavings with few preemptions. Those of shuttle explore a large model under many
//! interleavings.

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
