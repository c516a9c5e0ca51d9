// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments of operators, and how they travel.
//!
//! A tag, then the value: numbers as varints (LEB128, signed ones zigzag), floats as they are in
//! memory, little-endian, texts and lists with their length first. Lists nest at most [`MAX_DEPTH`]
//! deep; an argument that says it is longer than what is left of its batch is refused before memory
//! is taken for it.

use ts_remote::Error;

/// How deep lists may nest: operators of PyTorch have lists of lists at most.
pub const MAX_DEPTH: usize = 4;
/// The most dimensions of a tensor, as in PyTorch.
pub const MAX_DIMS: usize = 64;

/// A tensor's elements, by PyTorch's own numbers for them (`c10::ScalarType`): 6 is float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScalarType(pub u8);

/// Where in a storage a tensor's elements are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StorageView {
    /// What they are.
    pub dtype: ScalarType,
    /// Length of each dimension, in elements.
    pub sizes: Vec<u64>,
    /// From one element of a dimension to the next, in elements.
    pub strides: Vec<i64>,
    /// The first element, counted from the storage's first byte in elements of this dtype.
    pub offset: u64,
}

/// A tensor that is elsewhere: a view of a storage.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorRef {
    /// Of which storage.
    pub storage: u64,
    /// Which part of it, and how it is seen.
    pub view: StorageView,
}

/// An argument of an operator, or what it gives.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Python's None: an optional that is not given.
    None,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// A complex number, its real part first.
    Complex(f64, f64),
    /// A text.
    Text(String),
    /// A dtype.
    Dtype(ScalarType),
    /// One of the other end's devices.
    Device(u32),
    /// The name of a memory format or a layout, such as `channels_last` or `strided`.
    Name(String),
    /// A tensor.
    Tensor(TensorRef),
    /// The conjugate of a tensor, whose elements are as they lie there: some operators read it so.
    Conjugate(TensorRef),
    /// A tensor without dimensions, by its one element: at most 16 bytes, little-endian.
    Scalar {
        /** What it is. */
        dtype: ScalarType,
        /** Its element, and zeros. */
        bytes: [u8; 16],
    },
    /// Several.
    List(Vec<Value>),
}

const NONE: u8 = 0;
const FALSE: u8 = 1;
const TRUE: u8 = 2;
const INT: u8 = 3;
const FLOAT: u8 = 4;
const COMPLEX: u8 = 5;
const TEXT: u8 = 6;
const DTYPE: u8 = 7;
const DEVICE: u8 = 8;
const NAME: u8 = 9;
const TENSOR: u8 = 10;
const LIST: u8 = 11;
const SCALAR: u8 = 12;
const CONJUGATE: u8 = 13;

impl StorageView {
    /// One that has its elements in order, from the storage's first byte on.
    pub fn contiguous(dtype: ScalarType, sizes: Vec<u64>) -> Self {
        let strides = contiguous(&sizes);
        Self { dtype, sizes, strides, offset: 0 }
    }

    /// Whether its elements are complex numbers.
    pub fn is_complex(&self) -> bool {
        // PyTorch's numbers for those of 4, 8 and 16 bytes.
        matches!(self.dtype.0, 8..=10)
    }

    /// How many elements it has; `None` if that is beyond 64 bits.
    pub fn elements(&self) -> Option<u64> {
        self.sizes.iter().try_fold(1u64, |count, &size| count.checked_mul(size))
    }

    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        let plain = self.strides == contiguous(&self.sizes);
        into.push(self.dtype.0);
        // Whether strides and offset follow.
        let dims = self.sizes.len() << 2 | usize::from(!plain) << 1 | usize::from(self.offset != 0);
        put_number(into, dims as u64);
        self.sizes.iter().for_each(|&size| put_number(into, size));
        if !plain {
            self.strides.iter().for_each(|&stride| put_number(into, zigzag(stride)));
        }
        if self.offset != 0 {
            put_number(into, self.offset);
        }
    }

    pub(crate) fn decode(from: &mut Decoder<'_>) -> Result<Self, Error> {
        let dtype = ScalarType(from.byte()?);
        let head = from.number()?;
        let dims = usize::try_from(head >> 2).ok().filter(|&dims| dims <= MAX_DIMS);
        let dims = dims.ok_or_else(|| from.bad(format!("a tensor of {} dimensions", head >> 2)))?;
        from.charge(dims * (size_of::<u64>() + size_of::<i64>()))?;
        let sizes: Vec<u64> = (0..dims).map(|_| from.number()).collect::<Result<_, _>>()?;
        let strides = if head & 2 == 0 {
            contiguous(&sizes)
        } else {
            (0..dims).map(|_| Ok(unzigzag(from.number()?))).collect::<Result<_, Error>>()?
        };
        let offset = if head & 1 == 0 { 0 } else { from.number()? };
        Ok(Self { dtype, sizes, strides, offset })
    }
}

