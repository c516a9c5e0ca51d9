// SPDX-License-Identifier: MIT OR Apache-2.0
//! Non-blocking I/O on the descriptors of sockets.

use std::io;
use std::time::Duration;

use rustix::event::{PollFd, Timespec};

#[cfg_attr(unix, path = "fd/unix.rs")]
#[cfg_attr(windows, path = "fd/windows.rs")]
mod system;

pub(crate) use system::*;

/// Waits at most `timeout` until a descriptor is ready. Returns the number of ready descriptors,
/// which is 0 after the timeout, or if a signal interrupted the wait.
pub(crate) fn poll(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<usize> {
    // A timeout that is too long for the system is as good as none.
    let timeout = Timespec::try_from(timeout).ok();
    match rustix::event::poll(fds, timeout.as_ref()) {
        Ok(ready) => Ok(ready),
        Err(rustix::io::Errno::INTR) => Ok(0),
        Err(error) => Err(error.into()),
    }
}
