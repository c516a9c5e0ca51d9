// SPDX-License-Identifier: MIT OR Apache-2.0
//! Statistics and snapshots of a stream-ordered pool.

use std::fmt;

use ts_streams::StreamId;

#[cfg(doc)]
use super::StreamOrderedPool;

/// Statistics of a [`StreamOrderedPool`]. Byte counts include the rounding of each request to whole
/// granules.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OrderedStats {
    /// Bytes allocated from the device.
    pub capacity_bytes: usize,
    /// Bytes in live buffers.
    pub in_use_bytes: usize,
    /// The most bytes that were ever in use at the same time.
    pub high_water_bytes: usize,
    /// Bytes in freed blocks that streams other than the owner may still use.
    pub pending_bytes: usize,
    /// Size of the largest free block in bytes.
    pub largest_free_bytes: usize,
    /// Free bytes of each stream that owns any.
    pub free_bytes: Vec<(StreamId, usize)>,
    /// Number of segments allocated from the device.
    pub segments: usize,
    /// Number of successful allocations since the pool was created.
    pub allocations: u64,
    /// Number of frees since the pool was created.
    pub frees: u64,
    /// Number of allocations that took a free block of another stream.
    pub reused_across_streams: u64,
    /// Number of allocations that failed for lack of memory.
    pub failures: u64,
}

/// The layout of all segments and blocks of a pool. Its `Display` output is JSON:
///
/// ```json
/// {"segments":[{"address":0,"len":0,"blocks":[{"offset":0,"len":0,"free":true,"stream":0}]}]}
/// ```
///
/// `offset` and `len` are in bytes; `stream` is a stream id.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolSnapshot {
    /// The segments of the pool.
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

/// A segment and its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentSnapshot {
    /// Device address of the first byte.
    pub address: usize,
    /// Length in bytes.
    pub len: usize,
    /// The blocks in ascending order of offset. They cover the segment without gaps.
    pub blocks: Vec<BlockSnapshot>,
}

/// A block of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockSnapshot {
    /// Offset in the segment, in bytes.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
    /// Whether the block is free. A freed block that other streams may still use is not free.
    pub free: bool,
    /// The stream that owns the block. A free block keeps its owner.
    pub stream: StreamId,
}
