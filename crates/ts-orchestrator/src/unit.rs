// SPDX-License-Identifier: MIT OR Apache-2.0
//! Units and their tensors.

use std::sync::Arc;

use ts_format::{ByteRange, Catalog, ChunkPart, Digest, TensorEntry};

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
#[non_exhaustive]
pub struct Unit {
    /// The name, for error messages and statistics.
    pub name: String,
    /// The tensors of the unit.
    pub tensors: Vec<UnitTensor>,
    /// When the unit is used.
    pub access: Access,
}

impl Unit {
    /// Creates a unit that passes use in order.
    pub fn new(name: impl Into<String>, tensors: Vec<UnitTensor>) -> Self {
        Self { name: name.into(), tensors, access: Access::Ordered }
    }

    /// Sets [`access`](Self::access).
    #[must_use]
    pub fn with_access(self, access: Access) -> Self {
        Self { access, ..self }
    }
}

/// When a unit is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Access {
    /// In every pass, in an order that the engine learns. The unit is read ahead of its use.
    #[default]
    Ordered,
    /// If the data of a pass select it, as a router selects experts. The unit is read when it is
    /// [expected](crate::Engine::expect) or acquired. The units that are expected most often stay
    /// in memory.
    Routed,
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
    pub digest: Option<RangeDigest>,
    /// The chunks that the compressed parts are decoded from, in the order of the parts.
    pub chunks: Vec<ChunkPart>,
}

/// The checksums of a range of a file.
#[derive(Debug, Clone)]
pub struct RangeDigest {
    /// The range that the checksums cover. The tensor consists of exactly one part, and this range
    /// contains it. To read the part, the engine reads the whole range.
    pub range: ByteRange,
    /// The checksums of the range.
    pub digest: Arc<Digest>,
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
            [part] if part.len > 0 => catalog
                .digest_around(part)
                .map(|(range, digest)| RangeDigest { range, digest: Arc::new(digest) }),
            _ => None,
        };
        let chunks = entry.parts.iter().flat_map(|part| catalog.chunk_parts(*part)).collect();
        Self { name: name.into(), entry, phase, digest, chunks }
    }

    /// Returns the range of the file to read for a part: the range with checksums that contains the
    /// part, or the part itself if there is none.
    pub(crate) fn range_to_read(&self, part: ByteRange) -> ByteRange {
        let contains = |range: &ByteRange| {
            range.file == part.file
                && range.offset <= part.offset
                && range.offset.saturating_add(range.len) >= part.offset.saturating_add(part.len)
        };
        self.digest.as_ref().map(|digest| digest.range).filter(contains).unwrap_or(part)
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
