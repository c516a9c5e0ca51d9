// SPDX-License-Identifier: MIT OR Apache-2.0
//! The load of one unit, step by step: its slot is split into parts, of which each is filled by at
//! most one read; then the unit is verified, encoded and copied to its device, as far as necessary.

mod parts;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use ts_format::FileId;
use ts_io::ReadPath;
use ts_pool::{BLOCK_ALIGN, Buffer, DeviceBuffer, SharedBuffer};
use ts_streams::Device;

use crate::encoding::Encoding;
use crate::event::DamagedChunk;
use crate::host_bytes::HostBytes;
use crate::image::{ImageLayout, ImagePart};
use crate::kept_image::KeptImage;
use crate::layout::{ReadKind, SlotLayout, SlotRead};
use crate::prepared::PreparedUnit;
use crate::requests::{RequestSizes, requests};
use crate::sharing::Pages;
use crate::slot_pool::LoadBuffers;
use crate::stats::add_bytes;
use crate::table::Table;
use crate::unit::UnitId;
use crate::{Error, PHASE_ALIGN};

use parts::Parts;

/// A read that is not submitted yet.
#[derive(Debug)]
pub(crate) struct QueuedRead {
    pub(crate) token: u64,
    pub(crate) file: FileId,
    /// The offset in the file of the first byte to read.
    pub(crate) offset: u64,
    /// The number of bytes to read.
    pub(crate) required: usize,
    /// The part of the slot that the read fills.
    pub(crate) target: Buffer,
    pub(crate) kind: ReadKind,
    /// The part of the compressed unit in memory that the read also fills.
    pub(crate) kept: Option<Buffer>,
    /// Whether the read must not be joined with others, because a joint read has failed.
    pub(crate) alone: bool,
}

/// A part of a kept unit in memory that is not copied or decoded yet.
#[derive(Debug)]
pub(crate) struct QueuedDecode {
    pub(crate) token: u64,
    pub(crate) image: SharedBuffer,
    /// The range of the image to copy or decode.
    pub(crate) stored: Range<usize>,
    pub(crate) kind: ReadKind,
    /// The part of the slot to fill.
    pub(crate) target: Buffer,
}

/// What must be done to load a unit.
#[derive(Debug, Default)]
pub(crate) struct LoadWork {
    pub(crate) reads: Vec<QueuedRead>,
    pub(crate) decodes: Vec<QueuedDecode>,
    /// The unit on the host, if it only has to be copied to the device or decoded there.
    pub(crate) ready: Option<HostBytes>,
}

/// Where a load finds or keeps the unit as it is on storage or encoded.
#[derive(Debug)]
pub(crate) enum Image {
    /// Nowhere.
    None,
    /// The load fills this memory with the bytes on storage.
    Empty(Buffer, Arc<ImageLayout>, Pages),
    /// The load decodes this memory, and reads nothing.
    Filled(KeptImage),
}

/// A unit that is being loaded.
#[derive(Debug)]
pub(crate) struct UnitLoad<D: Device> {
    /// `None` for a gather, whose unit exists only for this load.
    pub(crate) id: Option<UnitId>,
    pub(crate) prepared: Arc<PreparedUnit>,
    /// The slot on the device, if the unit is copied to a device after it is read.
    pub(crate) device: Option<DeviceBuffer<D>>,
    /// Whether the memory on the host is kept for later loads.
    pub(crate) keeps_host: bool,
    /// The unit on the host that is kept for later loads, once it was uploaded.
    pub(crate) kept: Option<KeptImage>,
    step: LoadStep,
    /// Whether the unit is decoded from memory, so that its bytes were verified before.
    pub(crate) from_image: bool,
    /// Whether another process has read the image that this load decodes, and nobody has verified
    /// it. The unit may lose its image meanwhile.
    pub(crate) unchecked: bool,
    /// Where the pages of the slot come from.
    pub(crate) pages: Pages,
    /// Where the pages of the compressed unit in memory come from, if the load also fills it.
    pub(crate) image_pages: Option<Pages>,
    /// The compressed unit, after all parts were filled.
    pub(crate) image: Option<Buffer>,
    pub(crate) error: Option<Error>,
    /// Whether the unit was only likely to be used when the load started.
    pub(crate) guessed: bool,
    /// Whether the unit is no longer needed, so that some parts are not read.
    pub(crate) cancelled: bool,
    pub(crate) started_ns: u64,
    pub(crate) read_bytes: Vec<(ReadPath, u64)>,
}

