// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metadata of a checkpoint that consists of several files.

use std::collections::BTreeMap;
use std::path::Path;

use crate::Checkpoint;

/// Merges the metadata of all files. If files disagree on a key, each value is kept as `key@file`.
pub(crate) fn merged_metadata(checkpoint: &Checkpoint) -> BTreeMap<String, String> {
    let files = checkpoint.catalog().files();
    let mut merged = BTreeMap::new();
    for file in files {
        for (key, value) in &file.metadata {
            let agreed = files.iter().all(|f| f.metadata.get(key).is_none_or(|v| v == value));
            let name = Path::new(&file.name).file_name().unwrap_or_default().to_string_lossy();
            let key = if agreed { key.clone() } else { format!("{key}@{name}") };
            merged.insert(key, value.clone());
        }
    }
    merged
}
