// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams a model of 16 MiB under a budget of 6 MiB.
#![forbid(unsafe_code)]

use std::error::Error;
use std::path::Path;

use ts_orchestrator::ts_format::{Dtype, SafetensorsLayout, TensorMeta};
use ts_orchestrator::{Bytes, ErrorKind, Model};

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    write_model(directory.path())?;

    let model = Model::open(directory.path())?.budget(Bytes::mib(6)).build()?;
    for _ in 0..2 {
        let pass = model.pass()?;
        for layer in 0..8 {
            let unit = pass.unit(&format!("model.layers.{layer}"))?;
            let weight = unit.tensor("mlp.weight")?;
            assert_eq!((weight.dtype(), weight.shape()), (Dtype::F32, &[512, 1024][..]));
            assert!(weight.iter().all(|&byte| byte == layer)); // compute with it here
        }
    }
    let stats = model.engine().stats();
    assert!(stats.in_use_high_water_bytes <= 6 << 20);

    let error = Model::open(directory.path())?.budget(Bytes::mib(1)).build();
    assert_eq!(error.expect_err("a layer has 2 MiB").kind(), ErrorKind::NeverFits);
    println!("8 layers of 2 MiB, at most {} bytes in use", stats.in_use_high_water_bytes);
    Ok(())
}

/// Writes a checkpoint of 8 layers of 2 MiB. The bytes of a layer are its number.
fn write_model(directory: &Path) -> Result<(), Box<dyn Error>> {
    let names: Vec<_> = (0..8).map(|layer| format!("model.layers.{layer}.mlp.weight")).collect();
    let meta = TensorMeta { dtype: Dtype::F32, shape: vec![512, 1024] };
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), &meta)).collect();
    let layout = SafetensorsLayout::new(&tensors, &Default::default())?;
    let mut file = layout.header;
    for layer in layout.order {
        file.resize(file.len() + (2 << 20), layer as u8);
    }
    Ok(std::fs::write(directory.join("model.safetensors"), file)?)
}
