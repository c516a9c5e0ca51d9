// SPDX-License-Identifier: MIT OR Apache-2.0
//! Helpers that write files.

use std::path::{Path, PathBuf};

use tensorstream::format::{Compression, Dtype, Metadata, TensorMeta};
use tensorstream::{FileWriter, NewTensor, Progress, WriteOptions};

pub(crate) fn plain() -> WriteOptions {
    with_compression(Compression::None, 1)
}

pub(crate) fn with_compression(compression: Compression, jobs: usize) -> WriteOptions {
    WriteOptions::default().with_compression(compression).with_jobs(jobs)
}

pub(crate) fn never() -> bool {
    false
}

pub(crate) fn quiet(_: Progress) -> bool {
    false
}

pub(crate) fn metadata() -> Metadata {
    Metadata::from([("format".into(), "pt".into()), ("note".into(), "a\"b\nc".into())])
}

/// Returns the bytes of tensor `i`. Every fourth tensor is empty. The other lengths are not
/// multiples of a chunk.
pub(crate) fn content(i: usize) -> Vec<u8> {
    (0..[3_000_001, 0, 17, 1][i % 4]).map(|at: usize| (at * 7 + i) as u8).collect()
}

pub(crate) fn write(path: &Path, count: usize) {
    let tensors = (0..count).map(|i| {
        let meta = TensorMeta { dtype: Dtype::U8, shape: vec![content(i).len() as u64] };
        NewTensor { name: format!("t{i}"), meta, phase: None }
    });
    let mut writer =
        FileWriter::create(path, tensors.collect(), metadata(), plain(), &mut never).unwrap();
    for i in writer.order().to_vec() {
        for piece in content(i).chunks(1_000_003) {
            writer.write(piece).unwrap();
        }
    }
    writer.commit().unwrap();
}

pub(crate) fn files(directory: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    all
}

pub(crate) fn u8s(name: &str, shape: &[u64]) -> NewTensor {
    let meta = TensorMeta { dtype: Dtype::U8, shape: shape.to_vec() };
    NewTensor { name: name.into(), meta, phase: None }
}
