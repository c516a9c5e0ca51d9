// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocation of offsets: which part of a range of granules is taken. Touches no memory.
//!
//! Free blocks hang in bins of rounded sizes, eight to a power of two, found by two bitmaps as in TLSF
//! (Masmano et al., 2004); neighbours are linked so that a freed block joins them. All steps are O(1), but for
//! a last look through one bin when no larger bin has a block: a pool that is meant to be full should not
//! refuse a block that fits exactly.

const NONE: u32 = u32::MAX;
const BIN_COUNT: usize = 8 * 32;

/// Names a block of an [`OffsetAllocator`]; valid until that block is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockId(u32);

#[derive(Debug, Clone, Copy)]
struct Node {
    offset: u32,
    len: u32,
    free: bool,
    /// Neighbours in address order.
    before: u32,
    after: u32,
    /// Neighbours in the free list of the block's bin.
    previous: u32,
    next: u32,
}

/// Hands out disjoint runs of `0..capacity`, in granules.
#[derive(Debug)]
pub(crate) struct OffsetAllocator {
    nodes: Vec<Node>,
    spare: Vec<u32>,
    heads: [u32; BIN_COUNT],
    /// Bit `b` of word `w`: bin `w * 32 + b` has a block.
    used_bins: [u32; BIN_COUNT / 32],
    free: u32,
}

impl OffsetAllocator {
    pub(crate) fn new(capacity: u32) -> Self {
        let mut this = Self {
            nodes: Vec::new(),
            spare: Vec::new(),
            heads: [NONE; BIN_COUNT],
            used_bins: [0; BIN_COUNT / 32],
            free: 0,
        };
        if capacity > 0 {
            let id = this.new_node(0, capacity, NONE, NONE);
            this.insert_free(id);
        }
        this
    }

    /// Takes `len` granules; `None` when no free block is that long.
    pub(crate) fn allocate(&mut self, len: u32) -> Option<(BlockId, u32)> {
        let len = len.max(1);
        let id = self.find(len)?;
        self.remove_free(id);
        let node = self.nodes[id as usize];
        if node.len > len {
            let rest = self.new_node(node.offset + len, node.len - len, id, node.after);
            if node.after != NONE {
                self.nodes[node.after as usize].before = rest;
            }
            self.nodes[id as usize].after = rest;
            self.nodes[id as usize].len = len;
            self.insert_free(rest);
        }
        Some((BlockId(id), node.offset))
    }

    /// Gives a block back, joined with its free neighbours.
    pub(crate) fn release(&mut self, id: BlockId) {
        let mut id = id.0;
        debug_assert!(!self.nodes[id as usize].free, "a block is released once");
        let before = self.nodes[id as usize].before;
        if before != NONE && self.nodes[before as usize].free {
            self.remove_free(before);
            self.absorb_after(before);
            id = before;
        }
        let after = self.nodes[id as usize].after;
        if after != NONE && self.nodes[after as usize].free {
            self.remove_free(after);
            self.absorb_after(id);
        }
        self.insert_free(id);
    }

    /// Free granules.
    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// Length of the longest free block.
    pub(crate) fn largest_free(&self) -> u32 {
        let Some(bin) = self.highest_bin() else { return 0 };
        self.bin(bin).map(|id| self.nodes[id as usize].len).max().unwrap_or(0)
    }

    fn find(&self, len: u32) -> Option<u32> {
        // Any block of a bin whose smallest size is enough will do; else one of the bin that straddles `len`.
        self.lowest_bin_from(bin_at_least(len))
            .map(|bin| self.heads[bin])
            .or_else(|| self.bin(bin_of(len)).find(|&id| self.nodes[id as usize].len >= len))
    }

