// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads a shard index of arbitrary bytes: the result is an error, or the index names only files in
//! its own directory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_format::CatalogReader;

fuzz_target!(|index: &[u8]| {
    let mut reader = CatalogReader::sharded("directory/index.json");
    if reader.feed(index, index.len() as u64).is_err() {
        return;
    }
    let empty = b"\x02\0\0\0\0\0\0\0{}";
    while let Some(need) = reader.need() {
        let name =
            need.file.strip_prefix("directory/").expect("shards are in the directory of the index");
        assert!(
            !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
        );
        let end = (need.offset + need.len).min(empty.len() as u64) as usize;
        // The shards are empty, so any tensor in the index is missing from its shard.
        if reader.feed(&empty[need.offset as usize..end], empty.len() as u64).is_err() {
            return;
        }
    }
});
