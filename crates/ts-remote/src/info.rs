// SPDX-License-Identifier: MIT OR Apache-2.0
//! META, the frame that describes a tensor.

use std::collections::BTreeMap;

use ts_format::{Codec, Dtype, MAX_RANK, TensorMeta};
use ts_pool::TensorBuffer;

use crate::fields::{FieldReader, FieldWriter, key_value};
use crate::frame::MAX_CONTROL_LEN;
use crate::{Device, Error};

const NAME: u8 = 1;
const DTYPE: u8 = 0x82;
const SHAPE: u8 = 0x83;
const STRIDES: u8 = 0x84;
const DEVICE: u8 = 5;
const STORAGE_ID: u8 = 6;
const STORAGE_OFFSET: u8 = 0x87;
const STORAGE_LEN: u8 = 0x88;
const METADATA: u8 = 9;
const CODEC: u8 = 0x8a;
const KEPT: u8 = 0x8b;
const KNOWN: u8 = 0x8c;

/// The maximum number of metadata entries of a tensor.
const MAX_METADATA: usize = 256;

/// The description of a tensor: its dtype, its shape, and the position of its elements in a
/// storage.
///
/// Tensors that share a storage, such as views and tied weights, have the same
/// [`storage_id`](Self::storage_id). With [`Connection::send_view`](crate::Connection::send_view),
/// the bytes of the storage are sent only once.
///
/// ```
/// use ts_remote::ts_format::Dtype;
/// use ts_remote::TensorInfo;
///
/// // The transpose of a 2 x 3 matrix.
/// let info = TensorInfo::new("w.t", Dtype::F32, [3, 2])?
///     .in_storage(1, 24, 0, Some(vec![1, 3]))?;
/// assert!(!info.is_contiguous());
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, which may be empty.
    pub name: String,
    /// The element type and the shape.
    pub meta: TensorMeta,
    /// The strides in elements. `None` if the tensor is row-major and contiguous.
    pub strides: Option<Vec<i64>>,
    /// The device at the sender.
    pub device: Device,
    /// The sender's number for the storage. 0 if no other tensor shares it.
    pub storage_id: u64,
    /// The offset of the first element in the storage, in bytes.
    pub storage_offset: u64,
    /// The length of the storage and of the payload, in bytes.
    pub storage_len: u64,
    /// Metadata of the user, with at most 256 entries.
    pub metadata: BTreeMap<String, String>,
}

impl TensorInfo {
    /// Describes a contiguous tensor on the CPU that fills its storage.
    ///
    /// # Errors
    /// Returns [`Error::Unsendable`] if the tensor has more than 64 dimensions, or if its length is
    /// not a whole number of bytes below 2^61.
    pub fn new(
        name: impl Into<String>,
        dtype: Dtype,
        shape: impl Into<Vec<u64>>,
    ) -> Result<Self, Error> {
        let (name, meta) = (name.into(), TensorMeta { dtype, shape: shape.into() });
        let Some(storage_len) = meta.byte_len() else {
            let (dtype, shape) = (meta.dtype, &meta.shape);
            let reason = format!(
                "the size of shape {shape:?} with {dtype} elements is not a whole number of bytes \
                 below 2^61"
            );
            return Err(Error::Unsendable { tensor: name, reason });
        };
        let this = Self {
            name,
            meta,
            strides: None,
            device: Device::Cpu,
            storage_id: 0,
            storage_offset: 0,
            storage_len,
            metadata: BTreeMap::new(),
        };
        this.check().map_err(|reason| this.unsendable(reason))?;
        Ok(this)
    }

