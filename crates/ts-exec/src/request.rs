// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests of a client, and their encoding.

use crate::codec::{Decoder, put_number, put_text};
use crate::value::Value;
use crate::view::TensorRef;
use ts_remote::Error;

/// A request to the server.
///
/// Requests are numbered from 1 for the whole session, in the order in which they are submitted.
/// The server runs them in that order. The client chooses the numbers of storages, operators and
/// replies.
///
/// # Examples
///
/// ```
/// use ts_exec::{Request, Requests};
///
/// let request = Request::Create { storage: 1, bytes: 16, device: 0 };
/// let mut batch = Vec::new();
/// request.encode(&mut batch);
///
/// let decoded: Vec<_> = Requests::new(&batch, 0).collect::<Result<_, _>>()?;
/// assert_eq!(decoded, [request]);
/// # Ok::<(), ts_exec::ts_remote::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Request {
    /// Defines the number of an operator.
    Define {
        /** The number. Numbers are assigned in order, from 0. */
        op: u32,
        /** Namespace, name and overload, such as `aten::add.Tensor`. */
        name: String,
    },
    /// Creates a storage of zeros. It should take no memory until the first write.
    Create {
        /** The number of the storage, which no other storage of the session has had. */
        storage: u64,
        /** The length in bytes. */
        bytes: u64,
        /** The index of the device on the server that stores the bytes. */
        device: u32,
    },
    /// Changes the length of a storage. The common prefix is kept; new bytes are zero.
    Resize {
        /** The number of the storage. */
        storage: u64,
        /** The new length in bytes. */
        bytes: u64,
    },
    /// Frees a storage, if it exists.
    Free {
        /** The number of the storage. */
        storage: u64,
    },
    /// Writes bytes to a storage.
    Write {
        /** The number of the storage. */
        storage: u64,
        /** The position of the first byte in the storage. */
        offset: u64,
        /** The bytes to write. */
        bytes: Vec<u8>,
    },
    /// Writes the next tensor of the stream to a storage.
    Receive {
        /** The number of the storage. */
        storage: u64,
        /** The position of the first byte in the storage. */
        offset: u64,
        /** The length of the tensor in bytes. */
        bytes: u64,
    },
    /// Reads the elements of a tensor, in row-major order.
    Read {
        /** The number of the reply. */
        reply: u64,
        /** The tensor to read. */
        tensor: TensorRef,
    },
    /// Requests a reply as soon as all earlier requests have run.
    Sync {
        /** The number of the reply. */
        reply: u64,
    },
    /// Lists the storages of the session.
    ///
    /// The reply has four integers for each storage: its number, its length in bytes, its device,
    /// and its state. The state is 0 if the storage was never written to, and 1 if it was. It is 2
    /// if a request that should have written to the storage failed.
    List {
        /** The number of the reply. */
        reply: u64,
    },
    /// Runs an operator.
    Call(Call),
}

/// A call of an operator.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The number of the operator, from [`Client::operator_id`](crate::Client::operator_id) or
    /// [`Request::Define`].
    pub op: u32,
    /// Positional arguments.
    pub args: Vec<Value>,
    /// Keyword arguments.
    pub kwargs: Vec<(String, Value)>,
    /// One output for each tensor that the operator returns, or one [`Output::Described`] for a
    /// list of tensors.
    pub outputs: Vec<Output>,
    /// The number of the reply, or `None` if the client needs no result. A reply is needed for
    /// [`Output::Described`], and for results that are not tensors.
    pub reply: Option<u64>,
}

impl Call {
    /// Returns an iterator over the tensors among the arguments, including those in lists.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorRef> {
        let values = self.args.iter().chain(self.kwargs.iter().map(|(_, value)| value));
        let mut lists: Vec<std::slice::Iter<'_, Value>> = Vec::new();
        let mut values = values.collect::<Vec<_>>().into_iter();
        std::iter::from_fn(move || {
            loop {
                let value = match lists.last_mut() {
                    Some(list) => match list.next() {
                        Some(value) => value,
                        None => {
                            lists.pop();
                            continue;
                        }
                    },
                    None => values.next()?,
                };
                match value {
                    Value::Tensor(tensor) | Value::Conjugate(tensor) => return Some(tensor),
                    Value::List(values) => lists.push(values.iter()),
                    _ => {}
                }
            }
        })
    }
}

