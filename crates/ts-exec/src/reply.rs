// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the machine that has the tensors says.

use crate::value::{Decoder, Value, put_number, put_text};
use ts_remote::Error;

/// Why something was not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OpFailureKind {
    /// The operator itself said so.
    Raised,
    /// There was not enough memory.
    OutOfMemory,
    /// Something was asked of a tensor that is not there.
    Stale,
    /// What was asked makes no sense, or may not be asked.
    Refused,
}

/// Something that was asked and not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct OpFailure {
    /// Why.
    pub kind: OpFailureKind,
    /// What is wrong, and with what.
    pub message: String,
}

impl OpFailure {
    /// One of a kind.
    pub fn new(kind: OpFailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

/// One thing that is said.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reply {
    /// What an operator gave, or that all before is done.
    Answer { reply: u64, values: Vec<Value> },
    /// The elements of a tensor.
    Bytes { reply: u64, bytes: Vec<u8> },
    /// They are the next tensor of the stream.
    Tensor { reply: u64 },
    /// A request, by its number, was not done; nor will be what needs what it would have given.
    Failed { request: u64, failure: OpFailure },
    /// There is no answer, for this request was not done.
    Refused { reply: u64, request: u64, failure: OpFailure },
}

const ANSWER: u8 = 1;
const BYTES: u8 = 2;
const TENSOR: u8 = 3;
const FAILED: u8 = 4;
const REFUSED: u8 = 5;

const KINDS: [OpFailureKind; 4] = [
    OpFailureKind::Raised,
    OpFailureKind::OutOfMemory,
    OpFailureKind::Stale,
    OpFailureKind::Refused,
];
/// The most of a failure's message that travels, in bytes.
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
            kind => return Err(from.bad(format!("a reply of kind {kind}"))),
        })
    }
}

fn put_failure(into: &mut Vec<u8>, failure: &OpFailure) {
    let kind = KINDS.iter().position(|&kind| kind == failure.kind).expect("all kinds are there");
    into.push(kind as u8);
    let text = &failure.message;
    let end = (0..=text.len().min(MAX_TEXT)).rev().find(|&end| text.is_char_boundary(end));
    put_text(into, &text[..end.unwrap_or(0)]);
}

fn failure(from: &mut Decoder<'_>) -> Result<OpFailure, Error> {
    let kind = from.byte()?;
    let kind = KINDS.get(usize::from(kind)).copied();
    let kind = kind.ok_or_else(|| from.bad("a failure of a kind that there is not".into()))?;
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
        fn what_was_said_is_read(said in replies()) {
            let mut bytes = Vec::new();
            said.encode(&mut bytes);
            let mut from = Decoder::new(&bytes, 1);
            prop_assert_eq!(Reply::decode(&mut from).unwrap(), said);
            prop_assert!(from.is_empty());
            for cut in 0..bytes.len() {
                prop_assert!(Reply::decode(&mut Decoder::new(&bytes[..cut], 1)).is_err());
            }
        }

        #[test]
        fn whatever_comes_is_a_reply_or_an_error(
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
