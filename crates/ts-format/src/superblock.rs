// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two superblocks that a `.ts` file begins with, of which the newer valid one counts.

use twox_hash::XxHash3_64;

use crate::Error;
use crate::sharded::MAX_INDEX_LEN;

/// The first bytes of a `.ts` file: no text, and broken by whatever converts line ends.
pub const MAGIC: [u8; 8] = *b"\x89TSF\r\n\x1a\n";

/// Room of one superblock, in bytes: a sector of the devices that have the largest.
pub(crate) const SUPERBLOCK_LEN: u64 = 4096;
/// Where data may begin.
pub(crate) const DATA_START: u64 = 2 * SUPERBLOCK_LEN;
const SUPERBLOCK_USED: usize = 64;
const MAJOR: u16 = 1;
/// Of the version that is written.
pub(crate) const MINOR: u16 = 0;
/// Where the index is, as the active superblock says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// Whether it is the second one.
    pub(crate) second: bool,
    pub(crate) generation: u64,
    /// Of the version that wrote it.
    pub(crate) minor: u16,
    pub(crate) index_offset: u64,
    pub(crate) index_len: u64,
    pub(crate) index_hash: u64,
}

impl Superblock {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SUPERBLOCK_LEN as usize);
        out.extend(MAGIC);
        out.extend(MAJOR.to_le_bytes());
        out.extend(self.minor.to_le_bytes());
        out.extend(0u32.to_le_bytes());
        for field in [self.generation, self.index_offset, self.index_len, self.index_hash, 0] {
            out.extend(field.to_le_bytes());
        }
        out.extend(XxHash3_64::oneshot(&out).to_le_bytes());
        out.resize(SUPERBLOCK_LEN as usize, 0);
        out
    }

    /// Where it is in the file.
    pub(crate) fn offset(&self) -> u64 {
        if self.second { SUPERBLOCK_LEN } else { 0 }
    }

    /// Reads one of the two; the reason when it is not valid.
    fn decode(block: &[u8], second: bool) -> Result<Self, String> {
        let Some((used, padding)) = block.split_at_checked(SUPERBLOCK_USED) else {
            return Err("it is cut off".into());
        };
        let word = |i: usize| u64::from_le_bytes(used[i..i + 8].try_into().expect("8 bytes"));
        if used[..8] != MAGIC {
            return Err("it does not begin as a superblock".into());
        }
        if word(56) != XxHash3_64::oneshot(&used[..56]) {
            return Err("its checksum is wrong".into());
        }
        let major = u16::from_le_bytes([used[8], used[9]]);
        if major != MAJOR {
            return Err(format!("it is of version {major}, this reader knows version {MAJOR}"));
        }
        if word(48) != 0 || used[12..16] != [0; 4] {
            return Err("it has flags that this reader does not know".into());
        }
        if padding.iter().any(|&b| b != 0) {
            return Err("its padding is not zero".into());
        }
        let minor = u16::from_le_bytes([used[10], used[11]]);
        let (generation, index_offset, index_len, index_hash) =
            (word(16), word(24), word(32), word(40));
        Ok(Self { second, generation, minor, index_offset, index_len, index_hash })
    }
}

/// The active superblock of a file's first 8192 bytes.
pub(crate) fn active(file: &str, bytes: &[u8], file_len: u64) -> Result<Superblock, Error> {
    let (first, second) = bytes.split_at((SUPERBLOCK_LEN as usize).min(bytes.len()));
    let block = match (Superblock::decode(first, false), Superblock::decode(second, true)) {
        (Ok(a), Ok(b)) => std::cmp::max_by_key(a, b, |s| s.generation),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => one,
        (Err(first), Err(second)) => {
            let reason =
                format!("no valid superblock: of the first, {first}; of the second, {second}");
            return Err(Error::header(file, 0, reason));
        }
    };
    let end = block.index_offset.saturating_add(block.index_len);
    if block.index_len > MAX_INDEX_LEN {
        return Err(Error::header(
            file,
            0,
            format!("an index of {} bytes is too large", block.index_len),
        ));
    }
    if block.index_offset < DATA_START {
        return Err(Error::header(
            file,
            0,
            format!("an index at byte {} is too early", block.index_offset),
        ));
    }
    if end > file_len {
        let (what, offset) = ("the index".into(), block.index_offset);
        return Err(Error::Truncated { file: file.into(), what, offset, end, file_len });
    }
    Ok(block)
}
