// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sockets that accept connections.

use std::io;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;

use crate::fd;
use crate::{Address, Error, Socket};

#[cfg(unix)]
mod unix;

#[cfg(unix)]
pub(crate) use unix::MAX_PEER_CHARS;

/// How long the listener waits if the process or the system has run out of descriptors or memory.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(5);

/// A TCP or Unix socket that accepts connections, or a channel that receives accepted connections
/// from another process. On Windows, only a TCP socket.
///
/// Dropping the listener removes the file of a Unix socket.
#[derive(Debug)]
pub struct Listener {
    source: ConnectionSource,
    address: Address,
    timeout: Duration,
}

#[derive(Debug)]
enum ConnectionSource {
    Tcp(TcpListener),
    /// The socket, and the device and the inode of its file.
    #[cfg(unix)]
    Unix(std::os::unix::net::UnixListener, (u64, u64)),
    #[cfg(unix)]
    Handoffs(rustix::fd::OwnedFd),
}

impl Listener {
    /// Listens on an address. Port 0 selects a free port, which [`address`](Self::address) returns.
    /// Replaces the file of a Unix socket on which no process listens any more.
    ///
    /// On Linux, accepted TCP connections break if the peer's machine does not acknowledge data for
    /// `timeout`.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the system cannot listen on the address, for example because the
    /// address is in use. Its source has the kind [`io::ErrorKind::Unsupported`] for a Unix socket
    /// on Windows.
    pub fn bind(address: &Address, timeout: Duration) -> Result<Self, Error> {
        let failed = |error| Error::io(&address.to_string(), "listening", error);
        let (source, address) = match address {
            Address::Tcp(name) => {
                let listener = TcpListener::bind(name).map_err(failed)?;
                let local = listener.local_addr().map_err(failed)?;
                (ConnectionSource::Tcp(listener), Address::Tcp(local.to_string()))
            }
            #[cfg(unix)]
            Address::Unix(path) => {
                let (listener, file) = unix::bind_unix(path).map_err(failed)?;
                (ConnectionSource::Unix(listener, file), address.clone())
            }
            #[cfg(windows)]
            Address::Unix(_) => return Err(failed(Address::no_unix_sockets())),
        };
        Ok(Self { source, address, timeout })
    }

    /// Makes [`accept`](Self::accept) return [`io::ErrorKind::WouldBlock`] instead of blocking.
    pub(crate) fn set_nonblocking(&self) -> Result<(), Error> {
        let done = match &self.source {
            ConnectionSource::Tcp(listener) => listener.set_nonblocking(true),
            #[cfg(unix)]
            ConnectionSource::Unix(listener, _) => listener.set_nonblocking(true),
            #[cfg(unix)]
            ConnectionSource::Handoffs(channel) => {
                rustix::io::ioctl_fionbio(channel, true).map_err(Into::into)
            }
        };
        done.map_err(|error| self.failed("listening", error))
    }

    /// Returns the address that the listener listens on. For a handoff channel, returns a
    /// placeholder.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Accepts the next connection. Blocks.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the system cannot accept a connection, and [`Error::Closed`] if a
    /// [handoff channel](Self::from_handoffs) has closed.
    pub fn accept(&self) -> Result<Socket, Error> {
        let failed = |error| self.failed("accepting", error);
        match &self.source {
            ConnectionSource::Tcp(listener) => {
                let (stream, peer) = listener.accept().map_err(failed)?;
                Socket::from_tcp(stream, peer.to_string(), self.timeout).map_err(failed)
            }
            #[cfg(unix)]
            ConnectionSource::Unix(listener, _) => {
                let (stream, _) = listener.accept().map_err(failed)?;
                Socket::from_unix(stream, self.address.to_string()).map_err(failed)
            }
            #[cfg(unix)]
            ConnectionSource::Handoffs(channel) => self.receive_handoff(channel).map_err(failed)?,
        }
    }

    /// Accepts the next connection, or returns `None` if there is none within `timeout`. Blocks.
    ///
    /// # Errors
    /// Returns the same errors as [`accept`](Self::accept).
    pub fn accept_within(&self, timeout: Duration) -> Result<Option<Socket>, Error> {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut polled = [PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN)];
            match fd::poll(&mut polled, left) {
                Ok(0) if left.is_zero() => return Ok(None),
                Ok(0) => {}
                Ok(_) => return self.accept().map(Some),
                Err(error) => return Err(self.failed("waiting for a connection", error)),
            }
        }
    }

    /// Accepts a connection that is waiting on a nonblocking listener. Returns `None` if there is
    /// none, and after errors that are temporary or concern only one connection.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the listener fails, and [`Error::Closed`] if a handoff channel has
    /// closed.
    pub(crate) fn accept_waiting(&self) -> Result<Option<Socket>, Error> {
        match self.accept() {
            Ok(socket) => Ok(Some(socket)),
            Err(Error::Io { source, what, peer }) => match source.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::Interrupted
                | io::ErrorKind::ConnectionAborted => Ok(None),
                _ if is_shortage(&source) => {
                    std::thread::sleep(ACCEPT_RETRY_DELAY);
                    Ok(None)
                }
                io::ErrorKind::InvalidInput => Err(Error::Io { peer, what, source }),
                _ => Ok(None),
            },
            Err(error) => Err(error),
        }
    }

    /// Waits at most `timeout` until a connection can be accepted or one of `sockets` is ready. The
    /// first element of the result tells whether the listener is ready, and the others whether each
    /// socket is ready. The listener is polled only if `listening` is set.
    pub(crate) fn wait_with<'a>(
        &'a self,
        listening: bool,
        sockets: impl Iterator<Item = PollFd<'a>>,
        timeout: Duration,
    ) -> Result<Vec<bool>, Error> {
        let flags = if listening { PollFlags::IN } else { PollFlags::empty() };
        let mut polled = vec![PollFd::from_borrowed_fd(self.as_fd(), flags)];
        polled.extend(sockets);
        fd::poll(&mut polled, timeout)
            .map_err(|error| self.failed("waiting for sockets", error))?;
        Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    fn failed(&self, what: &'static str, error: io::Error) -> Error {
        Error::io(&self.address.to_string(), what, error)
    }
}

/// Returns whether the process or the system has run out of descriptors or memory.
fn is_shortage(error: &io::Error) -> bool {
    #[cfg(unix)]
    let shortages = [Errno::NFILE, Errno::MFILE, Errno::NOMEM, Errno::NOBUFS];
    #[cfg(windows)]
    let shortages = [Errno::MFILE, Errno::NOBUFS];
    Errno::from_io_error(error).is_some_and(|errno| shortages.contains(&errno))
}

#[cfg(unix)]
impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.source {
            ConnectionSource::Tcp(listener) => listener.as_fd(),
            ConnectionSource::Unix(listener, _) => listener.as_fd(),
            ConnectionSource::Handoffs(channel) => channel.as_fd(),
        }
    }
}

#[cfg(windows)]
impl std::os::windows::io::AsSocket for Listener {
    fn as_socket(&self) -> BorrowedFd<'_> {
        match &self.source {
            ConnectionSource::Tcp(listener) => listener.as_fd(),
        }
    }
}

#[cfg(unix)]
impl Drop for Listener {
    fn drop(&mut self) {
        // The file may be that of another socket by now.
        if let (ConnectionSource::Unix(_, file), Address::Unix(path)) =
            (&self.source, &self.address)
            && unix::file_id(path).is_ok_and(|found| found == *file)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}
