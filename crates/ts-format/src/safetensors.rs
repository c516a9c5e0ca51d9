// SPDX-License-Identifier: MIT OR Apache-2.0
//! The safetensors header: 8 bytes of length, JSON, then the data of all tensors without a gap.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeOwned, MapAccess, Visitor};

use crate::error::{check_name, describe};
use crate::index::MAX_RANK;
use crate::json::{offset_of, unique};
use crate::table::{Kept, NewRow, Table};
use crate::{Dtype, Error, TensorMeta};

/// Longest JSON header that is read, in bytes: the limit of the safetensors library itself.
pub const MAX_HEADER_LEN: u64 = 100_000_000;

/// Length of the field that holds the header's length.
pub(crate) const PREFIX_LEN: u64 = 8;

#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) table: Table,
    pub(crate) metadata: BTreeMap<String, String>,
}

/// Checks the length field of `file` and returns the length of the JSON behind it.
pub(crate) fn header_len(file: &str, prefix: &[u8], file_len: u64) -> Result<u64, Error> {
    let truncated = |what: &str, offset, end| Error::Truncated {
        file: file.into(),
        what: what.into(),
        offset,
        end,
        file_len,
    };
    let prefix: [u8; 8] =
        prefix.try_into().map_err(|_| truncated("the safetensors header length", 0, PREFIX_LEN))?;
    let len = u64::from_le_bytes(prefix);
    if len > MAX_HEADER_LEN {
        let reason = format!(
            "the header length field says {len} bytes, more than the {MAX_HEADER_LEN} allowed: \
             this is not a safetensors file, or it is damaged"
        );
        return Err(Error::header(file, 0, reason));
    }
    if PREFIX_LEN + len > file_len {
        return Err(truncated("the safetensors header", PREFIX_LEN, PREFIX_LEN + len));
    }
    Ok(len)
}

/// Parses the JSON of a header and checks every claim it makes about a file of `file_len` bytes. A
/// `lenient` reader takes what the safetensors library does.
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
    let (tensors, metadata) =
        parsed.map_err(|e| Error::header(file, PREFIX_LEN + offset_of(json, &e), e.to_string()))?;
    let data_start = PREFIX_LEN + json.len() as u64;
    let mut table = Table::default();
    let mut places = Vec::with_capacity(tensors.len());
    let max_rank = if lenient { usize::from(u8::MAX) } else { MAX_RANK };
    for (name, info) in &tensors {
        let tensor = check_tensor(file, name, info, max_rank, data_start, file_len)?;
        table.push_shape(info.shape.iter().copied());
        // The rank was checked.
        table.push(file, &tensor, Kept::Plain, info.shape.len() as u8, [0; 16])?;
        places.push(tensor);
    }
    places.sort_by_key(|t| (t.offset, t.len));
    check_cover(file, &places, data_start, file_len)?;
    Ok(Header { table, metadata })
}

/// How a safetensors file of given tensors begins, and in which order their data follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SafetensorsLayout {
    /// The first bytes of the file.
    pub header: Vec<u8>,
    /// Indices of the tensors, in the order of their data: as the safetensors library orders them,
    /// by dtype from wide to narrow and then by name, so that its files come out byte for byte.
    pub order: Vec<usize>,
}

