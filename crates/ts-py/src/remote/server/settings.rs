// SPDX-License-Identifier: MIT OR Apache-2.0
//! The settings of each session: the default dtype, whether operators must be deterministic, and
//! the precision of products of matrices.
//!
//! PyTorch has them once for the process. While no session has set its own, operators run in
//! parallel, with the settings of the process. While a session that has set its own exists, each
//! operator of PyTorch runs under a lock, with the settings of its session
//! (`Hooks::with_settings`). If the server is in the process of the client, there is no lock, and
//! operators always use the settings of the process.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;

/// The time between two checks of [`Settings::set`] for parallel calls in progress.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// The number of sessions that have set their own.
static SESSIONS: AtomicUsize = AtomicUsize::new(0);
/// The number of calls in progress that run without the lock.
static PARALLEL_CALLS: AtomicUsize = AtomicUsize::new(0);

/// The settings of a session, or `None` until the client has set them.
#[derive(Default)]
pub(super) struct Settings(Option<Py<PyAny>>);

impl Settings {
    pub(super) fn get(&self) -> Option<&Py<PyAny>> {
        self.0.as_ref()
    }

    /// Replaces the settings. The first call in a session blocks until no call runs without the
    /// lock.
    pub(super) fn set(&mut self, py: Python<'_>, settings: Py<PyAny>) {
        if self.0.replace(settings).is_none() {
            SESSIONS.fetch_add(1, Ordering::SeqCst);
            py.detach(|| {
                while PARALLEL_CALLS.load(Ordering::SeqCst) > 0 {
                    thread::sleep(POLL_INTERVAL);
                }
            });
        }
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        if self.0.is_some() {
            SESSIONS.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A call that runs without the lock, with the settings of the process.
pub(super) struct ParallelCall;

impl ParallelCall {
    /// Begins a call, or returns `None` if a session has its own settings.
    pub(super) fn begin() -> Option<Self> {
        PARALLEL_CALLS.fetch_add(1, Ordering::SeqCst);
        let call = Self;
        (SESSIONS.load(Ordering::SeqCst) == 0).then_some(call)
    }
}

impl Drop for ParallelCall {
    fn drop(&mut self) {
        PARALLEL_CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}
