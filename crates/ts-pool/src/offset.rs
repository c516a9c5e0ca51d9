// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocates blocks of granules in ranges. A granule is the unit of allocation, for example 512
//! bytes. This module only does the bookkeeping and never accesses the memory.
//!
//! Free blocks are in bins by size, eight bins per power of two, with a bitmap of the non-empty
//! bins as in TLSF (Masmano et al., 2004). Blocks are linked to their neighbours, so that a freed
//! block coalesces with them. Allocating and freeing take O(1), with one exception: if no larger
//! bin has a block, the bin of the requested size is searched linearly. Without this search, a
//! nearly full pool could reject a request although a free block fits.
//!
//! Each block has an owner (for example a stream). A free block is in the bins of its owner, and
//! coalesces only with neighbours of the same owner.
//!
//! Programs request the same sizes again and again. A freed block of such a size goes to a quick
//! list, and is usually not coalesced until memory is short. Freeing and reusing such a block does
//! not access its node. With 100,000 blocks, the node is rarely in the CPU cache.

const NONE: u32 = u32::MAX;
/// Number of quick lists per owner.
const QUICK_LISTS: usize = 32;
/// Capacity of a quick list in blocks.
const QUICK_LIST_LEN: usize = 16;
/// The score that a quick list needs to accept freed blocks. A request of the list's size adds one
/// to its score. A request of another size with the same hash subtracts one.
const MIN_SCORE: u16 = 2;
/// The highest score of a quick list. If the score is 0 after a request of another size, the list
/// changes to that size.
const MAX_SCORE: u16 = 4;
const BIN_COUNT: usize = 8 * 32;

/// Identifies an allocated block of an [`OffsetAllocator`]. The id becomes invalid when the block
/// is freed, unless the block goes to a quick list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockId {
    node: u32,
    generation: u32,
}

impl BlockId {
    /// Returns a number that no other allocated block has.
    pub(crate) fn index(self) -> u32 {
        self.node
    }
}

/// The owner of a block, for example a stream. A free block can be allocated only for its owner,
/// until [`OffsetAllocator::steal`] or [`OffsetAllocator::give`] transfers it to another owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner(pub(crate) u16);

/// Position, owner and state of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockInfo {
    /// Number of the range, as passed to [`OffsetAllocator::add_range`].
    pub(crate) range: u16,
    /// Offset in the range, in granules.
    pub(crate) offset: u32,
    /// Length in granules.
    pub(crate) len: u32,
    /// The owner of the block, also while the block is free.
    pub(crate) owner: Owner,
    pub(crate) free: bool,
}

/// An entry of the node table: a block, or an unused entry if `len` is 0.
#[derive(Debug, Clone, Copy)]
struct Node {
    offset: u32,
    len: u32,
    /// Index of the node of the preceding block in the range, or `NONE`.
    before: u32,
    /// Index of the node of the following block in the range, or `NONE`.
    after: u32,
    /// Index of the preceding node in the free list of the bin, or `NONE`.
    previous: u32,
    /// Index of the following node in the free list of the bin, or `NONE`.
    next: u32,
    /// Odd while the block is allocated.
    generation: u32,
    owner: u16,
    range: u16,
}

impl Node {
    fn is_free(&self) -> bool {
        self.generation.is_multiple_of(2)
    }
}

/// Freed blocks of one size that are not coalesced. Their nodes still count as allocated.
#[derive(Debug, Clone, Copy)]
struct QuickList {
    /// Size of the blocks in granules.
    len: u32,
    count: u16,
    /// A measure of how often this size is requested, from 0 to [`MAX_SCORE`].
    score: u16,
    blocks: [BlockId; QUICK_LIST_LEN],
}

impl QuickList {
    const EMPTY: Self = Self {
        len: 0,
        count: 0,
        score: 0,
        blocks: [BlockId { node: NONE, generation: 0 }; QUICK_LIST_LEN],
    };

    fn push(&mut self, block: BlockId) {
        self.blocks[usize::from(self.count)] = block;
        self.count += 1;
    }

    fn pop(&mut self) -> Option<BlockId> {
        self.count = self.count.checked_sub(1)?;
        Some(self.blocks[usize::from(self.count)])
    }
}

/// The free blocks of one owner.
#[derive(Debug)]
struct Bins {
    quick_lists: [QuickList; QUICK_LISTS],
    /// Index of the first node of each bin, or `NONE`.
    heads: [u32; BIN_COUNT],
    /// Bit `b` of word `w` is set if bin `w * 32 + b` has a block.
    used: [u32; BIN_COUNT / 32],
    /// Number of free granules, including those in quick lists.
    free: u64,
}