    /// Makes the tensor a view of the storage with the number `id` and a length of `len` bytes.
    /// `offset` is the position of the first element, in bytes. `strides` are in elements; `None`
    /// means row-major and contiguous.
    ///
    /// # Errors
    /// Returns [`Error::Unsendable`] if elements would be outside the storage, if the number of
    /// strides is wrong, or if `len` exceeds the largest `isize`. Elements of less than a byte must
    /// be contiguous.
    pub fn in_storage(
        mut self,
        id: u64,
        len: u64,
        offset: u64,
        strides: Option<Vec<i64>>,
    ) -> Result<Self, Error> {
        (self.storage_id, self.storage_len, self.storage_offset, self.strides) =
            (id, len, offset, strides);
        self.check().map_err(|reason| self.unsendable(reason))?;
        Ok(self)
    }

    /// Sets the [device](Self::device). Moves no bytes.
    #[must_use]
    pub fn with_device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Allocates memory for the storage on GPU `ordinal`, or in host memory if that fails, as
    /// [`TensorBuffer::try_allocate_gpu`] does. [`Device::allocate_buffer`] does not fall back.
    ///
    /// # Errors
    /// Returns the errors of [`TensorBuffer::try_cpu_zeros`]: the length comes from the sender, and
    /// can exceed the memory.
    pub fn allocate_buffer(&self, ordinal: usize) -> Result<TensorBuffer, ts_pool::Error> {
        let len = usize::try_from(self.storage_len).unwrap_or(usize::MAX);
        TensorBuffer::allocate_gpu(len, ordinal).or_else(|_| TensorBuffer::try_cpu_zeros(len))
    }

    /// Returns whether the elements are in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let Some(strides) = &self.strides else { return true };
        let mut expected = 1i64;
        self.meta.shape.iter().zip(strides).rev().all(|(&n, &stride)| {
            let fits = n == 1 || stride == expected;
            expected = expected.saturating_mul(n as i64);
            fits
        }) || self.meta.shape.contains(&0)
    }

    /// Checks that the tensor is valid.
    ///
    /// # Errors
    /// Returns the reason why the tensor is invalid.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.meta.shape.len() > MAX_RANK {
            return Err(format!(
                "it has {} dimensions (expected at most {MAX_RANK})",
                self.meta.shape.len()
            ));
        }
        let bytes = self.meta.byte_len().ok_or_else(|| {
            let TensorMeta { dtype, shape } = &self.meta;
            format!(
                "the size of shape {shape:?} with {dtype} elements is not a whole number of bytes \
                 below 2^61"
            )
        })?;
        if self.metadata.len() > MAX_METADATA {
            return Err(format!(
                "it has {} metadata entries (expected at most {MAX_METADATA})",
                self.metadata.len()
            ));
        }
        if self.storage_len > isize::MAX as u64 {
            return Err(format!(
                "its storage has {} bytes (expected at most {})",
                self.storage_len,
                isize::MAX
            ));
        }
        let (begin, end) = match &self.strides {
            None => (0, i128::from(bytes)),
            Some(strides) => self.extent(strides)?,
        };
        let offset = i128::from(self.storage_offset);
        if begin + offset < 0 || end + offset > i128::from(self.storage_len) {
            return Err(format!(
                "its elements occupy bytes {}..{} of the storage, which has {} bytes",
                begin + offset,
                end + offset,
                self.storage_len
            ));
        }
        Ok(())
    }

    /// Returns the range of bytes that elements with these strides occupy, relative to the start of
    /// the first element.
    fn extent(&self, strides: &[i64]) -> Result<(i128, i128), String> {
        let shape = &self.meta.shape;
        if strides.len() != shape.len() {
            return Err(format!("it has {} strides (expected {})", strides.len(), shape.len()));
        }
        let bits = i128::from(self.meta.dtype.bits());
        if bits % 8 != 0 && !self.is_contiguous() {
            return Err(format!(
                "elements of {bits} bits must be contiguous (got strides {strides:?})"
            ));
        }
        if shape.contains(&0) {
            return Ok((0, 0));
        }
        // The product of two 64-bit numbers fits in an `i128`. Sums may overflow and are checked.
        let reach = |&(&n, &stride): &(&u64, &i64)| i128::from(n - 1) * i128::from(stride);
        let too_large = || format!("its strides {strides:?} are too large for shape {shape:?}");
        let (mut begin, mut end) = (0i128, 0i128);
        for step in shape.iter().zip(strides).map(|pair| reach(&pair)) {
            let side = if step < 0 { &mut begin } else { &mut end };
            *side = side.checked_add(step).ok_or_else(too_large)?;
        }
        let bytes = |elements: i128| elements.checked_mul(bits).map(|bits| bits / 8);
        bytes(begin).zip(end.checked_add(1).and_then(bytes)).ok_or_else(too_large)
    }

    fn unsendable(&self, reason: String) -> Error {
        Error::Unsendable { tensor: self.name.clone(), reason }
    }
}