/// What is done for a load now. Reads fill many parts at a time; all else is one thing after the
/// other, and whoever does it has the memory of the unit.
#[derive(Debug)]
enum LoadStep {
    /// Reads and workers fill the parts of the slot or the staging memory.
    Filling(Parts),
    /// All reads have ended, or there were none. The unit is verified, estimated or copied, or
    /// nothing is done.
    Filled,
    /// Workers encode the unit. `pending` is the number of pieces that are not encoded yet.
    Encoding { encoding: Arc<Encoding>, pending: usize },
}

/// Returns a token, which is a number that identifies a part of a load.
fn token(load: u32, part: usize) -> u64 {
    u64::from(load) << 32 | part as u64
}

/// Returns the load and the part that a token identifies.
pub(crate) fn split_token(token: u64) -> (u32, usize) {
    ((token >> 32) as u32, token as u32 as usize)
}

impl<D: Device> UnitLoad<D> {
    /// Splits the memory for a unit into parts, and returns the work that fills them.
    pub(crate) fn new(
        load_id: u32,
        id: Option<UnitId>,
        prepared: &Arc<PreparedUnit>,
        LoadBuffers { host, device, pages }: LoadBuffers<D>,
        image: Image,
        sizes: RequestSizes,
        now_ns: u64,
    ) -> (Self, LoadWork) {
        let mut load = Self {
            id,
            prepared: Arc::clone(prepared),
            device,
            keeps_host: matches!(host, HostBytes::EmptyToKeep(_)),
            kept: None,
            step: LoadStep::Filled,
            from_image: matches!(image, Image::Filled(_)),
            unchecked: false,
            pages,
            image_pages: None,
            image: None,
            error: None,
            guessed: false,
            cancelled: false,
            started_ns: now_ns,
            read_bytes: Vec::new(),
        };
        let host = match host {
            HostBytes::Empty(host) | HostBytes::EmptyToKeep(host) => host,
            ready => {
                load.from_image = true;
                return (load, LoadWork { ready: Some(ready), ..LoadWork::default() });
            }
        };
        let parts: Vec<ImagePart> = match &image {
            _ if matches!(load.pages, Pages::Taken) => Vec::new(),
            Image::None => {
                let reads = prepared.layout.reads.iter().flat_map(|read| requests(read, sizes));
                reads.map(|read| ImagePart { read, at: 0 }).collect()
            }
            Image::Empty(_, layout, _) | Image::Filled(KeptImage { layout, .. }) => {
                layout.parts.clone()
            }
        };
        let (mut rest, mut work, mut filling) = (host, LoadWork::default(), Parts::default());
        let mut image = image;
        for ImagePart { read, at: stored_at } in parts {
            let gap = read.slot_offset - filling.end();
            filling.push_gap(take_front(&mut rest, gap));
            let target = take_front(&mut rest, read.len);
            let (token, kind) = (token(load_id, filling.push(&read)), read.kind);
            if let Image::Filled(KeptImage { bytes, .. }) = &image {
                let (image, stored) = (bytes.clone(), stored_at..stored_at + read.required);
                work.decodes.push(QueuedDecode { token, image, stored, kind, target });
            } else {
                let kept = match &mut image {
                    Image::Empty(rest, ..) => Some(take_front(rest, read.required)),
                    _ => None,
                };
                let (file, offset, required) = (read.file, read.file_offset, read.required);
                let alone = false;
                let read = QueuedRead { token, file, offset, required, target, kind, kept, alone };
                work.reads.push(read);
            }
        }
        filling.push_gap(rest);
        if let Image::Empty(_, _, pages) = image {
            load.image_pages = Some(pages);
        }
        load.step = LoadStep::Filling(filling);
        (load, work)
    }

