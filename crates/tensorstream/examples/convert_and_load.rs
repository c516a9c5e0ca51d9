// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts a safetensors file to a compressed `.ts` file, verifies it and loads its tensors.
//!
//! ```text
//! cargo run -p tensorstream --example convert_and_load
//! ```

use std::error::Error;
use std::path::Path;

use tensorstream::format::{Compression, Dtype, TensorMeta};
use tensorstream::{Checkpoint, FileWriter, LoadOptions, NewTensor, WriteOptions, convert, verify};

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    let (source, target) =
        (directory.path().join("model.safetensors"), directory.path().join("model.ts"));
    write_weights(&source)?;

    // Each function calls its last argument with the progress. Returning true interrupts
    // the function.
    let options = WriteOptions::default().with_compression(Compression::Auto);
    let converted = convert(&source, &target, options, &mut |_| false)?;
    println!("{} bytes in a file of {} bytes", converted.bytes, converted.file_bytes);

    let verified = verify(&target, 0, &mut |_| false)?;
    assert!(verified.damaged.is_empty());

    let checkpoint = Checkpoint::open(&target)?;
    for tensor in checkpoint.load(LoadOptions::default(), &mut |_| false)? {
        println!("{}: {} {:?}", tensor.name, tensor.meta.dtype, tensor.meta.shape);
        assert_eq!(&tensor.bytes[..4], 0.0f32.to_le_bytes());
    }
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
    for _ in 0..writer.order().len() {
        let values = (0..512 * 512).map(|i| i as f32 / 1000.0);
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        writer.write(&bytes)?;
    }
    writer.commit()
}