impl Bins {
    const EMPTY: Self = Self {
        quick_lists: [QuickList::EMPTY; QUICK_LISTS],
        heads: [NONE; BIN_COUNT],
        used: [0; BIN_COUNT / 32],
        free: 0,
    };

    /// Returns the first non-empty bin from `bin` on.
    fn lowest_from(&self, bin: usize) -> Option<usize> {
        let mut mask = u32::MAX << (bin % 32);
        for word in bin / 32..self.used.len() {
            let bits = self.used[word] & mask;
            if bits != 0 {
                return Some(word * 32 + bits.trailing_zeros() as usize);
            }
            mask = u32::MAX;
        }
        None
    }

    /// Returns the last non-empty bin.
    fn highest(&self) -> Option<usize> {
        let word = self.used.iter().rposition(|&bits| bits != 0)?;
        Some(word * 32 + self.used[word].ilog2() as usize)
    }
}

/// Allocates disjoint blocks in one or more ranges. All lengths are in granules.
#[derive(Debug, Default)]
pub(crate) struct OffsetAllocator {
    nodes: Vec<Node>,
    /// Unused entries of `nodes`.
    unused_nodes: Vec<u32>,
    /// The bins of each owner.
    bins: Vec<Bins>,
}

impl OffsetAllocator {
    /// Creates an allocator with one range `0..capacity`, which belongs to owner 0.
    pub(crate) fn new(capacity: u32) -> Self {
        let mut this = Self::default();
        this.add_range(0, capacity, Owner(0));
        this
    }

    /// Adds a free range `0..len` with the number `range`, which belongs to `owner`.
    pub(crate) fn add_range(&mut self, range: u16, len: u32, owner: Owner) {
        self.add_owner(owner);
        if len > 0 {
            let node = Node {
                offset: 0,
                len,
                before: NONE,
                after: NONE,
                previous: NONE,
                next: NONE,
                generation: 0,
                owner: owner.0,
                range,
            };
            let id = self.new_node(node);
            self.insert_free(id);
        }
    }

    /// Removes each range that consists of one free block, if `remove` returns `true` for the
    /// block. Returns the numbers of the removed ranges.
    pub(crate) fn remove_ranges(&mut self, mut remove: impl FnMut(BlockInfo) -> bool) -> Vec<u16> {
        self.coalesce_all();
        let mut removed = Vec::new();
        for id in 0..self.nodes.len() as u32 {
            let node = self.nodes[id as usize];
            let whole = node.len > 0 && node.is_free() && node.before == NONE && node.after == NONE;
            if whole && remove(block_info(&node)) {
                self.remove_free(id);
                self.recycle_node(id);
                removed.push(node.range);
            }
        }
        removed
    }

    /// Creates the bins of an owner, and of all owners with smaller numbers, if they do not exist.
    pub(crate) fn add_owner(&mut self, owner: Owner) {
        while self.bins.len() <= usize::from(owner.0) {
            self.bins.push(Bins::EMPTY);
        }
    }

    /// Allocates `len` granules from the free blocks of `owner`. Returns `None` if no block is long
    /// enough.
    pub(crate) fn allocate(&mut self, len: u32, owner: Owner) -> Option<BlockId> {
        let len = len.max(1);
        if let Some(block) = self.take_quick(len, owner) {
            return Some(block);
        }
        let id = match self.find(len, owner) {
            Some(id) => id,
            None => {
                self.coalesce(owner);
                self.find(len, owner)?
            }
        };
        Some(self.take(id, len))
    }

    /// Allocates `len` granules for `owner` from a free block of another owner.
    ///
    /// Considers only owners for which `may_take` returns `true`, and takes the smallest block
    /// found. Returns the block and its previous owner, or `None` if no block is long enough.
    pub(crate) fn steal(
        &mut self,
        len: u32,
        owner: Owner,
        mut may_take: impl FnMut(Owner) -> bool,
    ) -> Option<(BlockId, Owner)> {
        let len = len.max(1);
        let others: Vec<_> = (0..self.bins.len() as u16)
            .map(Owner)
            .filter(|&other| other != owner && may_take(other))
            .collect();
        let best = |this: &Self| {
            let found = others.iter().filter_map(|&other| this.find(len, other));
            found.min_by_key(|&id| this.nodes[id as usize].len)
        };
        let id = match best(self) {
            Some(id) => id,
            // Takes blocks from quick lists last, because their owners will probably request these
            // blocks soon.
            None => {
                others.iter().for_each(|&other| self.coalesce(other));
                best(self)?
            }
        };
        let from = Owner(self.nodes[id as usize].owner);
        let block = self.take(id, len);
        self.nodes[id as usize].owner = owner.0;
        Some((block, from))
    }

