// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two superblocks at the start of a `.ts` file. The valid one with the higher generation is
//! active.

use twox_hash::XxHash3_64;

use crate::Error;
use crate::sharded::MAX_INDEX_LEN;

/// The first bytes of a `.ts` file. As in PNG, they are chosen so that a conversion of line endings
/// damages them.
pub const MAGIC: [u8; 8] = *b"\x89TSF\r\n\x1a\n";

/// Length of one superblock in bytes: the largest sector size of common devices.
pub(crate) const SUPERBLOCK_LEN: u64 = 4096;
/// The lowest offset of data.
pub(crate) const DATA_START: u64 = 2 * SUPERBLOCK_LEN;
/// Length in bytes of the fields of a superblock. The rest is zero padding.
const FIELDS_LEN: usize = 64;
const MAJOR: u16 = 1;
/// Minor version of the files that this crate writes.
pub(crate) const MINOR: u16 = 0;

/// A superblock, which locates the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// Whether this is superblock B.
    pub(crate) second: bool,
    pub(crate) generation: u64,
    /// Minor version of the writer.
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

    /// Returns the offset of this superblock in the file.
    pub(crate) fn offset(&self) -> u64 {
        if self.second { SUPERBLOCK_LEN } else { 0 }
    }

    /// Decodes a superblock, or returns the reason why it is invalid.
    fn decode(block: &[u8], second: bool) -> Result<Self, String> {
        let Some((fields, padding)) = block.split_at_checked(FIELDS_LEN) else {
            return Err("truncated".into());
        };
        let word = |i: usize| {
            u64::from_le_bytes(fields[i..i + 8].try_into().expect("the slice has 8 bytes"))
        };
        if fields[..8] != MAGIC {
            return Err("wrong magic bytes".into());
        }
        if word(56) != XxHash3_64::oneshot(&fields[..56]) {
            return Err("checksum mismatch".into());
        }
        let major = u16::from_le_bytes([fields[8], fields[9]]);
        if major != MAJOR {
            return Err(format!("unsupported version {major} (expected {MAJOR})"));
        }
        if word(48) != 0 || fields[12..16] != [0; 4] {
            return Err("unknown flags".into());
        }
        if padding.iter().any(|&b| b != 0) {
            return Err("nonzero padding".into());
        }
        let minor = u16::from_le_bytes([fields[10], fields[11]]);
        let (generation, index_offset, index_len, index_hash) =
            (word(16), word(24), word(32), word(40));
        Ok(Self { second, generation, minor, index_offset, index_len, index_hash })
    }
}

/// Returns the active superblock. `bytes` are the first 8192 bytes of the file.
pub(crate) fn active(file: &str, bytes: &[u8], file_len: u64) -> Result<Superblock, Error> {
    let (first, second) = bytes.split_at((SUPERBLOCK_LEN as usize).min(bytes.len()));
    let block = match (Superblock::decode(first, false), Superblock::decode(second, true)) {
        (Ok(a), Ok(b)) => std::cmp::max_by_key(a, b, |s| s.generation),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => one,
        (Err(first), Err(second)) => {
            let reason = format!("no valid superblock (A: {first}; B: {second})");
            return Err(Error::header(file, 0, reason));
        }
    };
    let end = block.index_offset.saturating_add(block.index_len);
    if block.index_len > MAX_INDEX_LEN {
        return Err(Error::header(
            file,
            0,
            format!("index of {} bytes exceeds the maximum of {MAX_INDEX_LEN}", block.index_len),
        ));
    }
    if block.index_offset < DATA_START {
        return Err(Error::header(
            file,
            0,
            format!("index offset {} is below the minimum of {DATA_START}", block.index_offset),
        ));
    }
    if end > file_len {
        let (what, offset) = ("the index".into(), block.index_offset);
        return Err(Error::Truncated { file: file.into(), what, offset, end, file_len });
    }
    Ok(block)
}
