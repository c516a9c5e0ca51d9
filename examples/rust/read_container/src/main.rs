// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes a `.ts` file with a compressed tensor, and reads the tensor back. The crate does no I/O,
//! so this program reads the byte ranges that the parser needs.

use std::error::Error;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use ts_format::{
    CHUNK_LEN, CatalogReader, Codec, ContainerWriter, Dtype, Encoder, Scratch, TensorMeta,
    decode_chunk,
};

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("model.ts");
    let weights: Vec<u8> = (0..300_000u32).flat_map(|i| (i / 100).to_le_bytes()).collect();
    fs::write(&path, container(&weights)?)?;

    let mut reader = CatalogReader::single("model.ts");
    let file_len = fs::metadata(&path)?.len();
    while let Some(need) = reader.need() {
        let len = need.len.min(file_len - need.offset);
        reader.feed(&read(&path, need.offset, len)?, file_len)?;
    }
    let catalog = reader.finish()?;
    let tensor = catalog.require("layer.weight")?;
    assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::I32, &[300, 1000][..]));

    let mut decoded = vec![0; tensor.range().len as usize];
    let mut scratch = Scratch::default();
    let chunks = tensor.chunks().ok_or("the tensor is compressed")?;
    for (chunk, out) in chunks.iter().zip(decoded.chunks_mut(CHUNK_LEN as usize)) {
        let stored = read(&path, chunk.offset, chunk.len.into())?;
        assert!(chunk.matches(&stored), "the checksum matches");
        decode_chunk(chunk.codec, chunk.width, &stored, out, &mut scratch)?;
    }
    assert_eq!(decoded, weights);
    println!("{tensor:?}, of which the file stores {} bytes", tensor.stored_len());
    Ok(())
}

/// Returns a `.ts` file with one tensor.
fn container(weights: &[u8]) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut file = Vec::new();
    let mut writer = ContainerWriter::new(Default::default());
    let meta = TensorMeta { dtype: Dtype::I32, shape: vec![300, 1000] };
    writer.begin_chunked("layer.weight", meta, None)?;
    let mut encoder = Encoder::new(Codec::Zstd, None)?;
    for raw in weights.chunks(CHUNK_LEN as usize) {
        let mut stored = Vec::new();
        let chunk = encoder.encode(Dtype::I32, raw, &mut stored);
        file.resize(writer.push_chunk(&chunk)? as usize, 0);
        file.extend(stored);
    }
    let tail = writer.finish()?;
    file.resize(tail.index_offset as usize, 0);
    file.extend(&tail.index);
    file[..tail.superblocks.len()].copy_from_slice(&tail.superblocks);
    Ok(file)
}

fn read(path: &Path, offset: u64, len: u64) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = vec![0; len as usize];
    file.read_exact(&mut bytes).map(|()| bytes)
}
