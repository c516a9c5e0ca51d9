// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replies of the server, and their encoding.

use crate::codec::{Decoder, put_number, put_text};
use crate::value::Value;
use ts_remote::Error;

/// The kind of an [`OpFailure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OpFailureKind {
    /// The operator failed.
    Operator,
    /// The server ran out of memory.
    OutOfMemory,
    /// A storage that the request names does not exist.
    Stale,
    /// The request is invalid, or not allowed.
    Refused,
}

/// The failure of a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct OpFailure {
    /// The kind of the failure.
    pub kind: OpFailureKind,
    /// A description of what failed and why, from the server.
    pub message: String,
}

impl OpFailure {
    /// Creates a failure of this kind. `message` describes what failed and why.
    pub fn new(kind: OpFailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

/// A message about the outcome of a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reply {
    /// The results of an operator, or of another request with a reply. Empty for SYNC.
    Answer { reply: u64, values: Vec<Value> },
    /// The elements of a tensor, in row-major order.
    Bytes { reply: u64, bytes: Vec<u8> },
    /// The elements of a tensor follow, as the next tensor of the stream.
    Tensor { reply: u64 },
    /// A request failed. Requests that depend on its outputs fail too.
    Failed { request: u64, failure: OpFailure },
    /// There is no answer for `reply`, because request `request` failed.
    Refused { reply: u64, request: u64, failure: OpFailure },
}

const ANSWER: u8 = 1;
const BYTES: u8 = 2;
const TENSOR: u8 = 3;
const FAILED: u8 = 4;
const REFUSED: u8 = 5;

const KINDS: [OpFailureKind; 4] = [
    OpFailureKind::Operator,
    OpFailureKind::OutOfMemory,
    OpFailureKind::Stale,
    OpFailureKind::Refused,
];
/// Longer messages of failures are truncated to this length in bytes.
const MAX_TEXT: usize = 16 << 10;

impl Reply {
    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::Answer { reply, values } => {
                into.push(ANSWER);
                put_number(into, *reply);
                put_number(into, values.len() as u64);
                values.iter().for_each(|value| value.encode(into));
            }
            Self::Bytes { reply, bytes } => {
                into.push(BYTES);
                put_number(into, *reply);
                put_number(into, bytes.len() as u64);
                into.extend_from_slice(bytes);
            }
            Self::Tensor { reply } => {
                into.push(TENSOR);
                put_number(into, *reply);
            }
            Self::Failed { request, failure } => {
                into.push(FAILED);
                put_number(into, *request);
                put_failure(into, failure);
            }
            Self::Refused { reply, request, failure } => {
                into.push(REFUSED);
                put_number(into, *reply);
                put_number(into, *request);
                put_failure(into, failure);
            }
        }
    }

    pub(crate) fn decode(from: &mut Decoder<'_>) -> Result<Self, Error> {
        Ok(match from.byte()? {
            ANSWER => {
                let (reply, len) = (from.number()?, from.len()?);
                let values = (0..len).map(|_| Value::decode(from)).collect::<Result<_, _>>()?;
                Self::Answer { reply, values }
            }
            BYTES => Self::Bytes { reply: from.number()?, bytes: from.bytes()?.into() },
            TENSOR => Self::Tensor { reply: from.number()? },
            FAILED => Self::Failed { request: from.number()?, failure: failure(from)? },
            REFUSED => Self::Refused {
                reply: from.number()?,
                request: from.number()?,
                failure: failure(from)?,
            },
            kind => {
                return Err(from
                    .error(format!("unknown reply kind {kind} (expected {ANSWER} to {REFUSED})")));
            }
        })
    }
}

fn put_failure(into: &mut Vec<u8>, failure: &OpFailure) {
    let kind = KINDS.iter().position(|&kind| kind == failure.kind).expect("`KINDS` has every kind");
    into.push(kind as u8);
    let text = &failure.message;
    let end = (0..=text.len().min(MAX_TEXT)).rev().find(|&end| text.is_char_boundary(end));
    put_text(into, &text[..end.unwrap_or(0)]);
}

fn failure(from: &mut Decoder<'_>) -> Result<OpFailure, Error> {
    let kind = from.byte()?;
    let known = KINDS.get(usize::from(kind)).copied();
    let kind = known.ok_or_else(|| {
        from.error(format!("unknown failure kind {kind} (expected 0 to {})", KINDS.len() - 1))
    })?;
    Ok(OpFailure { kind, message: from.text()?.into() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::value::tests::values;

    fn replies() -> impl Strategy<Value = Reply> {
        let failure = (prop::sample::select(KINDS.to_vec()), ".*");
        let failure = failure.prop_map(|(kind, message)| OpFailure { kind, message });
        prop_oneof![
            (any::<u64>(), prop::collection::vec(values(), 0..4))
                .prop_map(|(reply, values)| Reply::Answer { reply, values }),
            (any::<u64>(), prop::collection::vec(any::<u8>(), 0..9))
                .prop_map(|(reply, bytes)| Reply::Bytes { reply, bytes }),
            any::<u64>().prop_map(|reply| Reply::Tensor { reply }),
            (any::<u64>(), failure.clone())
                .prop_map(|(request, failure)| Reply::Failed { request, failure }),
            (any::<[u64; 2]>(), failure).prop_map(|([reply, request], failure)| Reply::Refused {
                reply,
                request,
                failure
            }),
        ]
    }

    proptest! {
        #[test]
        fn replies_survive_encoding_and_truncation_is_an_error(sent in replies()) {
            let mut bytes = Vec::new();
            sent.encode(&mut bytes);
            let mut from = Decoder::new(&bytes, 1);
            prop_assert_eq!(Reply::decode(&mut from).unwrap(), sent);
            prop_assert!(from.is_empty());
            for cut in 0..bytes.len() {
                prop_assert!(Reply::decode(&mut Decoder::new(&bytes[..cut], 1)).is_err());
            }
        }

        #[test]
        fn any_bytes_decode_to_a_reply_or_an_error(
            kind in 0u8..7,
            rest in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            let bytes = [vec![kind], rest].concat();
            let mut from = Decoder::new(&bytes, 1);
            if let Ok(reply) = Reply::decode(&mut from) {
                let mut again = Vec::new();
                reply.encode(&mut again);
                prop_assert!(again.len() <= bytes.len());
            }
        }
    }
}