    /// Reverts [`steal`](Self::steal): frees the block for its previous owner.
    pub(crate) fn unsteal(&mut self, block: BlockId, from: Owner) {
        self.nodes[block.node as usize].owner = from.0;
        self.free_to_bins(block);
    }

    /// Frees a block and coalesces it with its free neighbours. Returns `false` if it was already
    /// free.
    pub(crate) fn release(&mut self, block: BlockId) -> bool {
        let live = self.is_live(block);
        if live {
            self.free_to_bins(block);
        }
        live
    }

    /// Frees an allocated block of `len` granules that belongs to `owner`. Puts the block into a
    /// quick list if possible.
    ///
    /// The caller must not use the id afterwards. [`is_live`](Self::is_live) cannot detect such a
    /// use, because the id stays valid while the block is in a quick list.
    pub(crate) fn release_sized(&mut self, block: BlockId, len: u32, owner: Owner) {
        let bins = &mut self.bins[usize::from(owner.0)];
        let list = &mut bins.quick_lists[quick_list_of(len)];
        if list.len == len && list.score >= MIN_SCORE && usize::from(list.count) < QUICK_LIST_LEN {
            list.push(block);
            bins.free += u64::from(len);
        } else {
            self.free_to_bins(block);
        }
    }

    /// Frees an allocated block, coalesces it and inserts it into its bin.
    fn free_to_bins(&mut self, block: BlockId) {
        let node = &mut self.nodes[block.node as usize];
        node.generation = node.generation.wrapping_add(1);
        let id = self.merge_neighbours(block.node);
        self.insert_free(id);
    }

    /// Allocates a block of exactly `len` granules from a quick list, if it has one. Updates the
    /// score of the list.
    fn take_quick(&mut self, len: u32, owner: Owner) -> Option<BlockId> {
        let bins = self.bins.get_mut(usize::from(owner.0))?;
        let list = &mut bins.quick_lists[quick_list_of(len)];
        if list.len == len {
            list.score = (list.score + 1).min(MAX_SCORE);
            let block = list.pop()?;
            bins.free -= u64::from(len);
            return Some(block);
        }
        list.score = list.score.saturating_sub(1);
        if list.score == 0 {
            self.flush_quick_list(owner, quick_list_of(len));
            let list = &mut self.bins[usize::from(owner.0)].quick_lists[quick_list_of(len)];
            (list.len, list.score) = (len, 1);
        }
        None
    }

    /// Coalesces the blocks of a quick list, and moves them to the bins.
    fn flush_quick_list(&mut self, owner: Owner, list: usize) {
        loop {
            let bins = &mut self.bins[usize::from(owner.0)];
            let list = &mut bins.quick_lists[list];
            let Some(block) = list.pop() else { return };
            bins.free -= u64::from(list.len);
            self.free_to_bins(block);
        }
    }

    /// Coalesces the blocks in the quick lists of an owner.
    fn coalesce(&mut self, owner: Owner) {
        if usize::from(owner.0) < self.bins.len() {
            (0..QUICK_LISTS).for_each(|list| self.flush_quick_list(owner, list));
        }
    }

    /// Coalesces the blocks in all quick lists.
    pub(crate) fn coalesce_all(&mut self) {
        (0..self.bins.len() as u16).for_each(|owner| self.coalesce(Owner(owner)));
    }

    /// Frees a block that fills its whole range, and removes the range. Returns the number of the
    /// range, or `None` if the block was already free.
    pub(crate) fn release_with_range(&mut self, block: BlockId) -> Option<u16> {
        if !self.is_live(block) {
            return None;
        }
        let node = &mut self.nodes[block.node as usize];
        debug_assert!(node.before == NONE && node.after == NONE, "the block fills its range");
        node.generation = node.generation.wrapping_add(1);
        let range = node.range;
        self.recycle_node(block.node);
        Some(range)
    }

