// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes units of the codec `split` on their device. The host copies the stored bytes there,
//! which are fewer than the decoded ones.

mod steps;

use std::alloc::Layout;
use std::ffi::CStr;
use std::sync::Arc;

use ts_pool::{BLOCK_ALIGN, Budget, DeviceBuffer, HostPool, PendingWrite, SharedBuffer};
use ts_streams::{Device, Kernel, MemoryKind, MemoryRange, RawMemory, Stream};

use self::steps::{Piece, Steps};
use crate::device_streams::DeviceStreams;
use crate::image::ImageLayout;

static MODULE: &CStr = c_text(concat!(include_str!("kernels.ptx"), "\0"));
static TABLES: Kernel =
    Kernel { name: c"split_tables", module: MODULE, block_threads: 32, parameters: 3 };
static RUNS: Kernel =
    Kernel { name: c"split_runs", module: MODULE, block_threads: 32, parameters: 6 };
static MERGE: Kernel =
    Kernel { name: c"split_merge", module: MODULE, block_threads: 256, parameters: 3 };

/// The number of pieces that a unit goes through: one is decoded while the next one is copied.
pub(crate) const PIECES: usize = 2;
/// The most memory for a piece, in bytes. Of bf16, the codewords in it are decoded by 1500 to 6000
/// threads.
const MOST_PIECE_BYTES: usize = 64 << 20;
/// The share of the budget for pieces is the budget divided by this number.
const SHARE: usize = 32;

const fn c_text(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("PTX has no zeros"),
    }
}

/// Returns whether a device can decode units. May block while its driver compiles the kernels.
pub(crate) fn can_decode<D: Device>(device: &D) -> bool {
    [&TABLES, &RUNS, &MERGE].iter().all(|kernel| device.load(kernel).is_ok())
}

/// Returns whether a device that can decode units may be able to decode this one.
pub(crate) fn may_decode(image: &ImageLayout) -> bool {
    image.parts.iter().all(|part| steps::may_decode(&part.read))
}

/// Returns the part of a budget for decoding units on the device, in bytes. `chunk_bytes` is the
/// length of the longest stored chunk. Returns 0 if the budget is too small.
pub(crate) fn memory_bytes(budget_bytes: usize, chunk_bytes: usize) -> usize {
    let least = chunk_bytes + chunk_bytes / 4 + (16 << 10);
    let piece = (budget_bytes / SHARE / PIECES).min(MOST_PIECE_BYTES);
    let piece = piece - piece % BLOCK_ALIGN;
    if piece < least { 0 } else { PIECES * piece }
}

/// Returns how much of the memory for units on the host is for decoding them on the device, in
/// bytes. A unit needs about one hundredth of its stored bytes.
pub(crate) fn steps_bytes(host_bytes: usize) -> usize {
    host_bytes / 64
}

/// A unit on the host that the device can decode.
#[derive(Debug, Clone)]
pub(crate) struct DecodableImage {
    /// The pieces, which are decoded one after the other.
    pieces: Arc<[Piece]>,
    /// What to do with the stored bytes of each piece.
    steps: SharedBuffer,
    /// The end of the decoded bytes in the slot.
    end: usize,
}

/// Decodes units on their device.
#[derive(Debug)]
pub(crate) struct SplitDecoder<D: Device> {
    device: D,
    streams: Arc<DeviceStreams<D>>,
    /// The memory of a piece on the device, which takes turns.
    memory: [D::Memory; PIECES],
    piece_bytes: usize,
    /// The budget on the host for what [`prepare`](Self::prepare) returns.
    host: Budget,
    /// The number of pieces so far.
    turn: usize,
}

impl<D: Device> SplitDecoder<D> {
    /// Allocates `bytes` bytes on the device. [`prepare`](Self::prepare) takes memory from the
    /// budget `host`.
    pub(crate) fn new(
        device: &D,
        bytes: usize,
        host: Budget,
        streams: Arc<DeviceStreams<D>>,
    ) -> Result<Self, ts_streams::Error> {
        let piece_bytes = bytes / PIECES;
        let layout = Layout::from_size_align(piece_bytes, 256).expect("the size is a valid one");
        let piece = || device.allocate(layout, MemoryKind::Device);
        let memory = [piece()?, piece()?];
        Ok(Self { device: device.clone(), streams, memory, piece_bytes, host, turn: 0 })
    }

