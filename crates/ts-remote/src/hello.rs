// SPDX-License-Identifier: MIT OR Apache-2.0
//! HELLO, the first frame of each end.

use crate::fields::{FieldReader, FieldWriter};
use crate::frame::{MAX_LONG_PIECE_LEN, MAX_PIECE_LEN};
use crate::{ConnectionOptions, Error, Role};

/// The version of the wire protocol. Both ends must use the same version.
pub const VERSION: u64 = 1;

const PROTOCOL_VERSION: u8 = 0x81;
const WINDOW: u8 = 0x82;
const MAX_STREAMS: u8 = 0x83;
const TOKEN: u8 = 4;
const SOFTWARE: u8 = 5;
const SERVICE: u8 = 6;
const LONGEST_PIECE: u8 = 7;

/// The body of HELLO.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) window: u64,
    pub(crate) max_streams: u32,
    /// The longest piece of a payload that the peer reads, in bytes.
    pub(crate) longest_piece: usize,
    token: Option<String>,
    pub(crate) software: String,
    pub(crate) service: String,
}

impl Hello {
    /// Returns the HELLO for a role. Only a connector sends its token.
    pub(crate) fn new(options: &ConnectionOptions, role: Role) -> Self {
        Self {
            window: options.window_bytes.max(1),
            max_streams: options.max_streams,
            longest_piece: MAX_LONG_PIECE_LEN,
            token: options.token.clone().filter(|_| role == Role::Connector),
            software: concat!("tensorstream/", env!("CARGO_PKG_VERSION")).into(),
            service: options.service.clone(),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut fields = FieldWriter::default();
        fields.number(PROTOCOL_VERSION, VERSION);
        fields.number(WINDOW, self.window).number(MAX_STREAMS, u64::from(self.max_streams));
        if let Some(token) = &self.token {
            fields.field(TOKEN, token.as_bytes());
        }
        fields.field(SOFTWARE, self.software.as_bytes()).field(SERVICE, self.service.as_bytes());
        fields.number(LONGEST_PIECE, self.longest_piece as u64);
        fields.finish()
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, Error> {
        let bad = |what: String| Error::Protocol { stream: 0, what };
        let mut this = Self {
            window: 0,
            max_streams: 0,
            longest_piece: MAX_PIECE_LEN,
            token: None,
            software: String::new(),
            service: String::new(),
        };
        let mut version = None;
        let mut fields = FieldReader::new(body, 0);
        while let Some(field) = fields.next()? {
            match field.tag {
                PROTOCOL_VERSION => version = Some(field.number()?),
                WINDOW => this.window = field.number()?,
                MAX_STREAMS => {
                    this.max_streams = u32::try_from(field.number()?).unwrap_or(u32::MAX);
                }
                TOKEN => this.token = Some(field.text()?.into()),
                SOFTWARE => this.software = field.text()?.into(),
                SERVICE => this.service = field.text()?.into(),
                LONGEST_PIECE => {
                    // No peer may ask for tiny frames.
                    let longest = usize::try_from(field.number()?).unwrap_or(usize::MAX);
                    this.longest_piece = longest.clamp(MAX_PIECE_LEN, MAX_LONG_PIECE_LEN);
                }
                _ => field.skip()?,
            }
        }
        match version {
            Some(VERSION) if this.window > 0 => Ok(this),
            Some(VERSION) => Err(bad("received HELLO without a window of at least 1 byte".into())),
            Some(other) => Err(bad(format!(
                "received HELLO of protocol version {other} (expected {VERSION}); update the older \
                 end"
            ))),
            None => Err(bad("received HELLO without a protocol version".into())),
        }
    }

    /// Removes the token after it was checked, because it is a secret.
    pub(crate) fn clear_token(&mut self) {
        self.token = None;
    }

    /// Returns whether this HELLO contains the required token, or no token is required. The
    /// duration does not depend on the position at which tokens differ.
    pub(crate) fn has_token(&self, required: Option<&str>) -> bool {
        let Some(token) = required.map(str::as_bytes) else { return true };
        let received = self.token.as_deref().unwrap_or_default().as_bytes();
        let differs = |(at, byte): (usize, &u8)| byte ^ received.get(at).unwrap_or(&0);
        received.len() == token.len()
            && token.iter().enumerate().map(differs).fold(0, |all, d| all | d) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_requires_the_version_and_the_token() {
        let options = ConnectionOptions::default().with_token("sesame".to_string());
        let sent = Hello::new(&options, Role::Connector);
        let read = Hello::decode(&sent.encode()).unwrap();
        assert_eq!(read, sent);
        assert!(read.has_token(Some("sesame")) && read.has_token(None));
        let mut older = FieldWriter::default();
        older.number(PROTOCOL_VERSION, VERSION).number(WINDOW, 1);
        let older = Hello::decode(&older.finish()).unwrap();
        assert_eq!((read.longest_piece, older.longest_piece), (16 << 20, 1 << 20));
        for wrong in ["sesam", "sesamE", ""] {
            assert!(!read.has_token(Some(wrong)));
        }
        let answer = Hello::new(&options, Role::Acceptor).encode();
        assert!(!answer.windows(6).any(|part| part == b"sesame"), "an acceptor sends no token");
        assert!(!format!("{options:?}").contains("sesame"));
        let mut newer = FieldWriter::default();
        newer.number(PROTOCOL_VERSION, VERSION + 1).number(WINDOW, 1);
        assert!(Hello::decode(&newer.finish()).unwrap_err().to_string().contains("version 2"));
        assert!(Hello::decode(&[]).is_err());
    }
}
