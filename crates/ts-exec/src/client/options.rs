// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a client connects.

use std::fmt;
use std::time::Duration;

use ts_remote::{Error, Link};

/// Options of a [`Client`](crate::Client): how to connect, and what to do when the link is lost.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// use ts_exec::{ClientOptions, EXEC};
/// use ts_remote::{Address, ConnectionOptions, Link};
///
/// let address: Address = "127.0.0.1:7070".parse()?;
/// let dial = move || {
///     let options = ConnectionOptions::default().with_service(EXEC);
///     Link::<Vec<u8>>::connect(&address, options)
/// };
/// let options = ClientOptions::new(dial).with_reconnect_timeout(Duration::from_secs(5));
/// # let _ = options;
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[non_exhaustive]
pub struct ClientOptions<S> {
    /// Connects to the server: at first, and again when the link was lost.
    pub dial: Dial<S>,
    /// How long the client tries to reconnect when the link was lost.
    pub reconnect_timeout: Duration,
    /// Whether the client keeps trying when the server's address refuses connections.
    pub retry_refused: bool,
}

/// Opens a link to a server.
pub type Dial<S> = Box<dyn Fn() -> Result<Link<S>, Error> + Send + Sync>;

impl<S> ClientOptions<S> {
    /// Creates options with a reconnect timeout of 30 seconds that retry refused connections.
    ///
    /// `dial` opens a link to the server. It is called again whenever the link was lost.
    pub fn new(dial: impl Fn() -> Result<Link<S>, Error> + Send + Sync + 'static) -> Self {
        Self {
            dial: Box::new(dial),
            reconnect_timeout: Duration::from_secs(30),
            retry_refused: true,
        }
    }

    /// Sets how long the client tries to reconnect when the link was lost. With zero, the session
    /// ends with its first link.
    #[must_use]
    pub fn with_reconnect_timeout(mut self, timeout: Duration) -> Self {
        self.reconnect_timeout = timeout;
        self
    }

    /// Sets whether the client keeps trying when the server's address refuses connections.
    ///
    /// Set it to `false` if the server is a process that was started for this session: if nothing
    /// listens at its address, it has ended and takes the session with it.
    #[must_use]
    pub fn with_retry_refused(mut self, retry: bool) -> Self {
        self.retry_refused = retry;
        self
    }
}

impl<S> fmt::Debug for ClientOptions<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientOptions")
            .field("reconnect_timeout", &self.reconnect_timeout)
            .field("retry_refused", &self.retry_refused)
            .finish_non_exhaustive()
    }
}
