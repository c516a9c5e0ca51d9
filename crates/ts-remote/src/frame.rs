// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frames: what every byte of a connection belongs to.

use crate::Error;

/// What a connection begins with, at both ends: the protocol's name and its major version.
pub(crate) const PREFACE: [u8; 8] = *b"TSWIRE1\n";
/// Bytes before the body of a frame.
pub(crate) const HEADER_LEN: usize = 24;
/// The longest body of a frame that is not DATA.
pub(crate) const MAX_CONTROL_LEN: usize = 64 << 10;
/// The most bytes of a payload that a DATA frame has.
pub(crate) const MAX_PIECE_LEN: usize = 1 << 20;
/// The longest body of a DATA frame: with what stands before an encoded piece, and a checksum.
pub(crate) const MAX_DATA_LEN: usize = MAX_PIECE_LEN + 16;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Who this is: the first frame of each end.
    Hello = 1,
    /// A tensor begins.
    Meta = 2,
    /// Bytes of the tensor's payload.
    Data = 3,
    /// The tensor is complete.
    End = 4,
    /// The stream ends before its tensor is complete.
    Cancel = 5,
    /// The other end may send so much.
    Credit = 6,
    /// Bytes of the user's, whole.
    Message = 7,
    Ping = 8,
    Pong = 9,
    /// The connection ends, and why.
    Close = 10,
    /// The stream ends: nothing more comes.
    Finish = 11,
    /// Memory by which payloads will come, whose descriptor comes with it.
    Share = 12,
}

impl Kind {
    const ALL: [Self; 12] = [
        Self::Hello,
        Self::Meta,
        Self::Data,
        Self::End,
        Self::Cancel,
        Self::Credit,
        Self::Message,
        Self::Ping,
        Self::Pong,
        Self::Close,
        Self::Finish,
        Self::Share,
    ];

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u8 == code)
    }
}

/// The body's last 8 bytes are the XXH3 of what is before them.
pub(crate) const CHECKED: u8 = 1;
/// The body is encoded, as the tensor's META says, behind 8 bytes that say what it decodes to.
pub(crate) const ENCODED: u8 = 2;
/// The bytes are in shared memory; the body says how many.
pub(crate) const SHARED: u8 = 4;
const KNOWN_FLAGS: u8 = CHECKED | ENCODED | SHARED;

/// The beginning of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) flags: u8,
    /// Which stream it is of; 0 for the connection.
    pub(crate) stream: u32,
    /// What it means depends on the kind: of DATA, where in the payload its bytes are.
    pub(crate) seq: u64,
    /// Bytes of the body.
    pub(crate) len: u64,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = self.kind as u8;
        bytes[1] = self.flags;
        bytes[4..8].copy_from_slice(&self.stream.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.seq.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, Error> {
        let [kind, flags, reserved @ ..] = *bytes;
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let bad = |what: String| Error::Protocol { stream: 0, what };
        let kind = Kind::from_code(kind)
            .ok_or_else(|| bad(format!("a frame of the unknown kind {kind}")))?;
        if flags & !KNOWN_FLAGS != 0 || reserved[..2] != [0, 0] {
            return Err(bad(format!("a {kind:?} frame with the unknown flags {flags:#04x}")));
        }
        let stream = u32::from_le_bytes(bytes[4..8].try_into().expect("4 bytes"));
        let header = Self { kind, flags, stream, seq: number(8), len: number(16) };
        let most = if kind == Kind::Data { MAX_DATA_LEN } else { MAX_CONTROL_LEN };
        if header.len > most as u64 {
            return Err(Error::Protocol {
                stream,
                what: format!("a {kind:?} frame of {} bytes, of at most {most}", header.len),
            });
        }
        Ok(header)
    }

    /// The body's length.
    pub(crate) fn body_len(&self) -> usize {
        self.len as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_are_read_as_they_were_written(
            code in 0u8..14, flags in 0u8..8, stream: u32, seq: u64, len in 0u64..100_000,
        ) {
            let mut bytes = Header { kind: Kind::Data, flags, stream, seq, len }.encode();
            bytes[0] = code;
            match Header::decode(&bytes) {
                Ok(header) => {
                    prop_assert_eq!(header.encode(), bytes);
                    prop_assert!(header.kind == Kind::Data || len <= MAX_CONTROL_LEN as u64);
                }
                Err(error) => {
                    let known = Kind::from_code(code).is_some() && flags <= KNOWN_FLAGS;
                    prop_assert!(!known || len > MAX_CONTROL_LEN as u64, "{error}");
                }
            }
        }
    }
}
