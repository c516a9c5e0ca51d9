// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream compact`.

use std::path::PathBuf;

use serde_json::json;
use ts_io::fault::WriteFaults;

use super::console::{Console, MIB, say};
use crate::{Compacted, Error, compact};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The .ts file, which is replaced atomically.
    path: PathBuf,
}

pub(super) fn run(
    arguments: &Arguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let (path, no_faults) = (&arguments.path, WriteFaults::default());
    let (done, seconds) =
        console.run_with_bar("compacting", interrupt, |watch| compact(path, &no_faults, watch))?;
    let Compacted { bytes_before, bytes } = done;
    if console.json {
        say(json!({
            "path": path,
            "bytes_before": bytes_before,
            "bytes": bytes,
            "seconds": seconds,
        }));
    } else {
        let (before, after) = (bytes_before as f64 / MIB, bytes as f64 / MIB);
        say(format_args!(
            "{}: {before:.1} MiB, now {after:.1} MiB, in {seconds:.1} s",
            path.display()
        ));
    }
    Ok(0)
}
