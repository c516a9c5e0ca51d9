// SPDX-License-Identifier: MIT OR Apache-2.0
//! Detects checkpoint formats that are not supported, so that the error can explain how to convert
//! them.

use std::path::{Path, PathBuf};

use ts_io::Source;

use crate::Error;

/// Number of bytes that identify a format.
const MAGIC_LEN: usize = 8;
/// Usual suffixes of files in unsupported formats.
const SUFFIXES: [&str; 5] = ["gguf", "bin", "pt", "pth", "ckpt"];

/// A description of a format, and how to convert it to safetensors.
type ForeignFormat = (&'static str, &'static str);

const GGUF: ForeignFormat = (
    "a GGUF file",
    "convert it to safetensors, for example with transformers: \
     AutoModelForCausalLM.from_pretrained(DIRECTORY, gguf_file=NAME).save_pretrained(TARGET)",
);
const PICKLE: ForeignFormat = (
    "a pickle (as torch.save writes it), which can run code when it is read",
    "convert it to safetensors: \
     safetensors.torch.save_file(torch.load(NAME, weights_only=True), \"model.safetensors\")",
);

/// Returns an error if the first bytes of a file identify an unsupported format.
pub(crate) fn detect(source: &Source) -> Option<Error> {
    let mut magic = [0; MAGIC_LEN];
    let len = source.read_at(0, &mut magic).ok()?;
    let (found, remedy) = identify(&magic[..len])?;
    Some(Error::ForeignFormat { path: source.path().into(), found, remedy })
}

/// Searches a directory for files in an unsupported format. Returns an error for the first of them
/// by name.
pub(crate) fn detect_in(directory: &Path) -> Option<Error> {
    let is_candidate = |path: &PathBuf| {
        path.extension().is_some_and(|e| SUFFIXES.iter().any(|suffix| e == *suffix))
            && path.is_file()
    };
    let entries = std::fs::read_dir(directory).ok()?;
    let mut files: Vec<_> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_candidate).collect();
    files.sort();
    files.iter().find_map(|file| detect(Source::open(file).ok()?.as_ref()))
}

fn identify(magic: &[u8]) -> Option<ForeignFormat> {
    match magic {
        [b'G', b'G', b'U', b'F', ..] => Some(GGUF),
        // torch.save writes a zip archive that contains a pickle.
        [b'P', b'K', 3, 4, ..] => Some(PICKLE),
        // Before PyTorch 1.6, torch.save wrote a pickle without an archive. In a safetensors file,
        // these bytes would be a header length of 2^48 bytes or more.
        [0x80, 2..=5, _, _, _, _, high @ ..] if high != [0, 0] => Some(PICKLE),
        _ => None,
    }
}
