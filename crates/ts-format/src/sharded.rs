// SPDX-License-Identifier: MIT OR Apache-2.0
//! The index of a sharded checkpoint (`model.safetensors.index.json`), which maps tensors to
//! shards.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use serde::Deserialize;

use crate::{Error, json};

/// Maximum length of an index in bytes. An index of 100,000 tensors has about 10 MB.
pub const MAX_INDEX_LEN: u64 = 256 << 20;

/// Formats a shard index as Hugging Face Transformers does. `shards` maps tensor names to file
/// names, and `total_size` is the size of all tensors in bytes.
///
/// # Errors
/// Returns [`Error::Unwritable`] if there are no tensors, or the index would exceed
/// [`MAX_INDEX_LEN`].
///
/// # Examples
/// ```
/// use std::collections::BTreeMap;
///
/// let shards = BTreeMap::from([("w".into(), "model-00001-of-00001.safetensors".into())]);
/// let json = ts_format::shard_index(8, &shards)?;
/// assert!(json.starts_with(b"{"));
/// # Ok::<(), ts_format::Error>(())
/// ```
pub fn shard_index(total_size: u64, shards: &BTreeMap<String, String>) -> Result<Vec<u8>, Error> {
    let index =
        serde_json::json!({ "metadata": { "total_size": total_size }, "weight_map": shards });
    let mut text = serde_json::to_vec_pretty(&index).expect("strings and a number are valid JSON");
    text.push(b'\n');
    let error =
        |reason: &str| Err(Error::Unwritable { tensor: String::new(), reason: reason.into() });
    match (shards.is_empty(), text.len() as u64 > MAX_INDEX_LEN) {
        (true, _) => error("the shard index would list no tensors"),
        (_, true) => error(&format!(
            "the shard index would have {} bytes (at most {MAX_INDEX_LEN})",
            text.len()
        )),
        _ => Ok(text),
    }
}

#[derive(Deserialize)]
struct RawIndex {
    #[serde(deserialize_with = "json::unique_strings")]
    weight_map: IndexMap<String, String>,
}

/// Parses an index into a map from tensor name to shard name. Each shard must be a plain file name,
/// because all shards are in the directory of the index.
pub(crate) fn parse_index(file: &str, text: &[u8]) -> Result<BTreeMap<String, String>, Error> {
    let index: RawIndex = serde_json::from_slice(text).map_err(|e| {
        Error::header(file, json::offset_of(text, &e), format!("invalid shard index: {e}"))
    })?;
    if index.weight_map.is_empty() {
        return Err(Error::header(file, 0, "invalid shard index: `weight_map` is empty"));
    }
    for (tensor, shard) in &index.weight_map {
        if shard.is_empty() || shard.contains(['/', '\\', '\0']) || shard == ".." || shard == "." {
            let reason = format!(
                "tensor `{tensor}`: invalid shard {shard:?} (expected a file name in the directory \
                 of the index)"
            );
            return Err(Error::header(file, 0, reason));
        }
    }
    Ok(index.weight_map.into_iter().collect())
}
