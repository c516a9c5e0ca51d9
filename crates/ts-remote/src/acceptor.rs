// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accepts connections and completes their handshakes.

use std::time::Duration;

use rustix::event::PollFd;

use crate::handshakes::{Handshake, Handshakes, Progress};
#[cfg(feature = "tls")]
use crate::tls::TlsServer;
use crate::{ConnectionOptions, Error, Link, Listener, Role, Sink};

/// Accepts connections and completes their handshakes, for programs that handle connections one by
/// one. [`serve`](crate::serve()) does the same for a whole server.
///
/// A peer that sends nothing, or no valid handshake, does not delay other peers.
///
/// ```
/// use std::thread;
/// use std::time::Duration;
/// use ts_remote::{Acceptor, ConnectionOptions, Link, Listener};
///
/// let options = ConnectionOptions::default();
/// let listener = Listener::bind(&"127.0.0.1:0".parse()?, options.idle_timeout)?;
/// let address = listener.address().clone();
/// let client = thread::spawn(move || {
///     Link::<Vec<u8>>::connect(&address, ConnectionOptions::default())
/// });
///
/// let mut acceptor = Acceptor::<Vec<u8>>::new(options);
/// let log = |peer: &str, error: &ts_remote::Error| eprintln!("{peer}: {error}");
/// let link = acceptor.accept_within(&listener, Duration::from_secs(30), log)?;
/// assert!(link.is_some());
/// client.join().expect("the client does not panic")?;
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug)]
pub struct Acceptor<S> {
    handshakes: Handshakes<Link<S>>,
    #[cfg(feature = "tls")]
    tls: Option<TlsServer>,
}

impl<S: Sink> Acceptor<S> {
    /// Creates an acceptor whose connections have these options. It disconnects peers that do not
    /// complete the handshake within `options.idle_timeout`.
    pub fn new(options: ConnectionOptions) -> Self {
        Self {
            handshakes: Handshakes::new(options),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Requires TLS on all TCP connections.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self, tls: TlsServer) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Returns the next connection whose handshake is complete, or `None` after `time`. Calls `log`
    /// with the peer and the reason for each connection that fails. Blocks.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the listener fails, and [`Error::Closed`] if a
    /// [handoff channel](Listener::from_handoffs) has closed. Errors of single connections are only
    /// passed to `log`.
    pub fn accept_within(
        &mut self,
        listener: &Listener,
        time: Duration,
        log: impl FnMut(&str, &Error),
    ) -> Result<Option<Link<S>>, Error> {
        #[cfg(feature = "tls")]
        let tls = self.tls.as_ref();
        let accepted = self.handshakes.accept_within(
            listener,
            time,
            |socket, options| {
                #[cfg(feature = "tls")]
                let socket = socket.into_tls_if_tcp(tls)?;
                Ok(Link::start(socket, Role::Acceptor, options.clone()))
            },
            log,
        )?;
        Ok(accepted.map(|(link, ())| link))
    }
}

impl<S: Sink> Handshake for Link<S> {
    type Output = ();

    fn peer(&self) -> &str {
        Link::peer(self)
    }

    fn poll_fd(&mut self) -> Option<PollFd<'_>> {
        Some(Link::poll_fd(self))
    }

    fn time_to_advance(&self) -> Option<Duration> {
        self.may_read().then_some(Duration::ZERO)
    }

    fn advance(&mut self, _: &ConnectionOptions) -> Result<Progress<()>, Error> {
        self.drive()?;
        let complete = self.handshake_within(Duration::ZERO)?;
        Ok(if complete { Progress::Complete(()) } else { Progress::Pending })
    }

    fn refuse(mut self, _: &ConnectionOptions, reason: &str) -> Error {
        self.connection().close(reason);
        let _ = self.drive();
        Error::Misuse(reason.into())
    }
}
