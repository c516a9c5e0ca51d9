// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts a safetensors file to a compressed `.ts` file and back, to the same bytes.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;
use std::path::Path;

use tensorstream::format::{Compression, Dtype, TensorMeta};
use tensorstream::{Checkpoint, FileWriter, NewTensor, WriteOptions, convert, verify};

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    let path = |name| directory.path().join(name);
    let (original, packed, again) =
        (path("model.safetensors"), path("model.ts"), path("again.safetensors"));
    write_weights(&original)?;

    let compressed = WriteOptions::default().with_compression(Compression::Auto);
    let converted = convert(&original, &packed, compressed, &mut |_| false)?;
    println!("{} bytes of tensors in {} bytes", converted.bytes, converted.file_bytes);
    assert!(converted.file_bytes < converted.bytes / 2);
    assert!(verify(&packed, 0, &mut |_| false)?.damaged.is_empty());
    assert_eq!(Checkpoint::open(&packed)?.catalog().tensors().len(), 2);

    convert(&packed, &again, WriteOptions::default(), &mut |_| false)?;
    assert_eq!(fs::read(&again)?, fs::read(&original)?);
    Ok(())
}

/// Writes a safetensors file with two tensors of 1 MiB.
fn write_weights(path: &Path) -> Result<(), tensorstream::Error> {
    let meta = TensorMeta { dtype: Dtype::F32, shape: vec![512, 512] };
    let tensors = ["layer.0.weight", "layer.1.weight"].map(|name| NewTensor {
        name: name.into(),
        meta: meta.clone(),
        phase: None,
    });
    let (metadata, options) = (Default::default(), WriteOptions::default());
    let mut writer = FileWriter::create(path, tensors.into(), metadata, options, &mut || false)?;
    for _ in 0..2 {
        let values = (0..512 * 512).map(|i| (i % 100) as f32);
        writer.write(&values.flat_map(f32::to_le_bytes).collect::<Vec<_>>())?;
    }
    writer.commit()
}
