// SPDX-License-Identifier: MIT OR Apache-2.0
//! What of a connection's bytes has come to the other end's system, as Linux tells it in
//! `/proc/net/tcp`.

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};

/// Bytes that were written and not acknowledged; `None` where the system does not say.
pub(crate) fn undelivered(stream: &TcpStream) -> Option<u64> {
    let (own, peer) = (stream.local_addr().ok()?, stream.peer_addr().ok()?);
    let table = if own.is_ipv4() { "tcp" } else { "tcp6" };
    let text = std::fs::read_to_string(format!("/proc/thread-self/net/{table}")).ok()?;
    find(&text, own, peer)
}

/// The connection's place in the table: its third field is the state, its fourth `sent:received`,
/// what waits each way.
fn find(table: &str, own: SocketAddr, peer: SocketAddr) -> Option<u64> {
    let (own, peer) = (written(own), written(peer));
    let mut lines = table.lines().map(str::split_ascii_whitespace);
    let mut line = lines.find_map(|mut fields| {
        (fields.nth(1) == Some(&own) && fields.next() == Some(&peer)).then_some(fields)
    })?;
    let (sent, _) = line.nth(1)?.split_once(':')?;
    u64::from_str_radix(sent, 16).ok()
}

/// An address as the table has it: words of 32 bits in the order of the machine, then the port.
fn written(address: SocketAddr) -> String {
    let octets = match address.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let mut text = String::new();
    for word in octets.chunks_exact(4) {
        let word = u32::from_ne_bytes(word.try_into().expect("4 bytes"));
        let _ = write!(text, "{word:08X}");
    }
    let _ = write!(text, ":{:04X}", address.port());
    text
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn what_nobody_reads_is_undelivered_beyond_what_the_system_keeps() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            // Not every machine has the second.
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