/// The storage for a tensor that an operator returns.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Output {
    /// The tensor is an argument, or a view of one, so the client already has it.
    Known,
    /// The tensor is new, and the client knows its layout. Creates a storage for it.
    New {
        /** The new storage, and the layout of the elements in it. */
        tensor: TensorRef,
        /** The length of the storage in bytes. */
        bytes: u64,
    },
    /// The tensor is new, and its layout depends on values. Creates a storage for it. The reply
    /// describes the layout. For a list of tensors, one such output creates a storage for each
    /// tensor, with consecutive numbers.
    Described {
        /** The number of the new storage. For a list of tensors, that of the first storage. */
        storage: u64,
    },
}

const DEFINE: u8 = 1;
const CREATE: u8 = 2;
const RESIZE: u8 = 3;
const FREE: u8 = 4;
const WRITE: u8 = 5;
const READ: u8 = 6;
const CALL: u8 = 7;
const RECEIVE: u8 = 8;
const SYNC: u8 = 9;
const LIST: u8 = 10;

/// The maximum memory that one decoded request may use, in bytes.
const MAX_DECODED: usize = 64 << 20;

const KNOWN: u8 = 0;
const NEW: u8 = 1;
const DESCRIBED: u8 = 2;

impl Request {
    /// Appends the encoded request to a batch.
    pub fn encode(&self, into: &mut Vec<u8>) {
        let mut numbers = |tag: u8, numbers: &[u64]| {
            into.push(tag);
            numbers.iter().for_each(|&number| put_number(into, number));
        };
        match self {
            Self::Define { op, name } => {
                numbers(DEFINE, &[u64::from(*op)]);
                put_text(into, name);
            }
            Self::Create { storage, bytes, device } => {
                numbers(CREATE, &[*storage, *bytes, u64::from(*device)]);
            }
            Self::Resize { storage, bytes } => numbers(RESIZE, &[*storage, *bytes]),
            Self::Free { storage } => numbers(FREE, &[*storage]),
            Self::Write { storage, offset, bytes } => {
                numbers(WRITE, &[*storage, *offset, bytes.len() as u64]);
                into.extend_from_slice(bytes);
            }
            Self::Receive { storage, offset, bytes } => {
                numbers(RECEIVE, &[*storage, *offset, *bytes]);
            }
            Self::Sync { reply } => numbers(SYNC, &[*reply]),
            Self::List { reply } => numbers(LIST, &[*reply]),
            Self::Read { reply, tensor } => {
                numbers(READ, &[*reply]);
                tensor.encode(into);
            }
            Self::Call(call) => {
                numbers(CALL, &[u64::from(call.op), call.args.len() as u64]);
                call.args.iter().for_each(|value| value.encode(into));
                put_number(into, call.kwargs.len() as u64);
                for (name, value) in &call.kwargs {
                    put_text(into, name);
                    value.encode(into);
                }
                put_number(into, call.outputs.len() as u64);
                call.outputs.iter().for_each(|output| output.encode(into));
                // Replies are numbered from 1; 0 means none.
                put_number(into, call.reply.unwrap_or(0));
            }
        }
    }

