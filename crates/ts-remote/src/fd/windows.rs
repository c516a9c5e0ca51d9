// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads and writes of nonblocking TCP sockets. Windows has no flags that make a single call
//! nonblocking.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;

use rustix::event::{PollFd, PollFlags};

use crate::socket::POLL_INTERVAL;

/// Reads from a socket. If the socket is empty, returns [`io::ErrorKind::WouldBlock`] at once. If
/// `wait` is set, waits for bytes first, for at most [`POLL_INTERVAL`].
pub(crate) fn receive(
    mut socket: &TcpStream,
    into: &mut [IoSliceMut<'_>],
    wait: bool,
) -> io::Result<usize> {
    if wait {
        super::poll(&mut [PollFd::new(&socket, PollFlags::IN)], POLL_INTERVAL)?;
    }
    socket.read_vectored(into)
}

/// Writes as much as the socket takes without blocking. Returns the number of written bytes.
pub(crate) fn send(mut socket: &TcpStream, from: &[IoSlice<'_>]) -> io::Result<usize> {
    socket.write_vectored(from)
}

/// Returns how many connections may be pending at a time. Windows does not limit how many sockets a
/// process may open.
pub(crate) fn most_pending(most: usize) -> usize {
    most
}
