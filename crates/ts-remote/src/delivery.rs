// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counts written bytes that the peer's system has not acknowledged.

use std::net::TcpStream;

/// Returns how many written bytes the peer's system has not acknowledged. Returns `None` if this
/// system does not report it; only Linux does.
pub(crate) fn undelivered(stream: &TcpStream) -> Option<u64> {
    #[cfg(target_os = "linux")]
    return ts_pool::send_queue_bytes(std::os::fd::AsFd::as_fd(stream)).ok();
    #[cfg(not(target_os = "linux"))]
    {
        let _ = stream;
        None
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn bytes_are_undelivered_until_the_peer_reads() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            // Some machines have no IPv6.
            let Ok(listener) = TcpListener::bind(any) else { continue };
            let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut far, _) = listener.accept().unwrap();
            near.set_nonblocking(true).unwrap();
            let mut sent = 0;
            while let Ok(len) = near.write(&[1; 1 << 16]) {
                sent += len;
            }
            assert!(undelivered(&near).unwrap() > 0);
            far.read_exact(&mut vec![0; sent]).unwrap();
            while undelivered(&near) != Some(0) {}
        }
    }
}
