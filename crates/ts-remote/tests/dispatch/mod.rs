// SPDX-License-Identifier: MIT OR Apache-2.0
//! Helpers for tests with a dispatcher, and a listener that receives its connections.

use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use ts_remote::{Dispatcher, Error, Listener, Socket};

use crate::common::options;

/// Returns a channel for sockets, and the listener at its other end.
pub(crate) fn channel() -> (OwnedFd, Listener) {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (here, there) = pair.unwrap();
    (here, Listener::from_handoffs(there, options().idle_timeout))
}

/// Accepts the next connection through a dispatcher.
pub(crate) fn dispatch(mut dispatcher: Dispatcher, listener: &Listener) -> Result<Socket, Error> {
    let (channel, receiver) = channel();
    let log = |peer: &str, error: &Error| panic!("{peer}: {error}");
    let handoff = dispatcher
        .accept_within(listener, options().idle_timeout, log)?
        .expect("a client connects in time");
    handoff.send_to(&channel)?;
    receiver.accept()
}