/// The body of META.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Meta {
    pub(crate) info: TensorInfo,
    /// The codec of ENCODED DATA.
    pub(crate) codec: Codec,
    /// Whether later tensors of this stream may use the same storage.
    pub(crate) kept: bool,
    /// Whether the storage came with an earlier tensor of this stream.
    pub(crate) known: bool,
}

impl Meta {
    pub(crate) fn encode(&self) -> Result<Vec<u8>, Error> {
        let info = &self.info;
        info.check().map_err(|reason| info.unsendable(reason))?;
        let mut fields = FieldWriter::default();
        fields.field(NAME, info.name.as_bytes());
        fields.field(DTYPE, info.meta.dtype.name().as_bytes());
        fields.numbers(SHAPE, info.meta.shape.iter().copied());
        if let Some(strides) = &info.strides {
            fields.numbers(STRIDES, strides.iter().map(|&stride| stride as u64));
        }
        fields.field(DEVICE, info.device.to_string().as_bytes());
        fields.number(STORAGE_ID, info.storage_id);
        fields.number(STORAGE_OFFSET, info.storage_offset).number(STORAGE_LEN, info.storage_len);
        for (key, value) in &info.metadata {
            fields.field(METADATA, &key_value(key, value));
        }
        if self.codec != Codec::Raw {
            fields.field(CODEC, self.codec.name().as_bytes());
        }
        for (tag, is_set) in [(KEPT, self.kept), (KNOWN, self.known)] {
            if is_set {
                fields.field(tag, &[]);
            }
        }
        let body = fields.finish();
        if body.len() > MAX_CONTROL_LEN {
            let reason = format!(
                "its name, shape, strides, device and metadata take {} bytes (expected at most \
                 {MAX_CONTROL_LEN})",
                body.len()
            );
            return Err(info.unsendable(reason));
        }
        Ok(body)
    }

