// SPDX-License-Identifier: MIT OR Apache-2.0
//! Byte ranges in the files of a checkpoint.

/// A file of a [`Catalog`](crate::Catalog), as an index into
/// [`Catalog::files`](crate::Catalog::files).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// A contiguous range of bytes of a tensor in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// The file that contains the bytes.
    pub file: FileId,
    /// Offset of the first byte in the file. An offset of [`VIRTUAL_START`](Self::VIRTUAL_START) or
    /// more is virtual: it addresses the decoded bytes of a compressed tensor.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl ByteRange {
    /// The first virtual offset: 2^63.
    ///
    /// Each compressed tensor of a file has a virtual range, which addresses its decoded bytes. The
    /// virtual ranges do not overlap. The offset of each, modulo 64, is the phase of its tensor. A
    /// part of a compressed tensor is thus addressed like a part of any other tensor.
    /// [`Catalog::chunk_parts`](crate::Catalog::chunk_parts) resolves virtual ranges to chunks.
    pub const VIRTUAL_START: u64 = 1 << 63;

    /// Returns whether the offset is virtual. The bytes of a virtual range must be decoded from
    /// [`Tensor::chunks`](crate::Tensor::chunks).
    pub fn is_virtual(&self) -> bool {
        self.offset >= Self::VIRTUAL_START
    }
}
