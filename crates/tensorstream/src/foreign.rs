// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recognises checkpoints in formats that are not read, so that the error can say what to do.

use std::path::{Path, PathBuf};

use ts_io::Source;

use crate::Error;

/// Bytes that tell the formats apart.
const MAGIC_BYTES: usize = 8;
/// Suffixes of checkpoints in such formats.
const SUFFIXES: [&str; 5] = ["gguf", "bin", "pt", "pth", "ckpt"];

/// A format, and how its files become safetensors.
type Known = (&'static str, &'static str);

const GGUF: Known = (
    "a GGUF file",
    "convert it to safetensors, for example with transformers: \
     AutoModelForCausalLM.from_pretrained(DIRECTORY, gguf_file=NAME).save_pretrained(TARGET)",
);
const PICKLE: Known = (
    "a pickle, as torch.save writes it, which can run code when it is read",
    "convert it to safetensors: \
     safetensors.torch.save_file(torch.load(NAME, weights_only=True), \"model.safetensors\")",
);

/// The error for a file whose first bytes are those of such a format.
pub(crate) fn recognised(source: &Source) -> Option<Error> {
    let mut first = [0; MAGIC_BYTES];
    let got = source.read_at(0, &mut first).ok()?;
    let (found, remedy) = known(&first[..got])?;
    Some(Error::ForeignFormat { path: source.path().into(), found, remedy })
}

/// The same for the first such file of a directory, by name.
pub(crate) fn recognised_in(directory: &Path) -> Option<Error> {
    let is_candidate = |path: &PathBuf| {
        path.extension().is_some_and(|e| SUFFIXES.iter().any(|suffix| e == *suffix))
            && path.is_file()
    };
    let entries = std::fs::read_dir(directory).ok()?;
    let mut files: Vec<_> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_candidate).collect();
    files.sort();
    files.iter().find_map(|file| recognised(Source::open(file).ok()?.as_ref()))
}

fn known(first: &[u8]) -> Option<Known> {
    match first {
        [b'G', b'G', b'U', b'F', ..] => Some(GGUF),
        // torch.save writes a zip archive with a pickle in it.
        [b'P', b'K', 3, 4, ..] => Some(PICKLE),
        // Before version 1.6 it wrote the pickle alone. A safetensors file that begins so would
        // have a header of petabytes.
        [0x80, 2..=5, _, _, _, _, high @ ..] if high != [0, 0] => Some(PICKLE),
        _ => None,
    }
}