    fn bin(&self, bin: usize) -> impl Iterator<Item = u32> + '_ {
        let first = self.heads[bin];
        std::iter::successors((first != NONE).then_some(first), |&id| {
            let next = self.nodes[id as usize].next;
            (next != NONE).then_some(next)
        })
    }

    fn lowest_bin_from(&self, bin: usize) -> Option<usize> {
        let mut mask = u32::MAX << (bin % 32);
        for word in bin / 32..self.used_bins.len() {
            let bits = self.used_bins[word] & mask;
            if bits != 0 {
                return Some(word * 32 + bits.trailing_zeros() as usize);
            }
            mask = u32::MAX;
        }
        None
    }

    fn highest_bin(&self) -> Option<usize> {
        let word = self.used_bins.iter().rposition(|&bits| bits != 0)?;
        Some(word * 32 + self.used_bins[word].ilog2() as usize)
    }

    fn absorb_after(&mut self, id: u32) {
        let gone = self.nodes[id as usize].after;
        let Node { len, after, .. } = self.nodes[gone as usize];
        self.nodes[id as usize].len += len;
        self.nodes[id as usize].after = after;
        if after != NONE {
            self.nodes[after as usize].before = id;
        }
        self.spare.push(gone);
    }

    fn new_node(&mut self, offset: u32, len: u32, before: u32, after: u32) -> u32 {
        let node = Node { offset, len, free: false, before, after, previous: NONE, next: NONE };
        if let Some(id) = self.spare.pop() {
            self.nodes[id as usize] = node;
            return id;
        }
        self.nodes.push(node);
        u32::try_from(self.nodes.len() - 1).expect("there are at most as many blocks as granules")
    }

    fn insert_free(&mut self, id: u32) {
        let bin = bin_of(self.nodes[id as usize].len);
        let head = self.heads[bin];
        let node = &mut self.nodes[id as usize];
        (node.free, node.previous, node.next) = (true, NONE, head);
        self.free += node.len;
        if head != NONE {
            self.nodes[head as usize].previous = id;
        }
        self.heads[bin] = id;
        self.used_bins[bin / 32] |= 1 << (bin % 32);
    }

    fn remove_free(&mut self, id: u32) {
        let Node { len, previous, next, .. } = self.nodes[id as usize];
        let bin = bin_of(len);
        match previous {
            NONE => self.heads[bin] = next,
            p => self.nodes[p as usize].next = next,
        }
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        if self.heads[bin] == NONE {
            self.used_bins[bin / 32] &= !(1 << (bin % 32));
        }
        self.nodes[id as usize].free = false;
        self.free -= len;
    }
}

/// The bin that holds blocks of `len`: 3 bits of mantissa below the leading one.
fn bin_of(len: u32) -> usize {
    let exponent = len.ilog2();
    if exponent < 3 {
        return len as usize;
    }
    let mantissa = (len >> (exponent - 3)) & 7;
    ((exponent - 2) * 8 + mantissa) as usize
}

/// The first bin whose every block has at least `len`.
fn bin_at_least(len: u32) -> usize {
    let bin = bin_of(len);
    let exponent = len.ilog2();
    let exact = exponent < 3 || len & ((1 << (exponent - 3)) - 1) == 0;
    if exact { bin } else { bin + 1 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bins_are_ordered_and_a_block_fits_every_request_of_its_bin_or_below() {
        let mut last = 0;
        for len in 1..70_000u32 {
            let bin = bin_of(len);
            assert!(bin == last || bin == last + 1, "{len}");
            last = bin;
            assert!(bin_at_least(len) >= bin);
            assert!(bin_of(len.next_power_of_two()) >= bin_at_least(len), "{len}");
        }
        assert!(bin_of(u32::MAX) < BIN_COUNT - 1);
    }

    #[test]
    fn a_block_that_fits_exactly_is_found_in_a_full_pool() {
        let mut a = OffsetAllocator::new(1733);
        let (id, _) = a.allocate(1733).unwrap();
        assert!(a.allocate(1).is_none());
        a.release(id);
        assert_eq!(a.allocate(1733).unwrap().1, 0);
    }

    /// The naive oracle: one flag per granule.
    fn longest_run(taken: &[bool]) -> u32 {
        taken.split(|&t| t).map(<[bool]>::len).max().unwrap_or(0) as u32
    }

    proptest! {
        #[test]
        fn random_programs_agree_with_one_flag_per_granule(
            capacity in 1u32..300,
            program in prop::collection::vec((any::<bool>(), 1u32..80), 1..200),
        ) {
            let mut a = OffsetAllocator::new(capacity);
            let mut taken = vec![false; capacity as usize];
            let mut live: Vec<(BlockId, u32, u32)> = Vec::new();
            for (allocate, n) in program {
                if allocate {
                    let fits = longest_run(&taken) >= n;
                    match a.allocate(n) {
                        Some((id, offset)) => {
                            prop_assert!(fits);
                            for flag in &mut taken[offset as usize..(offset + n) as usize] {
                                prop_assert!(!*flag, "overlap");
                                *flag = true;
                            }
                            live.push((id, offset, n));
                        }
                        None => prop_assert!(!fits, "refused {n} with a run of {}", longest_run(&taken)),
                    }
                } else if !live.is_empty() {
                    let (id, offset, n) = live.swap_remove(n as usize % live.len());
                    a.release(id);
                    taken[offset as usize..(offset + n) as usize].fill(false);
                }
                prop_assert_eq!(a.largest_free(), longest_run(&taken));
                prop_assert_eq!(a.free() as usize, taken.iter().filter(|t| !**t).count());
            }
        }
    }
}
