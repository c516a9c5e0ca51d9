// SPDX-License-Identifier: MIT OR Apache-2.0
//! Timeouts of blocking calls, and locks that do not block.

use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;

use crate::errors::configuration_error;

/// How long a blocking call waits between two checks for signals.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Returns the end of a timeout in seconds, or None if there is no timeout.
pub(super) fn deadline(timeout: Option<f64>) -> Option<Instant> {
    let time = timeout
        .map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
    time.and_then(|time| Instant::now().checked_add(time))
}

/// Returns how long to wait before the next check for signals or the deadline.
pub(super) fn poll_time(deadline: Option<Instant>) -> Duration {
    deadline.map_or(POLL_INTERVAL, |deadline| {
        deadline.saturating_duration_since(Instant::now()).min(POLL_INTERVAL)
    })
}

/// Returns whether the deadline has passed.
pub(super) fn is_over(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// Locks a value without blocking.
///
/// # Errors
/// ConfigurationError if another thread holds the lock.
pub(super) fn try_lock<'a, T>(py: Python<'_>, value: &'a Mutex<T>) -> PyResult<MutexGuard<'a, T>> {
    value.try_lock().ok_or_else(|| {
        configuration_error(py, "another thread is using it: only one thread can at a time")
    })
}
