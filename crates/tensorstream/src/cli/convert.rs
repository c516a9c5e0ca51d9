// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream convert`.

use std::path::PathBuf;

use serde_json::json;
use ts_format::Compression;

use super::console::{Console, MIB, say};
use crate::write::unfinished;
use crate::{Converted, Error, WriteOptions, convert};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The checkpoint to convert: a .safetensors or .ts file, a shard index, or a directory with
    /// one of them.
    from: PathBuf,
    /// The .ts or .safetensors file to write, which is replaced atomically. If the name ends in
    /// .safetensors.index.json, the command writes shards and this index.
    to: PathBuf,
    /// Lossless compression of a .ts file: raw (none), auto (chosen by dtype), split (for floats),
    /// zstd, lz4 or zlib.
    #[arg(long, default_value = "raw")]
    codec: String,
    /// The level of the codec: -7 to 22 for zstd, 0 to 9 for zlib.
    #[arg(long, allow_negative_numbers = true)]
    level: Option<i32>,
    /// Number of threads that compress, at most 16. By default, one for each core.
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    jobs: usize,
}

pub(super) fn run(
    arguments: &Arguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let Arguments { from, to, codec, level, jobs } = arguments;
    let compression = Compression::parse(codec, *level)
        .map_err(|reason| Error::Compression { path: to.clone(), reason })?;
    let options = WriteOptions::default().with_compression(compression).with_jobs(*jobs);
    let converted =
        console.run_with_bar("converting", interrupt, |watch| convert(from, to, options, watch));
    if let (Err(_), Some(partial)) = (&converted, unfinished(to)) {
        console.note(format_args!(
            "{} contains the finished tensors; run the same command to resume",
            partial.display()
        ));
    }
    let (Converted { tensors, bytes, file_bytes }, seconds) = converted?;
    if console.json {
        say(json!({
            "path": to,
            "tensors": tensors,
            "bytes": bytes,
            "file_bytes": file_bytes,
            "seconds": seconds,
        }));
    } else {
        let (mib, file_mib) = (bytes as f64 / MIB, file_bytes as f64 / MIB);
        say(format_args!(
            "{}: {tensors} tensors, {mib:.1} MiB in {file_mib:.1} MiB, in {seconds:.1} s",
            to.display()
        ));
    }
    Ok(0)
}