impl SafetensorsLayout {
    /// Lays out tensors, given by name, and the file's metadata.
    ///
    /// # Errors
    /// [`Error::Unwritable`] for a name that is empty, has a NUL, is `__metadata__` or stands
    /// twice, a rank over 64, a size that is no whole number of bytes, or a header over
    /// [`MAX_HEADER_LEN`].
    pub fn new(
        tensors: &[(&str, &TensorMeta)],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, Error> {
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&i| (std::cmp::Reverse(tensors[i].1.dtype), tensors[i].0));
        let (mut json, mut seen, mut at) = (String::from("{"), HashSet::new(), 0u64);
        let text = |text: &str| serde_json::to_string(text).expect("a string is JSON");
        if !metadata.is_empty() {
            let map = serde_json::to_string(metadata).expect("a map of strings is JSON");
            json.push_str(&format!("\"__metadata__\":{map},"));
        }
        for &i in &order {
            let (name, meta) = tensors[i];
            let bad = |reason: String| Error::Unwritable { tensor: name.into(), reason };
            check_name(name).map_err(bad)?;
            if name == "__metadata__" || !seen.insert(name) {
                return Err(bad("the name is taken".into()));
            }
            if meta.shape.len() > MAX_RANK {
                return Err(bad(format!("rank {}, more than {MAX_RANK}", meta.shape.len())));
            }
            let end = meta.byte_len().and_then(|len| at.checked_add(len));
            let end = end
                .ok_or_else(|| bad(format!("{} has no size", describe(meta.dtype, &meta.shape))))?;
            let shape = serde_json::to_string(&meta.shape).expect("numbers are JSON");
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
            let reason = format!("the header would be over {MAX_HEADER_LEN} bytes");
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
    let Some(dtype) = Dtype::from_name(&info.dtype) else {
        return Err(bad(format!("unknown dtype `{}`", info.dtype)));
    };
    if begin > end {
        return Err(bad(format!("data_offsets [{begin}, {end}] run backwards")));
    }
    if info.shape.len() > max_rank {
        return Err(bad(format!("rank {}, more than {max_rank}", info.shape.len())));
    }
    let Some(len) = dtype.byte_len(&info.shape) else {
        let what = describe(dtype, &info.shape);
        return Err(bad(format!("{what} is no whole number of bytes below 2^64")));
    };
    if len != end - begin {
        let what = describe(dtype, &info.shape);
        return Err(bad(format!("{what} is {len} bytes, its data_offsets hold {}", end - begin)));
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

/// The data must be covered from its first byte to the end of the file, each byte by one tensor.
fn check_cover(
    file: &str,
    tensors: &[NewRow<'_>],
    data_start: u64,
    file_len: u64,
) -> Result<(), Error> {
    let mut next = data_start;
    for t in tensors {
        if t.offset != next {
            let how = if t.offset < next {
                "overlaps the tensor before it"
            } else {
                "leaves a gap before it"
            };
            let reason = format!("its data {how}, which ends at byte {next}");
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
            format!("{} bytes after the last tensor", file_len - next),
        ));
    }
    Ok(())
}

/// What a header says of a tensor. Other fields are passed over.
#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The same, without other fields.
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

/// Which kind of entry a header is read as, and so how strictly.
trait Entry: DeserializeOwned + Into<RawTensor> {
    type Metadata: DeserializeOwned + Into<Option<BTreeMap<String, String>>>;
    /// Whether a name may be empty, have a NUL, or stand twice: the last one counts then.
    const ANY_NAME: bool;
}

impl Entry for RawTensor {
    type Metadata = Option<BTreeMap<String, String>>;
    const ANY_NAME: bool = true;
}

impl Entry for StrictTensor {
    type Metadata = UniqueKeys;
    const ANY_NAME: bool = false;
}

#[derive(Deserialize)]
struct UniqueKeys(#[serde(deserialize_with = "unique")] BTreeMap<String, String>);

impl From<UniqueKeys> for Option<BTreeMap<String, String>> {
    fn from(UniqueKeys(map): UniqueKeys) -> Self {
        Some(map)
    }
}

struct RawHeader<E> {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
    entry: PhantomData<E>,
}

impl<'de, E: Entry> Deserialize<'de> for RawHeader<E> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor(PhantomData))
    }
}

/// A map's visitor rather than a map, because a map would keep the last of two equal names in
/// silence.
struct HeaderVisitor<E>(PhantomData<E>);

impl<'de, E: Entry> Visitor<'de> for HeaderVisitor<E> {
    type Value = RawHeader<E>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensor names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader<E>, A::Error> {
        let mut header =
            RawHeader { tensors: Vec::new(), metadata: BTreeMap::new(), entry: PhantomData };
        let mut seen = HashMap::new();
        while let Some(name) = map.next_key::<String>()? {
            let before = seen.insert(name.clone(), header.tensors.len());
            if before.is_some() && (!E::ANY_NAME || name == "__metadata__") {
                return Err(serde::de::Error::custom(format!("the name `{name}` stands twice")));
            }
            if name == "__metadata__" {
                header.metadata = map.next_value::<E::Metadata>()?.into().unwrap_or_default();
                continue;
            }
            if !E::ANY_NAME {
                check_name(&name).map_err(serde::de::Error::custom)?;
            }
            let tensor: RawTensor = map.next_value::<E>()?.into();
            // The library minds also in an entry that a later one takes the place of.
            if E::ANY_NAME && Dtype::from_name(&tensor.dtype).is_none() {
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
