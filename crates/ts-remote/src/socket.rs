// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sockets.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};
use socket2::{SockRef, TcpKeepalive};

use crate::Error;
use crate::handoff::MAX_PEER;
#[cfg(feature = "tls")]
use crate::tls::{TlsClient, TlsServer, TlsStream};

/// Where an end of a connection is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// `HOST:PORT`.
    Tcp(String),
    /// `unix:PATH`.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Address {
    /// Whether others than this machine's own programs may reach it. Asks for the addresses of a
    /// name, and may block for that.
    pub fn is_public(&self) -> bool {
        match self {
            Self::Unix(_) => false,
            Self::Tcp(name) => {
                let mut found = name.to_socket_addrs().into_iter().flatten().peekable();
                found.peek().is_none() || found.any(|address| !address.ip().is_loopback())
            }
        }
    }
}

impl FromStr for Address {
    type Err = Error;

    /// `HOST:PORT`, `[V6]:PORT` or `unix:PATH`.
    fn from_str(text: &str) -> Result<Self, Error> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        match text.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>())) {
            Some((host, Ok(_))) if !host.is_empty() => Ok(Self::Tcp(text.into())),
            _ => Err(Error::Misuse(format!("`{text}` is no address: HOST:PORT or unix:PATH are"))),
        }
    }
}

/// For what a socket is ready, or is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ready {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

/// One end of a connection that the system keeps. Its calls never wait but where they say so.
#[derive(Debug)]
pub struct Socket {
    stream: Stream,
    peer: String,
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream, Descriptors),
    #[cfg(feature = "tls")]
    Tls(Box<TlsStream>),
}

/// What comes beside bytes.
#[derive(Debug)]
struct Descriptors {
    /// Whether they are looked for, which takes time. Those that nobody looks for the system drops.
    wanted: bool,
    /// The one that came last.
    last: Option<OwnedFd>,
}

/// What a read from TCP gets at most, in bytes: the other end is told of room only between reads.
const PIECE: usize = 64 << 10;
/// How long a read waits at most: so often a wait looks whether it is to go on.
pub(crate) const SLICE: Duration = Duration::from_millis(100);
/// How long the system asks a silent machine before it gives it up.
const KEEPALIVE: Duration = Duration::from_secs(10);

