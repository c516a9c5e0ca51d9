// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures the send buffer of a TCP socket, on Linux. The `ioctl` for it has no safe wrapper in
//! the dependencies of this crate.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Returns the number of bytes in the kernel's send buffer of a TCP socket. These bytes were
/// written to the socket, and the peer's system has not acknowledged them. Does not block.
///
/// # Errors
/// Returns the error of the system, for example if `socket` is not a socket or is a listening
/// socket.
///
/// # Examples
/// ```
/// use std::io::Write;
/// use std::net::{TcpListener, TcpStream};
/// use std::os::fd::AsFd;
///
/// let listener = TcpListener::bind("127.0.0.1:0")?;
/// let mut socket = TcpStream::connect(listener.local_addr()?)?;
/// socket.write_all(b"bytes")?;
/// // The system of the peer acknowledges the bytes, whether or not they are read.
/// while ts_pool::send_queue_bytes(socket.as_fd())? > 0 {}
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn send_queue_bytes(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // Linux defines the request `SIOCOUTQ` as `TIOCOUTQ` on every architecture.
    // SAFETY: `socket` is open during the call, which writes one `c_int` to the address of `bytes`.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(bytes.unsigned_abs().into()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_file_has_no_send_queue() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(send_queue_bytes(file.as_fd()).is_err());
    }
}
