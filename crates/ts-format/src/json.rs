// SPDX-License-Identifier: MIT OR Apache-2.0
//! What serde_json leaves to its users: no key twice, and where an error is.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Error, MapAccess, Visitor};

/// Byte offset of a JSON error: serde_json counts lines from 1 and columns in bytes from 1.
pub(crate) fn offset_of(text: &[u8], error: &serde_json::Error) -> u64 {
    let lines = text.split_inclusive(|&b| b == b'\n').take(error.line().saturating_sub(1));
    let before: usize = lines.map(<[u8]>::len).sum();
    (before + error.column().saturating_sub(1)) as u64
}

/// An object of strings. A plain map would keep the last of two equal keys in silence.
pub(crate) fn unique<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    struct Strings;
    impl<'de> Visitor<'de> for Strings {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object of strings")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut all = BTreeMap::new();
            while let Some((key, value)) = map.next_entry::<String, String>()? {
                if all.contains_key(&key) {
                    return Err(A::Error::custom(format!("the key `{key}` stands twice")));
                }
                all.insert(key, value);
            }
            Ok(all)
        }
    }
    deserializer.deserialize_map(Strings)
}
