// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metadata of a checkpoint that consists of several files.

use std::path::Path;

use ts_format::Metadata;

use crate::Checkpoint;

/// Merges the metadata of all files. If files disagree on a key, each value is kept as `key@file`.
pub(crate) fn merged_metadata(checkpoint: &Checkpoint) -> Metadata {
    let files = checkpoint.catalog().files();
    let is_stated = files.iter().any(|file| file.metadata.is_stated());
    let mut merged = if is_stated { Metadata::stated() } else { Metadata::default() };
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
