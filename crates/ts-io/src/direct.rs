// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocking reads into any memory, with direct I/O where possible.

use ts_pool::{BLOCK_ALIGN, Buffer};

use crate::file::{Access, FileOrigin};
use crate::hook::ReadHook;
use crate::page_cache::Residency;
use crate::scatter::Target;
use crate::{Error, Source};

/// Reads of fewer bytes go through the page cache, because its readahead makes later reads faster.
const MIN_DIRECT_BYTES: usize = 256 << 10;

/// Reads on the calling thread, into memory of any alignment.
///
/// Chooses one path for each read of a file. Ranges of less than 256 KiB and ranges that are in the
/// page cache are read through the page cache. Other ranges are read with direct I/O, if the file
/// system supports it. Sources that are not files are read with [`Source::read_at`].
///
/// If memory address and file offset are equal modulo [`BLOCK_ALIGN`], direct I/O reads directly
/// into the memory. Otherwise it reads into a window, which costs a copy but no allocation.
///
/// Use one reader for each thread; a dozen threads saturate a device. Reads of files have no
/// timeout: they block until the system responds.
///
/// ```
/// use ts_io::{DirectReader, Source};
/// use ts_io::ts_pool::{Budget, HostPool};
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("data");
/// std::fs::write(&path, vec![7u8; 1 << 20])?;
/// let pool = HostPool::new(&Budget::new(4 << 20), 4 << 20)?;
/// let mut reader = DirectReader::new(pool.allocate(4 << 20)?);
/// let mut bytes = vec![0; 1 << 20];
/// let source = Source::open(&path)?;
/// assert_eq!(reader.read_at(&source, 1000, &mut bytes)?, (1 << 20) - 1000);
/// assert!(bytes[..(1 << 20) - 1000].iter().all(|&byte| byte == 7));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DirectReader {
    window: Buffer,
}

impl DirectReader {
    /// Creates a reader with a window, which should be a few MiB long. Allocate the window from a
    /// [`HostPool`](ts_pool::HostPool): the huge pages of a pool make direct reads much faster.
    ///
    /// # Panics
    /// Panics if the length of the window is not a multiple of [`BLOCK_ALIGN`], or is less than
    /// twice [`BLOCK_ALIGN`].
    pub fn new(window: Buffer) -> Self {
        assert!(
            window.len() >= 2 * BLOCK_ALIGN && window.len().is_multiple_of(BLOCK_ALIGN),
            "invalid window of {} bytes: expected a multiple of {BLOCK_ALIGN}, at least {}",
            window.len(),
            2 * BLOCK_ALIGN
        );
        Self { window }
    }

    /// Reads `out.len()` bytes at `offset`, or fewer at the end of the source. Returns the number
    /// of bytes. Blocks.
    ///
    /// # Errors
    /// Returns the same errors as [`Source::read_at`].
    pub fn read_at(
        &mut self,
        source: &Source,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, Error> {
        let file = FileOrigin::of(source).filter(|_| {
            out.len() >= MIN_DIRECT_BYTES
                && source.direct_alignment().is_ok_and(|n| n <= BLOCK_ALIGN)
        });
        let Some(file) = file else { return source.read_at(offset, out) };
        if Residency::sample(source, offset, out.len()) == Residency::Warm {
            return source.read_at(offset, out);
        }
        let block = BLOCK_ALIGN as u64;
        if out.as_ptr().addr() % BLOCK_ALIGN == (offset % block) as usize {
            return self.read_in_place(file, offset, out);
        }
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let skip = (at % block) as usize;
            let wanted = (out.len() - done).min(self.window.len() - skip);
            let window = &mut self.window[..(skip + wanted).next_multiple_of(BLOCK_ALIGN)];
            let bytes = read(file, at - skip as u64, &mut Target::Slice(window))?;
            let bytes = bytes.saturating_sub(skip).min(wanted);
            if bytes == 0 {
                break;
            }
            out[done..done + bytes].copy_from_slice(&self.window[skip..skip + bytes]);
            done += bytes;
        }
        Ok(done)
    }

    /// Reads whole blocks directly into `out`, and the partial blocks at its ends into the window,
    /// all with one vectored read.
    fn read_in_place(
        &mut self,
        file: &FileOrigin,
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
        let mut slices = [&mut first[..if head > 0 { BLOCK_ALIGN } else { 0 }], middle, last];
        let count = if tail > 0 { 3 } else { 2 };
        let bytes = read(file, offset - skip as u64, &mut Target::Slices(&mut slices[..count]))?;
        start.copy_from_slice(&self.window[BLOCK_ALIGN - head..BLOCK_ALIGN]);
        end.copy_from_slice(&self.window[BLOCK_ALIGN..BLOCK_ALIGN + tail]);
        Ok(bytes.saturating_sub(skip).min(head + whole + tail))
    }
}

fn read(file: &FileOrigin, offset: u64, target: &mut Target<'_>) -> Result<usize, Error> {
    file.read(Access::Direct, offset, target, &ReadHook::default())
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
        fn any_range_is_read_into_any_memory(
            offset in 0..FILE_LEN,
            len in 0..FILE_LEN,
            unaligned in prop_oneof![Just(None), (0..BLOCK_ALIGN).prop_map(Some)],
            cold: bool,
        ) {
            // The temporary directory is not used, because it may be a tmpfs without direct I/O.
            let directory =
                tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR").to_owned() + "/../../target")
                    .unwrap();
            let path = directory.path().join("data");
            let content: Vec<u8> =
                (0..FILE_LEN as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            std::fs::write(&path, &content).unwrap();
            let source = Source::open(&path).unwrap();
            // Only Linux drops files from the page cache.
            if cold && cfg!(target_os = "linux") {
                source.evict().unwrap();
            }
            let pool = HostPool::new(&Budget::new(8 << 20), 8 << 20).unwrap();
            let mut reader = DirectReader::new(pool.allocate(64 << 10).unwrap());
            let mut memory = pool.allocate(MEMORY).unwrap();
            // If `unaligned` is `None`, the address of `out` and `offset` are equal modulo
            // `BLOCK_ALIGN`.
            let begin = unaligned.unwrap_or(offset % BLOCK_ALIGN);
            let out = &mut memory[begin..begin + len];
            let expected = &content[offset..FILE_LEN.min(offset + len)];
            prop_assert_eq!(reader.read_at(&source, offset as u64, out).unwrap(), expected.len());
            prop_assert!(out[..expected.len()] == *expected);
        }
    }
}
