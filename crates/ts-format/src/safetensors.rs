// SPDX-License-Identifier: MIT OR Apache-2.0
//! The safetensors header: an 8-byte length field, then JSON. The data of all tensors follows
//! without gaps.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::marker::PhantomData;

use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::{DeserializeOwned, MapAccess, Visitor};

use crate::error::{check_name, describe};
use crate::index::MAX_RANK;
use crate::json::{offset_of, unique_strings};
use crate::table::{Layout, NewRow, Table};
use crate::{Dtype, Error, Metadata, TensorMeta};

/// Maximum length of the JSON header in bytes, as in the safetensors library.
pub const MAX_HEADER_LEN: u64 = 100_000_000;

/// Length in bytes of the length field before the JSON header.
pub(crate) const PREFIX_LEN: u64 = 8;

#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) table: Table,
    pub(crate) metadata: Metadata,
}

/// Validates the length field of `file` and returns the length of the JSON in bytes.
pub(crate) fn header_len(file: &str, prefix: &[u8], file_len: u64) -> Result<u64, Error> {
    let truncated = |what: &str, offset, end| Error::Truncated {
        file: file.into(),
        what: what.into(),
        offset,
        end,
        file_len,
    };
    let prefix: [u8; 8] = prefix.try_into().map_err(|_| truncated("the header", 0, PREFIX_LEN))?;
    let len = u64::from_le_bytes(prefix);
    if len > MAX_HEADER_LEN {
        let reason = format!(
            "header length {len} exceeds the maximum of {MAX_HEADER_LEN}: this is not a \
             safetensors or .ts file, or it is damaged"
        );
        return Err(Error::header(file, 0, reason));
    }
    if PREFIX_LEN + len > file_len {
        return Err(truncated("the safetensors header", PREFIX_LEN, PREFIX_LEN + len));
    }
    Ok(len)
}

/// Parses and validates the JSON of a header. With `lenient`, accepts every header up to rank 255
/// that the safetensors library accepts.
pub(crate) fn parse_header(
    file: &str,
    json: &[u8],
    file_len: u64,
    lenient: bool,
) -> Result<Header, Error> {
    let text = std::str::from_utf8(json).map_err(|e| {
        Error::header(file, PREFIX_LEN + e.valid_up_to() as u64, "the header is not UTF-8")
    })?;
    if !lenient && !text.starts_with('{') {
        return Err(Error::header(file, PREFIX_LEN, "the header does not begin with `{`"));
    }
    let parsed = match lenient {
        false => serde_json::from_str::<RawHeader<StrictTensor>>(text)
            .map(|raw| (raw.tensors, raw.metadata)),
        true => serde_json::from_str::<RawHeader<RawTensor>>(text)
            .map(|raw| (raw.tensors, raw.metadata)),
    };
    let (tensors, metadata) = parsed.map_err(|e| {
        let offset = PREFIX_LEN + offset_of(json, &e);
        Error::header(file, offset, format!("invalid safetensors header: {e}"))
    })?;
    let data_start = PREFIX_LEN + json.len() as u64;
    let mut table = Table::default();
    let mut rows = Vec::with_capacity(tensors.len());
    let max_rank = if lenient { usize::from(u8::MAX) } else { MAX_RANK };
    for (name, info) in &tensors {
        let tensor = check_tensor(file, name, info, max_rank, data_start, file_len)?;
        table.push_shape(info.shape.iter().copied());
        table.push(file, &tensor, Layout::Plain, info.shape.len() as u8, [0; 16])?;
        rows.push(tensor);
    }
    rows.sort_by_key(|t| (t.offset, t.len));
    check_contiguous(file, &rows, data_start, file_len)?;
    Ok(Header { table, metadata })
}

/// The header of a new safetensors file, and the order of its data.
///
/// ```
/// use ts_format::{Dtype, SafetensorsLayout, TensorMeta};
///
/// let meta = |dtype| TensorMeta { dtype, shape: vec![2] };
/// let (a, b) = (meta(Dtype::U8), meta(Dtype::F32));
/// let layout = SafetensorsLayout::new(&[("a", &a), ("b", &b)], &Default::default())?;
/// let mut file = layout.header; // then the data: 8 bytes of `b`, 2 bytes of `a`
/// assert_eq!(layout.order, [1, 0]);
/// file.extend([0; 8 + 2]);
/// # assert_eq!(ts_format::Catalog::from_bytes("m", &file)?.tensors().len(), 2);
/// # Ok::<(), ts_format::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SafetensorsLayout {
    /// The first bytes of the file: the length field and the JSON.
    pub header: Vec<u8>,
    /// Indices of the tensors, in the order of their data. They are sorted by descending [`Dtype`]
    /// and then by name, as in the safetensors library, so that both libraries write identical
    /// files.
    pub order: Vec<usize>,
}

