// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options of a client.

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
/// use ts_exec::ts_remote::{Address, ConnectionOptions, Link};
///
/// let address: Address = "127.0.0.1:7070".parse()?;
/// let dial = move || {
///     let options = ConnectionOptions::default().with_service(EXEC);
///     Link::<Vec<u8>>::connect(&address, options)
/// };
/// let options = ClientOptions::new(dial).with_reconnect_timeout(Duration::from_secs(5));
/// # let _ = options;
/// # Ok::<(), ts_exec::ts_remote::Error>(())
/// ```
#[non_exhaustive]
pub struct ClientOptions<S> {
    /// The function that opens a link to the server. It is called again to reconnect.
    pub dial: Dial<S>,
    /// How long the client tries to reconnect after the link was lost.
    pub reconnect_timeout: Duration,
    /// Whether the client keeps trying to reconnect when the server's address refuses connections.
    pub retry_refused: bool,
}

/// A function that opens a link to a server.
pub type Dial<S> = Box<dyn Fn() -> Result<Link<S>, Error> + Send + Sync>;

impl<S> ClientOptions<S> {
    /// Creates options with the default values: a reconnect timeout of 30 seconds, and retries
    /// after refused connections.
    ///
    /// `dial` opens a link to the server. It is called again to reconnect.
    pub fn new(dial: impl Fn() -> Result<Link<S>, Error> + Send + Sync + 'static) -> Self {
        Self {
            dial: Box::new(dial),
            reconnect_timeout: Duration::from_secs(30),
            retry_refused: true,
        }
    }

    /// Sets how long the client tries to reconnect after the link was lost. With zero, the session
    /// ends when its first link is lost.
    #[must_use]
    pub fn with_reconnect_timeout(mut self, timeout: Duration) -> Self {
        self.reconnect_timeout = timeout;
        self
    }

    /// Sets whether the client keeps trying to reconnect when the server's address refuses
    /// connections.
    ///
    /// Set this to `false` if the server process was started for this session only. If nothing
    /// listens at its address any more, the process has ended, and so has the session.
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
