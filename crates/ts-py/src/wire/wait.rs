// SPDX-License-Identifier: MIT OR Apache-2.0
//! Timeouts of blocking calls, and locks that do not block.

use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
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

/// Locks a value without blocking.
///
/// # Errors
/// ConfigurationError if another call has locked the value: a call on another thread, or the call
/// that runs the current Python callback.
pub(super) fn try_lock<'a, T>(py: Python<'_>, value: &'a Mutex<T>) -> PyResult<MutexGuard<'a, T>> {
    value.try_lock().ok_or_else(|| {
        configuration_error(
            py,
            "this connection or listener is in use: another thread, or a call that runs this \
             callback, has not returned yet",
        )
    })
}