    fn parts(&mut self) -> &mut Parts {
        match &mut self.step {
            LoadStep::Filling(parts) => parts,
            step => unreachable!("parts are filled before a unit is {step:?}"),
        }
    }

    /// Takes a part back after its read. Returns whether it was the last pending part. `buffer` is
    /// `None` if the buffer is lost: the system may still write to it after a timeout, or a job
    /// panicked and dropped it.
    pub(crate) fn return_part(&mut self, part: usize, buffer: Option<Buffer>) -> bool {
        self.parts().give_back(part, buffer);
        self.is_complete()
    }

    /// Takes back the part of the compressed unit that was filled with a part of the slot.
    pub(crate) fn return_kept(&mut self, part: usize, kept: Option<Buffer>) {
        self.parts().give_back_kept(part, kept);
    }

    /// Returns whether all reads have ended.
    pub(crate) fn is_complete(&self) -> bool {
        match &self.step {
            LoadStep::Filling(parts) => parts.are_complete(),
            LoadStep::Filled | LoadStep::Encoding { .. } => true,
        }
    }

    /// Ends the reads. Returns the memory of the unit, unless the buffer of a part is lost: the
    /// memory is then freed when the system can no longer write to that part. Keeps the compressed
    /// unit if the load fills it, and has not lost a part of it.
    pub(crate) fn end_filling(&mut self) -> Option<Buffer> {
        let LoadStep::Filling(mut parts) = std::mem::replace(&mut self.step, LoadStep::Filled)
        else {
            unreachable!("reads end once");
        };
        self.image = self.image_pages.as_ref().and_then(|_| parts.join_kept());
        parts.join()
    }

    /// Begins to encode the unit in this many pieces.
    pub(crate) fn begin_encoding(&mut self, encoding: Arc<Encoding>, pieces: usize) {
        self.step = LoadStep::Encoding { encoding, pending: pieces };
    }

    /// Counts a piece that was encoded. Returns the encoded unit after the last one.
    pub(crate) fn end_piece(&mut self) -> Option<Arc<Encoding>> {
        let LoadStep::Encoding { pending, .. } = &mut self.step else {
            unreachable!("only a unit that is encoded has pieces");
        };
        *pending -= 1;
        if *pending > 0 {
            return None;
        }
        match std::mem::replace(&mut self.step, LoadStep::Filled) {
            LoadStep::Encoding { encoding, .. } => Some(encoding),
            LoadStep::Filling(_) | LoadStep::Filled => None,
        }
    }

    /// Returns the name of the unit.
    pub(crate) fn name(&self) -> String {
        self.prepared.unit.name.clone()
    }

    /// Returns the file that a part is read from.
    pub(crate) fn file(&mut self, part: usize) -> FileId {
        self.parts().file(part)
    }

    /// Records that a part could not be read.
    pub(crate) fn fail(&mut self, part: usize, source: ts_io::Error) {
        let file_offset = self.parts().file_offset(part);
        let failed_at = match &source {
            ts_io::Error::ShortRead { offset, actual, .. } => offset + *actual as u64,
            ts_io::Error::Read { offset, .. } => *offset,
            _ => file_offset,
        };
        let tensor = self.tensor_at(part, failed_at.saturating_sub(file_offset)).into();
        let error = Error::Load { unit: self.name(), tensor, source };
        self.error.get_or_insert(error);
    }

    /// Records that the read of the bytes at this offset in the slot failed.
    pub(crate) fn fail_at(&mut self, slot_offset: usize, source: ts_io::Error) {
        let tensor = self.tensor_in_slot(slot_offset as u64).into();
        let error = Error::Load { unit: self.name(), tensor, source };
        self.error.get_or_insert(error);
    }

    /// Records that the chunk of a part is damaged.
    pub(crate) fn fail_damaged(&mut self, part: usize, path: PathBuf, damage: DamagedChunk) {
        let tensor = self.tensor_at(part, 0).into();
        let DamagedChunk { chunk, what } = damage;
        let (unit, offset, len) = (self.name(), chunk.offset, u64::from(chunk.len));
        self.error.get_or_insert(Error::Corrupt { unit, tensor, path, offset, len, what });
    }

