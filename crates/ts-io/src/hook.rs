// SPDX-License-Identifier: MIT OR Apache-2.0
//! A hook that backends call before each system call or network request of a read. Fault injection
//! is the only implementation; without one, the hook costs a check for `None`.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::sys::Gate;

/// Decides what happens to each attempt to read.
pub(crate) trait Intercept: Send + Sync {
    /// Called on the thread that is about to read `len` bytes of `path` at `offset`. Returns `None`
    /// to let the attempt proceed unchanged.
    fn intercept(&self, path: &Path, offset: u64, len: usize) -> Option<Interception>;
}

/// How an attempt to read deviates from normal.
pub(crate) enum Interception {
    /// It returns at most this many bytes (at least 1).
    Truncate(usize),
    /// It fails with this error, without reading.
    Fail(io::Error),
    /// It starts after this delay.
    Delay(Duration),
    /// It starts only after the gate opens.
    Block(Arc<Gate>),
}

/// An optional [`Intercept`], shared by the backends that one set of options creates.
#[derive(Clone, Default)]
pub(crate) struct ReadHook(Option<Arc<dyn Intercept>>);

impl ReadHook {
    pub(crate) fn new(intercept: Arc<dyn Intercept>) -> Self {
        Self(Some(intercept))
    }

    /// Asks the hook about an attempt. For backends that must not block the calling thread.
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
