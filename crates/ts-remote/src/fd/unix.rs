// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads and writes with flags of each call, and with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};

/// Reads from a socket. If the socket is empty, returns [`io::ErrorKind::WouldBlock`] at once. If
/// `wait` is set, waits for bytes first, for at most the read timeout of the socket.
pub(crate) fn receive(
    socket: impl AsFd,
    into: &mut [IoSliceMut<'_>],
    wait: bool,
) -> io::Result<usize> {
    let flags = receive_flags(wait);
    match into {
        [one] => Ok(recv(socket, &mut **one, flags)?.0),
        _ => Ok(recvmsg(socket, into, &mut RecvAncillaryBuffer::default(), flags)?.bytes),
    }
}

/// Reads from a socket like [`receive`], and stores one descriptor that arrives with the bytes.
/// Other descriptors are closed.
pub(crate) fn receive_with_descriptor(
    socket: impl AsFd,
    into: &mut [IoSliceMut<'_>],
    wait: bool,
    descriptor: &mut Option<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = receive_flags(wait);
    #[cfg(target_os = "linux")]
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let len = recvmsg(socket, into, &mut ancillary, flags)?.bytes;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            for received in descriptors {
                #[cfg(not(target_os = "linux"))]
                rustix::io::fcntl_setfd(&received, rustix::io::FdFlags::CLOEXEC)?;
                *descriptor = Some(received);
            }
        }
    }
    Ok(len)
}

/// Copies the first bytes in a socket's receive buffer and leaves them there. Does not block.
pub(crate) fn peek(socket: impl AsFd, into: &mut [u8]) -> io::Result<usize> {
    Ok(recv(socket, into, RecvFlags::PEEK | RecvFlags::DONTWAIT)?.0)
}

/// Writes as much as the socket takes without blocking. Returns the number of written bytes.
pub(crate) fn send(socket: impl AsFd, from: &[IoSlice<'_>]) -> io::Result<usize> {
    match from {
        [one] => Ok(rustix::net::send(socket, one, SEND_FLAGS)?),
        _ => Ok(sendmsg(socket, from, &mut SendAncillaryBuffer::default(), SEND_FLAGS)?),
    }
}

/// Writes like [`send`], with a descriptor attached to the first byte.
pub(crate) fn send_with_descriptor(
    socket: impl AsFd,
    from: &[IoSlice<'_>],
    descriptor: BorrowedFd<'_>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    Ok(sendmsg(socket, from, &mut ancillary, SEND_FLAGS)?)
}

/// The flags of all writes. Apple systems have no `MSG_NOSIGNAL`, but the standard library sets
/// `SO_NOSIGPIPE` on its sockets there.
#[cfg(target_vendor = "apple")]
const SEND_FLAGS: SendFlags = SendFlags::DONTWAIT;
#[cfg(not(target_vendor = "apple"))]
const SEND_FLAGS: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

fn receive_flags(wait: bool) -> RecvFlags {
    if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT }
}

/// Returns how many connections may be pending at a time: at most `most`, and a quarter of the
/// descriptors that this process may open. The others are for connections that are established,
/// and for files.
pub(crate) fn most_pending(most: usize) -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok());
    limit.map_or(most, |limit| most.min((limit / 4).max(1)))
}