/// Strides as PyTorch gives them: those of empty dimensions as if they had one element.
fn contiguous(sizes: &[u64]) -> Vec<i64> {
    let mut strides = vec![1; sizes.len()];
    for at in (1..sizes.len()).rev() {
        let size = i64::try_from(sizes[at].max(1)).unwrap_or(i64::MAX);
        strides[at - 1] = size.saturating_mul(strides[at]);
    }
    strides
}

impl TensorRef {
    /// A number by which logs name it: FNV-1a, 64 bits, over its sizes, strides, dtype, offset and
    /// storage, each number as 8 bytes, little-endian. <http://www.isthe.com/chongo/tech/comp/fnv/>
    pub fn metadata_hash(&self) -> u64 {
        let StorageView { dtype, sizes, strides, offset } = &self.view;
        let strides = strides.iter().map(|&stride| stride as u64);
        let numbers =
            sizes.iter().copied().chain(strides).chain([u64::from(dtype.0), *offset, self.storage]);
        numbers.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        put_number(into, self.storage);
        self.view.encode(into);
    }

    pub(crate) fn decode(from: &mut Decoder<'_>) -> Result<Self, Error> {
        Ok(Self { storage: from.number()?, view: StorageView::decode(from)? })
    }
}

impl Value {
    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::None => into.push(NONE),
            Self::Bool(value) => into.push(if *value { TRUE } else { FALSE }),
            Self::Int(value) => {
                into.push(INT);
                put_number(into, zigzag(*value));
            }
            Self::Float(value) => {
                into.push(FLOAT);
                into.extend_from_slice(&value.to_le_bytes());
            }
            Self::Complex(real, imaginary) => {
                into.push(COMPLEX);
                [real, imaginary]
                    .iter()
                    .for_each(|part| into.extend_from_slice(&part.to_le_bytes()));
            }
            Self::Text(text) => {
                into.push(TEXT);
                put_text(into, text);
            }
            Self::Dtype(dtype) => into.extend_from_slice(&[DTYPE, dtype.0]),
            Self::Device(index) => {
                into.push(DEVICE);
                put_number(into, u64::from(*index));
            }
            Self::Name(name) => {
                into.push(NAME);
                put_text(into, name);
            }
            Self::Tensor(tensor) => {
                into.push(TENSOR);
                tensor.encode(into);
            }
            Self::Conjugate(tensor) => {
                into.push(CONJUGATE);
                tensor.encode(into);
            }
            Self::Scalar { dtype, bytes } => {
                into.extend_from_slice(&[SCALAR, dtype.0]);
                into.extend_from_slice(bytes);
            }
            Self::List(values) => {
                into.push(LIST);
                put_number(into, values.len() as u64);
                values.iter().for_each(|value| value.encode(into));
            }
        }
    }

    pub(crate) fn decode(from: &mut Decoder<'_>) -> Result<Self, Error> {
        Self::decode_within(from, MAX_DEPTH)
    }

    fn decode_within(from: &mut Decoder<'_>, depth: usize) -> Result<Self, Error> {
        from.charge(size_of::<Self>())?;
        Ok(match from.byte()? {
            NONE => Self::None,
            FALSE => Self::Bool(false),
            TRUE => Self::Bool(true),
            INT => Self::Int(unzigzag(from.number()?)),
            FLOAT => Self::Float(from.float()?),
            COMPLEX => Self::Complex(from.float()?, from.float()?),
            TEXT => Self::Text(from.text()?.into()),
            DTYPE => Self::Dtype(ScalarType(from.byte()?)),
            DEVICE => {
                let index = from.number()?;
                Self::Device(u32::try_from(index).map_err(|_| from.bad(format!("device {index}")))?)
            }
            NAME => Self::Name(from.text()?.into()),
            TENSOR => Self::Tensor(TensorRef::decode(from)?),
            CONJUGATE => Self::Conjugate(TensorRef::decode(from)?),
            SCALAR => Self::Scalar { dtype: ScalarType(from.byte()?), bytes: from.array()? },
            LIST => {
                let inner = depth
                    .checked_sub(1)
                    .ok_or_else(|| from.bad(format!("lists {MAX_DEPTH} deep")))?;
                let len = from.len()?;
                Self::List(
                    (0..len).map(|_| Self::decode_within(from, inner)).collect::<Result<_, _>>()?,
                )
            }
            tag => return Err(from.bad(format!("an argument of kind {tag}"))),
        })
    }
}

fn zigzag(value: i64) -> u64 {
    (value << 1 ^ value >> 63) as u64
}

fn unzigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

