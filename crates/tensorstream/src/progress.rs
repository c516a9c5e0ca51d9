// SPDX-License-Identifier: MIT OR Apache-2.0
//! Progress and interruption of long operations.

/// The progress of a long operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Number of bytes processed so far.
    pub done: u64,
    /// Number of bytes to process in total.
    pub total: u64,
}

/// A callback that long operations call at least every 16 MiB of work, and every 20 ms while they
/// wait. Returning true interrupts the operation, which then returns
/// [`Error::Interrupted`](crate::Error::Interrupted).
pub type Watch<'a> = dyn FnMut(Progress) -> bool + 'a;
