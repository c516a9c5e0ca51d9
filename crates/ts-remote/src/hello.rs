// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who the two ends are.

use std::fmt;
use std::time::Duration;

use crate::wire::{FieldWriter, Fields};
use crate::{Error, Role};

/// The version of the protocol that this is. Ends agree if it is the same.
pub const VERSION: u64 = 1;

const THE_VERSION: u8 = 0x81;
const WINDOW: u8 = 0x82;
const MAX_STREAMS: u8 = 0x83;
const TOKEN: u8 = 4;
const SOFTWARE: u8 = 5;
const SERVICE: u8 = 6;

/// How an end of a connection is set up.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectionOptions {
    /// How much of each stream the other end may send before this end has memory for it, in bytes.
    /// At least one.
    pub window_bytes: u64,
    /// How many streams the other end may have open at a time.
    pub max_streams: u32,
    /// The secret that who connects must know; who connects tells it, to whoever is there. Without
    /// TLS it can be read on its way.
    pub token: Option<String>,
    /// What this end wants of the other; an end that accepts connections may offer several
    /// services.
    pub service: String,
    /// The most bytes of one payload in one frame. Smaller ones let other streams through sooner. 1
    /// byte to 1 MiB.
    pub frame_bytes: usize,
    /// Memory by which large payloads go to an end on the same host, in bytes; 0 for none, and to
    /// take none of the other's. Over Unix sockets only; each connection that sends such payloads
    /// takes so much.
    pub shared_bytes: usize,
    /// How long the other end may be silent while it is waited for. It is asked for a sign of life
    /// before.
    pub idle_timeout: Duration,
    /// How long the other end may be there and yet not do what is waited for: give credit, or send
    /// the rest of a tensor.
    pub stall_timeout: Duration,
}

impl fmt::Debug for ConnectionOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            window_bytes,
            max_streams,
            token,
            service,
            frame_bytes,
            shared_bytes,
            idle_timeout,
            stall_timeout,
        } = self;
        f.debug_struct("ConnectionOptions")
            .field("window_bytes", window_bytes)
            .field("max_streams", max_streams)
            .field("token", &token.as_ref().map(|_| "secret"))
            .field("service", service)
            .field("frame_bytes", frame_bytes)
            .field("shared_bytes", shared_bytes)
            .field("idle_timeout", idle_timeout)
            .field("stall_timeout", stall_timeout)
            .finish()
    }
}

impl Default for ConnectionOptions {
    /// 16 MiB for each of 16 streams, frames of 1 MiB, 4 MiB of shared memory, 30 s of silence, 5
    /// minutes of patience, and no token.
    fn default() -> Self {
        Self {
            window_bytes: 16 << 20,
            max_streams: 16,
            token: None,
            service: String::new(),
            frame_bytes: 1 << 20,
            shared_bytes: 4 << 20,
            idle_timeout: Duration::from_secs(30),
            stall_timeout: Duration::from_secs(300),
        }
    }
}

/// What an end says first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) window: u64,
    pub(crate) max_streams: u32,
    token: Option<String>,
    pub(crate) software: String,
    pub(crate) service: String,
}

impl Hello {
    /// Who accepts keeps its secret: it is for who connects to know.
    pub(crate) fn of(options: &ConnectionOptions, role: Role) -> Self {
        Self {
            window: options.window_bytes.max(1),
            max_streams: options.max_streams,
            token: options.token.clone().filter(|_| role == Role::Connector),
            software: concat!("tensorstream/", env!("CARGO_PKG_VERSION")).into(),
            service: options.service.clone(),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut fields = FieldWriter::default();
        fields.number(THE_VERSION, VERSION);
        fields.number(WINDOW, self.window).number(MAX_STREAMS, u64::from(self.max_streams));
        if let Some(token) = &self.token {
            fields.field(TOKEN, token.as_bytes());
        }
        fields.field(SOFTWARE, self.software.as_bytes()).field(SERVICE, self.service.as_bytes());
        fields.finish()
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, Error> {
        let bad = |what: String| Error::Protocol { stream: 0, what };
        let mut this = Self {
            window: 0,
            max_streams: 0,
            token: None,
            software: String::new(),
            service: String::new(),
        };
        let mut version = None;
        let mut fields = Fields::new(body, 0);
        while let Some(field) = fields.next()? {
            match field.tag {
                THE_VERSION => version = Some(field.number()?),
                WINDOW => this.window = field.number()?,
                MAX_STREAMS => {
                    this.max_streams = u32::try_from(field.number()?).unwrap_or(u32::MAX);
                }
                TOKEN => this.token = Some(field.text()?.into()),
                SOFTWARE => this.software = field.text()?.into(),
                SERVICE => this.service = field.text()?.into(),
                _ => field.skip()?,
            }
        }
        match version {
            Some(VERSION) if this.window > 0 => Ok(this),
            Some(VERSION) => Err(bad("a window of no bytes".into())),
            Some(other) => Err(bad(format!("it speaks version {other}, this end {VERSION}"))),
            None => Err(bad("it does not say which version it speaks".into())),
        }
    }

    /// It has been compared, and is nobody's to see.
    pub(crate) fn forget_token(&mut self) {
        self.token = None;
    }

    /// Whether who says this has the secret. How long that takes does not depend on where two
    /// secrets differ.
    pub(crate) fn knows(&self, token: Option<&str>) -> bool {
        let Some(token) = token.map(str::as_bytes) else { return true };
        let said = self.token.as_deref().unwrap_or_default().as_bytes();
        let differs = |(at, byte): (usize, &u8)| byte ^ said.get(at).unwrap_or(&0);
        said.len() == token.len()
            && token.iter().enumerate().map(differs).fold(0, |all, d| all | d) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_must_speak_the_same_version_and_know_the_secret() {
        let options =
            ConnectionOptions { token: Some("sesame".into()), ..ConnectionOptions::default() };
        let said = Hello::of(&options, Role::Connector);
        let read = Hello::decode(&said.encode()).unwrap();
        assert_eq!(read, said);
        assert!(read.knows(Some("sesame")) && read.knows(None));
        assert!(!read.knows(Some("sesam")) && !read.knows(Some("sesamE")) && !read.knows(Some("")));
        let answer = Hello::of(&options, Role::Acceptor).encode();
        assert!(!answer.windows(6).any(|part| part == b"sesame"), "who accepts keeps its secret");
        assert!(!format!("{options:?}").contains("sesame"));
        let mut newer = FieldWriter::default();
        newer.number(THE_VERSION, VERSION + 1).number(WINDOW, 1);
        assert!(Hello::decode(&newer.finish()).unwrap_err().to_string().contains("version 2"));
        assert!(Hello::decode(&[]).is_err());
    }
}
