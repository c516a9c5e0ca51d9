// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream verify`.

use serde_json::{Value, json};

use super::arguments::{CheckpointPath, Jobs};
use super::console::{Console, MIB, say};
use crate::{Error, verify};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    checkpoint: CheckpointPath,
    #[command(flatten)]
    threads: Jobs,
}

pub(super) fn run(
    arguments: &Arguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let (path, jobs) = (&arguments.checkpoint.path, arguments.threads.jobs);
    let (found, seconds) =
        console.run_with_bar("verifying", interrupt, |watch| verify(path, jobs, watch))?;
    if console.json {
        let damaged = found.damaged.iter().map(
            |d| json!({ "path": d.path, "tensor": d.tensor, "offset": d.offset, "bytes": d.len }),
        );
        let damaged: Vec<Value> = damaged.collect();
        say(json!({
            "tensors": found.tensors, "bytes": found.bytes, "checked_bytes": found.checked_bytes,
            "seconds": seconds, "damaged": damaged,
        }));
    } else {
        found.damaged.iter().for_each(say);
        let (tensors, mib) = (found.tensors, found.bytes as f64 / MIB);
        match found.checked_bytes {
            0 if found.bytes > 0 => {
                say(format_args!("{tensors} tensors, {mib:.1} MiB read; no checksums"));
            }
            checked => say(format_args!(
                "{tensors} tensors, {mib:.1} MiB read, {:.1} MiB with checksums, {} chunks damaged",
                checked as f64 / MIB,
                found.damaged.len()
            )),
        }
    }
    Ok(u8::from(!found.damaged.is_empty()))
}