    fn decode(from: &mut Decoder<'_>) -> Result<Self, Error> {
        from.limit_memory(MAX_DECODED);
        Ok(match from.byte()? {
            DEFINE => {
                Self::Define { op: number_u32(from, "operator number")?, name: from.text()?.into() }
            }
            CREATE => Self::Create {
                storage: from.number()?,
                bytes: from.number()?,
                device: number_u32(from, "device index")?,
            },
            RESIZE => Self::Resize { storage: from.number()?, bytes: from.number()? },
            FREE => Self::Free { storage: from.number()? },
            WRITE => Self::Write {
                storage: from.number()?,
                offset: from.number()?,
                bytes: from.bytes()?.into(),
            },
            RECEIVE => Self::Receive {
                storage: from.number()?,
                offset: from.number()?,
                bytes: from.number()?,
            },
            SYNC => Self::Sync { reply: from.number()? },
            LIST => Self::List { reply: from.number()? },
            READ => Self::Read { reply: from.number()?, tensor: TensorRef::decode(from)? },
            CALL => {
                let op = number_u32(from, "operator number")?;
                let args = list(from, Value::decode)?;
                let kwargs = list(from, |from| Ok((from.text()?.into(), Value::decode(from)?)))?;
                let outputs = list(from, Output::decode)?;
                let reply = Some(from.number()?).filter(|&reply| reply != 0);
                Self::Call(Call { op, args, kwargs, outputs, reply })
            }
            kind => {
                return Err(from
                    .error(format!("unknown request kind {kind} (expected {DEFINE} to {LIST})")));
            }
        })
    }
}

impl Output {
    fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::Known => into.push(KNOWN),
            Self::New { tensor, bytes } => {
                into.push(NEW);
                tensor.encode(into);
                put_number(into, *bytes);
            }
            Self::Described { storage } => {
                into.push(DESCRIBED);
                put_number(into, *storage);
            }
        }
    }

    fn decode(from: &mut Decoder<'_>) -> Result<Self, Error> {
        Ok(match from.byte()? {
            KNOWN => Self::Known,
            NEW => Self::New { tensor: TensorRef::decode(from)?, bytes: from.number()? },
            DESCRIBED => Self::Described { storage: from.number()? },
            kind => {
                return Err(from.error(format!(
                    "unknown output kind {kind} (expected {KNOWN} to {DESCRIBED})"
                )));
            }
        })
    }
}

/// Reads a number of 32 bits. `what` names the number in the error.
fn number_u32(from: &mut Decoder<'_>, what: &str) -> Result<u32, Error> {
    let number = from.number()?;
    u32::try_from(number)
        .map_err(|_| from.error(format!("{what} {number} does not fit in 32 bits")))
}

fn list<T>(
    from: &mut Decoder<'_>,
    decode: impl Fn(&mut Decoder<'_>) -> Result<T, Error>,
) -> Result<Vec<T>, Error> {
    let len = from.len()?;
    let element = |_| {
        from.charge(size_of::<T>())?;
        decode(from)
    };
    (0..len).map(element).collect()
}

/// An iterator over the requests of a batch. It ends after the first error.
#[derive(Debug, Clone)]
pub struct Requests<'a> {
    from: Decoder<'a>,
}

impl<'a> Requests<'a> {
    /// Creates an iterator over the requests of an encoded batch. Errors name `stream`, the stream
    /// on which the batch arrived.
    pub fn new(batch: &'a [u8], stream: u32) -> Self {
        Self { from: Decoder::new(batch, stream) }
    }

    /// Returns how many bytes of the batch have not been read.
    pub fn remaining_bytes(&self) -> usize {
        self.from.remaining_bytes()
    }
}

