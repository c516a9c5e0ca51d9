// SPDX-License-Identifier: MIT OR Apache-2.0
//! Those who have connected and are still to say who they are.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::socket::{SLICE, timespec};
#[cfg(feature = "tls")]
use crate::tls::TlsServer;
use crate::{ConnectionOptions, Error, Link, Listener, Role, Sink, Socket};

/// The most that are in a lobby. For another the oldest of them goes.
const MAX_STRANGERS: usize = 128;
/// How long nobody is let in when the system can take no more.
const SHORTAGE: Duration = Duration::from_millis(5);

/// Lets those in who say who they are, whoever else has connected: who says nothing, or something
/// else, keeps nobody waiting. For programs that have connections one by one;
/// [`serve`](crate::serve()) does so by itself.
#[derive(Debug)]
pub struct Acceptor<S> {
    options: ConnectionOptions,
    strangers: Vec<Link<S>>,
    #[cfg(feature = "tls")]
    tls: Option<TlsServer>,
}

impl<S: Sink> Acceptor<S> {
    /// An empty one. Who says nothing in the connection's `timeout` is sent away.
    pub fn new(options: ConnectionOptions) -> Self {
        Self {
            options,
            strangers: Vec::new(),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Those who come by TCP speak TLS.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self, tls: TlsServer) -> Self {
        self.tls = Some(tls);
        self
    }

    /// The next that is known, at most so long; `None` when there was none. `log` hears who was
    /// sent away and why. Blocks.
    ///
    /// # Errors
    /// [`Error::Io`] when the listener fails for good. No stranger's error ends it.
    pub fn accept_within(
        &mut self,
        listener: &Listener,
        time: Duration,
        mut log: impl FnMut(&str, &Error),
    ) -> Result<Option<Link<S>>, Error> {
        listener.set_nonblocking()?;
        let end = Instant::now().checked_add(time);
        loop {
            let left = end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()));
            let busy = self.strangers.iter().any(Link::may_read);
            let slice = if busy { Duration::ZERO } else { left.min(SLICE) };
            let links = self.strangers.iter_mut().collect();
            if wait(listener, true, links, slice)?[0] {
                let mut strangers = std::mem::take(&mut self.strangers);
                let accepted = accept_all(
                    listener,
                    &mut strangers,
                    |socket| self.receive(socket),
                    Link::peer,
                    &mut log,
                );
                self.strangers = strangers;
                accepted?;
            }
            let mut at = 0;
            while let Some(stranger) = self.strangers.get_mut(at) {
                match stranger.drive().and_then(|_| stranger.meet_within(Duration::ZERO)) {
                    Ok(true) => return Ok(Some(self.strangers.remove(at))),
                    Ok(false) => at += 1,
                    Err(error) => {
                        log(stranger.peer(), &error);
                        self.strangers.remove(at);
                    }
                }
            }
            if left.is_zero() {
                return Ok(None);
            }
        }
    }

    fn receive(&self, socket: Socket) -> Result<Link<S>, Error> {
        #[cfg(feature = "tls")]
        let socket = socket.into_tls_if_asked(self.tls.as_ref())?;
        Ok(Link::unmet(socket, Role::Acceptor, self.options.clone()))
    }
}

/// Accepts all waiting connections. Drops the oldest pending ones if there are too many.
pub(crate) fn accept_all<P>(
    listener: &Listener,
    pending: &mut Vec<P>,
    receive: impl Fn(Socket) -> Result<P, Error>,
    peer: impl Fn(&P) -> &str,
    log: &mut impl FnMut(&str, &Error),
) -> Result<(), Error> {
    while let Some(socket) = accept(listener)? {
        match receive(socket) {
            Ok(received) => pending.push(received),
            Err(error) => log("a socket", &error),
        }
        if pending.len() > MAX_STRANGERS {
            let oldest = pending.remove(0);
            log(peer(&oldest), &Error::Misuse("others came, and it had said nothing".into()));
        }
    }
    Ok(())
}

/// The next that has connected, if there is one and the system can take it.
pub(crate) fn accept(listener: &Listener) -> Result<Option<Socket>, Error> {
    match listener.accept() {
        Ok(socket) => Ok(Some(socket)),
        Err(Error::Io { source, what, peer }) => match source.kind() {
            io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionAborted => Ok(None),
            // No more files may be open: others will end.
            _ if matches!(source.raw_os_error(), Some(23 | 24 | 12 | 105)) => {
                std::thread::sleep(SHORTAGE);
                Ok(None)
            }
            io::ErrorKind::InvalidInput => Err(Error::Io { peer, what, source }),
            // What went wrong went wrong for the one that wanted to connect.
            _ => Ok(None),
        },
        Err(error) => Err(error),
    }
}

/// Whether the listener, where it is looked at, and each link in turn is ready for something. Waits
/// at most so long for one that is.
pub(crate) fn wait<S: Sink>(
    listener: &Listener,
    listening: bool,
    mut links: Vec<&mut Link<S>>,
    timeout: Duration,
) -> Result<Vec<bool>, Error> {
    let writing: Vec<bool> = links.iter_mut().map(|link| link.wants_write()).collect();
    let mut polled = Vec::with_capacity(links.len() + 1);
    let flags = if listening { PollFlags::IN } else { PollFlags::empty() };
    polled.push(PollFd::from_borrowed_fd(listener.as_fd(), flags));
    for (link, writing) in links.iter().zip(writing) {
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, writing);
        polled.push(PollFd::from_borrowed_fd(link.socket().as_fd(), flags));
    }
    match poll(&mut polled, Some(&timespec(timeout))) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {
            Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect())
        }
        Err(error) => Err(Error::io(&listener.address().to_string(), "waiting", error.into())),
    }
}
