// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocking reads past the page cache, to any memory.

use ts_pool::{BLOCK_ALIGN, Buffer};

use crate::fault::Faults;
use crate::file::Access;
use crate::memory::Memory;
use crate::source::SAMPLES;
use crate::{Error, Source};

/// Fewer bytes come by way of the page cache, which reads on to the next ones.
const SMALLEST: usize = 256 << 10;

/// Reads on the calling thread, as [`adaptive`](crate::Registry) does on its own: what the page
/// cache holds is copied from there, the rest comes past it, and objects over the network. Memory
/// may lie anywhere. Where it lies in its pages as its bytes do in the file's blocks they come
/// straight to it, else by way of a window, which costs a copy and not fresh memory.
///
/// One for each thread; a dozen threads keep a device busy. A read is not timed: it blocks as long
/// as the system does.
#[derive(Debug)]
pub struct DirectReader {
    window: Buffer,
}

impl DirectReader {
    /// With a window of some MiB, on huge pages as a [`HostPool`](ts_pool::HostPool) has them:
    /// disks are twice as fast with these as with others.
    ///
    /// # Panics
    /// If the window is smaller than two blocks of [`BLOCK_ALIGN`] bytes or no whole number of
    /// them.
    pub fn new(window: Buffer) -> Self {
        assert!(
            window.len() >= 2 * BLOCK_ALIGN && window.len().is_multiple_of(BLOCK_ALIGN),
            "a window of {} bytes",
            window.len()
        );
        Self { window }
    }

    /// Reads `out.len()` bytes at `offset`; fewer only at the end of the source.
    ///
    /// # Errors
    /// As [`Source::read_at`]. Blocks.
    pub fn read_at(
        &mut self,
        source: &Source,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, Error> {
        let is_direct =
            out.len() >= SMALLEST && source.direct_alignment().is_ok_and(|n| n <= BLOCK_ALIGN);
        if !is_direct || source.warm_samples(offset, out.len()) == SAMPLES {
            return source.read_at(offset, out);
        }
        let block = BLOCK_ALIGN as u64;
        if out.as_ptr().addr() % BLOCK_ALIGN == (offset % block) as usize {
            return self.read_straight(source, offset, out);
        }
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let skip = (at % block) as usize;
            let wanted = (out.len() - done).min(self.window.len() - skip);
            let window = &mut self.window[..(skip + wanted).next_multiple_of(BLOCK_ALIGN)];
            let came = read(source, at - skip as u64, &mut Memory::Slice(window))?;
            let counts = came.saturating_sub(skip).min(wanted);
            if counts == 0 {
                break;
            }
            out[done..done + counts].copy_from_slice(&self.window[skip..skip + counts]);
            done += counts;
        }
        Ok(done)
    }

    /// In one read: the blocks that are wanted whole to their place, those at the ends to the
    /// window.
    fn read_straight(
        &mut self,
        source: &Source,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, Error> {
        let skip = (offset % BLOCK_ALIGN as u64) as usize;
        let head = (BLOCK_ALIGN - skip) % BLOCK_ALIGN;
        let tail = (out.len() - head) % BLOCK_ALIGN;
        let (start, rest) = out.split_at_mut(head);
        let (middle, end) = rest.split_at_mut(rest.len() - tail);
        let whole = middle.len();
        let (first, last) = self.window[..2 * BLOCK_ALIGN].split_at_mut(BLOCK_ALIGN);
        let mut pieces = [&mut first[..if head > 0 { BLOCK_ALIGN } else { 0 }], middle, last];
        let count = if tail > 0 { 3 } else { 2 };
        let came = read(source, offset - skip as u64, &mut Memory::Pieces(&mut pieces[..count]))?;
        start.copy_from_slice(&self.window[BLOCK_ALIGN - head..BLOCK_ALIGN]);
        end.copy_from_slice(&self.window[BLOCK_ALIGN..BLOCK_ALIGN + tail]);
        Ok(came.saturating_sub(skip).min(head + whole + tail))
    }
}

fn read(source: &Source, offset: u64, memory: &mut Memory<'_>) -> Result<usize, Error> {
    source.read(Access::Direct, offset, memory, &Faults::default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ts_pool::{Budget, HostPool};

    use super::*;

    const FILE_LEN: usize = (1 << 20) + 1234;
    const MEMORY: usize = 2 << 20;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_bytes_come_to_any_memory_from_a_cold_file_and_a_warm_one(
            offset in 0..FILE_LEN,
            len in 0..FILE_LEN,
            aside in prop_oneof![Just(None), (0..BLOCK_ALIGN).prop_map(Some)],
            cold: bool,
        ) {
            // Not in memory, as the temporary directory may be.
            let directory =
                tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR").to_owned() + "/../../target")
                    .unwrap();
            let path = directory.path().join("data");
            let content: Vec<u8> =
                (0..FILE_LEN as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            std::fs::write(&path, &content).unwrap();
            let source = Source::open(&path).unwrap();
            if cold {
                source.evict().unwrap();
            }
            let pool = HostPool::new(&Budget::new(8 << 20), 8 << 20).unwrap();
            let mut reader = DirectReader::new(pool.allocate(64 << 10).unwrap());
            let mut memory = pool.allocate(MEMORY).unwrap();
            // Where the bytes lie in their blocks as in the file's, or not.
            let begin = aside.unwrap_or(offset % BLOCK_ALIGN);
            let out = &mut memory[begin..begin + len];
            let expected = &content[offset..FILE_LEN.min(offset + len)];
            prop_assert_eq!(reader.read_at(&source, offset as u64, out).unwrap(), expected.len());
            prop_assert!(out[..expected.len()] == *expected);
        }
    }
}
