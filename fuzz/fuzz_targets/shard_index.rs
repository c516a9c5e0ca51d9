// SPDX-License-Identifier: MIT OR Apache-2.0
//! A shard index, whatever its bytes: an error, or files beside it and nowhere else.
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
        let name = need.file.strip_prefix("directory/").expect("a shard lies beside its index");
        assert!(
            !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
        );
        let end = (need.offset + need.len).min(empty.len() as u64) as usize;
        // Its shards are empty, so the tensors it names are not in them.
        if reader.feed(&empty[need.offset as usize..end], empty.len() as u64).is_err() {
            return;
        }
    }
});