pub(crate) fn put_number(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

pub(crate) fn put_text(into: &mut Vec<u8>, text: &str) {
    put_number(into, text.len() as u64);
    into.extend_from_slice(text.as_bytes());
}

/// Takes bytes of a batch apart.
#[derive(Debug, Clone)]
pub(crate) struct Decoder<'a> {
    rest: &'a [u8],
    stream: u32,
    /// Memory that what is decoded may still take: more than its bytes, for a value of one byte is
    /// as large as any here.
    room: usize,
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(bytes: &'a [u8], stream: u32) -> Self {
        Self { rest: bytes, stream, room: usize::MAX }
    }

    /// What is decoded from now on may take so many bytes of memory.
    pub(crate) fn allow(&mut self, bytes: usize) {
        self.room = bytes;
    }

    /// Something takes so many bytes of memory.
    pub(crate) fn charge(&mut self, bytes: usize) -> Result<(), Error> {
        let left = self.room.checked_sub(bytes);
        self.room =
            left.ok_or_else(|| self.bad("an operator that takes too much memory".into()))?;
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn left(&self) -> usize {
        self.rest.len()
    }

    pub(crate) fn byte(&mut self) -> Result<u8, Error> {
        let (&byte, rest) = self.rest.split_first().ok_or_else(|| self.cut())?;
        self.rest = rest;
        Ok(byte)
    }

    pub(crate) fn number(&mut self) -> Result<u64, Error> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.bad("a number of more than 64 bits".into()))
    }

    /// How many things follow, of at least a byte each.
    pub(crate) fn len(&mut self) -> Result<usize, Error> {
        let len = self.number()?;
        let there = usize::try_from(len).ok().filter(|&len| len <= self.rest.len());
        there.ok_or_else(|| self.cut())
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, Error> {
        std::str::from_utf8(self.bytes()?).map_err(|_| self.bad("a text that is no UTF-8".into()))
    }

    fn float(&mut self) -> Result<f64, Error> {
        Ok(f64::from_le_bytes(self.array()?))
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or_else(|| self.cut())?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// Bytes with their length before them.
    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], Error> {
        let len = self.len()?;
        self.charge(len)?;
        let (bytes, rest) = self.rest.split_at(len);
        self.rest = rest;
        Ok(bytes)
    }

    /// Nothing more is taken.
    pub(crate) fn end(&mut self) {
        self.rest = &[];
    }

    fn cut(&self) -> Error {
        self.bad("an operator that is cut off".into())
    }

    pub(crate) fn bad(&self, what: String) -> Error {
        Error::Protocol { stream: self.stream, what }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    fn views() -> impl Strategy<Value = StorageView> {
        let sizes = prop::collection::vec(any::<u64>(), 0..5);
        let strides = prop::option::of(any::<i64>());
        (any::<u8>(), sizes, strides, prop_oneof![Just(0), any::<u64>()]).prop_map(
            |(dtype, sizes, stride, offset)| {
                let mut view = StorageView::contiguous(ScalarType(dtype), sizes);
                view.strides.iter_mut().zip(stride).for_each(|(first, stride)| *first = stride);
                StorageView { offset, ..view }
            },
        )
    }

    pub(crate) fn tensors() -> impl Strategy<Value = TensorRef> {
        (any::<u64>(), views()).prop_map(|(storage, view)| TensorRef { storage, view })
    }

    pub(crate) fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::None),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Int),
            (-1e300..1e300).prop_map(Value::Float),
            (-1.0..1.0, -1.0..1.0).prop_map(|(real, imaginary)| Value::Complex(real, imaginary)),
            ".*".prop_map(Value::Text),
            any::<u8>().prop_map(|dtype| Value::Dtype(ScalarType(dtype))),
            any::<u32>().prop_map(Value::Device),
            "[a-z_]+".prop_map(Value::Name),
            tensors().prop_map(Value::Tensor),
            tensors().prop_map(Value::Conjugate),
            (any::<u8>(), any::<[u8; 16]>())
                .prop_map(|(dtype, bytes)| { Value::Scalar { dtype: ScalarType(dtype), bytes } }),
        ];
        leaf.prop_recursive(MAX_DEPTH as u32, 40, 6, |inner| {
            prop::collection::vec(inner, 0..6).prop_map(Value::List)
        })
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_and_nothing_shorter_is(value in values()) {
            let mut bytes = Vec::new();
            value.encode(&mut bytes);
            let mut decoder = Decoder::new(&bytes, 1);
            prop_assert_eq!(Value::decode(&mut decoder).unwrap(), value);
            prop_assert!(decoder.is_empty());
            for cut in 0..bytes.len() {
                prop_assert!(Value::decode(&mut Decoder::new(&bytes[..cut], 1)).is_err());
            }
        }

        #[test]
        fn any_bytes_are_a_value_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Value::decode(&mut Decoder::new(&bytes, 1));
        }
    }

    #[test]
    fn lies_take_no_memory() {
        let mut bytes = vec![LIST];
        put_number(&mut bytes, u64::MAX);
        let told = Value::decode(&mut Decoder::new(&bytes, 1)).unwrap_err().to_string();
        assert!(told.contains("cut off"), "{told}");
        let told =
            Value::decode(&mut Decoder::new(&[LIST, 1].repeat(9), 1)).unwrap_err().to_string();
        assert!(told.contains("lists 4 deep"), "{told}");
        let mut tensor = vec![TENSOR, 1, 6];
        put_number(&mut tensor, 65 << 2);
        let told = Value::decode(&mut Decoder::new(&tensor, 1)).unwrap_err().to_string();
        assert!(told.contains("65 dimensions"), "{told}");
    }
}
