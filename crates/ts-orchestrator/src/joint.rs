// SPDX-License-Identifier: MIT OR Apache-2.0
//! Joins reads of neighbours in a file into one request, and divides its result.
//!
//! Units begin and end anywhere in a file, but direct reads begin and end at blocks. So a block
//! often contains the end of one unit and the beginning of the next one. It is read into the memory
//! of the latter, and copied to the former.

use std::collections::VecDeque;

use ts_format::FileId;
use ts_io::Transfer;
use ts_pool::Buffer;

use crate::layout::ReadKind;
use crate::unit_load::QueuedRead;

/// The length of the longest joint read, in bytes. Longer requests were not faster.
pub(crate) const JOINT_BYTES: usize = 1 << 20;
/// The length of the longest read that is joined with others, in bytes.
pub(crate) const LARGEST_JOINED: usize = JOINT_BYTES / 2;
/// The memory for streamed units has room for so many joint reads.
const RING_BATCHES: usize = 8;

/// Returns how many bytes to read at a time into a ring of this length, in bytes.
pub(crate) fn batch_bytes(ring_bytes: usize) -> usize {
    (ring_bytes / RING_BATCHES).min(JOINT_BYTES)
}

/// The most reads that are joined. Each needs an entry in the vector of the system call, and a
/// request with more than 1024 entries would be split.
const MOST_PARTS: usize = 512;

/// A read that fills the memory of several reads.
#[derive(Debug)]
pub(crate) struct JointRead {
    parts: Vec<Part>,
    file: FileId,
    alignment: usize,
}

/// One of the reads that were joined.
#[derive(Debug)]
struct Part {
    token: u64,
    offset: u64,
    required: usize,
    /// Whether the request fills the part, at least all but its last block.
    has_buffer: bool,
    /// The last block, if the next part begins with the same block of the file.
    shared: Option<Buffer>,
}

/// The end of one of the reads that were joined.
#[derive(Debug)]
pub(crate) struct PartRead {
    pub(crate) token: u64,
    pub(crate) buffer: Buffer,
    pub(crate) transfer: Transfer,
}

/// Returns whether `next` can be read in one request with `last` before it, because it continues
/// where `last` ends or begins with its last block.
fn continues(last: &QueuedRead, next: &QueuedRead, alignment: usize) -> bool {
    let end = last.offset + last.target.len() as u64;
    let shares_block = next.offset + alignment as u64 == end && next.target.len() >= alignment;
    can_join(next) && last.file == next.file && (next.offset == end || shares_block)
}

fn can_join(read: &QueuedRead) -> bool {
    read.kind == ReadKind::InPlace
        && read.kept.is_none()
        && !read.alone
        && read.target.len() <= LARGEST_JOINED
}

/// Puts reads of about `joint_bytes` bytes at a time into the order of the file, so that more of
/// them can be joined.
pub(crate) fn sort(reads: &mut [QueuedRead], joint_bytes: usize) {
    let mut rest = reads;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |read: &&QueuedRead| {
            bytes += read.target.len();
            can_join(read) && bytes <= joint_bytes
        };
        let count = rest.iter().take_while(fits).count();
        rest[..count].sort_by_key(|read| (read.file, read.offset));
        rest = &mut rest[count.max(1)..];
    }
}

/// Takes the first read of a queue if it is suitable.
fn pop_front_if(
    queue: &mut VecDeque<QueuedRead>,
    is_suitable: &dyn Fn(&QueuedRead) -> bool,
) -> Option<QueuedRead> {
    queue.front().is_some_and(is_suitable).then(|| queue.pop_front()).flatten()
}

/// Takes the reads that are to be joined with `first` from the front of a queue, as long as
/// `joint_bytes` suffices. Returns them all, in order.
pub(crate) fn take(
    first: QueuedRead,
    queue: &mut VecDeque<QueuedRead>,
    joint_bytes: usize,
    alignment: usize,
) -> Vec<QueuedRead> {
    let can_begin = can_join(&first);
    let (mut reads, mut bytes) = (vec![first], 0);
    while can_begin && reads.len() < MOST_PARTS {
        let last = reads.last().expect("there is the first one");
        bytes += last.target.len();
        let fits = |read: &QueuedRead| {
            continues(last, read, alignment) && bytes + read.target.len() <= joint_bytes
        };
        let Some(read) = pop_front_if(queue, &fits) else { break };
        reads.push(read);
    }
    reads
}

/// The request of a joint read.
#[derive(Debug)]
pub(crate) struct JointRequest {
    pub(crate) token: u64,
    pub(crate) offset: u64,
    pub(crate) required: usize,
    pub(crate) buffers: Vec<Buffer>,
}