    /// Returns the name of the tensor at byte `at` of a part, or of the next tensor in the slot.
    fn tensor_at(&mut self, part: usize, at: u64) -> &str {
        let range = self.parts().slot_range(part);
        self.tensor_in_slot(range.start as u64 + at.min(range.len().saturating_sub(1) as u64))
    }

    /// Returns the name of the tensor at byte `at` of the slot, or of the next one.
    fn tensor_in_slot(&self, at: u64) -> &str {
        let PreparedUnit { unit, layout, .. } = &*self.prepared;
        let hit = layout.tensors.iter().enumerate().filter(|(_, p)| (p.offset + p.len) as u64 > at);
        hit.min_by_key(|(_, p)| p.offset).map_or("", |(i, _)| unit.tensors[i].name.as_str())
    }

    pub(crate) fn count(&mut self, path: ReadPath, bytes: usize) {
        add_bytes(&mut self.read_bytes, path, bytes as u64);
    }
}

/// Splits the first `len` bytes off `rest`.
fn take_front(rest: &mut Buffer, len: usize) -> Buffer {
    let tail = rest.split_off(len);
    std::mem::replace(rest, tail)
}

/// The longest read that is copied from a bounce buffer, in bytes. Longer ranges are split.
const LARGEST_COPY: usize = 1 << 20;

fn with_alignment(len: usize, alignment: usize) -> usize {
    (len.next_multiple_of(PHASE_ALIGN) + 2 * alignment).next_multiple_of(alignment)
}

/// Sizes of bounce buffers, in bytes. All are 0 if no read needs one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct BounceSizes {
    /// The smallest one with which all reads are possible.
    pub(crate) least: usize,
    /// The one for the fewest reads.
    pub(crate) most: usize,
}

impl BounceSizes {
    /// Returns the sizes for rows of tables, and with `of_any` for those of all other tensors,
    /// whose chunks are also those of units.
    pub(crate) fn of_rows(tables: &[Table], of_any: bool, alignment: usize) -> Self {
        let needs = tables.iter().map(|table| {
            let row = with_alignment(table.row_bytes() as usize, alignment).min(LARGEST_COPY);
            let chunks = table.tensor().chunks.iter();
            let chunks = chunks.map(|part| with_alignment(part.chunk.len as usize, alignment));
            chunks.fold(row, usize::max)
        });
        let rows = needs.max().unwrap_or(0);
        let any = |most| if of_any { with_alignment(0, alignment).max(most) } else { 0 };
        Self { least: rows.max(any(0)), most: rows.max(any(LARGEST_COPY)) }
    }

    /// Returns the sizes for these layouts. If units are also kept `on_host`, all reads of
    /// compressed units need bounce buffers.
    pub(crate) fn new<'a>(
        layouts: impl Iterator<Item = &'a SlotLayout>,
        alignment: usize,
        on_host: bool,
    ) -> Self {
        let decodes = |read: &SlotRead| matches!(read.kind, ReadKind::Decoded { .. });
        let mut sizes = Self::default();
        for layout in layouts {
            let keeps_stored = on_host && layout.reads.iter().any(decodes);
            for read in &layout.reads {
                match read.kind {
                    ReadKind::InPlace if !keeps_stored => {}
                    // Longer reads are split.
                    ReadKind::InPlace | ReadKind::Copied => {
                        let most = with_alignment(read.len, alignment).min(LARGEST_COPY);
                        sizes = sizes.with(Self { least: alignment, most });
                    }
                    ReadKind::Decoded { .. } => {
                        let whole = with_alignment(read.required, alignment);
                        sizes = sizes.with(Self { least: whole, most: whole });
                    }
                }
            }
        }
        sizes
    }

    /// Returns the sizes for both uses, in whole blocks of the pool.
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            least: self.least.max(other.least).next_multiple_of(BLOCK_ALIGN),
            most: self.most.max(other.most).next_multiple_of(BLOCK_ALIGN),
        }
    }
}
