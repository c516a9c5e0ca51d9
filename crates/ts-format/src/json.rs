// SPDX-License-Identifier: MIT OR Apache-2.0
//! Additions to serde_json: duplicate keys are errors, and errors have byte offsets.

use std::fmt;

use indexmap::IndexMap;
use serde::de::{Error, MapAccess, Visitor};

/// Returns the byte offset of a JSON error in `text`. serde_json counts lines and columns from 1,
/// and measures columns in bytes.
pub(crate) fn offset_of(text: &[u8], error: &serde_json::Error) -> u64 {
    let lines = text.split_inclusive(|&b| b == b'\n').take(error.line().saturating_sub(1));
    let before: usize = lines.map(<[u8]>::len).sum();
    (before + error.column().saturating_sub(1)) as u64
}

/// Deserializes an object whose values are strings. Duplicate keys are errors, whereas the
/// `Deserialize` implementations of maps silently keep the last of two equal keys.
pub(crate) fn unique_strings<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<IndexMap<String, String>, D::Error> {
    struct UniqueStrings;
    impl<'de> Visitor<'de> for UniqueStrings {
        type Value = IndexMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object of strings")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut all = IndexMap::new();
            while let Some((key, value)) = map.next_entry::<String, String>()? {
                if all.contains_key(&key) {
                    return Err(A::Error::custom(format!("duplicate key `{key}`")));
                }
                all.insert(key, value);
            }
            Ok(all)
        }
    }
    deserializer.deserialize_map(UniqueStrings)
}