    /// Prepares to decode a unit, whose bytes must not change any more. Returns `None` if the
    /// kernels cannot decode it, or too little memory is left.
    pub(crate) fn prepare(&self, image: &[u8], layout: &ImageLayout) -> Option<DecodableImage> {
        let Steps { pieces, bytes } = Steps::new(image, layout, self.piece_bytes)?;
        let pool = HostPool::new(&self.host, bytes.len().next_multiple_of(BLOCK_ALIGN));
        let mut steps = pool.and_then(|pool| pool.allocate(bytes.len())).ok()?;
        drop(steps.split_off(bytes.len()));
        steps.copy_from_slice(&bytes);
        let _ = steps.register(&self.device);
        let ends = layout.parts.iter().map(|part| part.read.slot_offset + part.read.len);
        let end = ends.max().unwrap_or(0);
        Some(DecodableImage { pieces: pieces.into(), steps: steps.freeze(), end })
    }

    /// Starts to decode a unit to its slot, after the earlier work on the stream that the slot is
    /// allocated for.
    ///
    /// # Errors
    /// Returns the errors of the driver.
    pub(crate) fn begin(
        &mut self,
        image: &SharedBuffer,
        decodable: &DecodableImage,
        slot: &mut DeviceBuffer<D>,
    ) -> Result<PendingWrite<D>, ts_pool::Error> {
        let submit = |copies: &D::Stream, slot: MemoryRange| {
            assert_eq!(copies.id(), self.streams.copies().id(), "slots are of this stream");
            let submitted = decodable
                .pieces
                .iter()
                .try_for_each(|piece| self.submit(piece, [image, &decodable.steps], slot));
            let decoded = self.streams.piece(self.turn % PIECES).decoded;
            let submitted =
                submitted.and_then(|()| self.streams.pipeline().run(decoded, |_| Ok(())));
            if submitted.is_err() {
                let _ = self.synchronize();
            }
            submitted.map_err(ts_pool::Error::from)
        };
        assert!(decodable.end <= slot.len(), "the unit fits its slot");
        let sources = vec![image.clone(), decodable.steps.clone()];
        // SAFETY: the copies run on the stream of the slot, and it waits for the kernels. They read
        // the memory of the pieces, and write to it and to the parts of the slot that `Steps`
        // names, which are those of the unit. The copies read the images, which the result keeps.
        // After a failure, nothing runs on the stream of the kernels.
        unsafe { slot.begin_write_with(sources, submit) }.map_err(|(error, _)| error)
    }

    /// Submits the copies and the kernels for a piece.
    fn submit(
        &mut self,
        piece: &Piece,
        [image, steps]: [&SharedBuffer; 2],
        slot: MemoryRange,
    ) -> Result<(), ts_streams::Error> {
        self.turn += 1;
        let stages = self.streams.piece(self.turn % PIECES);
        let memory = self.memory[self.turn % PIECES].range();
        let at = |offset: usize| (memory.address() + offset) as u64;
        self.streams.pipeline().run(stages.copy, |copies| {
            let copy = |bytes: &[u8], offset: usize| {
                let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
                // SAFETY: the caller keeps both images. Earlier kernels that use the memory of the
                // piece have ended, because the stage waits for them.
                unsafe { copies.copy(memory.slice(offset..offset + bytes.len()), from) }
            };
            copy(&image[piece.stored.clone()], 0)?;
            copy(&steps[piece.steps.clone()], piece.codes_at())
        })?;
        let (stored, slot) = (at(0), slot.address() as u64);
        let [codes, runs, blocks, tables] =
            [piece.codes_at(), piece.runs_at(), piece.blocks_at(), piece.tables_at()].map(at);
        let threads = |kernel: &Kernel, count: usize| count.div_ceil(kernel.block_threads as usize);
        let (code_count, run_count) = (piece.codes as u64, piece.runs as u64);
        let tables_by = threads(&TABLES, piece.codes) as u32;
        let runs_by = threads(&RUNS, piece.runs) as u32;
        self.streams.pipeline().run(stages.decode, |stream| {
            let launch = |kernel: &Kernel, count: usize, blocks: u32, arguments: &[u64]| {
                if count == 0 {
                    return Ok(());
                }
                // SAFETY: `Steps` has laid the structures out in the memory of the piece, and
                // checked that they name only bytes of the piece and the slot. Nothing else uses
                // either now.
                unsafe { stream.launch(kernel, blocks, arguments) }
            };
            launch(&TABLES, piece.codes, tables_by, &[codes, tables, code_count])?;
            let arguments = [stored, codes, tables, runs, slot, run_count];
            launch(&RUNS, piece.runs, runs_by, &arguments)?;
            launch(&MERGE, piece.blocks, piece.blocks as u32, &[stored, blocks, slot])
        })
    }

    /// Blocks until all kernels have ended.
    fn synchronize(&self) -> Result<(), ts_streams::Error> {
        self.streams.pipeline().stream(self.streams.piece(0).decode).synchronize()
    }
}

impl<D: Device> Drop for SplitDecoder<D> {
    fn drop(&mut self) {
        // The memory is freed next.
        let _ = self.synchronize();
    }
}