impl SafetensorsLayout {
    /// Computes the layout of a file with these tensors and this metadata.
    ///
    /// # Errors
    /// Returns [`Error::Unwritable`] if:
    /// - a name is empty, contains NUL, is `__metadata__`, or is used twice;
    /// - safetensors lacks the dtype;
    /// - a rank exceeds 64;
    /// - a size is not a whole number of bytes below 2^61;
    /// - the data would have 2^64 bytes or more;
    /// - the header exceeds [`MAX_HEADER_LEN`].
    pub fn new(tensors: &[(&str, &TensorMeta)], metadata: &Metadata) -> Result<Self, Error> {
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&i| (std::cmp::Reverse(tensors[i].1.dtype), tensors[i].0));
        let (mut json, mut seen, mut at) = (String::from("{"), HashSet::new(), 0u64);
        let text =
            |text: &str| serde_json::to_string(text).expect("any string can be written as JSON");
        if metadata.is_stated() {
            let map =
                serde_json::to_string(metadata).expect("any map of strings can be written as JSON");
            json.push_str(&format!("\"__metadata__\":{map},"));
        }
        for &i in &order {
            let (name, meta) = tensors[i];
            let bad = |reason: String| Error::Unwritable { tensor: name.into(), reason };
            check_name(name).map_err(bad)?;
            if name == "__metadata__" || !seen.insert(name) {
                let reason = match name {
                    "__metadata__" => "safetensors reserves this name",
                    _ => "duplicate tensor name",
                };
                return Err(bad(reason.into()));
            }
            if !meta.dtype.is_in_safetensors() {
                return Err(bad(format!(
                    "safetensors files cannot contain dtype {}; write a .ts file",
                    meta.dtype
                )));
            }
            if meta.shape.len() > MAX_RANK {
                return Err(bad(format!(
                    "rank {} exceeds the maximum of {MAX_RANK}",
                    meta.shape.len()
                )));
            }
            let end = meta.byte_len().and_then(|len| at.checked_add(len));
            let end = end.ok_or_else(|| {
                let what = describe(meta.dtype, &meta.shape);
                bad(match meta.byte_len() {
                    Some(len) => {
                        format!("the data would have {at} + {len} bytes (at most 2^64 - 1)")
                    }
                    None => {
                        format!("the size of {what} is not a whole number of bytes below 2^61")
                    }
                })
            })?;
            let shape =
                serde_json::to_string(&meta.shape).expect("integers can be written as JSON");
            json.push_str(&format!(
                "{}:{{\"dtype\":\"{}\",\"shape\":{shape},\"data_offsets\":[{at},{end}]}},",
                text(name),
                meta.dtype
            ));
            at = end;
        }
        if json.len() > 1 {
            json.pop();
        }
        json.push('}');
        json.push_str(&" ".repeat(json.len().next_multiple_of(8) - json.len()));
        if json.len() as u64 > MAX_HEADER_LEN {
            let len = json.len();
            let reason = format!("the header would have {len} bytes (at most {MAX_HEADER_LEN})");
            return Err(Error::Unwritable { tensor: String::new(), reason });
        }
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend(json.into_bytes());
        Ok(Self { header, order })
    }
}

fn check_tensor<'a>(
    file: &str,
    name: &'a str,
    info: &RawTensor,
    max_rank: usize,
    data_start: u64,
    file_len: u64,
) -> Result<NewRow<'a>, Error> {
    let (begin, end) = info.data_offsets;
    let offset = data_start.saturating_add(begin);
    let bad = |reason: String| Error::BadTensor {
        file: file.into(),
        tensor: name.into(),
        offset,
        reason,
    };
    let Some(dtype) = dtype_of(&info.dtype) else {
        return Err(bad(format!("unknown dtype `{}`", info.dtype)));
    };
    if begin > end {
        return Err(bad(format!("data_offsets [{begin}, {end}] end before they begin")));
    }
    if info.shape.len() > max_rank {
        return Err(bad(format!("rank {} exceeds the maximum of {max_rank}", info.shape.len())));
    }
    let Some(len) = dtype.byte_len(&info.shape) else {
        let what = describe(dtype, &info.shape);
        return Err(bad(format!("the size of {what} is not a whole number of bytes below 2^61")));
    };
    if len != end - begin {
        let what = describe(dtype, &info.shape);
        return Err(bad(format!(
            "{what} has {len} bytes, but its data_offsets span {} bytes",
            end - begin
        )));
    }
    match data_start.checked_add(end) {
        Some(stop) if stop <= file_len => Ok(NewRow { name, dtype, offset, len }),
        stop => Err(Error::Truncated {
            file: file.into(),
            what: format!("tensor `{name}`"),
            offset,
            end: stop.unwrap_or(u64::MAX),
            file_len,
        }),
    }
}

