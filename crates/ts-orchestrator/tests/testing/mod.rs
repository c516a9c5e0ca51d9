// SPDX-License-Identifier: MIT OR Apache-2.0
//! Test models on disk, and engines that stream them.
#![allow(dead_code)] // each test program uses only a part of this module

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use ts_format::{
    ByteRange, Chunk, ChunkPart, Codec, Dtype, Encoded, Encoder, FileId, TensorEntry, TensorMeta,
};
use ts_io::{BackendProvider, Registry, Source};
use ts_orchestrator::{Engine, EngineConfig, Error, Phase, TensorBytes, Unit, UnitId, UnitTensor};

pub(crate) const KIB: usize = 1024;

/// A file with known content, divided into units.
pub(crate) struct Model {
    _dir: tempfile::TempDir,
    pub(crate) path: PathBuf,
    pub(crate) content: Vec<u8>,
    pub(crate) units: Vec<Unit>,
    /// The decoded bytes of encoded tensors, by their virtual offset.
    decoded: HashMap<u64, Vec<u8>>,
}

impl Model {
    /// Creates units of these sizes, with one tensor each. The first 8 bytes of the file belong to
    /// no unit.
    pub(crate) fn new(sizes: &[usize]) -> Self {
        Self::build(8, sizes, |i, begin, len| {
            vec![tensor(&format!("t{i}"), &[(begin as u64, len)], Phase::Mapped)]
        })
    }

    /// Creates units of two tensors over the same bytes of the file: one that is read in place, and
    /// one that is assembled from three parts in another order.
    pub(crate) fn assembled(sizes: &[usize]) -> Self {
        Self::build(0, sizes, |i, begin, len| {
            let third = len / 3;
            let parts = [
                ((begin + third) as u64, third),
                (begin as u64, third),
                ((begin + 2 * third) as u64, len - 2 * third),
            ];
            vec![
                tensor(&format!("run{i}"), &[(begin as u64, len)], Phase::Mapped),
                tensor(&format!("assembled{i}"), &parts, Phase::At(24)),
            ]
        })
    }