impl Socket {
    /// Connects. Blocks, at most so long for each of the addresses that a name has.
    ///
    /// # Errors
    /// [`Error::Io`] with what the system says of the last of them.
    pub fn connect(address: &Address, timeout: Duration) -> Result<Self, Error> {
        let failed = |error| Error::io(&address.to_string(), "connecting", error);
        match address {
            Address::Tcp(name) => {
                let nobody = || io::Error::new(io::ErrorKind::NotFound, "the name has no address");
                let mut last = nobody();
                for target in name.to_socket_addrs().map_err(failed)? {
                    match TcpStream::connect_timeout(&target, timeout) {
                        Ok(stream) => {
                            return Self::of_tcp(stream, name.clone(), timeout).map_err(failed);
                        }
                        Err(error) => last = error,
                    }
                }
                Err(failed(last))
            }
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).map_err(failed)?;
                Self::of_unix(stream, address.to_string()).map_err(failed)
            }
        }
    }

    fn of_tcp(stream: TcpStream, peer: String, timeout: Duration) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SLICE))?;
        let socket = SockRef::from(&stream);
        let every = KEEPALIVE.min(timeout).max(Duration::from_secs(1));
        socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(every).with_interval(every))?;
        // What is sent into a cut link is an error as soon as the other end's silence is.
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(timeout))?;
        Ok(Self { stream: Stream::Tcp(stream), peer })
    }

    pub(crate) fn of_unix(stream: UnixStream, peer: String) -> io::Result<Self> {
        stream.set_read_timeout(Some(SLICE))?;
        Ok(Self { stream: Stream::Unix(stream, Descriptors { wanted: true, last: None }), peer })
    }

    /// Goes on under TLS with a server, whose certificate must be of the name or address that was
    /// connected to. Does not wait for it.
    ///
    /// # Errors
    /// [`Error::Misuse`] of a socket that is not one of TCP.
    #[cfg(feature = "tls")]
    pub fn into_tls_client(self, client: &TlsClient) -> Result<Self, Error> {
        let Stream::Tcp(tcp) = self.stream else { return Err(no_tcp(&self.peer)) };
        let host = self.peer.rsplit_once(':').map_or(&self.peer[..], |(host, _)| host);
        let name = host.trim_matches(['[', ']']).to_string();
        Ok(Self {
            stream: Stream::Tls(Box::new(TlsStream::client(tcp, client, &name)?)),
            peer: self.peer,
        })
    }

    /// Goes on under TLS with a client. Does not wait for it.
    ///
    /// # Errors
    /// [`Error::Misuse`] of a socket that is not one of TCP.
    #[cfg(feature = "tls")]
    pub fn into_tls_server(self, server: &TlsServer) -> Result<Self, Error> {
        let Stream::Tcp(tcp) = self.stream else { return Err(no_tcp(&self.peer)) };
        Ok(Self { stream: Stream::Tls(Box::new(TlsStream::server(tcp, server)?)), peer: self.peer })
    }

    /// Goes on under TLS with a client, if that is asked for and it is a socket of TCP: others are
    /// on this host, and go on as they are.
    #[cfg(feature = "tls")]
    pub(crate) fn into_tls_if_asked(self, server: Option<&TlsServer>) -> Result<Self, Error> {
        match server {
            Some(server) if self.is_tcp() => self.into_tls_server(server),
            _ => Ok(self),
        }
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Reads what is there; if `wait` says so and nothing is, waits for it, at most [`SLICE`].
    pub(crate) fn read(&mut self, into: &mut [IoSliceMut<'_>; 2], wait: bool) -> io::Result<usize> {
        let into = if into[0].is_empty() { &mut into[1..] } else { &mut into[..] };
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        match &mut self.stream {
            Stream::Tcp(stream) => match &mut *into {
                [large, ..] if large.len() > PIECE => {
                    receive(stream, &mut [IoSliceMut::new(&mut large[..PIECE])], flags)
                }
                _ => receive(stream, into, flags),
            },
            Stream::Unix(stream, descriptors) if descriptors.wanted => {
                receive_with(stream, into, flags, &mut descriptors.last)
            }
            Stream::Unix(stream, _) => receive(stream, into, flags),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.read(into, flags),
        }
    }

    /// Whether it is one of TCP, without TLS.
    #[cfg(feature = "tls")]
    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self.stream, Stream::Tcp(_))
    }

    /// Whether descriptors travel on it.
    pub(crate) fn takes_descriptors(&self) -> bool {
        matches!(&self.stream, Stream::Unix(_, descriptors) if descriptors.wanted)
    }

    /// The descriptor that came with what was read last.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        match &mut self.stream {
            Stream::Unix(_, descriptors) => descriptors.last.take(),
            _ => None,
        }
    }

    /// No descriptor that comes is of use from now on.
    pub(crate) fn refuse_descriptors(&mut self) {
        if let Stream::Unix(_, descriptors) = &mut self.stream {
            descriptors.wanted = false;
        }
    }

    /// Whether more may be there after a read of so many bytes of those that were wanted.
    pub(crate) fn may_have_more(&self, len: usize, wanted: usize) -> bool {
        match &self.stream {
            // A socket that gives less than it was asked for is empty.
            Stream::Tcp(_) => len == wanted || len == PIECE,
            Stream::Unix(..) => len == wanted,
            // What it has, others may have taken off the socket.
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => len == wanted || stream.has_input(),
        }
    }

    /// Whether it may take more after a write of so many bytes of those that were wanted.
    pub(crate) fn may_take_more(&self, len: usize, wanted: usize) -> bool {
        match &self.stream {
            // A socket that takes less is full.
            Stream::Tcp(_) | Stream::Unix(..) => len == wanted,
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => !stream.wants_write(),
        }
    }

    /// Says that nothing more will be written.
    pub(crate) fn shutdown(&mut self) -> io::Result<()> {
        let done = match &mut self.stream {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream, _) => stream.shutdown(Shutdown::Write),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.shutdown(),
        };
        // It may be gone already, and knows then.
        done.or_else(
            |error| if error.kind() == io::ErrorKind::NotConnected { Ok(()) } else { Err(error) },
        )
    }

    /// Bytes that were written and that the other end's system does not have yet; `None` where this
    /// one does not say.
    pub(crate) fn undelivered(&self) -> Option<u64> {
        match &self.stream {
            Stream::Tcp(stream) => crate::delivery::undelivered(stream),
            // There is only one system.
            Stream::Unix(..) => Some(0),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => crate::delivery::undelivered(stream.tcp()),
        }
    }

    /// Whether bytes that it took wait for the system.
    pub(crate) fn wants_write(&self) -> bool {
        match &self.stream {
            Stream::Tcp(_) | Stream::Unix(..) => false,
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.wants_write(),
        }
    }

    /// Hands over what it took, as far as the system takes it.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        match &mut self.stream {
            Stream::Tcp(_) | Stream::Unix(..) => Ok(()),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.flush(),
        }
    }

    /// Writes what it takes at once, a descriptor with the first byte: only to sockets that take
    /// such.
    pub(crate) fn write(
        &mut self,
        from: &[IoSlice<'_>],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<usize> {
        match &mut self.stream {
            Stream::Tcp(stream) => send(stream, from),
            Stream::Unix(stream, _) => match descriptor {
                Some(descriptor) => send_with(stream, from, descriptor),
                None => send(stream, from),
            },
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.write(from),
        }
    }

    /// Waits until something may be read, or written, at most so long. For what it is ready then.
    pub(crate) fn wait(&self, wanted: Ready, timeout: Duration) -> Result<Ready, Error> {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, wanted.read);
        flags.set(PollFlags::OUT, wanted.write);
        let mut polled = [PollFd::from_borrowed_fd(self.as_fd(), flags)];
        match poll(&mut polled, Some(&timespec(timeout))) {
            Ok(_) => {
                // Who has failed is ready for all: it will say so.
                let got =
                    |flag| polled[0].revents().intersects(flag | PollFlags::ERR | PollFlags::HUP);
                Ok(Ready { read: got(PollFlags::IN), write: got(PollFlags::OUT) })
            }
            Err(rustix::io::Errno::INTR) => Ok(Ready { read: false, write: false }),
            Err(error) => Err(self.failed("waiting", error.into())),
        }
    }

    pub(crate) fn failed(&self, what: &'static str, error: io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => {
                Error::Lost { what: format!("to {}, {what}", self.peer) }
            }
            // Of sockets only TLS has such errors.
            io::ErrorKind::InvalidData => {
                Error::Tls { peer: self.peer.clone(), source: error.into() }
            }
            _ => Error::io(&self.peer, what, error),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream, _) => stream.as_fd(),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.tcp().as_fd(),
        }
    }
}

