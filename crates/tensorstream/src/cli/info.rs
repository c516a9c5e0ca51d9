// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream info`.

use serde_json::{Value, json};
use ts_format::{Codec, Tensor};

use super::arguments::CheckpointPath;
use super::console::{Console, MIB, say};
use crate::{Checkpoint, Error};

pub(super) fn run(arguments: &CheckpointPath, console: Console) -> Result<u8, Error> {
    let checkpoint = Checkpoint::open(&arguments.path)?;
    match console.json {
        true => print_json(&checkpoint),
        false => print_text(&checkpoint),
    }
    Ok(0)
}

fn print_json(checkpoint: &Checkpoint) {
    let catalog = checkpoint.catalog();
    let files = catalog.files().iter().zip(checkpoint.sources()).map(|(file, source)| {
        json!({ "path": source.path(), "bytes": file.len, "metadata": file.metadata })
    });
    let tensors = catalog.tensors().map(|tensor| {
        let (range, first) = (tensor.range(), tensor.chunks().and_then(|chunks| chunks.first()));
        json!({
            "name": tensor.name(),
            "dtype": tensor.dtype().name(),
            "shape": tensor.shape(),
            "bytes": range.len,
            "file": range.file.0,
            "offset": first.map_or(range.offset, |chunk| chunk.offset),
            "checksums": tensor.checksums().is_some() || tensor.chunks().is_some(),
            "codec": codec(tensor).name(),
            "stored_bytes": tensor.stored_len(),
        })
    });
    let (files, tensors): (Vec<Value>, Vec<Value>) = (files.collect(), tensors.collect());
    let (bytes, stored) = sizes(checkpoint);
    say(json!({ "files": files, "tensors": tensors, "bytes": bytes, "stored_bytes": stored }));
}

fn print_text(checkpoint: &Checkpoint) {
    let catalog = checkpoint.catalog();
    for (file, source) in catalog.files().iter().zip(checkpoint.sources()) {
        say(format_args!("{}   {:.1} MiB", source.path().display(), file.len as f64 / MIB));
        for (key, value) in &file.metadata {
            say(format_args!("    {key} = {value}"));
        }
    }
    let width = catalog.tensors().map(|tensor| tensor.name().len()).max().unwrap_or(0);
    for tensor in catalog.tensors() {
        let (name, dtype, shape) =
            (tensor.name(), tensor.dtype().name(), format!("{:?}", tensor.shape()));
        let len = tensor.range().len;
        let compression = match codec(tensor) {
            Codec::Raw => String::new(),
            codec => format!("  {codec} {:.2}x", len as f64 / tensor.stored_len() as f64),
        };
        say(format_args!("{name:width$}  {dtype:5} {shape:20} {len:12} bytes{compression}"));
    }
    let (bytes, stored) = sizes(checkpoint);
    let stored_size =
        if stored < bytes { format!(" in {:.1} MiB", stored as f64 / MIB) } else { String::new() };
    let count = catalog.tensors().len();
    say(format_args!("{count} tensors, {:.1} MiB{stored_size}", bytes as f64 / MIB));
}

/// Returns the size of all tensors in bytes, decoded and stored.
fn sizes(checkpoint: &Checkpoint) -> (u64, u64) {
    let tensors = || checkpoint.catalog().tensors();
    (tensors().map(|t| t.range().len).sum(), tensors().map(|t| t.stored_len()).sum())
}

/// Returns the most frequent codec of a tensor's chunks, or `Raw` if the tensor has no chunks.
fn codec(tensor: Tensor<'_>) -> Codec {
    let chunks = tensor.chunks().unwrap_or_default();
    let most =
        Codec::ALL.iter().max_by_key(|codec| chunks.iter().filter(|c| c.codec == **codec).count());
    most.filter(|_| !chunks.is_empty()).copied().unwrap_or(Codec::Raw)
}
