// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a pool holds and has done, and where.

use std::fmt;

use ts_streams::StreamId;

#[cfg(doc)]
use super::StreamOrderedPool;

/// What a [`StreamOrderedPool`] holds and has done. Bytes are those of whole blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderedStats {
    /// Taken from the device.
    pub capacity_bytes: usize,
    /// In blocks that somebody has.
    pub in_use_bytes: usize,
    /// The most that was in use at any time.
    pub high_water_bytes: usize,
    /// In blocks that are freed, and that streams may still use which do not own them.
    pub pending_bytes: usize,
    /// The longest free block.
    pub largest_free_bytes: usize,
    /// What is free, by the stream whose it is.
    pub free_bytes: Vec<(StreamId, usize)>,
    /// Segments.
    pub segments: usize,
    /// Blocks handed out since the beginning.
    pub allocations: u64,
    /// Blocks freed since the beginning.
    pub frees: u64,
    /// Blocks handed out that another stream had freed.
    pub stolen: u64,
    /// Requests that found no memory.
    pub failures: u64,
}

/// Where everything lies in a pool. Its text is JSON:
/// `{"segments":[{"address":0,"len":0,"blocks":[{"offset":0,"len":0,"free":true, "stream":0}]}]}`,
/// all numbers in bytes but the stream's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSnapshot {
    /// The segments.
    pub segments: Vec<SegmentSnapshot>,
}

impl fmt::Display for PoolSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let block = |BlockSnapshot { offset, len, free, stream }: &BlockSnapshot| {
            format!(r#"{{"offset":{offset},"len":{len},"free":{free},"stream":{stream}}}"#)
        };
        let segment = |SegmentSnapshot { address, len, blocks }: &SegmentSnapshot| {
            let blocks: Vec<_> = blocks.iter().map(block).collect();
            format!(r#"{{"address":{address},"len":{len},"blocks":[{}]}}"#, blocks.join(","))
        };
        let segments: Vec<_> = self.segments.iter().map(segment).collect();
        write!(f, r#"{{"segments":[{}]}}"#, segments.join(","))
    }
}

/// A segment, and what lies in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentSnapshot {
    /// Where it begins.
    pub address: usize,
    /// Its length in bytes.
    pub len: usize,
    /// Its blocks, one behind the other.
    pub blocks: Vec<BlockSnapshot>,
}

/// A block of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSnapshot {
    /// From the segment's beginning, in bytes.
    pub offset: usize,
    /// In bytes.
    pub len: usize,
    /// Whether it is free.
    pub free: bool,
    /// The stream whose it is.
    pub stream: StreamId,
}
