// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts of the memory of a unit while reads fill them.

use std::ops::Range;

use ts_format::FileId;
use ts_pool::Buffer;

use crate::layout::SlotRead;

/// The parts of a slot or of staging memory, in order. Some are gaps that no read fills.
#[derive(Debug, Default)]
pub(super) struct Parts {
    parts: Vec<Part>,
    /// The number of parts that are not filled yet.
    pending: usize,
}

#[derive(Debug)]
struct Part {
    slot_range: Range<usize>,
    /// `None` while a read or a job uses the buffer.
    buffer: Option<Buffer>,
    /// What fills the part. `None` for a gap.
    read: Option<PartSource>,
}

#[derive(Debug)]
struct PartSource {
    file: FileId,
    file_offset: u64,
    /// The part of the compressed unit that was filled with this one.
    kept: Option<Buffer>,
}

impl Parts {
    /// Returns where the next part begins in the slot.
    pub(super) fn end(&self) -> usize {
        self.parts.last().map_or(0, |part| part.slot_range.end)
    }

    /// Adds a part that no read fills.
    pub(super) fn push_gap(&mut self, buffer: Buffer) {
        let begin = self.end();
        let slot_range = begin..begin + buffer.len();
        self.parts.push(Part { slot_range, buffer: Some(buffer), read: None });
    }

    /// Adds a part that a read fills. Returns its number.
    pub(super) fn push(&mut self, read: &SlotRead) -> usize {
        let &SlotRead { slot_offset, len, file, file_offset, .. } = read;
        let (slot_range, source) =
            (slot_offset..slot_offset + len, PartSource { file, file_offset, kept: None });
        self.parts.push(Part { slot_range, buffer: None, read: Some(source) });
        self.pending += 1;
        self.parts.len() - 1
    }

    /// Takes a part back after its read.
    pub(super) fn give_back(&mut self, part: usize, buffer: Option<Buffer>) {
        let returned = &mut self.parts[part].buffer;
        assert!(returned.is_none(), "each part is returned only once");
        *returned = buffer;
        self.pending -= 1;
    }

    /// Takes back the part of the compressed unit that was filled with a part.
    pub(super) fn give_back_kept(&mut self, part: usize, kept: Option<Buffer>) {
        self.source_mut(part).kept = kept;
    }

    pub(super) fn are_complete(&self) -> bool {
        self.pending == 0
    }

    pub(super) fn file(&self, part: usize) -> FileId {
        self.source(part).file
    }

    pub(super) fn file_offset(&self, part: usize) -> u64 {
        self.source(part).file_offset
    }

    pub(super) fn slot_range(&self, part: usize) -> Range<usize> {
        self.parts[part].slot_range.clone()
    }

    fn source(&self, part: usize) -> &PartSource {
        self.parts[part].read.as_ref().expect("only parts that are read have numbers")
    }

    fn source_mut(&mut self, part: usize) -> &mut PartSource {
        self.parts[part].read.as_mut().expect("only parts that are read have numbers")
    }

    /// Joins the parts of the compressed unit. Returns `None` if one is lost.
    pub(super) fn join_kept(&mut self) -> Option<Buffer> {
        let sources = self.parts.iter_mut().filter_map(|part| part.read.as_mut());
        let parts: Option<Vec<Buffer>> = sources.map(|source| source.kept.take()).collect();
        join(parts?)
    }

    /// Joins the parts. Returns `None` if the buffer of one is lost.
    pub(super) fn join(self) -> Option<Buffer> {
        let parts: Option<Vec<Buffer>> = self.parts.into_iter().map(|part| part.buffer).collect();
        join(parts?)
    }
}

/// Joins adjacent parts. Returns `None` if there are none.
fn join(parts: Vec<Buffer>) -> Option<Buffer> {
    let mut parts = parts.into_iter();
    let mut whole = parts.next()?;
    for part in parts {
        whole.unsplit(part).expect("the parts are adjacent and in order");
    }
    Some(whole)
}
