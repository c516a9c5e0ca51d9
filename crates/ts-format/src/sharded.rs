// SPDX-License-Identifier: MIT OR Apache-2.0
//! `model.safetensors.index.json`: which shard has which tensor.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::{Error, json};

/// Longest index that is read, in bytes. 100,000 tensors take about 10 MB.
pub const MAX_INDEX_LEN: u64 = 256 << 20;

/// The text of an index, as transformers writes it, of tensors with `total_size` bytes: which shard
/// has which.
///
/// # Errors
/// [`Error::Unwritable`] when it would be over 256 MiB, or there are no tensors.
pub fn shard_index(total_size: u64, shards: &BTreeMap<String, String>) -> Result<Vec<u8>, Error> {
    let index =
        serde_json::json!({ "metadata": { "total_size": total_size }, "weight_map": shards });
    let mut text = serde_json::to_vec_pretty(&index).expect("text and a number are JSON");
    text.push(b'\n');
    let refuse =
        |reason: &str| Err(Error::Unwritable { tensor: String::new(), reason: reason.into() });
    match (shards.is_empty(), text.len() as u64 > MAX_INDEX_LEN) {
        (true, _) => refuse("an index must have tensors"),
        (_, true) => refuse("the index would be over 256 MiB"),
        _ => Ok(text),
    }
}

#[derive(Deserialize)]
struct RawIndex {
    #[serde(deserialize_with = "json::unique")]
    weight_map: BTreeMap<String, String>,
}

/// Parses an index into tensor name -> shard name. A shard is a plain file name beside its index.
pub(crate) fn parse_index(file: &str, text: &[u8]) -> Result<BTreeMap<String, String>, Error> {
    let index: RawIndex = serde_json::from_slice(text).map_err(|e| {
        Error::header(file, json::offset_of(text, &e), format!("not a shard index: {e}"))
    })?;
    if index.weight_map.is_empty() {
        return Err(Error::header(file, 0, "the weight_map is empty"));
    }
    for (tensor, shard) in &index.weight_map {
        if shard.is_empty() || shard.contains(['/', '\\', '\0']) || shard == ".." || shard == "." {
            let reason = format!("tensor `{tensor}`: {shard:?} is no file name beside the index");
            return Err(Error::header(file, 0, reason));
        }
    }
    Ok(index.weight_map)
}
