// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments and results of operators, and their encoding.
//!
//! A value is a tag byte followed by its content:
//!
//! - integers are varints (LEB128), and signed integers are zigzag-encoded first;
//! - floats are little-endian;
//! - texts and lists begin with their length.
//!
//! Lists nest at most [`MAX_DEPTH`] deep. A length beyond the end of the batch is rejected before
//! memory is allocated.

use crate::codec::{Decoder, put_number, put_text, unzigzag, zigzag};
use crate::view::{ScalarType, TensorRef};
use ts_remote::Error;

/// The maximum depth of nested lists in an argument. PyTorch's operators need two levels.
pub const MAX_DEPTH: usize = 4;

/// An argument or result of an operator.
///
/// # Examples
///
/// ```
/// use ts_exec::{ScalarType, StorageView, TensorRef, Value};
///
/// // The arguments of `aten::full`: a list of sizes, and the value to fill with.
/// let args = [Value::List(vec![Value::Int(2), Value::Int(3)]), Value::Float(1.5)];
///
/// // A tensor is named by its storage and its layout there.
/// let view = StorageView::contiguous(ScalarType::FLOAT32, vec![2, 3]);
/// let tensor = Value::Tensor(TensorRef { storage: 1, view });
/// # let _ = (args, tensor);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Python's `None`: an optional argument without a value.
    None,
    /// A boolean.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// An integer of 64 bits that exceeds the range of `Int`.
    Unsigned(u64),
    /// A floating-point number.
    Float(f64),
    /// A complex number: real and imaginary part.
    Complex(f64, f64),
    /// A string.
    Text(String),
    /// A dtype.
    Dtype(ScalarType),
    /// A device of the server, by its index.
    Device(u32),
    /// The name of a memory format or a layout, such as `channels_last` or `strided`.
    Name(String),
    /// A tensor.
    Tensor(TensorRef),
    /// A tensor whose elements are the complex conjugates of the elements in memory.
    Conjugate(TensorRef),
    /// A tensor without dimensions, given by the value of its element.
    Scalar {
        /** The type of the element. */
        dtype: ScalarType,
        /** The element, little-endian, padded with zeros. */
        bytes: [u8; 16],
    },
    /// A list of values.
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
const UNSIGNED: u8 = 14;

impl Value {
    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::None => into.push(NONE),
            Self::Bool(value) => into.push(if *value { TRUE } else { FALSE }),
            Self::Int(value) => {
                into.push(INT);
                put_number(into, zigzag(*value));
            }
            Self::Unsigned(value) => {
                into.push(UNSIGNED);
                put_number(into, *value);
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
            UNSIGNED => Self::Unsigned(from.number()?),
            FLOAT => Self::Float(from.float()?),
            COMPLEX => Self::Complex(from.float()?, from.float()?),
            TEXT => Self::Text(from.text()?.into()),
            DTYPE => Self::Dtype(ScalarType(from.byte()?)),
            DEVICE => {
                let index = from.number()?;
                Self::Device(u32::try_from(index).map_err(|_| {
                    from.error(format!("device index {index} does not fit in 32 bits"))
                })?)
            }
            NAME => Self::Name(from.text()?.into()),
            TENSOR => Self::Tensor(TensorRef::decode(from)?),
            CONJUGATE => Self::Conjugate(TensorRef::decode(from)?),
            SCALAR => Self::Scalar { dtype: ScalarType(from.byte()?), bytes: from.array()? },
            LIST => {
                let inner = depth.checked_sub(1).ok_or_else(|| {
                    from.error(format!("lists are nested more than {MAX_DEPTH} deep"))
                })?;
                let len = from.len()?;
                Self::List(
                    (0..len).map(|_| Self::decode_within(from, inner)).collect::<Result<_, _>>()?,
                )
            }
            tag => {
                return Err(
                    from.error(format!("unknown value tag {tag} (expected {NONE} to {UNSIGNED})"))
                );
            }
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::view::tests::tensors;

    pub(crate) fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::None),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Int),
            any::<u64>().prop_map(Value::Unsigned),
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
        fn values_survive_encoding_and_truncation_is_an_error(value in values()) {
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
        fn any_bytes_decode_to_a_value_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let _ = Value::decode(&mut Decoder::new(&bytes, 1));
        }
    }

    #[test]
    fn false_lengths_are_errors_before_memory_is_allocated() {
        let mut bytes = vec![LIST];
        put_number(&mut bytes, u64::MAX);
        let error = Value::decode(&mut Decoder::new(&bytes, 1)).unwrap_err().to_string();
        assert!(error.contains("truncated"), "{error}");
        let error =
            Value::decode(&mut Decoder::new(&[LIST, 1].repeat(9), 1)).unwrap_err().to_string();
        assert!(error.contains("more than 4 deep"), "{error}");
        let mut tensor = vec![TENSOR, 1, 6];
        put_number(&mut tensor, 65 << 2);
        let error = Value::decode(&mut Decoder::new(&tensor, 1)).unwrap_err().to_string();
        assert!(error.contains("65 dimensions"), "{error}");
    }
}