    /// Transfers free blocks of other owners to `owner`, and coalesces them. Takes the blocks of
    /// each owner for which `may_take` returns `true`.
    pub(crate) fn give(&mut self, owner: Owner, mut may_take: impl FnMut(Owner) -> bool) {
        self.coalesce_all();
        for id in 0..self.nodes.len() as u32 {
            let node = self.nodes[id as usize];
            if node.len > 0
                && node.is_free()
                && node.owner != owner.0
                && may_take(Owner(node.owner))
            {
                self.remove_free(id);
                self.nodes[id as usize].owner = owner.0;
                let id = self.merge_neighbours(id);
                self.insert_free(id);
            }
        }
    }

    /// Replaces the id of an allocated block, so that the old id becomes invalid.
    pub(crate) fn renew_id(&mut self, block: BlockId) -> BlockId {
        debug_assert!(self.is_live(block));
        let generation = block.generation.wrapping_add(2);
        self.nodes[block.node as usize].generation = generation;
        BlockId { generation, ..block }
    }

    /// Returns the allocated blocks of `owner`.
    pub(crate) fn live_of(&mut self, owner: Owner) -> Vec<BlockId> {
        self.coalesce(owner);
        let live =
            |(_, node): &(usize, &Node)| node.len > 0 && !node.is_free() && node.owner == owner.0;
        let nodes = self.nodes.iter().enumerate().filter(live);
        nodes.map(|(id, node)| BlockId { node: id as u32, generation: node.generation }).collect()
    }

    /// Returns whether the id is valid: the block was not freed, or is still in a quick list.
    pub(crate) fn is_live(&self, block: BlockId) -> bool {
        self.nodes[block.node as usize].generation == block.generation
    }

    /// Returns the position and the owner of a block, or `None` if the id is invalid.
    pub(crate) fn block_info(&self, block: BlockId) -> Option<BlockInfo> {
        self.is_live(block).then(|| block_info(&self.nodes[block.node as usize]))
    }

    /// Returns all blocks, allocated and free, in the order of range and offset.
    /// Coalesces all free blocks first.
    pub(crate) fn blocks(&mut self) -> Vec<BlockInfo> {
        self.coalesce_all();
        let mut blocks: Vec<BlockInfo> =
            self.nodes.iter().filter(|node| node.len > 0).map(block_info).collect();
        blocks.sort_unstable_by_key(|block| (block.range, block.offset));
        blocks
    }

    /// Returns the number of free granules.
    pub(crate) fn free(&self) -> u64 {
        self.bins.iter().map(|bins| bins.free).sum()
    }

    /// Returns the number of free granules of `owner`.
    pub(crate) fn free_of(&self, owner: Owner) -> u64 {
        self.bins.get(usize::from(owner.0)).map_or(0, |bins| bins.free)
    }

    /// Returns the length of the longest free block of any owner, in granules. Coalesces all free
    /// blocks first.
    pub(crate) fn largest_free(&mut self) -> u32 {
        self.coalesce_all();
        let largest = |owner: usize| {
            let bin = self.bins[owner].highest()?;
            self.bin(owner, bin).map(|id| self.nodes[id as usize].len).max()
        };
        (0..self.bins.len()).filter_map(largest).max().unwrap_or(0)
    }

    /// Returns a free block of `owner` with at least `len` granules.
    fn find(&self, len: u32, owner: Owner) -> Option<u32> {
        let bins = self.bins.get(usize::from(owner.0))?;
        // The block that was freed last often fits, because programs request the same sizes again.
        let last = bins.heads[bin_of(len)];
        if last != NONE && self.nodes[last as usize].len >= len {
            return Some(last);
        }
        // Every block in the bins from `bin_at_least(len)` on fits. If these bins are empty,
        // searches the bin of `len`, whose blocks may be too short.
        bins.lowest_from(bin_at_least(len)).map(|bin| bins.heads[bin]).or_else(|| {
            self.bin(usize::from(owner.0), bin_of(len))
                .find(|&id| self.nodes[id as usize].len >= len)
        })
    }

