// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranges of bytes of the files of a checkpoint.

/// A file of a [`Catalog`](crate::Catalog), as an index into
/// [`Catalog::files`](crate::Catalog::files).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// A contiguous range of bytes of a tensor in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// The file.
    pub file: FileId,
    /// Offset of the first byte in the file; or, from [`VIRTUAL_START`](Self::VIRTUAL_START) on, a
    /// virtual offset in the decoded bytes of compressed tensors.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl ByteRange {
    /// The first virtual offset: 2^63.
    ///
    /// The decoded bytes of the compressed tensors of a file are assigned consecutive virtual
    /// ranges, each at its tensor's phase (offset modulo 64). So a part of a compressed tensor is
    /// addressed like a part of any other. [`Catalog::chunk_parts`](crate::Catalog::chunk_parts)
    /// resolves such ranges to chunks.
    pub const VIRTUAL_START: u64 = 1 << 63;

    /// Returns whether the offset is virtual, so the bytes must be decoded from
    /// [`Tensor::chunks`](crate::Tensor::chunks).
    pub fn is_virtual(&self) -> bool {
        self.offset >= Self::VIRTUAL_START
    }
}