impl Iterator for Requests<'_> {
    type Item = Result<Request, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.from.is_empty() {
            return None;
        }
        let request = Request::decode(&mut self.from);
        if request.is_err() {
            self.from.skip_remaining();
        }
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::value::tests::values;
    use crate::view::tests::tensors;
    use crate::view::{ScalarType, StorageView};

    fn outputs() -> impl Strategy<Value = Output> {
        prop_oneof![
            Just(Output::Known),
            (tensors(), any::<u64>()).prop_map(|(tensor, bytes)| Output::New { tensor, bytes }),
            any::<u64>().prop_map(|storage| Output::Described { storage }),
        ]
    }

    fn requests() -> impl Strategy<Value = Request> {
        use prop::collection::vec;
        let reply = prop::option::of(1..=u64::MAX);
        let call = (
            any::<u32>(),
            vec(values(), 0..4),
            vec((".*", values()), 0..3),
            vec(outputs(), 0..3),
            reply,
        );
        prop_oneof![
            (any::<u32>(), ".*").prop_map(|(op, name)| Request::Define { op, name }),
            (any::<[u64; 2]>(), any::<u32>())
                .prop_map(|([storage, bytes], device)| Request::Create { storage, bytes, device }),
            any::<[u64; 2]>().prop_map(|[storage, bytes]| Request::Resize { storage, bytes }),
            any::<u64>().prop_map(|storage| Request::Free { storage }),
            (any::<[u64; 2]>(), vec(any::<u8>(), 0..9))
                .prop_map(|([storage, offset], bytes)| Request::Write { storage, offset, bytes }),
            any::<[u64; 3]>().prop_map(|[storage, offset, bytes]| Request::Receive {
                storage,
                offset,
                bytes
            }),
            any::<u64>().prop_map(|reply| Request::Sync { reply }),
            any::<u64>().prop_map(|reply| Request::List { reply }),
            (any::<u64>(), tensors()).prop_map(|(reply, tensor)| Request::Read { reply, tensor }),
            call.prop_map(|(op, args, kwargs, outputs, reply)| {
                Request::Call(Call { op, args, kwargs, outputs, reply })
            }),
        ]
    }

    proptest! {
        #[test]
        fn requests_survive_encoding(sent in prop::collection::vec(requests(), 0..6)) {
            let mut batch = Vec::new();
            sent.iter().for_each(|request| request.encode(&mut batch));
            let read: Vec<_> = Requests::new(&batch, 1).collect::<Result<_, _>>().unwrap();
            prop_assert_eq!(read, sent);
        }

        #[test]
        fn any_bytes_decode_to_requests_and_at_most_one_error(
            bytes in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let read: Vec<_> = Requests::new(&bytes, 1).collect();
            let errors = read.iter().filter(|request| request.is_err()).count();
            prop_assert!(errors <= 1 && (errors == 0 || read.last().unwrap().is_err()));
        }
    }

    #[test]
    fn a_decoded_request_uses_bounded_memory() {
        let call = |args| {
            let call = Call { op: 7, args, kwargs: Vec::new(), outputs: Vec::new(), reply: None };
            let mut batch = Vec::new();
            Request::Call(call).encode(&mut batch);
            batch
        };
        let of = |storage| {
            Value::Tensor(TensorRef {
                storage,
                view: StorageView::contiguous(ScalarType(6), vec![1000; 4]),
            })
        };
        let foreach = call(vec![Value::List((0..50_000).map(of).collect())]);
        assert!(
            Requests::new(&foreach, 1).all(|request| request.is_ok()),
            "the step of an optimizer fits"
        );
        // Each value is encoded in one byte, but takes the size of `Value` when decoded.
        let nothing = call(vec![Value::List(vec![Value::None; 2_000_000])]);
        let read: Vec<_> = Requests::new(&nothing, 1).collect();
        assert!(matches!(&read[..], [Err(Error::Protocol { .. })]), "{} requests", read.len());
        // The limit is for each request, not for a batch.
        let many = [foreach.clone(), foreach.clone(), foreach].concat();
        assert_eq!(Requests::new(&many, 1).filter(Result::is_ok).count(), 3);
    }

    #[test]
    fn the_product_of_two_matrices_takes_few_bytes() {
        let of = |storage| TensorRef {
            storage,
            view: StorageView::contiguous(ScalarType(6), vec![1000, 1000]),
        };
        let args = vec![Value::Tensor(of(1000)), Value::Tensor(of(1001))];
        let output = Output::New { tensor: of(1002), bytes: 4_000_000 };
        let call = Call { op: 7, args, kwargs: Vec::new(), outputs: vec![output], reply: None };
        let mut batch = Vec::new();
        Request::Call(call).encode(&mut batch);
        assert!(batch.len() <= 40, "{} bytes", batch.len());
    }
}
