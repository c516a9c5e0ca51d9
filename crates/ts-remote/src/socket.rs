// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connected sockets.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
#[cfg(unix)]
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
#[cfg(unix)]
use rustix::fd::OwnedFd;
use rustix::fd::{AsFd, BorrowedFd};
use socket2::{SockRef, TcpKeepalive};

use crate::fd;
use crate::{Address, Error};

/// The operations that a socket is ready for, or that a caller waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ready {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

/// A protocol on top of TCP, such as TLS, that carries the bytes of a [`Socket`]. No method blocks,
/// except `read` with `wait`.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    fn tcp(&self) -> &TcpStream;

    /// Reads decrypted bytes, and blocks like [`fd::receive`].
    fn read(&mut self, into: &mut [IoSliceMut<'_>], wait: bool) -> io::Result<usize>;

    /// Returns whether the transport has buffered received bytes. The TCP socket does not become
    /// readable for them.
    fn has_input(&self) -> bool;

    /// Accepts as many bytes as fit into the buffer, and returns how many.
    fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Returns whether the transport has buffered bytes that the TCP socket has not taken.
    fn wants_write(&self) -> bool;

    /// Writes buffered bytes to the TCP socket.
    fn flush(&mut self) -> io::Result<()>;

    /// Closes the sending direction.
    fn shutdown(&mut self) -> io::Result<()>;
}

/// A connected TCP, TLS or Unix socket. Windows has no Unix sockets.
///
/// Its public methods do not block, except [`connect`](Self::connect).
#[derive(Debug)]
pub struct Socket {
    stream: Stream,
    peer: String,
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream, DescriptorSlot),
    #[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "TLS is the only transport"))]
    Layered(Box<dyn Transport>),
}

/// The descriptors that a Unix socket receives.
#[cfg(unix)]
#[derive(Debug)]
struct DescriptorSlot {
    /// Whether reads also receive descriptors, which makes them slower. If not, the system closes
    /// the descriptors.
    enabled: bool,
    /// The last descriptor that was received.
    last: Option<OwnedFd>,
}

/// The maximum number of bytes per read from TCP. The system advertises free space in the receive
/// buffer to the peer only between reads, so shorter reads keep the peer sending.
const MAX_TCP_READ: usize = 64 << 10;
/// The read timeout of sockets, after which a blocking wait checks its deadlines.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The longest interval between TCP keep-alive probes.
const KEEPALIVE: Duration = Duration::from_secs(10);