/// Returns the dtype with this name if safetensors has it.
fn dtype_of(name: &str) -> Option<Dtype> {
    Dtype::from_name(name).filter(|dtype| dtype.is_in_safetensors())
}

/// Checks that each byte from `data_start` to the end of the file belongs to exactly one tensor.
/// `tensors` must be sorted by offset.
fn check_contiguous(
    file: &str,
    tensors: &[NewRow<'_>],
    data_start: u64,
    file_len: u64,
) -> Result<(), Error> {
    let mut next = data_start;
    for t in tensors {
        if t.offset != next {
            let how =
                if t.offset < next { "overlaps the previous tensor" } else { "follows a gap" };
            let reason = format!("its data {how} (expected it to begin at byte {next})");
            return Err(Error::BadTensor {
                file: file.into(),
                tensor: t.name.into(),
                offset: t.offset,
                reason,
            });
        }
        next += t.len;
    }
    if next != file_len {
        return Err(Error::header(
            file,
            next,
            format!("{} trailing bytes after the last tensor", file_len - next),
        ));
    }
    Ok(())
}

/// The header entry of a tensor. Unknown fields are ignored.
#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header entry of a tensor. Unknown fields are errors.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StrictTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl From<StrictTensor> for RawTensor {
    fn from(StrictTensor { dtype, shape, data_offsets }: StrictTensor) -> Self {
        Self { dtype, shape, data_offsets }
    }
}

/// The type of the header entries, which decides how strictly a header is read.
trait HeaderEntry: DeserializeOwned + Into<RawTensor> {
    type Metadata: DeserializeOwned + Into<Option<IndexMap<String, String>>>;
    /// Whether names may be empty, contain NUL, or be used twice (the last entry wins).
    const LENIENT_NAMES: bool;
}

impl HeaderEntry for RawTensor {
    type Metadata = Option<IndexMap<String, String>>;
    const LENIENT_NAMES: bool = true;
}

impl HeaderEntry for StrictTensor {
    type Metadata = UniqueKeys;
    const LENIENT_NAMES: bool = false;
}

#[derive(Deserialize)]
struct UniqueKeys(#[serde(deserialize_with = "unique_strings")] IndexMap<String, String>);

impl From<UniqueKeys> for Option<IndexMap<String, String>> {
    fn from(UniqueKeys(map): UniqueKeys) -> Self {
        Some(map)
    }
}

struct RawHeader<E> {
    tensors: Vec<(String, RawTensor)>,
    metadata: Metadata,
    entry: PhantomData<E>,
}

impl<'de, E: HeaderEntry> Deserialize<'de> for RawHeader<E> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor(PhantomData))
    }
}

/// A visitor that reads entries one by one, because a map would silently keep the last of two
/// equal names.
struct HeaderVisitor<E>(PhantomData<E>);

impl<'de, E: HeaderEntry> Visitor<'de> for HeaderVisitor<E> {
    type Value = RawHeader<E>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with tensor names as keys")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader<E>, A::Error> {
        let mut header =
            RawHeader { tensors: Vec::new(), metadata: Metadata::default(), entry: PhantomData };
        let mut seen = HashMap::new();
        while let Some(name) = map.next_key::<String>()? {
            let before = seen.insert(name.clone(), header.tensors.len());
            if before.is_some() && (!E::LENIENT_NAMES || name == "__metadata__") {
                return Err(serde::de::Error::custom(format!("duplicate key `{name}`")));
            }
            if name == "__metadata__" {
                if let Some(entries) = map.next_value::<E::Metadata>()?.into() {
                    header.metadata = Metadata::stated();
                    header.metadata.extend(entries);
                }
                continue;
            }
            if !E::LENIENT_NAMES {
                check_name(&name).map_err(serde::de::Error::custom)?;
            }
            let tensor: RawTensor = map.next_value::<E>()?.into();
            // The safetensors library also checks the dtype of an entry that a later duplicate
            // replaces.
            if E::LENIENT_NAMES && dtype_of(&tensor.dtype).is_none() {
                return Err(serde::de::Error::custom(format!("unknown dtype `{}`", tensor.dtype)));
            }
            match before {
                None => header.tensors.push((name, tensor)),
                Some(at) => {
                    header.tensors[at].1 = tensor;
                    seen.insert(name, at);
                }
            }
        }
        Ok(header)
    }
}
