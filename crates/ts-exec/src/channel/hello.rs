// SPDX-License-Identifier: MIT OR Apache-2.0
//! The handshake of a session: the first message of each peer on a new link.

use crate::codec::{Decoder, put_number};
use ts_remote::{Error, Event, Link, Sink};

/// The type byte of a HELLO message.
pub(super) const HELLO: u8 = 2;

/// The content of a HELLO message of the service `exec`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The name of the session, chosen by the client.
    pub(crate) session: [u8; 16],
    /// How many items of the session this peer has received.
    pub(crate) received: u64,
}

impl Hello {
    /// Opens a stream, sends this HELLO on it, and waits for the HELLO of the peer. Blocks.
    ///
    /// Returns the number of the stream, and the peer's HELLO.
    pub(crate) fn exchange<S: Sink>(self, link: &mut Link<S>) -> Result<(u32, Self), Error> {
        let stream = link.connection().open_stream()?;
        let sent = self.send(link, stream);
        let received = sent.and_then(|()| Self::receive(link)).map_err(|error| match error {
            // A server that refuses the session sends CLOSE with a reason. Without CLOSE, only this
            // link has ended, so the client may try another link.
            Error::Closed { reason } if !closed_by_peer(link) => {
                Error::Lost { what: format!("closed during the session's handshake: {reason}") }
            }
            other => other,
        })?;
        Ok((stream, received))
    }

    /// Sends this HELLO. Blocks until the socket has taken it.
    pub(crate) fn send<S: Sink>(self, link: &mut Link<S>, stream: u32) -> Result<(), Error> {
        let mut hello = vec![HELLO];
        hello.extend_from_slice(&self.session);
        put_number(&mut hello, self.received);
        link.send_message(stream, hello.into())
    }

    /// Waits for the peer's HELLO, which must be its first message. Blocks.
    pub(crate) fn receive<S: Sink>(link: &mut Link<S>) -> Result<Self, Error> {
        loop {
            match link.next_event()? {
                Event::Message { stream, bytes } => {
                    let mut fields = Decoder::new(&bytes, stream);
                    let kind = fields.byte()?;
                    if kind != HELLO {
                        let what = format!(
                            "the session must begin with a HELLO message, which has type {HELLO} \
                             (got type {kind})"
                        );
                        return Err(fields.error(what));
                    }
                    let session = fields.array()?;
                    return Ok(Self { session, received: fields.number()? });
                }
                Event::Connected { .. } => {}
                other => {
                    let got = match other {
                        Event::Finished { .. } => "the end of a stream",
                        Event::Cancelled { .. } => "the cancellation of a stream",
                        _ => "a tensor",
                    };
                    let what = format!("the session must begin with a HELLO message (got {got})");
                    return Err(Error::Protocol { stream: 0, what });
                }
            }
        }
    }
}

/// Returns whether the peer has sent CLOSE.
pub(super) fn closed_by_peer<S: Sink>(link: &mut Link<S>) -> bool {
    matches!(link.connection().end_of_input(), Err(Error::Closed { .. }))
}