/// Reads from a socket.
pub(crate) fn receive(
    socket: impl AsFd,
    into: &mut [IoSliceMut<'_>],
    flags: RecvFlags,
) -> io::Result<usize> {
    match into {
        [one] => Ok(recv(socket, &mut **one, flags)?.0),
        _ => Ok(recvmsg(socket, into, &mut RecvAncillaryBuffer::default(), flags)?.bytes),
    }
}

/// As [`receive`], with a descriptor that comes with it. Of more than one the system drops the
/// rest.
fn receive_with(
    socket: impl AsFd,
    into: &mut [IoSliceMut<'_>],
    flags: RecvFlags,
    descriptor: &mut Option<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let len = recvmsg(socket, into, &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC)?.bytes;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            descriptors.for_each(|came| *descriptor = Some(came));
        }
    }
    Ok(len)
}

/// As [`send`], with a descriptor.
pub(crate) fn send_with(
    socket: impl AsFd,
    from: &[IoSlice<'_>],
    descriptor: BorrowedFd<'_>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    Ok(sendmsg(socket, from, &mut ancillary, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Writes what a socket takes at once.
pub(crate) fn send(socket: impl AsFd, from: &[IoSlice<'_>]) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match from {
        [one] => Ok(rustix::net::send(socket, one, flags)?),
        _ => Ok(sendmsg(socket, from, &mut SendAncillaryBuffer::default(), flags)?),
    }
}

#[cfg(feature = "tls")]
fn no_tcp(peer: &str) -> Error {
    Error::Misuse(format!("{peer}: TLS is for TCP, and once"))
}

pub(crate) fn timespec(duration: Duration) -> Timespec {
    let tv_sec = duration.as_secs().try_into().unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: duration.subsec_nanos().into() }
}

/// Where others connect to. A socket of Unix is removed with it.
#[derive(Debug)]
pub struct Listener {
    listener: Listening,
    address: Address,
    timeout: Duration,
}

#[derive(Debug)]
enum Listening {
    Tcp(TcpListener),
    Unix(UnixListener),
    Handoffs(OwnedFd),
}

impl Listener {
    /// Listens. Port 0 is one that is free: [`address`](Self::address) says which. Sockets accepted
    /// here give up a silent machine after `timeout`.
    ///
    /// # Errors
    /// [`Error::Io`] when the address is taken, or not this machine's.
    pub fn bind(address: &Address, timeout: Duration) -> Result<Self, Error> {
        let failed = |error| Error::io(&address.to_string(), "listening", error);
        let (listener, address) = match address {
            Address::Tcp(name) => {
                let listener = TcpListener::bind(name).map_err(failed)?;
                let own = listener.local_addr().map_err(failed)?;
                (Listening::Tcp(listener), Address::Tcp(own.to_string()))
            }
            Address::Unix(path) => {
                (Listening::Unix(UnixListener::bind(path).map_err(failed)?), address.clone())
            }
        };
        Ok(Self { listener, address, timeout })
    }

    /// Receives connections that another process has accepted and [passes
    /// on](crate::Handoff::send_to) over `channel`, a Unix socket of type `SOCK_SEQPACKET`. A
    /// connection ends when its peer's machine has been silent for `timeout`.
    /// [`accept`](Self::accept) returns [`Error::Closed`] once that process has ended.
    pub fn from_handoffs(channel: OwnedFd, timeout: Duration) -> Self {
        let address = Address::Unix("(another process's)".into());
        Self { listener: Listening::Handoffs(channel), address, timeout }
    }

    /// From now on nobody waits in [`accept`](Self::accept).
    pub(crate) fn set_nonblocking(&self) -> Result<(), Error> {
        let done = match &self.listener {
            Listening::Tcp(listener) => listener.set_nonblocking(true),
            Listening::Unix(listener) => listener.set_nonblocking(true),
            Listening::Handoffs(channel) => {
                rustix::io::ioctl_fionbio(channel, true).map_err(Into::into)
            }
        };
        done.map_err(|error| Error::io(&self.address.to_string(), "listening", error))
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The next that connects. Blocks.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn accept(&self) -> Result<Socket, Error> {
        let failed = |error| Error::io(&self.address.to_string(), "accepting", error);
        match &self.listener {
            Listening::Tcp(listener) => {
                let (stream, peer) = listener.accept().map_err(failed)?;
                Socket::of_tcp(stream, peer.to_string(), self.timeout).map_err(failed)
            }
            Listening::Unix(listener) => {
                let (stream, _) = listener.accept().map_err(failed)?;
                Socket::of_unix(stream, self.address.to_string()).map_err(failed)
            }
            Listening::Handoffs(channel) => self.receive_handoff(channel).map_err(failed)?,
        }
    }

    /// Receives the next socket from the process that accepts connections.
    fn receive_handoff(&self, channel: &OwnedFd) -> io::Result<Result<Socket, Error>> {
        let (mut peer, mut relayed, mut passed) = ([0; 4 * MAX_PEER], [0], None);
        let mut into = [IoSliceMut::new(&mut relayed), IoSliceMut::new(&mut peer)];
        let len = receive_with(channel, &mut into, RecvFlags::empty(), &mut passed)?;
        let Some(passed) = passed else {
            let ended =
                Error::Closed { reason: "the process that accepts connections has ended".into() };
            return if len == 0 { Ok(Err(ended)) } else { Err(io::ErrorKind::InvalidData.into()) };
        };
        let peer = String::from_utf8_lossy(&peer[..len - 1]).into_owned();
        let socket = if rustix::net::sockopt::socket_domain(&passed)? == AddressFamily::UNIX {
            let mut socket = Socket::of_unix(passed.into(), peer)?;
            if relayed != [0] {
                socket.refuse_descriptors();
            }
            socket
        } else {
            Socket::of_tcp(passed.into(), peer, self.timeout)?
        };
        Ok(Ok(socket))
    }

    /// As [`accept`](Self::accept), at most so long; `None` when nobody came.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn accept_within(&self, timeout: Duration) -> Result<Option<Socket>, Error> {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match poll(
                &mut [PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN)],
                Some(&timespec(left)),
            ) {
                Ok(0) => return Ok(None),
                Ok(_) => return self.accept().map(Some),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    return Err(Error::io(&self.address.to_string(), "waiting", error.into()));
                }
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.listener {
            Listening::Tcp(listener) => listener.as_fd(),
            Listening::Unix(listener) => listener.as_fd(),
            Listening::Handoffs(channel) => channel.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let (Listening::Unix(_), Address::Unix(path)) = (&self.listener, &self.address) {
            // Somebody else may have removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}
