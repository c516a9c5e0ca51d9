// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocking calls: their timeouts, and how other threads end them.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use pyo3::prelude::*;

use crate::errors::configuration_error;

/// The time between two checks for signals in a blocking call.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Returns the time at which a timeout in seconds ends. None if `timeout` is None, or too long for
/// an `Instant`.
pub(super) fn deadline(timeout: Option<f64>) -> Option<Instant> {
    let time = timeout
        .map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
    time.and_then(|time| Instant::now().checked_add(time))
}

/// Returns the time to wait until the next check for signals, or until an earlier deadline.
pub(super) fn poll_time(deadline: Option<Instant>) -> Duration {
    deadline.map_or(POLL_INTERVAL, |deadline| {
        deadline.saturating_duration_since(Instant::now()).min(POLL_INTERVAL)
    })
}

/// Returns whether the deadline has passed.
pub(super) fn is_over(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// A connection or listener: one call at a time uses it, and any thread can close it.
pub(super) struct Closable<T> {
    /// What it is, for error messages.
    what: &'static str,
    /// None after it was closed.
    value: Mutex<Option<T>>,
    /// The thread whose call uses the value.
    user: Mutex<Option<ThreadId>>,
    closes: AtomicBool,
}

impl<T: Send> Closable<T> {
    pub(super) fn new(what: &'static str, value: T) -> Self {
        Self {
            what,
            value: Mutex::new(Some(value)),
            user: Mutex::new(None),
            closes: AtomicBool::new(false),
        }
    }

    /// Begins a call, without blocking.
    ///
    /// # Errors
    /// ConfigurationError if it is closed, or if another call uses it: on another thread, or the
    /// call that runs the current Python callback.
    pub(super) fn begin(&self, py: Python<'_>) -> PyResult<Call<'_, T>> {
        self.check(py)?;
        let value = self.value.try_lock().ok_or_else(|| self.in_use(py))?;
        let value = MutexGuard::try_map(value, Option::as_mut).map_err(|_| self.closed(py))?;
        *self.user.lock() = Some(thread::current().id());
        Ok(Call { value, user: &self.user })
    }

    /// Returns an error if it was closed. A call that waits calls this every [`POLL_INTERVAL`].
    pub(super) fn check(&self, py: Python<'_>) -> PyResult<()> {
        if self.closes.load(Ordering::Acquire) { Err(self.closed(py)) } else { Ok(()) }
    }

    /// Closes it, and returns the value, unless it is closed already. Blocks until the call of
    /// another thread has ended: that call raises an error.
    ///
    /// # Errors
    /// ConfigurationError if the call that runs the current Python callback uses it.
    pub(super) fn close(&self, py: Python<'_>) -> PyResult<Option<T>> {
        if *self.user.lock() == Some(thread::current().id()) {
            return Err(self.in_use(py));
        }
        self.closes.store(true, Ordering::Release);
        Ok(py.detach(|| self.value.lock().take()))
    }

    fn closed(&self, py: Python<'_>) -> PyErr {
        configuration_error(py, &format!("the {} is closed", self.what))
    }

    fn in_use(&self, py: Python<'_>) -> PyErr {
        let what = format!(
            "this {} is in use: another thread, or a call that runs this callback, has not \
             returned yet",
            self.what
        );
        configuration_error(py, &what)
    }
}

/// A call that uses a [`Closable`].
pub(super) struct Call<'a, T> {
    value: MappedMutexGuard<'a, T>,
    user: &'a Mutex<Option<ThreadId>>,
}

impl<T> Deref for Call<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Call<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Call<'_, T> {
    fn drop(&mut self) {
        *self.user.lock() = None;
    }
}