impl JointRead {
    /// Joins reads that [`take`] returned. The request has the token of the first one.
    pub(crate) fn new(reads: Vec<QueuedRead>, alignment: usize) -> (Self, JointRequest) {
        let begins: Vec<u64> = reads.iter().map(|read| read.offset).collect();
        let (file, offset, token) = (reads[0].file, reads[0].offset, reads[0].token);
        let end = reads.iter().map(|read| read.offset + read.required as u64).max();
        let required = (end.unwrap_or(offset) - offset) as usize;
        let (mut parts, mut buffers) = (Vec::with_capacity(reads.len()), Vec::new());
        for (index, read) in reads.into_iter().enumerate() {
            let QueuedRead { token, offset, required, mut target, .. } = read;
            let end = offset + target.len() as u64;
            let next = begins.get(index + 1);
            let shared = next.is_some_and(|&next| next < end).then(|| {
                let rest = target.len() - alignment;
                target.split_off(rest)
            });
            let has_buffer = !target.is_empty();
            if has_buffer {
                buffers.push(target);
            }
            parts.push(Part { token, offset, required, has_buffer, shared });
        }
        let request = JointRequest { token, offset, required, buffers };
        (Self { parts, file, alignment }, request)
    }

    /// Returns the file, and the token, the offset and the required length of each part.
    pub(crate) fn parts(&self) -> (FileId, impl Iterator<Item = (u64, u64, usize)> + '_) {
        (self.file, self.parts.iter().map(|part| (part.token, part.offset, part.required)))
    }

    /// Returns whether these are all buffers of the request.
    pub(crate) fn is_complete(&self, buffers: &[Buffer]) -> bool {
        buffers.len() == self.parts.iter().filter(|part| part.has_buffer).count()
    }

    /// Divides the buffers of a request that was read. Each byte counts for one of the parts.
    pub(crate) fn divide(self, buffers: Vec<Buffer>, transfer: &Transfer) -> Vec<PartRead> {
        let begins: Vec<u64> = self.parts.iter().map(|part| part.offset).collect();
        let (alignment, mut read) = (self.alignment, self.rejoin(buffers));
        for index in (1..read.len()).rev() {
            let [before, after] = &mut read[index - 1..=index] else { unreachable!("two parts") };
            if before.offset + before.target.len() as u64 > after.offset {
                let begin = before.target.len() - alignment;
                before.target[begin..].copy_from_slice(&after.target[..alignment]);
            }
        }
        let mut left = transfer.paths.clone();
        let divided = read.into_iter().enumerate().map(|(index, read)| {
            let end = begins.get(index + 1);
            let mut wanted = end.map_or(usize::MAX, |&end| (end - read.offset) as usize);
            let mut part = transfer.clone();
            part.paths.clear();
            for (path, bytes) in &mut left {
                let taken = wanted.min(*bytes);
                (*bytes, wanted) = (*bytes - taken, wanted - taken);
                part.paths.extend((taken > 0).then_some((*path, taken)));
            }
            PartRead { token: read.token, buffer: read.target, transfer: part }
        });
        divided.collect()
    }

