// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unix sockets, and channels that pass accepted connections to another process.

use std::fs;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use super::{ConnectionSource, Listener};
use crate::fd;
use crate::{Address, Error, Socket};

/// The maximum number of characters of a peer's address that are passed with a handoff.
pub(crate) const MAX_PEER_CHARS: usize = 100;

impl Listener {
    /// Creates a listener that receives connections from another process, which accepts them and
    /// [passes them on](crate::Handoff::send_to). `channel` is a Unix socket of type
    /// `SOCK_SEQPACKET`. [`accept`](Self::accept) returns [`Error::Closed`] once that process has
    /// ended.
    ///
    /// On Linux, TCP connections break if the peer's machine does not acknowledge data for
    /// `timeout`.
    pub fn from_handoffs(channel: OwnedFd, timeout: Duration) -> Self {
        let address = Address::Unix("(handoff channel)".into());
        Self { source: ConnectionSource::Handoffs(channel), address, timeout }
    }

    /// Receives the next socket from the process that accepts connections.
    pub(super) fn receive_handoff(&self, channel: &OwnedFd) -> io::Result<Result<Socket, Error>> {
        let (mut peer, mut relayed, mut passed) = ([0; 4 * MAX_PEER_CHARS], [0], None);
        let mut into = [IoSliceMut::new(&mut relayed), IoSliceMut::new(&mut peer)];
        let len = fd::receive_with_descriptor(channel, &mut into, true, &mut passed)?;
        let Some(passed) = passed else {
            let ended =
                Error::Closed { reason: "the process that accepts connections has ended".into() };
            return if len == 0 { Ok(Err(ended)) } else { Err(io::ErrorKind::InvalidData.into()) };
        };
        let peer = String::from_utf8_lossy(&peer[..len - 1]).into_owned();
        let socket = if is_unix(&passed)? {
            let mut socket = Socket::from_unix(passed.into(), peer)?;
            if relayed != [0] {
                socket.disable_descriptors();
            }
            socket
        } else {
            Socket::from_tcp(passed.into(), peer, self.timeout)?
        };
        Ok(Ok(socket))
    }
}

/// Binds a Unix socket. Returns it with the device and the inode of its file.
pub(super) fn bind_unix(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    let bound = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_stale(path) => {
            fs::remove_file(path)?;
            UnixListener::bind(path)?
        }
        bound => bound?,
    };
    Ok((bound, file_id(path)?))
}

pub(super) fn file_id(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Returns whether a path is a socket whose process has ended without removing it.
fn is_stale(path: &Path) -> bool {
    let refuses = || {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
        // Otherwise, a process that accepts too slowly would block this one.
        rustix::io::ioctl_fionbio(&socket, true)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
    };
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
        && refuses() == Err(Errno::CONNREFUSED)
}

#[cfg(target_os = "linux")]
fn is_unix(socket: &OwnedFd) -> io::Result<bool> {
    Ok(rustix::net::sockopt::socket_domain(socket)? == AddressFamily::UNIX)
}

#[cfg(not(target_os = "linux"))]
fn is_unix(socket: &OwnedFd) -> io::Result<bool> {
    Ok(rustix::net::getsockname(socket)?.address_family() == AddressFamily::UNIX)
}
