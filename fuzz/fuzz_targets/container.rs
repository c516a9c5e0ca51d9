// SPDX-License-Identifier: MIT OR Apache-2.0
//! A `.ts` index, whatever its bytes, under superblocks that point to it rightly: a catalog within the file, or an
//! error; and what is accepted can be written again and reads alike.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_format::{Catalog, ContainerWriter, Digest};

const DATA: usize = 8192;

/// XXH3 of less than a chunk is the digest's only checksum.
fn hash(bytes: &[u8]) -> u64 {
    Digest::of(bytes).chunks().first().copied().unwrap_or_default()
}

fuzz_target!(|input: (u8, bool, &[u8])| {
    let (data_len, raw, index) = input;
    let mut file = ContainerWriter::new(Default::default()).finish().expect("nothing is missing").superblocks;
    file.resize(DATA + usize::from(data_len), 0);
    if raw {
        // The superblocks themselves.
        file[..index.len().min(DATA)].copy_from_slice(&index[..index.len().min(DATA)]);
    } else if index.is_empty() || index.len() > 1 << 20 {
        return;
    } else {
        let offset = file.len() as u64;
        file.extend(index);
        file[24..32].copy_from_slice(&offset.to_le_bytes());
        file[32..40].copy_from_slice(&(index.len() as u64).to_le_bytes());
        file[40..48].copy_from_slice(&hash(index).to_le_bytes());
        let sum = hash(&file[..56]);
        file[56..64].copy_from_slice(&sum.to_le_bytes());
    }
    let Ok(catalog) = Catalog::from_bytes("m", &file) else { return };
    let mut writer = ContainerWriter::new(catalog.files()[0].metadata.clone());
    let mut copy = vec![0; DATA];
    for (name, entry) in catalog.tensors() {
        let part = entry.parts[0];
        let bytes = &file[part.offset as usize..(part.offset + part.len) as usize];
        let offset = writer.begin(name, entry.meta.clone(), None).expect("what was read can be written");
        copy.resize(offset as usize, 0);
        copy.extend(bytes);
        writer.feed(bytes).expect("as many bytes as it has");
    }
    let ends = writer.finish().expect("all is complete");
    copy.extend(&ends.index);
    copy[..DATA].copy_from_slice(&ends.superblocks);
    let again = Catalog::from_bytes("m", &copy).expect("what was written can be read");
    for ((name, before), (copied, after)) in catalog.tensors().zip(again.tensors()) {
        assert_eq!((name, &before.meta), (copied, &after.meta));
    }
});