    /// Returns the reads that were joined. They are not joined again.
    pub(crate) fn rejoin(self, buffers: Vec<Buffer>) -> Vec<QueuedRead> {
        let mut buffers = buffers.into_iter();
        let file = self.file;
        let whole = self.parts.into_iter().map(|part| {
            let Part { token, offset, required, has_buffer, shared } = part;
            let begin = if has_buffer { buffers.next() } else { None };
            let target = match (begin, shared) {
                (Some(mut begin), Some(shared)) => {
                    begin.unsplit(shared).expect("the block was split off");
                    begin
                }
                (Some(target), None) | (None, Some(target)) => target,
                (None, None) => unreachable!("the caller checked that all buffers are there"),
            };
            let (kind, kept, alone) = (ReadKind::InPlace, None, true);
            QueuedRead { token, file, offset, required, target, kind, kept, alone }
        });
        whole.collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ts_io::ReadPath;
    use ts_pool::{Budget, HostPool};

    use super::*;

    const ALIGNMENT: usize = 512;

    /// Returns the reads of units that begin and end there, as `SlotLayout` makes them.
    fn reads(pool: &HostPool, units: &[(u64, usize)]) -> VecDeque<QueuedRead> {
        let read = |(token, &(begin, len)): (u64, &(u64, usize))| {
            let lead = (begin % ALIGNMENT as u64) as usize;
            let required = lead + len;
            QueuedRead {
                token,
                file: FileId(0),
                offset: begin - lead as u64,
                required,
                target: pool.allocate(required.next_multiple_of(ALIGNMENT)).unwrap(),
                kind: ReadKind::InPlace,
                kept: None,
                alone: false,
            }
        };
        let mut reads: VecDeque<_> = (0..).zip(units).map(read).collect();
        // A slot may be larger than its unit.
        for read in &mut reads {
            let len = read.required.next_multiple_of(ALIGNMENT);
            drop(read.target.split_off(len));
        }
        reads
    }

    fn group(queue: &mut VecDeque<QueuedRead>, joint_bytes: usize) -> Vec<QueuedRead> {
        let first = queue.pop_front().unwrap();
        take(first, queue, joint_bytes, ALIGNMENT)
    }

    proptest! {
        /// Whatever the units and the gaps between them are, every unit gets its bytes, also at the
        /// end of the file, and each byte that was read counts once.
        #[test]
        fn every_part_gets_its_bytes(
            units in prop::collection::vec((0u64..1500, 1usize..3000), 1..30),
            header in 0u64..3000,
            joint_bytes in 1usize..20_000,
        ) {
            let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20).unwrap();
            let mut at = header;
            let units: Vec<(u64, usize)> = units
                .into_iter()
                .map(|(gap, len)| {
                    // Most units are neighbours.
                    let begin = at + if gap < 900 { 0 } else { gap };
                    at = begin + len as u64;
                    (begin, len)
                })
                .collect();
            let file: Vec<u8> = (0..at as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
                .collect();
            let (mut queue, mut requests) = (reads(&pool, &units), 0);
            let mut delivered = vec![false; units.len()];
            while !queue.is_empty() {
                let group = group(&mut queue, joint_bytes);
                requests += 1;
                let (joint, request) = JointRead::new(group, ALIGNMENT);
                let JointRequest { offset, required, mut buffers, .. } = request;
                let (mut position, mut bytes) = (offset as usize, 0);
                for buffer in &mut buffers {
                    prop_assert!(position.is_multiple_of(ALIGNMENT));
                    let there = file.len().saturating_sub(position).min(buffer.len());
                    buffer[..there].copy_from_slice(&file[position..position + there]);
                    (position, bytes) = (position + buffer.len(), bytes + there);
                }
                prop_assert!(bytes >= required && joint.is_complete(&buffers));
                let mut counted = 0;
                for part in joint.divide(buffers, &Transfer::new(ReadPath::Direct, bytes, 0)) {
                    let (begin, len) = units[part.token as usize];
                    let lead = (begin % ALIGNMENT as u64) as usize;
                    prop_assert!(part.buffer[lead..lead + len]
                        == file[begin as usize..begin as usize + len]);
                    counted += part.transfer.bytes();
                    prop_assert!(!std::mem::replace(&mut delivered[part.token as usize], true));
                }
                prop_assert_eq!(counted, bytes);
            }
            prop_assert!(delivered.into_iter().all(|delivered| delivered));
            let neighbours = units.windows(2).all(|pair| pair[0].0 + pair[0].1 as u64 == pair[1].0);
            let all: usize = units.iter().map(|(_, len)| len + 2 * ALIGNMENT).sum();
            if neighbours && all <= joint_bytes {
                prop_assert_eq!(requests, 1);
            }
        }
    }

    #[test]
    fn what_failed_is_read_again_alone() {
        let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20).unwrap();
        let units = [(100, 300), (400, 50), (450, 20), (470, 4000), (4470, 100)];
        let mut queue = reads(&pool, &units);
        let before: Vec<_> =
            queue.iter().map(|read| (read.offset, read.required, read.target.len())).collect();
        let all = group(&mut queue, JOINT_BYTES);
        let (joint, request) = JointRead::new(all, ALIGNMENT);
        assert!(!joint.is_complete(&[]));
        // Three of the units are in the first block, of which there is one copy in the request.
        assert_eq!(request.buffers.len(), 2);
        let mut alone: VecDeque<_> = joint.rejoin(request.buffers).into();
        let after: Vec<_> =
            alone.iter().map(|read| (read.offset, read.required, read.target.len())).collect();
        assert_eq!(before, after);
        assert_eq!(group(&mut alone, JOINT_BYTES).len(), 1);
    }

    #[test]
    fn reads_are_sorted_within_the_length_of_a_request() {
        let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20).unwrap();
        let block = ALIGNMENT as u64;
        let units = [3, 1, 2, 9, 8].map(|block_number| (block_number * block, ALIGNMENT));
        let mut reads: Vec<_> = reads(&pool, &units).into();
        sort(&mut reads, 3 * ALIGNMENT);
        let order: Vec<u64> = reads.iter().map(|read| read.offset / block).collect();
        assert_eq!(order, [1, 2, 3, 8, 9]);
    }
}
