// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that a read fills: one slice, or several that are filled one after the other.

use std::io::IoSliceMut;
use std::ops::DerefMut;

use ts_pool::{BLOCK_ALIGN, Buffer};

/// A block with the alignment that direct I/O needs.
#[repr(C, align(4096))]
pub(crate) struct Block(pub(crate) [u8; BLOCK_ALIGN]);

impl Block {
    pub(crate) fn zeroed() -> Self {
        Self([0; BLOCK_ALIGN])
    }
}

/// The destination of a read.
pub(crate) enum Target<'a> {
    Slice(&'a mut [u8]),
    Slices(&'a mut [&'a mut [u8]]),
    Buffers(&'a mut [Buffer]),
}

impl Target<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Target::Slice(slice) => slice.len(),
            Target::Slices(slices) => slices.iter().map(|slice| slice.len()).sum(),
            Target::Buffers(buffers) => buffers.iter().map(|buffer| buffer.len()).sum(),
        }
    }

    /// Returns the bytes `at..at + len` as a list of slices.
    pub(crate) fn slices(&mut self, at: usize, len: usize) -> Vec<IoSliceMut<'_>> {
        match self {
            Target::Slice(slice) => vec![IoSliceMut::new(&mut slice[at..at + len])],
            Target::Slices(all) => slices(all, at, len).map(IoSliceMut::new).collect(),
            Target::Buffers(buffers) => slices(buffers, at, len).map(IoSliceMut::new).collect(),
        }
    }

    /// Copies `bytes` to position `at`.
    pub(crate) fn copy(&mut self, at: usize, bytes: &[u8]) {
        match self {
            Target::Slice(slice) => slice[at..at + bytes.len()].copy_from_slice(bytes),
            Target::Slices(slices) => copy_to(slices, at, bytes),
            Target::Buffers(buffers) => copy_to(buffers, at, bytes),
        }
    }
}

/// Returns the bytes `at..at + len` of concatenated buffers as non-empty slices.
pub(crate) fn slices<B: DerefMut<Target = [u8]>>(
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

/// Copies `bytes` to position `at` of concatenated buffers.
pub(crate) fn copy_to<B: DerefMut<Target = [u8]>>(buffers: &mut [B], at: usize, bytes: &[u8]) {
    let mut rest = bytes;
    for slice in slices(buffers, at, bytes.len()) {
        let (head, tail) = rest.split_at(slice.len());
        slice.copy_from_slice(head);
        rest = tail;
    }
}
