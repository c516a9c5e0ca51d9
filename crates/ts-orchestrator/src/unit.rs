// SPDX-License-Identifier: MIT OR Apache-2.0
use std::sync::Arc;

use ts_format::{Catalog, ChunkPart, Digest, TensorEntry};

/// Alignment that decides how a tensor's arithmetic rounds: vector code peels elements up to it, so
/// the same tensor at another address modulo 64 may differ in its last bits.
pub const PHASE_ALIGN: usize = 64;

/// Which unit of an engine, as an index into the units it was made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub u32);

impl UnitId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Tensors that are used together: read, held and let go as one. Usually the parameters of one
/// layer.
#[derive(Debug, Clone)]
pub struct Unit {
    /// How messages and statistics call it.
    pub name: String,
    /// Its tensors.
    pub tensors: Vec<UnitTensor>,
}

/// One tensor of a unit.
#[derive(Debug, Clone)]
pub struct UnitTensor {
    /// Its name in the checkpoint.
    pub name: String,
    /// What it is and where its bytes lie.
    pub entry: TensorEntry,
    /// Where in memory it must stand.
    pub phase: Phase,
    /// The checksums of its bytes, where there are some.
    pub digest: Option<Arc<Digest>>,
    /// What those of its parts that are compressed are decoded from, in their order.
    pub chunks: Vec<ChunkPart>,
}

/// A tensor's address modulo [`PHASE_ALIGN`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// As a mapping of the file would put it: the offset of its first byte in the file.
    Mapped,
    /// This, whatever the file says: 0 for what the reference copies, `data_ptr() % 64` of a live
    /// tensor.
    At(u8),
}

impl UnitTensor {
    /// A tensor of a catalog, or one that was assembled of its bytes.
    pub fn new(
        catalog: &Catalog,
        name: impl Into<String>,
        entry: TensorEntry,
        phase: Phase,
    ) -> Self {
        let digest = match entry.parts[..] {
            [part] => catalog.digest(part).map(Arc::new),
            _ => None,
        };
        let chunks = entry.parts.iter().flat_map(|part| catalog.chunk_parts(*part)).collect();
        Self { name: name.into(), entry, phase, digest, chunks }
    }

    /// The address modulo [`PHASE_ALIGN`] that it must have.
    pub fn phase_bytes(&self) -> usize {
        match (self.phase, self.entry.parts.first()) {
            (Phase::At(phase), _) => usize::from(phase) % PHASE_ALIGN,
            (Phase::Mapped, Some(part)) => (part.offset % PHASE_ALIGN as u64) as usize,
            (Phase::Mapped, None) => 0,
        }
    }
}
