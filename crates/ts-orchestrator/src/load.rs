// SPDX-License-Identifier: MIT OR Apache-2.0
//! One unit on its way into memory: its slot in parts, each filled by one read.

use std::path::PathBuf;
use std::thread::ThreadId;

use ts_format::FileId;
use ts_io::{Completion, ReadPath};
use ts_pool::{Buffer, DeviceBuffer};
use ts_streams::Device;

use crate::layout::{Fill, SlotLayout, SlotRead};
use crate::slot::{Room, Uploaded};
use crate::unit::{Unit, UnitId};
use crate::worker::{Damage, Lost, Mismatch};
use crate::{Error, PHASE_ALIGN};

/// What the loader thread reacts to.
#[derive(Debug)]
pub(crate) enum Event<D: Device> {
    Read(Completion),
    Brought {
        token: u64,
        bounce: Buffer,
        target: Buffer,
        damage: Option<Damage>,
    },
    Checked {
        load: u32,
        slot: Buffer,
        mismatch: Option<Mismatch>,
    },
    Lost(Lost),
    Uploaded(Uploaded<D>),
    /// A lease was dropped by work of a stream.
    Released {
        unit: UnitId,
        user: ThreadId,
        used_ns: u64,
    },
    /// A slot's memory went back to the pool.
    Freed,
    Stop,
}

/// How reads are cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    /// Largest read into place, a multiple of `alignment`.
    pub(crate) request_bytes: usize,
    /// Size of a bounce buffer, a multiple of `alignment`.
    pub(crate) bounce_bytes: usize,
    pub(crate) alignment: usize,
}

/// A read that waits to be submitted. `target` is the part of the slot that it fills.
#[derive(Debug)]
pub(crate) struct QueuedRead {
    pub(crate) token: u64,
    pub(crate) file: FileId,
    /// First byte and number of bytes of the file that the target gets.
    pub(crate) offset: u64,
    pub(crate) required: usize,
    pub(crate) target: Buffer,
    pub(crate) fill: Fill,
}

#[derive(Debug)]
pub(crate) struct Load<D: Device> {
    pub(crate) unit: UnitId,
    /// Where the unit is to stay, if that is not where it is read to.
    pub(crate) stays: Option<DeviceBuffer<D>>,
    /// The slot that is read to, cut up; `None` for a part whose read is under way.
    parts: Vec<Part>,
    missing: usize,
    pub(crate) error: Option<Error>,
    pub(crate) started_ns: u64,
    pub(crate) read_bytes: Vec<(ReadPath, u64)>,
}

#[derive(Debug)]
struct Part {
    buffer: Option<Buffer>,
    slot_offset: usize,
    len: usize,
    file: FileId,
    file_offset: u64,
}

pub(crate) fn token(load: u32, part: usize) -> u64 {
    u64::from(load) << 32 | part as u64
}

pub(crate) fn split_token(token: u64) -> (u32, usize) {
    ((token >> 32) as u32, token as u32 as usize)
}

impl<D: Device> Load<D> {
    /// Cuts `slot` into the parts that `layout`'s reads fill, and says which reads these are.
    pub(crate) fn new(
        id: u32,
        unit: UnitId,
        layout: &SlotLayout,
        Room { slot, stays }: Room<D>,
        cut: Cut,
        now_ns: u64,
    ) -> (Self, Vec<QueuedRead>) {
        let mut this = Self {
            unit,
            stays,
            parts: Vec::new(),
            missing: 0,
            error: None,
            started_ns: now_ns,
            read_bytes: Vec::new(),
        };
        let (mut rest, mut queue, mut at) = (slot, Vec::new(), 0);
        for read in layout.reads.iter().flat_map(|read| pieces(read, cut)) {
            this.keep(take(&mut rest, read.slot_offset - at), at);
            let target = take(&mut rest, read.len);
            at = read.slot_offset + read.len;
            queue.push(QueuedRead {
                token: token(id, this.parts.len()),
                file: read.file,
                offset: read.file_offset,
                required: read.required,
                target,
                fill: read.fill,
            });
            this.missing += 1;
            let SlotRead { slot_offset, file, file_offset, len, .. } = read;
            this.parts.push(Part { buffer: None, slot_offset, len, file, file_offset });
        }
        this.keep(rest, at);
        (this, queue)
    }

    fn keep(&mut self, buffer: Buffer, slot_offset: usize) {
        let len = buffer.len();
        self.parts.push(Part {
            buffer: Some(buffer),
            slot_offset,
            len,
            file: FileId(0),
            file_offset: 0,
        });
    }

    /// Takes a part back from its read; whether it was the last one missing. `None` for a part that
    /// the system still holds after a read that timed out.
    pub(crate) fn put_back(&mut self, part: usize, buffer: Option<Buffer>) -> bool {
        let home = &mut self.parts[part].buffer;
        assert!(home.is_none(), "a part is read once");
        *home = buffer;
        self.missing -= 1;
        self.missing == 0
    }