impl Socket {
    /// Connects to an address. Blocks while it resolves a host name, and then at most `timeout` for
    /// each address that the name resolves to. For a Unix socket, blocks while the queue of the
    /// listener is full.
    ///
    /// On Linux, a TCP connection also breaks if the peer's machine does not acknowledge data for
    /// `timeout`.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if no address accepts the connection, with the error of the last one.
    /// Its source has the kind [`io::ErrorKind::Unsupported`] for a Unix socket on Windows.
    pub fn connect(address: &Address, timeout: Duration) -> Result<Self, Error> {
        let failed = |error| Error::io(&address.to_string(), "connecting", error);
        match address {
            Address::Tcp(name) => {
                let mut last =
                    io::Error::new(io::ErrorKind::NotFound, "the host name has no addresses");
                for target in name.to_socket_addrs().map_err(failed)? {
                    match TcpStream::connect_timeout(&target, timeout) {
                        Ok(stream) => {
                            return Self::from_tcp(stream, name.clone(), timeout).map_err(failed);
                        }
                        Err(error) => last = error,
                    }
                }
                Err(failed(last))
            }
            #[cfg(unix)]
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).map_err(failed)?;
                Self::from_unix(stream, address.to_string()).map_err(failed)
            }
            #[cfg(windows)]
            Address::Unix(_) => Err(failed(Address::no_unix_sockets())),
        }
    }

    pub(crate) fn from_tcp(stream: TcpStream, peer: String, timeout: Duration) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        // On some systems, a socket that a nonblocking listener has accepted does not block either.
        // On Windows, none may block, because calls have no flag for it.
        stream.set_nonblocking(cfg!(windows))?;
        stream.set_read_timeout(Some(POLL_INTERVAL))?;
        let socket = SockRef::from(&stream);
        let interval = KEEPALIVE.min(timeout).max(Duration::from_secs(1));
        let keepalive = TcpKeepalive::new().with_time(interval).with_interval(interval);
        socket.set_tcp_keepalive(&keepalive)?;
        // Unacknowledged data breaks the connection after the same time as a silent peer.
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(timeout))?;
        Ok(Self { stream: Stream::Tcp(stream), peer })
    }

    #[cfg(unix)]
    pub(crate) fn from_unix(stream: UnixStream, peer: String) -> io::Result<Self> {
        stream.set_nonblocking(false)?; // as in `from_tcp`
        stream.set_read_timeout(Some(POLL_INTERVAL))?;
        let descriptors = DescriptorSlot { enabled: true, last: None };
        Ok(Self { stream: Stream::Unix(stream, descriptors), peer })
    }

    /// Adds a protocol such as TLS on top of a plain TCP stream. `layer` creates it from the stream
    /// and the name of the peer.
    #[cfg(feature = "tls")]
    pub(crate) fn layered<T: Transport + 'static>(
        self,
        layer: impl FnOnce(TcpStream, &str) -> Result<T, Error>,
    ) -> Result<Self, Error> {
        let Self { stream: Stream::Tcp(tcp), peer } = self else {
            let what = format!("cannot start TLS with {}: expected a plain TCP socket", self.peer);
            return Err(Error::Misuse(what));
        };
        Ok(Self { stream: Stream::Layered(Box::new(layer(tcp, &peer)?)), peer })
    }

    /// Returns the address of the peer, as text.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns whether this is a TCP socket without TLS.
    #[cfg(feature = "tls")]
    pub(crate) fn is_plain_tcp(&self) -> bool {
        matches!(self.stream, Stream::Tcp(_))
    }

    /// Reads into two buffers, of which the first may be empty. If `wait` is set, waits for bytes
    /// for at most [`POLL_INTERVAL`].
    pub(crate) fn read(&mut self, into: &mut [IoSliceMut<'_>; 2], wait: bool) -> io::Result<usize> {
        let into = if into[0].is_empty() { &mut into[1..] } else { &mut into[..] };
        match &mut self.stream {
            Stream::Tcp(stream) => match &mut *into {
                [large, ..] if large.len() > MAX_TCP_READ => {
                    let mut piece = [IoSliceMut::new(&mut large[..MAX_TCP_READ])];
                    fd::receive(stream, &mut piece, wait)
                }
                _ => fd::receive(stream, into, wait),
            },
            #[cfg(unix)]
            Stream::Unix(stream, descriptors) if descriptors.enabled => {
                fd::receive_with_descriptor(stream, into, wait, &mut descriptors.last)
            }
            #[cfg(unix)]
            Stream::Unix(stream, _) => fd::receive(stream, into, wait),
            Stream::Layered(transport) => transport.read(into, wait),
        }
    }

    /// Returns whether descriptors can be sent and received.
    pub(crate) fn takes_descriptors(&self) -> bool {
        #[cfg(unix)]
        return matches!(&self.stream, Stream::Unix(_, descriptors) if descriptors.enabled);
        #[cfg(windows)]
        false
    }

    /// Takes the last descriptor that was received.
    #[cfg(unix)]
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        match &mut self.stream {
            Stream::Unix(_, descriptors) => descriptors.last.take(),
            _ => None,
        }
    }

    /// Stops receiving descriptors. The system then closes descriptors that arrive.
    pub(crate) fn disable_descriptors(&mut self) {
        #[cfg(unix)]
        if let Stream::Unix(_, descriptors) = &mut self.stream {
            descriptors.enabled = false;
        }
    }

    /// Returns whether the socket may have more to read, after a read of `len` bytes into buffers
    /// of `wanted` bytes.
    pub(crate) fn may_have_more(&self, len: usize, wanted: usize) -> bool {
        match &self.stream {
            // After a short read, the socket is empty.
            Stream::Tcp(_) => len == wanted || len == MAX_TCP_READ,
            #[cfg(unix)]
            Stream::Unix(..) => len == wanted,
            Stream::Layered(transport) => len == wanted || transport.has_input(),
        }
    }

    /// Returns whether the socket may take more, after it took `len` of `wanted` bytes.
    pub(crate) fn may_take_more(&self, len: usize, wanted: usize) -> bool {
        match &self.stream {
            // After a short write, the socket is full.
            Stream::Tcp(_) => len == wanted,
            #[cfg(unix)]
            Stream::Unix(..) => len == wanted,
            Stream::Layered(transport) => !transport.wants_write(),
        }
    }

    /// Closes the sending direction.
    pub(crate) fn shutdown(&mut self) -> io::Result<()> {
        let done = match &mut self.stream {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            #[cfg(unix)]
            Stream::Unix(stream, _) => stream.shutdown(Shutdown::Write),
            Stream::Layered(transport) => transport.shutdown(),
        };
        done.or_else(|error| match error.kind() {
            // The peer has closed the connection already. TLS would tell it that this end closes.
            io::ErrorKind::NotConnected
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset => Ok(()),
            _ => Err(error),
        })
    }

    /// Returns how many written bytes the peer's system has not acknowledged, or `None` if this
    /// system does not report it.
    pub(crate) fn undelivered(&self) -> Option<u64> {
        match &self.stream {
            Stream::Tcp(stream) => crate::delivery::undelivered(stream),
            // Both ends are on this system.
            #[cfg(unix)]
            Stream::Unix(..) => Some(0),
            Stream::Layered(transport) => crate::delivery::undelivered(transport.tcp()),
        }
    }

    /// Returns whether the transport has buffered bytes that the system has not taken.
    pub(crate) fn wants_write(&self) -> bool {
        match &self.stream {
            Stream::Layered(transport) => transport.wants_write(),
            _ => false,
        }
    }

    /// Writes buffered bytes to the system.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        match &mut self.stream {
            Stream::Layered(transport) => transport.flush(),
            _ => Ok(()),
        }
    }

    /// Writes as much as the socket takes, with `descriptor` attached to the first byte. Sockets
    /// other than Unix sockets ignore `descriptor`.
    pub(crate) fn write(
        &mut self,
        from: &[IoSlice<'_>],
        #[cfg_attr(windows, expect(unused_variables, reason = "only Unix sockets carry one"))]
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<usize> {
        match &mut self.stream {
            Stream::Tcp(stream) => fd::send(stream, from),
            #[cfg(unix)]
            Stream::Unix(stream, _) => match descriptor {
                Some(descriptor) => fd::send_with_descriptor(stream, from, descriptor),
                None => fd::send(stream, from),
            },
            Stream::Layered(transport) => transport.write(from),
        }
    }

    /// Waits at most `timeout` until the socket is ready for one of the `wanted` operations.
    /// Returns the operations that it is ready for.
    pub(crate) fn wait(&self, wanted: Ready, timeout: Duration) -> Result<Ready, Error> {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, wanted.read);
        flags.set(PollFlags::OUT, wanted.write);
        let mut polled = [PollFd::from_borrowed_fd(self.as_fd(), flags)];
        fd::poll(&mut polled, timeout)
            .map_err(|error| self.failed("waiting for the socket", error))?;
        // A socket with an error counts as ready for both operations, so that the next call returns
        // the error.
        let got = |flag| polled[0].revents().intersects(flag | PollFlags::ERR | PollFlags::HUP);
        Ok(Ready { read: got(PollFlags::IN), write: got(PollFlags::OUT) })
    }

    /// Returns the error for a failed call on the socket.
    pub(crate) fn failed(&self, what: &'static str, error: io::Error) -> Error {
        // Only TLS reports invalid data.
        if error.kind() == io::ErrorKind::InvalidData {
            return Error::Tls { peer: self.peer.clone(), source: error.into() };
        }
        Error::transport(&self.peer, what, error)
    }
}

#[cfg(unix)]
impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream, _) => stream.as_fd(),
            Stream::Layered(transport) => transport.tcp().as_fd(),
        }
    }
}

#[cfg(windows)]
impl std::os::windows::io::AsSocket for Socket {
    fn as_socket(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Layered(transport) => transport.tcp().as_fd(),
        }
    }
}