    /// Iterates over the nodes of the free blocks in a bin.
    fn bin(&self, owner: usize, bin: usize) -> impl Iterator<Item = u32> + '_ {
        let first = self.bins[owner].heads[bin];
        std::iter::successors((first != NONE).then_some(first), |&id| {
            let next = self.nodes[id as usize].next;
            (next != NONE).then_some(next)
        })
    }

    /// Allocates the first `len` granules of a free block, and frees the rest as a new block.
    fn take(&mut self, id: u32, len: u32) -> BlockId {
        self.remove_free(id);
        let node = self.nodes[id as usize];
        if node.len > len {
            let rest = Node {
                offset: node.offset + len,
                len: node.len - len,
                before: id,
                generation: 0,
                ..node
            };
            let rest = self.new_node(rest);
            if node.after != NONE {
                self.nodes[node.after as usize].before = rest;
            }
            self.nodes[id as usize].after = rest;
            self.nodes[id as usize].len = len;
            self.insert_free(rest);
        }
        let node = &mut self.nodes[id as usize];
        node.generation = node.generation.wrapping_add(1);
        BlockId { node: id, generation: node.generation }
    }

    /// Coalesces a block with its free neighbours of the same owner. The block must not be in a
    /// bin. Returns the resulting block.
    fn merge_neighbours(&mut self, id: u32) -> u32 {
        let mut id = id;
        let Node { before, after, owner, .. } = self.nodes[id as usize];
        let can_merge = |this: &Self, other: u32| {
            other != NONE
                && this.nodes[other as usize].is_free()
                && this.nodes[other as usize].owner == owner
        };
        if can_merge(self, after) {
            self.remove_free(after);
            self.absorb_after(id);
        }
        if can_merge(self, before) {
            self.remove_free(before);
            self.absorb_after(before);
            id = before;
        }
        id
    }

    /// Extends a block by the block after it, which must not be in a bin.
    fn absorb_after(&mut self, id: u32) {
        let gone = self.nodes[id as usize].after;
        let Node { len, after, .. } = self.nodes[gone as usize];
        self.nodes[id as usize].len += len;
        self.nodes[id as usize].after = after;
        if after != NONE {
            self.nodes[after as usize].before = id;
        }
        self.recycle_node(gone);
    }

    /// Makes a node available for another block. The node keeps its generation, so that old ids
    /// stay invalid.
    fn recycle_node(&mut self, id: u32) {
        self.nodes[id as usize].len = 0;
        self.unused_nodes.push(id);
    }

    fn new_node(&mut self, node: Node) -> u32 {
        if let Some(id) = self.unused_nodes.pop() {
            let generation = self.nodes[id as usize].generation;
            self.nodes[id as usize] = Node { generation, ..node };
            return id;
        }
        self.nodes.push(node);
        u32::try_from(self.nodes.len() - 1).expect("there are at most `u32::MAX` blocks")
    }

    /// Inserts a block at the head of its bin.
    fn insert_free(&mut self, id: u32) {
        let Node { len, owner, .. } = self.nodes[id as usize];
        let (bin, bins) = (bin_of(len), &mut self.bins[usize::from(owner)]);
        let head = std::mem::replace(&mut bins.heads[bin], id);
        bins.used[bin / 32] |= 1 << (bin % 32);
        bins.free += u64::from(len);
        let node = &mut self.nodes[id as usize];
        (node.previous, node.next) = (NONE, head);
        if head != NONE {
            self.nodes[head as usize].previous = id;
        }
    }

    /// Removes a block from its bin.
    fn remove_free(&mut self, id: u32) {
        let Node { len, previous, next, owner, .. } = self.nodes[id as usize];
        let (bin, bins) = (bin_of(len), &mut self.bins[usize::from(owner)]);
        bins.free -= u64::from(len);
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        match previous {
            NONE => {
                bins.heads[bin] = next;
                if next == NONE {
                    bins.used[bin / 32] &= !(1 << (bin % 32));
                }
            }
            p => self.nodes[p as usize].next = next,
        }
    }
}

/// Returns the quick list for blocks of `len` granules.
fn quick_list_of(len: u32) -> usize {
    // Fibonacci hashing (Knuth) distributes similar sizes over different lists.
    (len.wrapping_mul(0x9E37_79B9) >> 27) as usize
}

fn block_info(node: &Node) -> BlockInfo {
    let Node { offset, len, owner, range, .. } = *node;
    BlockInfo { range, offset, len, owner: Owner(owner), free: node.is_free() }
}

/// Returns the bin for blocks of `len` granules. From 8 granules on, the number of the bin combines
/// the binary exponent of `len` with the 3 bits below its leading bit.
fn bin_of(len: u32) -> usize {
    let exponent = len.ilog2();
    if exponent < 3 {
        return len as usize;
    }
    let mantissa = (len >> (exponent - 3)) & 7;
    ((exponent - 2) * 8 + mantissa) as usize
}

/// Returns the first bin in which all blocks have at least `len` granules.
fn bin_at_least(len: u32) -> usize {
    let bin = bin_of(len);
    let exponent = len.ilog2();
    let exact = exponent < 3 || len & ((1 << (exponent - 3)) - 1) == 0;
    if exact { bin } else { bin + 1 }
}

#[cfg(test)]
mod tests;
