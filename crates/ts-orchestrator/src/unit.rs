// SPDX-License-Identifier: MIT OR Apache-2.0
//! Units and their tensors.

use std::sync::Arc;

use ts_format::{Catalog, ChunkPart, Digest, TensorEntry};

/// The address alignment, in bytes, that can affect the rounding of results.
///
/// Vector code handles the elements before the first aligned address separately. So results can
/// differ in their last bits if a tensor has another address modulo 64.
pub const PHASE_ALIGN: usize = 64;

/// The id of a unit, which is its index among the units of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub u32);

impl UnitId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A set of tensors that are loaded, leased and evicted together, usually the parameters of one
/// layer.
#[derive(Debug, Clone)]
pub struct Unit {
    /// The name, for error messages and statistics.
    pub name: String,
    /// The tensors of the unit.
    pub tensors: Vec<UnitTensor>,
}

/// A tensor of a unit.
#[derive(Debug, Clone)]
pub struct UnitTensor {
    /// The name in the checkpoint.
    pub name: String,
    /// The dtype, the shape, and the ranges of files that contain the bytes.
    pub entry: TensorEntry,
    /// The address modulo [`PHASE_ALIGN`] that the tensor needs in memory.
    pub phase: Phase,
    /// The checksums of the bytes, if there are any.
    pub digest: Option<Arc<Digest>>,
    /// The chunks that the compressed parts are decoded from, in the order of the parts.
    pub chunks: Vec<ChunkPart>,
}

/// A tensor's address modulo [`PHASE_ALIGN`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The phase that a memory mapping of the file gives: the file offset of the first byte, modulo
    /// [`PHASE_ALIGN`].
    Mapped,
    /// A given phase: for example `data_ptr() % 64` of an existing PyTorch tensor, or 0 for a
    /// tensor that PyTorch would copy to newly allocated memory.
    At(u8),
}

impl UnitTensor {
    /// Creates a tensor of a catalog, with its checksums and chunks.
    ///
    /// `entry` is an entry of the catalog, or an [assembled](Catalog::assemble) one.
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

    /// Returns the address modulo [`PHASE_ALIGN`] that the tensor needs in memory.
    pub fn phase_bytes(&self) -> usize {
        match (self.phase, self.entry.parts.first()) {
            (Phase::At(phase), _) => usize::from(phase) % PHASE_ALIGN,
            (Phase::Mapped, Some(part)) => (part.offset % PHASE_ALIGN as u64) as usize,
            (Phase::Mapped, None) => 0,
        }
    }
}
