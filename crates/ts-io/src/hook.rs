// SPDX-License-Identifier: MIT OR Apache-2.0
//! A hook for attempts to read. Before each system call or network request of a read, the backend
//! calls the hook. All built-in backends do this, except `remote`. Only fault injection implements
//! the hook. Without fault injection, a call of the hook costs one check for `None`.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::sys::Gate;

/// Decides what happens to each attempt to read.
pub(crate) trait Intercept: Send + Sync {
    /// Decides about an attempt to read `len` bytes of `path` at `offset`. The thread that makes
    /// the attempt calls this method first. `None` leaves the attempt unchanged.
    fn intercept(&self, path: &Path, offset: u64, len: usize) -> Option<Interception>;
}

/// A change to an attempt to read.
pub(crate) enum Interception {
    /// The attempt returns at most this many bytes. The number is at least 1.
    Truncate(usize),
    /// The attempt fails with this error, without reading.
    Fail(io::Error),
    /// The attempt starts after this delay.
    Delay(Duration),
    /// The attempt starts only after the gate opens.
    Block(Arc<Gate>),
}

/// An optional [`Intercept`], shared by all backends that are created with the same options.
#[derive(Clone, Default)]
pub(crate) struct ReadHook(Option<Arc<dyn Intercept>>);

impl ReadHook {
    pub(crate) fn new(intercept: Arc<dyn Intercept>) -> Self {
        Self(Some(intercept))
    }

    /// Returns the hook's decision about an attempt, without applying it. For backends that must
    /// not block the calling thread.
    pub(crate) fn intercept(&self, path: &Path, offset: u64, len: usize) -> Option<Interception> {
        self.0.as_ref()?.intercept(path, offset, len)
    }

    /// Runs `attempt` under the hook. Blocks while the hook delays or blocks the attempt.
    pub(crate) fn run(
        &self,
        path: &Path,
        offset: u64,
        len: usize,
        attempt: impl FnOnce() -> io::Result<usize>,
    ) -> io::Result<usize> {
        match self.intercept(path, offset, len) {
            None => {}
            Some(Interception::Truncate(limit)) => return attempt().map(|read| read.min(limit)),
            Some(Interception::Fail(error)) => return Err(error),
            Some(Interception::Delay(time)) => std::thread::sleep(time),
            Some(Interception::Block(gate)) => gate.wait(),
        }
        attempt()
    }
}

impl fmt::Debug for ReadHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "hooked" } else { "no hook" })
    }
}
