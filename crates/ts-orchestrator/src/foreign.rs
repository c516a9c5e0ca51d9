// SPDX-License-Identifier: MIT OR Apache-2.0
//! Detects checkpoint formats that are not supported, so that the error can explain how to convert
//! them.

use std::path::{Path, PathBuf};

use ts_io::Source;

use crate::not_a_checkpoint::NotACheckpoint;

/// Number of bytes that identify a format.
const MAGIC_LEN: usize = 512;
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

const LFS_POINTER: ForeignFormat = (
    "a Git LFS pointer, which stands for the file in a repository",
    "download the file: run `git lfs install` and `git lfs pull` in the repository, or \
     `hf download NAME`",
);
const HTML: ForeignFormat = (
    "an HTML page, such as an error or a login page that was saved instead of the file",
    "download the file again; on the Hugging Face Hub, use the link with /resolve/ instead of \
     /blob/, and a token if the model requires one",
);
const XML: ForeignFormat = (
    "an XML document, such as the error message of an object store that was saved instead of the \
     file",
    "look into the document for the reason, and download the file again",
);

/// Returns an error if the first bytes of a file identify an unsupported format.
pub(crate) fn detect(source: &Source) -> Option<NotACheckpoint> {
    let mut magic = [0; MAGIC_LEN];
    let len = source.read_at(0, &mut magic).ok()?;
    let (found, remedy) = identify(&magic[..len])?;
    Some(NotACheckpoint::ForeignFormat { path: source.path().into(), found, remedy })
}

/// Searches a directory for files in an unsupported format. Returns an error for the first of them
/// by name.
pub(crate) fn detect_in(directory: &Path) -> Option<NotACheckpoint> {
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
        [0x80, 2..=5, _, _, _, _, a, b, ..] if [*a, *b] != [0, 0] => Some(PICKLE),
        _ => identify_text(magic),
    }
}

/// Identifies text that takes the place of a file that was not downloaded. In a safetensors file,
/// the text would be a header length of 2^56 bytes or more.
fn identify_text(start: &[u8]) -> Option<ForeignFormat> {
    let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    let begins_with = |prefix: &[u8]| {
        text.get(..prefix.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(prefix))
    };
    let has = |tag: &[u8]| text.windows(tag.len()).any(|part| part.eq_ignore_ascii_case(tag));
    if begins_with(b"version https://git-lfs.github.com/spec/") {
        Some(LFS_POINTER)
    } else if begins_with(b"<!doctype html") || begins_with(b"<html") {
        Some(HTML)
    } else if begins_with(b"<?xml") || begins_with(b"<!--") || begins_with(b"<head") {
        Some(if has(b"<html") || has(b"<head") { HTML } else { XML })
    } else {
        None
    }
}
