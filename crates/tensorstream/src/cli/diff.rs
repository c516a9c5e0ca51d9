// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream diff`.

use std::path::PathBuf;

use serde_json::json;

use super::arguments::Jobs;
use super::console::{Console, say};
use crate::{Error, diff};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The first checkpoint: a .safetensors or .ts file, a shard index, or a directory with one of
    /// them.
    first: PathBuf,
    /// The second checkpoint, in any of these forms.
    second: PathBuf,
    #[command(flatten)]
    threads: Jobs,
}

pub(super) fn run(
    arguments: &Arguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let Arguments { first, second, threads } = arguments;
    let (found, seconds) = console
        .run_with_bar("comparing", interrupt, |watch| diff(first, second, threads.jobs, watch))?;
    if console.json {
        let tensors = found
            .tensors
            .iter()
            .map(|(name, difference)| (name.clone(), difference.to_string().into()));
        let tensors: serde_json::Map<_, _> = tensors.collect();
        say(json!({
            "metadata": found.metadata, "tensors": tensors, "same": found.same, "seconds": seconds,
        }));
    } else {
        let value = |value: &Option<String>| {
            value.as_ref().map_or("nothing".into(), |text| format!("{text:?}"))
        };
        for (key, (first, second)) in &found.metadata {
            say(format_args!("metadata {key} differs: {} and {}", value(first), value(second)));
        }
        for (name, difference) in &found.tensors {
            say(format_args!("{name}: {difference}"));
        }
        say(format_args!("{} tensors differ, {} are the same", found.tensors.len(), found.same));
    }
    Ok(u8::from(!found.is_empty()))
}