    /// The file that a part is read from.
    pub(crate) fn file(&self, part: usize) -> FileId {
        self.parts[part].file
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Notes what went wrong with a part, naming the tensor whose bytes did not come.
    pub(crate) fn fail(
        &mut self,
        part: usize,
        unit: &Unit,
        layout: &SlotLayout,
        source: ts_io::Error,
    ) {
        let file_offset = self.parts[part].file_offset;
        let failed_at = match &source {
            ts_io::Error::ShortRead { offset, actual, .. } => offset + *actual as u64,
            ts_io::Error::Read { offset, .. } => *offset,
            _ => file_offset,
        };
        let tensor =
            self.tensor_at(part, failed_at.saturating_sub(file_offset), unit, layout).into();
        let error = Error::Load { unit: unit.name.clone(), tensor, source };
        self.error.get_or_insert(error);
    }

    /// Notes that what a part was to be decoded from is not what was written.
    pub(crate) fn fail_damaged(
        &mut self,
        part: usize,
        unit: &Unit,
        layout: &SlotLayout,
        path: PathBuf,
        damage: Damage,
    ) {
        let tensor = self.tensor_at(part, 0, unit, layout).into();
        let Damage { chunk, what } = damage;
        let (unit, offset, len) = (unit.name.clone(), chunk.offset, u64::from(chunk.len));
        self.error.get_or_insert(Error::Corrupt { unit, tensor, path, offset, len, what });
    }

    /// The tensor that has the byte `at` of a part, or the next one behind it.
    fn tensor_at<'a>(&self, part: usize, at: u64, unit: &'a Unit, layout: &SlotLayout) -> &'a str {
        let Part { slot_offset, len, .. } = self.parts[part];
        let at = slot_offset as u64 + at.min(len.saturating_sub(1) as u64);
        let hit = layout.tensors.iter().enumerate().filter(|(_, p)| (p.offset + p.len) as u64 > at);
        hit.min_by_key(|(_, p)| p.offset).map_or("", |(i, _)| unit.tensors[i].name.as_str())
    }

    pub(crate) fn count(&mut self, path: ReadPath, bytes: usize) {
        add(&mut self.read_bytes, path, bytes as u64);
    }

    /// The slot, whole again; `None` when the system still holds a part of it, with which it will
    /// be free. The load has no parts then.
    pub(crate) fn join(&mut self) -> Option<Buffer> {
        let parts: Option<Vec<Buffer>> = self.parts.drain(..).map(|part| part.buffer).collect();
        let mut parts = parts?.into_iter();
        let mut slot = parts.next().expect("a slot has at least one part");
        for part in parts {
            slot.unsplit(part).expect("parts were cut in order");
        }
        Some(slot)
    }
}

/// Adds to the count of a path.
pub(crate) fn add(counts: &mut Vec<(ReadPath, u64)>, path: ReadPath, bytes: u64) {
    match counts.iter_mut().find(|(p, _)| *p == path) {
        Some((_, count)) => *count += bytes,
        None => counts.push((path, bytes)),
    }
}

/// Splits the first `len` bytes off `rest`.
fn take(rest: &mut Buffer, len: usize) -> Buffer {
    let tail = rest.split_off(len);
    std::mem::replace(rest, tail)
}

/// A layout's read, cut into requests.
fn pieces(read: &SlotRead, cut: Cut) -> impl Iterator<Item = SlotRead> + '_ {
    // What is read aside is read with the aligned bytes around it. A chunk is one piece.
    let step = match read.fill {
        Fill::Straight => cut.request_bytes,
        Fill::Copied => cut.bounce_bytes - 2 * cut.alignment,
        Fill::Decoded { .. } => read.len,
    };
    (0..read.len).step_by(step).map(move |begin| SlotRead {
        file_offset: read.file_offset + begin as u64,
        slot_offset: read.slot_offset + begin,
        len: step.min(read.len - begin),
        required: match read.fill {
            Fill::Decoded { .. } => read.required,
            _ => step.min(read.required.saturating_sub(begin)),
        },
        ..*read
    })
}

/// Size of bounce buffers for these layouts; 0 when no read bounces.
pub(crate) fn bounce_bytes<'a>(
    layouts: impl Iterator<Item = &'a SlotLayout>,
    alignment: usize,
) -> usize {
    const LARGEST: usize = 1 << 20;
    let room = |len: usize| {
        (len.next_multiple_of(PHASE_ALIGN) + 2 * alignment).next_multiple_of(alignment)
    };
    let needs = layouts.flat_map(|layout| &layout.reads).map(|read| match read.fill {
        Fill::Straight => 0,
        // A longer one is copied in pieces.
        Fill::Copied => room(read.len).min(LARGEST),
        Fill::Decoded { .. } => room(read.required),
    });
    needs.max().unwrap_or(0)
}
