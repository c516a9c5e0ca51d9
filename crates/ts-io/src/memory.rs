// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that a read fills: one slice, or several one behind the other.

use std::io::IoSliceMut;
use std::ops::DerefMut;

use ts_pool::{BLOCK_ALIGN, Buffer};

/// A block that direct I/O can read to.
#[repr(C, align(4096))]
pub(crate) struct Block(pub(crate) [u8; BLOCK_ALIGN]);

impl Block {
    pub(crate) fn zeroed() -> Self {
        Self([0; BLOCK_ALIGN])
    }
}

/// Where a read's bytes go.
pub(crate) enum Memory<'a> {
    Slice(&'a mut [u8]),
    Pieces(&'a mut [&'a mut [u8]]),
    Buffers(&'a mut [Buffer]),
}

impl Memory<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Memory::Slice(slice) => slice.len(),
            Memory::Pieces(pieces) => pieces.iter().map(|piece| piece.len()).sum(),
            Memory::Buffers(buffers) => buffers.iter().map(|buffer| buffer.len()).sum(),
        }
    }

    /// `at..at + len` of it, in pieces.
    pub(crate) fn slices(&mut self, at: usize, len: usize) -> Vec<IoSliceMut<'_>> {
        match self {
            Memory::Slice(slice) => vec![IoSliceMut::new(&mut slice[at..at + len])],
            Memory::Pieces(all) => pieces(all, at, len).map(IoSliceMut::new).collect(),
            Memory::Buffers(buffers) => pieces(buffers, at, len).map(IoSliceMut::new).collect(),
        }
    }

    pub(crate) fn copy(&mut self, at: usize, bytes: &[u8]) {
        match self {
            Memory::Slice(slice) => slice[at..at + bytes.len()].copy_from_slice(bytes),
            Memory::Pieces(pieces) => copy_to(pieces, at, bytes),
            Memory::Buffers(buffers) => copy_to(buffers, at, bytes),
        }
    }
}

/// The bytes `at..at + len` of buffers that stand one behind the other, without empty pieces.
pub(crate) fn pieces<B: DerefMut<Target = [u8]>>(
    buffers: &mut [B],
    at: usize,
    len: usize,
) -> impl Iterator<Item = &mut [u8]> {
    let (mut skip, mut left) = (at, len);
    buffers.iter_mut().filter_map(move |buffer| {
        let begin = skip.min(buffer.len());
        let end = buffer.len().min(begin + left);
        skip -= begin;
        left -= end - begin;
        (begin < end).then(|| &mut buffer[begin..end])
    })
}

/// Copies to the place `at` of buffers that stand one behind the other.
pub(crate) fn copy_to<B: DerefMut<Target = [u8]>>(buffers: &mut [B], at: usize, bytes: &[u8]) {
    let mut rest = bytes;
    for piece in pieces(buffers, at, bytes.len()) {
        let (now, later) = rest.split_at(piece.len());
        piece.copy_from_slice(now);
        rest = later;
    }
}
