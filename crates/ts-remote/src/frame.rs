// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frames, the units of the byte stream.

use crate::Error;

/// The first bytes of each direction: the name of the protocol and its major version.
pub(crate) const PREFACE: [u8; 8] = *b"TSWIRE1\n";
/// The length of a frame's header, in bytes.
pub(crate) const HEADER_LEN: usize = 24;
/// The longest body of a frame other than DATA, in bytes.
pub(crate) const MAX_CONTROL_LEN: usize = 64 << 10;
/// The longest piece of a payload in a DATA frame that is encoded or in shared memory, or whose
/// receiver has announced no other limit, in bytes.
pub(crate) const MAX_PIECE_LEN: usize = 1 << 20;
/// The longest piece that this end reads and writes, in bytes.
pub(crate) const MAX_LONG_PIECE_LEN: usize = 16 << 20;
/// The length of the prefix of an ENCODED body: the length of the decoded piece (4 bytes), the
/// width of its floats (1 byte), and 3 zero bytes.
pub(crate) const ENCODED_PREFIX_LEN: usize = 8;
/// The longest body of a DATA frame with an encoded piece, its prefix and a checksum, in bytes.
pub(crate) const MAX_ENCODED_LEN: usize = MAX_PIECE_LEN + ENCODED_PREFIX_LEN + 8;
/// The longest body of a DATA frame, with a checksum, in bytes.
const MAX_DATA_LEN: usize = MAX_LONG_PIECE_LEN + 8;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Identifies the sender. This is the first frame of each end, except for a CLOSE that refuses
    /// the connection.
    Hello = 1,
    /// Begins a tensor.
    Meta = 2,
    /// Carries bytes of the tensor's payload.
    Data = 3,
    /// Completes the tensor.
    End = 4,
    /// Aborts the stream, with a reason.
    Cancel = 5,
    /// Grants the peer credit for more bytes.
    Credit = 6,
    /// Carries a message of the user.
    Message = 7,
    Ping = 8,
    Pong = 9,
    /// Ends the connection, with a reason.
    Close = 10,
    /// Ends a stream of the sender, or releases a stream of the peer.
    Finish = 11,
    /// Offers shared memory for payloads. The descriptor of the memory comes with this frame.
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

/// A flag of DATA. The body ends with the XXH3 hash of all bytes before it, or of the piece in
/// shared memory.
pub(crate) const CHECKED: u8 = 1;
/// A flag of DATA. The body is encoded with the codec of the tensor's META, after a prefix of
/// [`ENCODED_PREFIX_LEN`] bytes.
pub(crate) const ENCODED: u8 = 2;
/// A flag of DATA. The piece is in shared memory, and the body begins with the piece's length.
pub(crate) const SHARED: u8 = 4;
const KNOWN_FLAGS: u8 = CHECKED | ENCODED | SHARED;

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) flags: u8,
    /// The number of the stream; 0 for the connection itself.
    pub(crate) stream: u32,
    /// A number whose meaning depends on the kind. For DATA, it is the offset of the piece in the
    /// payload, in bytes.
    pub(crate) seq: u64,
    /// The length of the body, in bytes.
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
        let number = |at: usize| {
            u64::from_le_bytes(bytes[at..at + 8].try_into().expect("the slice has 8 bytes"))
        };
        let bad = |what: String| Error::Protocol { stream: 0, what };
        let kind = Kind::from_code(kind)
            .ok_or_else(|| bad(format!("received unknown frame kind {kind}")))?;
        if flags & !KNOWN_FLAGS != 0 || reserved[..2] != [0, 0] {
            return Err(bad(format!(
                "received a {kind:?} frame with flags {flags:#04x} and reserved bytes {:02x?} \
                 (expected no flags other than {KNOWN_FLAGS:#04x}, and reserved bytes [00, 00])",
                &reserved[..2]
            )));
        }
        let stream = u32::from_le_bytes(bytes[4..8].try_into().expect("the slice has 4 bytes"));
        let header = Self { kind, flags, stream, seq: number(8), len: number(16) };
        let most = if kind == Kind::Data { MAX_DATA_LEN } else { MAX_CONTROL_LEN };
        if header.len > most as u64 {
            return Err(Error::Protocol {
                stream,
                what: format!(
                    "received a {kind:?} frame of {} bytes (expected at most {most})",
                    header.len
                ),
            });
        }
        Ok(header)
    }

    /// Returns the length of the body in bytes, as a `usize`.
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
        fn headers_round_trip(
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