    fn build(
        begin: usize,
        sizes: &[usize],
        tensors: impl Fn(usize, usize, usize) -> Vec<UnitTensor>,
    ) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("weights");
        let total = begin + sizes.iter().sum::<usize>();
        let content: Vec<u8> =
            (0..total).map(|i| (i ^ (i >> 8).wrapping_mul(37) ^ (i >> 16)) as u8).collect();
        fs::write(&path, &content).unwrap();
        let mut at = begin;
        let units = sizes.iter().enumerate().map(|(i, &len)| {
            let tensors = tensors(i, at, len);
            at += len;
            Unit::new(format!("u{i}"), tensors)
        });
        let units = units.collect();
        Self { _dir: dir, path, content, units, decoded: HashMap::new() }
    }

    /// Creates units of tensors that are encoded with the codec `split` in chunks of `chunk_len`
    /// bytes, and of one tensor that is not encoded.
    pub(crate) fn encoded(units: &[Vec<(Dtype, Vec<u8>)>], chunk_len: usize) -> Self {
        let (mut content, mut decoded, mut at) = (Vec::new(), HashMap::new(), 0);
        let mut encoder = Encoder::new(Codec::Split, None).unwrap();
        let mut encode = |name: String, (dtype, raw): &(Dtype, Vec<u8>)| {
            let chunks = raw.chunks(chunk_len).map(|raw| {
                let offset = content.len() as u64;
                let Encoded { codec, width, len, checksum, .. } =
                    encoder.encode(*dtype, raw, &mut content);
                let chunk = Chunk { offset, len: len as u32, codec, width, checksum };
                let raw_len = raw.len() as u32;
                ChunkPart { file: FileId(0), chunk, raw_len, skip: 0, len: raw_len }
            });
            let chunks = chunks.collect();
            let offset = ByteRange::VIRTUAL_START + at;
            at += (raw.len() as u64 + 1).next_multiple_of(64);
            decoded.insert(offset, raw.clone());
            let parts = vec![ByteRange { file: FileId(0), offset, len: raw.len() as u64 }];
            let shape = vec![raw.len() as u64 * 8 / u64::from(dtype.bits())];
            let entry = TensorEntry { meta: TensorMeta { dtype: *dtype, shape }, parts };
            UnitTensor { name, entry, phase: Phase::At(0), digest: None, chunks }
        };
        let mut made: Vec<Unit> = Vec::new();
        for (i, tensors) in units.iter().enumerate() {
            let tensors = tensors.iter().enumerate();
            let tensors = tensors.map(|(j, tensor)| encode(format!("t{i}.{j}"), tensor)).collect();
            made.push(Unit::new(format!("u{i}"), tensors));
        }
        for (i, unit) in made.iter_mut().enumerate() {
            let begin = content.len().next_multiple_of(64);
            content.resize(begin + 3000, i as u8 + 1);
            unit.tensors.push(tensor(&format!("raw{i}"), &[(begin as u64, 3000)], Phase::Mapped));
        }
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("weights");
        fs::write(&path, &content).unwrap();
        Self { _dir: dir, path, content, units: made, decoded }
    }

    pub(crate) fn sources(&self) -> Vec<Arc<Source>> {
        vec![Source::open(&self.path).unwrap()]
    }

    pub(crate) fn engine(&self, config: EngineConfig) -> Result<Engine, Error> {
        Engine::new(self.units.clone(), self.sources(), config)
    }

    /// Returns the content of a tensor.
    pub(crate) fn expected(&self, unit: usize, tensor: usize) -> Vec<u8> {
        let parts = &self.units[unit].tensors[tensor].entry.parts;
        if let Some(raw) = parts.first().and_then(|part| self.decoded.get(&part.offset)) {
            return raw.clone();
        }
        parts
            .iter()
            .flat_map(|p| self.content[p.offset as usize..][..p.len as usize].to_vec())
            .collect()
    }

    /// Asserts that these are the bytes of the first tensor of a unit.
    pub(crate) fn check(&self, unit: usize, bytes: &[u8]) {
        assert!(bytes == self.expected(unit, 0), "unit {unit} has the right bytes");
    }

    /// Runs a pass that visits units in this order. Returns whether a better plan is available.
    pub(crate) fn pass(&self, engine: &Engine, order: &[usize]) -> bool {
        let pass = engine.begin_pass();
        for &unit in order {
            let lease = engine.acquire(Some(pass), UnitId(unit as u32)).unwrap();
            self.check(unit, &lease.tensor(0));
        }
        engine.end_pass(pass)
    }
}

pub(crate) fn tensor(name: &str, parts: &[(u64, usize)], phase: Phase) -> UnitTensor {
    let parts: Vec<_> = parts
        .iter()
        .map(|&(offset, len)| ByteRange { file: FileId(0), offset, len: len as u64 })
        .collect();
    let shape = vec![parts.iter().map(|p| p.len).sum()];
    let entry = TensorEntry { meta: TensorMeta { dtype: Dtype::U8, shape }, parts };
    UnitTensor { name: name.into(), entry, phase, digest: None, chunks: Vec::new() }
}

/// Returns a configuration with small requests, so that a unit needs several.
pub(crate) fn config(budget_bytes: usize) -> EngineConfig {
    EngineConfig::with_budget(budget_bytes).with_request_bytes(64 * KIB)
}

/// Returns a configuration that reads with this backend.
pub(crate) fn with_backend(
    config: EngineConfig,
    provider: impl BackendProvider + 'static,
) -> EngineConfig {
    let (mut registry, name) = (Registry::builtin(), provider.name().to_owned());
    registry.register(Arc::new(provider));
    config.with_registry(registry).with_backend(name)
}

pub(crate) fn buffered() -> Arc<dyn BackendProvider> {
    Registry::builtin().choose(Some("buffered"), &[]).unwrap().provider
}

/// Returns an interrupt that ends a wait after about eight seconds.
pub(crate) fn patience() -> impl FnMut() -> bool {
    let mut ticks = 0;
    move || {
        ticks += 1;
        ticks > 400
    }
}

/// Returns the first tensor of a unit.
pub(crate) fn acquire_tensor(engine: &Engine, unit: u32) -> Result<TensorBytes, Error> {
    let lease = engine.acquire_interruptible(None, UnitId(unit), &mut patience());
    lease.map(|lease| lease.tensor(0))
}
