// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a client asks of the machine that has its tensors, in the order in which it is to be done.

use crate::value::{Decoder, TensorRef, Value, put_number, put_text};
use ts_remote::Error;

/// One thing to be done. Each has the number after the one before it, from 1 on, for as long as the
/// session lasts.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Request {
    /// `op` means the operator of this name from now on: `aten::add.Tensor`.
    Define {
        /** Its number, one more than the last that was given, from 0 on. */
        op: u32,
        /** Namespace, name and overload. */
        name: String,
    },
    /// A storage begins. It takes memory when something is first written to it.
    Create {
        /** Its number, which no other had. */
        storage: u64,
        /** Its length. */
        bytes: u64,
        /** On which of the machine's devices. */
        device: u32,
    },
    /// A storage has another length from now on; what fits of its bytes stays.
    Resize {
        /** Which. */
        storage: u64,
        /** Its length. */
        bytes: u64,
    },
    /// Nobody has a view of a storage any more.
    Free {
        /** Which. */
        storage: u64,
    },
    /// Bytes of a storage.
    Write {
        /** Of which. */
        storage: u64,
        /** The first, counted from the storage's first. */
        offset: u64,
        /** What they are. */
        bytes: Vec<u8>,
    },
    /// Bytes of a storage, which are the next tensor of the stream.
    Receive {
        /** Of which. */
        storage: u64,
        /** The first, counted from the storage's first. */
        offset: u64,
        /** How many. */
        bytes: u64,
    },
    /// Sends the elements of a tensor, in order.
    Read {
        /** What the answer is known by. */
        reply: u64,
        /** Which. */
        tensor: TensorRef,
    },
    /// Says when all before it is done.
    Sync {
        /** What the answer is known by. */
        reply: u64,
    },
    /// Tells what storages there are: of each four numbers, its own, its bytes, its device, and 0
    /// if nothing was ever written to it, 1, or 2 if it was to be written to by a request that was
    /// not done.
    List {
        /** What the answer is known by. */
        reply: u64,
    },
    /// Runs an operator.
    Call(Call),
}

/// An operator and its arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Which, as it was defined.
    pub op: u32,
    /// Arguments by their place.
    pub args: Vec<Value>,
    /// Arguments by their name.
    pub kwargs: Vec<(String, Value)>,
    /// What becomes of each tensor that it gives.
    pub outputs: Vec<Output>,
    /// What the answer is known by, where what it gives is asked for: [`Output::Asked`], or that
    /// which is no tensor.
    pub reply: Option<u64>,
}

/// What becomes of a tensor that an operator gives.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Output {
    /// It is one of the arguments, or a view of one: the client has it.
    Known,
    /// It is new: the elements go to this storage, which begins with it, as its view says.
    New {
        /** The storage, and how its elements lie in it. */
        tensor: TensorRef,
        /** The storage's length. */
        bytes: u64,
    },
    /// It is new, and only its elements say what it is like: the storage begins with it, and the
    /// answer says the rest.
    Asked {
        /** The storage. */
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

/// The most memory that a request may take when it is decoded.
const MAX_DECODED: usize = 64 << 20;

const KNOWN: u8 = 0;
const NEW: u8 = 1;
const ASKED: u8 = 2;

impl Request {
    /// Appends it to a batch.
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
                // No answer has the number 0.
                put_number(into, call.reply.unwrap_or(0));
            }
        }
    }

    fn decode(from: &mut Decoder<'_>) -> Result<Self, Error> {
        from.allow(MAX_DECODED);
        Ok(match from.byte()? {
            DEFINE => Self::Define { op: small(from)?, name: from.text()?.into() },
            CREATE => Self::Create {
                storage: from.number()?,
                bytes: from.number()?,
                device: small(from)?,
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
                let op = small(from)?;
                let args = many(from, Value::decode)?;
                let kwargs = many(from, |from| Ok((from.text()?.into(), Value::decode(from)?)))?;
                let outputs = many(from, Output::decode)?;
                let reply = Some(from.number()?).filter(|&reply| reply != 0);
                Self::Call(Call { op, args, kwargs, outputs, reply })
            }
            kind => return Err(from.bad(format!("a request of kind {kind}"))),
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
            Self::Asked { storage } => {
                into.push(ASKED);
                put_number(into, *storage);
            }
        }
    }

    fn decode(from: &mut Decoder<'_>) -> Result<Self, Error> {
        Ok(match from.byte()? {
            KNOWN => Self::Known,
            NEW => Self::New { tensor: TensorRef::decode(from)?, bytes: from.number()? },
            ASKED => Self::Asked { storage: from.number()? },
            kind => return Err(from.bad(format!("an output of kind {kind}"))),
        })
    }
}

fn small(from: &mut Decoder<'_>) -> Result<u32, Error> {
    let number = from.number()?;
    u32::try_from(number).map_err(|_| from.bad(format!("{number}, where at most 32 bits are")))
}

fn many<T>(
    from: &mut Decoder<'_>,
    one: impl Fn(&mut Decoder<'_>) -> Result<T, Error>,
) -> Result<Vec<T>, Error> {
    let len = from.len()?;
    let one = |_| {
        from.charge(size_of::<T>())?;
        one(from)
    };
    (0..len).map(one).collect()
}

/// The requests of a batch, in their order. It ends with the first that is none.
#[derive(Debug, Clone)]
pub struct Requests<'a> {
    from: Decoder<'a>,
}

impl<'a> Requests<'a> {
    /// Of a batch that came on this stream.
    pub fn new(batch: &'a [u8], stream: u32) -> Self {
        Self { from: Decoder::new(batch, stream) }
    }

    /// Bytes of the batch that are still to be read.
    pub fn left(&self) -> usize {
        self.from.left()
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
            self.from.end();
        }
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::value::tests::{tensors, values};
    use crate::value::{ScalarType, StorageView};

    fn outputs() -> impl Strategy<Value = Output> {
        prop_oneof![
            Just(Output::Known),
            (tensors(), any::<u64>()).prop_map(|(tensor, bytes)| Output::New { tensor, bytes }),
            any::<u64>().prop_map(|storage| Output::Asked { storage }),
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
        fn what_was_asked_is_read(asked in prop::collection::vec(requests(), 0..6)) {
            let mut batch = Vec::new();
            asked.iter().for_each(|request| request.encode(&mut batch));
            let read: Vec<_> = Requests::new(&batch, 1).collect::<Result<_, _>>().unwrap();
            prop_assert_eq!(read, asked);
        }

        #[test]
        fn any_bytes_are_requests_or_one_error(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let read: Vec<_> = Requests::new(&bytes, 1).collect();
            let errors = read.iter().filter(|request| request.is_err()).count();
            prop_assert!(errors <= 1 && (errors == 0 || read.last().unwrap().is_err()));
        }
    }

    #[test]
    fn a_request_takes_a_bounded_amount_of_memory_whatever_it_says() {
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
            "an optimiser's step is one"
        );
        // A byte each, and as large as any value when they are decoded.
        let nothing = call(vec![Value::List(vec![Value::None; 2_000_000])]);
        let read: Vec<_> = Requests::new(&nothing, 1).collect();
        assert!(matches!(&read[..], [Err(Error::Protocol { .. })]), "{} requests", read.len());
        // Each request by itself.
        let many = [foreach.clone(), foreach.clone(), foreach].concat();
        assert_eq!(Requests::new(&many, 1).filter(Result::is_ok).count(), 3);
    }

    #[test]
    fn an_operator_of_two_matrices_is_short() {
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
