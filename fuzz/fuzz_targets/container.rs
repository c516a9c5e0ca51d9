// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads a `.ts` file with an arbitrary index or arbitrary superblocks: the result is an error or a
//! catalog whose ranges are within the file. The chunks of accepted tensors are decoded. Tensors
//! without chunks are written to a new file, which must describe them in the same way.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_format::{CHUNK_LEN, Catalog, ContainerWriter, Digest, Scratch, decode_chunk};

const DATA: usize = 8192;

/// Returns the 64-bit XXH3 of `bytes`, which must not be longer than one chunk. Their digest then
/// consists of this one checksum.
fn hash(bytes: &[u8]) -> u64 {
    Digest::of(bytes).chunks().first().copied().unwrap_or_default()
}

fuzz_target!(|input: (u8, bool, &[u8])| {
    let (data_len, raw_superblocks, index) = input;
    let mut file = ContainerWriter::new(Default::default())
        .finish()
        .expect("an empty file is complete")
        .superblocks;
    file.resize(DATA + usize::from(data_len), 0);
    if raw_superblocks {
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
    for tensor in catalog.tensors() {
        let range = tensor.range();
        let Some(chunks) = tensor.chunks() else {
            let bytes = &file[range.offset as usize..(range.offset + range.len) as usize];
            let offset = writer
                .begin(tensor.name(), tensor.meta(), None)
                .expect("every tensor of a catalog can be written");
            copy.resize(offset as usize, 0);
            copy.extend(bytes);
            writer.feed(bytes).expect("the bytes have the length of the tensor");
            continue;
        };
        let mut scratch = Scratch::default();
        let mut raw = vec![0; range.len.min(CHUNK_LEN) as usize];
        for (i, chunk) in chunks.iter().enumerate() {
            let len = CHUNK_LEN.min(range.len - i as u64 * CHUNK_LEN) as usize;
            let stored = &file[chunk.offset as usize..][..chunk.len as usize];
            let _ = chunk.matches(stored);
            let _ = decode_chunk(chunk.codec, chunk.width, stored, &mut raw[..len], &mut scratch);
        }
    }
    let tail = writer.finish().expect("all tensors are complete");
    copy.extend(&tail.index);
    copy[..DATA].copy_from_slice(&tail.superblocks);
    let copied = Catalog::from_bytes("m", &copy).expect("a written file is valid");
    for tensor in copied.tensors() {
        let original =
            catalog.tensor(tensor.name()).expect("every copied tensor is in the catalog");
        assert_eq!(original.meta(), tensor.meta());
    }
});