    pub(crate) fn decode(body: &[u8], stream: u32) -> Result<Self, Error> {
        let bad = |what: String| Error::Protocol { stream, what };
        let (mut dtype, mut shape, mut len) = (None, None, None);
        let mut info = TensorInfo {
            name: String::new(),
            meta: TensorMeta { dtype: Dtype::U8, shape: Vec::new() },
            strides: None,
            device: "".into(),
            storage_id: 0,
            storage_offset: 0,
            storage_len: 0,
            metadata: BTreeMap::new(),
        };
        let (mut codec, mut kept, mut known) = (Codec::Raw, false, false);
        let mut fields = FieldReader::new(body, stream);
        while let Some(field) = fields.next()? {
            match field.tag {
                NAME => info.name = field.text()?.into(),
                DTYPE => {
                    let name = field.text()?;
                    dtype = Some(Dtype::from_name(name).ok_or_else(|| {
                        bad(format!("received META with unknown dtype {name:?}"))
                    })?);
                }
                SHAPE => shape = Some(field.numbers()?.collect()),
                STRIDES => {
                    info.strides = Some(field.numbers()?.map(|stride| stride as i64).collect());
                }
                DEVICE => info.device = field.text()?.into(),
                STORAGE_ID => info.storage_id = field.number()?,
                STORAGE_OFFSET => info.storage_offset = field.number()?,
                STORAGE_LEN => len = Some(field.number()?),
                METADATA => {
                    let (key, value) = field.key_value()?;
                    info.metadata.insert(key.into(), value.into());
                    // A small entry takes far more memory than its bytes in META.
                    if info.metadata.len() > MAX_METADATA {
                        return Err(bad(format!(
                            "received META with more than {MAX_METADATA} metadata entries"
                        )));
                    }
                }
                CODEC => {
                    let name = field.text()?;
                    codec = Codec::from_name(name)
                        .ok_or_else(|| bad(format!("received META with unknown codec {name:?}")))?;
                }
                KEPT => kept = true,
                KNOWN => known = true,
                _ => field.skip()?,
            }
        }
        let absent = |what: &str| bad(format!("received META without {what}"));
        info.meta.dtype = dtype.ok_or_else(|| absent("dtype"))?;
        info.meta.shape = shape.ok_or_else(|| absent("shape"))?;
        info.storage_len = len.ok_or_else(|| absent("storage length"))?;
        info.check()
            .map_err(|reason| bad(format!("received invalid tensor {:?}: {reason}", info.name)))?;
        Ok(Self { info, codec, kept, known })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn views_must_be_inside_their_storage() {
        let view = |shape: &[u64], len, offset, strides: &[i64]| {
            let info = TensorInfo::new("w", Dtype::F32, shape).unwrap();
            info.in_storage(7, len, offset, Some(strides.to_vec()))
        };
        assert!(view(&[2, 3], 24, 0, &[3, 1]).unwrap().is_contiguous());
        assert!(!view(&[3, 2], 24, 0, &[1, 3]).unwrap().is_contiguous());
        assert!(
            view(&[3], 24, 20, &[-2]).is_ok(),
            "a negative stride may begin at the last element"
        );
        assert!(view(&[5], 4, 0, &[0]).is_ok(), "a stride of 0 may repeat an element");
        assert!(view(&[0, 9], 0, 0, &[900, 1]).is_ok());
        for bad in [
            view(&[2, 3], 20, 0, &[3, 1]),
            view(&[3], 24, 12, &[-2]),
            view(&[2, 3], 24, 0, &[3]),
            view(&[3], 24, u64::MAX, &[1]),
            view(&[1 << 58, 1], 24, 0, &[i64::MAX, i64::MIN]),
        ] {
            assert!(matches!(bad, Err(Error::Unsendable { .. })), "{bad:?}");
        }
        assert!(TensorInfo::new("w", Dtype::F32, [1u64 << 62]).is_err());
    }

    proptest! {
        #[test]
        fn meta_round_trips(
            name in ".{0,20}",
            shape in prop::collection::vec(0u64..9, 0..5),
            dtype in 0..Dtype::ALL.len(),
            pad in 0u64..100,
            id: u64,
            strided: bool,
            kept: bool,
            known: bool,
            metadata in prop::collection::btree_map(".{0,8}", ".{0,8}", 0..4),
        ) {
            let Ok(mut info) = TensorInfo::new(name, Dtype::ALL[dtype], shape) else {
                return Ok(());
            };
            info.metadata = metadata;
            let len = info.storage_len;
            let strides = strided.then(|| {
                let mut next = 1i64;
                let mut strides: Vec<i64> = info
                    .meta
                    .shape
                    .iter()
                    .rev()
                    .map(|&n| {
                        let s = next;
                        next *= n as i64;
                        s
                    })
                    .collect();
                strides.reverse();
                strides
            });
            let info = info.in_storage(id, len + pad, pad, strides).unwrap();
            let meta = Meta { info, codec: Codec::Split, kept, known };
            let body = meta.encode().unwrap();
            prop_assert_eq!(&Meta::decode(&body, 1).unwrap(), &meta);
            for cut in 0..body.len() {
                if let Ok(read) = Meta::decode(&body[..cut], 1) {
                    prop_assert!(read.info.check().is_ok());
                }
            }
        }

        #[test]
        fn any_bytes_are_rejected_or_valid(body in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(read) = Meta::decode(&body, 1) {
                prop_assert!(read.info.check().is_ok());
            }
        }
    }
}
