// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocates offsets in ranges of granules. It only does the bookkeeping and touches no memory.
//!
//! Free blocks are kept in bins by size, eight bins per power of two, with a bitmap of the
//! non-empty bins as in TLSF (Masmano et al., 2004). Blocks are linked to their neighbours, so that
//! a freed block coalesces with them. Allocating and freeing take O(1), with one exception: if no
//! larger bin has a block, the bin of the requested size is searched linearly. A pool that is meant
//! to be full must not refuse a block that fits exactly.
//!
//! Each block has an owner (for example a stream). A free block is in the bins of its owner, and
//! coalesces only with neighbours of the same owner.
//!
//! Programs request the same sizes again and again. A freed block of such a size goes to a quick
//! list and is not coalesced before memory is short. Freeing and reusing it does not read or change
//! its node, which with 100,000 blocks is rarely in the cache.

const NONE: u32 = u32::MAX;
/// Number of quick lists per owner.
const QUICK_LISTS: usize = 32;
/// Capacity of a quick list in blocks.
const QUICK_LIST_LEN: usize = 16;
/// The score from which a quick list accepts blocks. A request of its size adds one to the score,
/// and a request of another size with the same hash subtracts one.
const MIN_SCORE: u16 = 2;
/// The highest score, which is the number of other requests after which the list changes its size.
const MAX_SCORE: u16 = 4;
const BIN_COUNT: usize = 8 * 32;

/// Identifies an allocated block of an [`OffsetAllocator`]. It becomes invalid when the block is
/// freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockId {
    node: u32,
    generation: u32,
}

impl BlockId {
    /// Returns a number that is unique among the allocated blocks.
    pub(crate) fn index(self) -> u32 {
        self.node
    }
}

/// The owner of a block. Only the owner can allocate the block again, until
/// [`OffsetAllocator::steal`] or [`OffsetAllocator::give`] transfers it to another owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner(pub(crate) u16);

/// Position, owner and state of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockInfo {
    /// Number of the range, as passed to [`OffsetAllocator::add_range`].
    pub(crate) range: u16,
    /// In granules.
    pub(crate) offset: u32,
    /// In granules.
    pub(crate) len: u32,
    /// The owner. A free block keeps its owner.
    pub(crate) owner: Owner,
    pub(crate) free: bool,
}

/// A block, or an unused entry of the node table with `len` 0.
#[derive(Debug, Clone, Copy)]
struct Node {
    offset: u32,
    len: u32,
    /// Neighbours in the range, by offset.
    before: u32,
    after: u32,
    /// Neighbours in the free list of the bin.
    previous: u32,
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

/// Freed blocks of one size that were not coalesced. Their nodes still count as allocated.
#[derive(Debug, Clone, Copy)]
struct QuickList {
    /// Size of the blocks in granules.
    len: u32,
    count: u16,
    /// How likely this size is to be requested again.
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
    /// The first node of each bin.
    heads: [u32; BIN_COUNT],
    /// Bit `b` of word `w` is set if bin `w * 32 + b` has a block.
    used: [u32; BIN_COUNT / 32],
    /// Free granules, including those in quick lists.
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

    /// Removes the ranges that are one free block and for which `remove` returns `true`. Returns
    /// their numbers.
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

    /// Creates the bins of an owner.
    pub(crate) fn add_owner(&mut self, owner: Owner) {
        while self.bins.len() <= usize::from(owner.0) {
            self.bins.push(Bins::EMPTY);
        }
    }

    /// Allocates `len` granules from the free blocks of `owner`; `None` if none is long enough.
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

    /// Allocates `len` granules for `owner` from the free blocks of another owner that `may_take`
    /// accepts. Takes the smallest block found. Returns the block and its previous owner.
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
            // Quick lists are the last resort, because their owners will probably request their
            // blocks next.
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

    /// Frees an allocated block of known length and owner, if possible to a quick list. The caller
    /// must not use the id any more, because it stays valid while the block is in the quick list.
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

    /// Takes a block of exactly this length from a quick list, and updates the score of the list.
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

    /// Moves the blocks of a quick list to the bins.
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

    /// Frees a block that fills its whole range, and removes the range. Returns the range's number,
    /// or `None` if the block was already free.
    pub(crate) fn release_with_range(&mut self, block: BlockId) -> Option<u16> {
        if !self.is_live(block) {
            return None;
        }
        let node = &mut self.nodes[block.node as usize];
        debug_assert!(node.before == NONE && node.after == NONE, "the range has other blocks");
        node.generation = node.generation.wrapping_add(1);
        let range = node.range;
        self.recycle_node(block.node);
        Some(range)
    }

    /// Transfers the free blocks of all owners that `may_take` accepts to `owner`, and coalesces
    /// them.
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

    /// Returns whether the id is valid: the block has not been freed since it was allocated.
    pub(crate) fn is_live(&self, block: BlockId) -> bool {
        self.nodes[block.node as usize].generation == block.generation
    }

    /// Returns position and owner of an allocated block; `None` if it was freed.
    pub(crate) fn block_info(&self, block: BlockId) -> Option<BlockInfo> {
        self.is_live(block).then(|| block_info(&self.nodes[block.node as usize]))
    }

    /// Returns all blocks, ordered by range and offset.
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

    /// Returns the length of the longest free block of any owner.
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
        // The block that was freed last often fits, because programs repeat their requests.
        let last = bins.heads[bin_of(len)];
        if last != NONE && self.nodes[last as usize].len >= len {
            return Some(last);
        }
        // Any block of a bin whose smallest size is at least `len` fits. Otherwise, search the bin
        // that contains `len`, whose blocks may be shorter.
        bins.lowest_from(bin_at_least(len)).map(|bin| bins.heads[bin]).or_else(|| {
            self.bin(usize::from(owner.0), bin_of(len))
                .find(|&id| self.nodes[id as usize].len >= len)
        })
    }

    /// Iterates over the free blocks in a bin.
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

    /// Coalesces a block that is in no bin with its free neighbours of the same owner. Returns the
    /// resulting block.
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

    /// Extends a block by its next neighbour, which must be in no bin.
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

    /// Makes a node available for another block. It keeps its generation, so that old ids stay
    /// invalid.
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
    // Fibonacci hashing (Knuth) spreads similar sizes over different lists.
    (len.wrapping_mul(0x9E37_79B9) >> 27) as usize
}

fn block_info(node: &Node) -> BlockInfo {
    let Node { offset, len, owner, range, .. } = *node;
    BlockInfo { range, offset, len, owner: Owner(owner), free: node.is_free() }
}

/// Returns the bin for blocks of `len` granules: the exponent and the 3 bits below the leading one.
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
