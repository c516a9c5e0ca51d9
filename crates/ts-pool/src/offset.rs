// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocation of offsets: which part of ranges of granules is taken, and by whom what is free may
//! be taken. Touches no memory.
//!
//! Free blocks hang in bins of rounded sizes, eight to a power of two, found by two bitmaps as in
//! TLSF (Masmano et al., 2004); neighbours are linked so that a freed block joins them. All steps
//! are O(1), but for a last look through one bin when no larger bin has a block: a pool that is
//! meant to be full should not refuse a block that fits exactly.
//!
//! Each free block has an owner, whose bins it hangs in. Neighbours join if their owner is the
//! same.
//!
//! Programs ask for the same sizes again and again. So a block of such a size that is freed first
//! rests as it is, and joins its neighbours only when memory is short. Nothing that is known of it
//! changes meanwhile, and nothing of it is looked at: of a hundred thousand blocks that is in no
//! cache.

const NONE: u32 = u32::MAX;
/// Places to rest of each owner, and how many blocks of one size fit in one.
const BEDS: usize = 32;
const BED_LEN: usize = 16;
/// How often in a row a size is asked for before its blocks rest, and after how many others they do
/// no more.
const TRUSTED: u16 = 2;
const MOST_TRUST: u16 = 4;
const BIN_COUNT: usize = 8 * 32;

/// Names a block of an [`OffsetAllocator`], and its state: a block that was freed since is another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockId {
    node: u32,
    generation: u32,
}

impl BlockId {
    /// A number that no other block has while this is taken.
    pub(crate) fn number(self) -> u32 {
        self.node
    }
}

/// Whose free blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner(pub(crate) u16);

/// A block as it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// The range that it is in, as [`OffsetAllocator::add_range`] was told.
    pub(crate) range: u16,
    /// In granules.
    pub(crate) offset: u32,
    /// In granules.
    pub(crate) len: u32,
    /// Whose it is, or who had it last.
    pub(crate) owner: Owner,
    pub(crate) free: bool,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    offset: u32,
    len: u32,
    /// Neighbours in address order.
    before: u32,
    after: u32,
    /// Neighbours in the free list of the block's bin.
    previous: u32,
    next: u32,
    /// Odd while the block is taken.
    generation: u32,
    owner: u16,
    range: u16,
}

impl Node {
    fn is_free(&self) -> bool {
        self.generation.is_multiple_of(2)
    }
}

/// Resting blocks of one size.
#[derive(Debug, Clone, Copy)]
struct Bed {
    /// In granules.
    len: u32,
    count: u16,
    /// How sure it is that this size will be asked for again.
    trust: u16,
    blocks: [BlockId; BED_LEN],
}

impl Bed {
    const EMPTY: Self = Self {
        len: 0,
        count: 0,
        trust: 0,
        blocks: [BlockId { node: NONE, generation: 0 }; BED_LEN],
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
    beds: [Bed; BEDS],
    heads: [u32; BIN_COUNT],
    /// Bit `b` of word `w`: bin `w * 32 + b` has a block.
    used: [u32; BIN_COUNT / 32],
    free: u64,
}

impl Bins {
    const EMPTY: Self = Self {
        beds: [Bed::EMPTY; BEDS],
        heads: [NONE; BIN_COUNT],
        used: [0; BIN_COUNT / 32],
        free: 0,
    };

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

    fn highest(&self) -> Option<usize> {
        let word = self.used.iter().rposition(|&bits| bits != 0)?;
        Some(word * 32 + self.used[word].ilog2() as usize)
    }
}

/// Hands out disjoint runs of ranges, in granules.
#[derive(Debug, Default)]
pub(crate) struct OffsetAllocator {
    nodes: Vec<Node>,
    spare: Vec<u32>,
    bins: Vec<Bins>,
}

impl OffsetAllocator {
    /// One range, `0..capacity`, of the first owner's.
    pub(crate) fn new(capacity: u32) -> Self {
        let mut this = Self::default();
        this.add_range(0, capacity, Owner(0));
        this
    }

    /// More to hand out, of `owner`'s: `0..len` of a range of its own.
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

    /// Takes ranges back that are free in one piece and of which `is_done` says so; their numbers.
    pub(crate) fn remove_ranges(&mut self, mut is_done: impl FnMut(Place) -> bool) -> Vec<u16> {
        self.wake_all();
        let mut removed = Vec::new();
        for id in 0..self.nodes.len() as u32 {
            let node = self.nodes[id as usize];
            let whole = node.len > 0 && node.is_free() && node.before == NONE && node.after == NONE;
            if whole && is_done(place(&node)) {
                self.remove_free(id);
                self.retire(id);
                removed.push(node.range);
            }
        }
        removed
    }

    /// Makes room for the free blocks of an owner.
    pub(crate) fn add_owner(&mut self, owner: Owner) {
        while self.bins.len() <= usize::from(owner.0) {
            self.bins.push(Bins::EMPTY);
        }
    }

    /// Takes `len` granules of what is `owner`'s; `None` when no free block of its is that long.
    pub(crate) fn allocate(&mut self, len: u32, owner: Owner) -> Option<BlockId> {
        let len = len.max(1);
        if let Some(block) = self.rouse(len, owner) {
            return Some(block);
        }
        let id = match self.find(len, owner) {
            Some(id) => id,
            None => {
                self.wake(owner);
                self.find(len, owner)?
            }
        };
        Some(self.take(id, len))
    }

    /// Takes `len` granules of what is another's, the best that fits, where `may_take` allows it,
    /// and makes it `owner`'s.
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
            // What rests is what its owner wants next.
            None => {
                others.iter().for_each(|&other| self.wake(other));
                best(self)?
            }
        };
        let from = Owner(self.nodes[id as usize].owner);
        let block = self.take(id, len);
        self.nodes[id as usize].owner = owner.0;
        Some((block, from))
    }

    /// Gives back what was stolen, as if it had not been.
    pub(crate) fn unsteal(&mut self, block: BlockId, from: Owner) {
        self.nodes[block.node as usize].owner = from.0;
        self.join_bins(block);
    }

    /// Gives a block back to its owner, joined with its free neighbours. Whether it was still
    /// taken.
    pub(crate) fn release(&mut self, block: BlockId) -> bool {
        let live = self.is_live(block);
        if live {
            self.join_bins(block);
        }
        live
    }

    /// Gives a block back that is taken, of this length and owner, to rest. Nobody may ask for it
    /// by its name any more.
    pub(crate) fn release_sized(&mut self, block: BlockId, len: u32, owner: Owner) {
        let bins = &mut self.bins[usize::from(owner.0)];
        let bed = &mut bins.beds[bed_of(len)];
        if bed.len == len && bed.trust >= TRUSTED && usize::from(bed.count) < BED_LEN {
            bed.push(block);
            bins.free += u64::from(len);
        } else {
            self.join_bins(block);
        }
    }

    /// Joins a block that is taken with its free neighbours.
    fn join_bins(&mut self, block: BlockId) {
        let node = &mut self.nodes[block.node as usize];
        node.generation = node.generation.wrapping_add(1);
        let id = self.join(block.node);
        self.insert_free(id);
    }

    /// A block of exactly this size that rests, and does no more.
    fn rouse(&mut self, len: u32, owner: Owner) -> Option<BlockId> {
        let bins = self.bins.get_mut(usize::from(owner.0))?;
        let bed = &mut bins.beds[bed_of(len)];
        if bed.len == len {
            bed.trust = (bed.trust + 1).min(MOST_TRUST);
            let block = bed.pop()?;
            bins.free -= u64::from(len);
            return Some(block);
        }
        bed.trust = bed.trust.saturating_sub(1);
        if bed.trust == 0 {
            self.clear_bed(owner, bed_of(len));
            let bed = &mut self.bins[usize::from(owner.0)].beds[bed_of(len)];
            (bed.len, bed.trust) = (len, 1);
        }
        None
    }

    /// Has blocks that rest join their neighbours.
    fn clear_bed(&mut self, owner: Owner, bed: usize) {
        loop {
            let bins = &mut self.bins[usize::from(owner.0)];
            let bed = &mut bins.beds[bed];
            let Some(block) = bed.pop() else { return };
            bins.free -= u64::from(bed.len);
            self.join_bins(block);
        }
    }

    fn wake(&mut self, owner: Owner) {
        if usize::from(owner.0) < self.bins.len() {
            (0..BEDS).for_each(|bed| self.clear_bed(owner, bed));
        }
    }

    /// Has all that rests join its neighbours.
    pub(crate) fn wake_all(&mut self) {
        (0..self.bins.len() as u16).for_each(|owner| self.wake(Owner(owner)));
    }

    /// Takes a block back with its range, all of which it is; the range's number. `None` when it
    /// was not taken any more.
    pub(crate) fn release_with_range(&mut self, block: BlockId) -> Option<u16> {
        if !self.is_live(block) {
            return None;
        }
        let node = &mut self.nodes[block.node as usize];
        debug_assert!(node.before == NONE && node.after == NONE, "others are in the range");
        node.generation = node.generation.wrapping_add(1);
        let range = node.range;
        self.retire(block.node);
        Some(range)
    }

    /// Makes what is free and of those that `may_take` allows `owner`'s, and joins what can be
    /// joined.
    pub(crate) fn give(&mut self, owner: Owner, mut may_take: impl FnMut(Owner) -> bool) {
        self.wake_all();
        for id in 0..self.nodes.len() as u32 {
            let node = self.nodes[id as usize];
            if node.len > 0
                && node.is_free()
                && node.owner != owner.0
                && may_take(Owner(node.owner))
            {
                self.remove_free(id);
                self.nodes[id as usize].owner = owner.0;
                let id = self.join(id);
                self.insert_free(id);
            }
        }
    }

    /// The same block under another name: who knew the old one finds it gone.
    pub(crate) fn renamed(&mut self, block: BlockId) -> BlockId {
        debug_assert!(self.is_live(block));
        let generation = block.generation.wrapping_add(2);
        self.nodes[block.node as usize].generation = generation;
        BlockId { generation, ..block }
    }

    /// The blocks that are taken and `owner`'s.
    pub(crate) fn live_of(&mut self, owner: Owner) -> Vec<BlockId> {
        self.wake(owner);
        let live =
            |(_, node): &(usize, &Node)| node.len > 0 && !node.is_free() && node.owner == owner.0;
        let nodes = self.nodes.iter().enumerate().filter(live);
        nodes.map(|(id, node)| BlockId { node: id as u32, generation: node.generation }).collect()
    }

    /// Whether a block is still taken by whoever was given it.
    pub(crate) fn is_live(&self, block: BlockId) -> bool {
        self.nodes[block.node as usize].generation == block.generation
    }

    /// Where a block lies, as long as it is taken by whoever was given it.
    pub(crate) fn place(&self, block: BlockId) -> Option<Place> {
        self.is_live(block).then(|| place(&self.nodes[block.node as usize]))
    }

    /// All blocks, in the order of their ranges and offsets.
    pub(crate) fn places(&mut self) -> Vec<Place> {
        self.wake_all();
        let mut places: Vec<Place> =
            self.nodes.iter().filter(|node| node.len > 0).map(place).collect();
        places.sort_unstable_by_key(|place| (place.range, place.offset));
        places
    }

    /// Granules that are free.
    pub(crate) fn free(&self) -> u64 {
        self.bins.iter().map(|bins| bins.free).sum()
    }

    /// Granules that are free and `owner`'s.
    pub(crate) fn free_of(&self, owner: Owner) -> u64 {
        self.bins.get(usize::from(owner.0)).map_or(0, |bins| bins.free)
    }

    /// Length of the longest free block, whosesoever.
    pub(crate) fn largest_free(&mut self) -> u32 {
        self.wake_all();
        let largest = |owner: usize| {
            let bin = self.bins[owner].highest()?;
            self.bin(owner, bin).map(|id| self.nodes[id as usize].len).max()
        };
        (0..self.bins.len()).filter_map(largest).max().unwrap_or(0)
    }

    fn find(&self, len: u32, owner: Owner) -> Option<u32> {
        let bins = self.bins.get(usize::from(owner.0))?;
        // What was freed last is often what is wanted next.
        let last = bins.heads[bin_of(len)];
        if last != NONE && self.nodes[last as usize].len >= len {
            return Some(last);
        }
        // Any block of a bin whose smallest size is enough will do; else one of the bin that
        // straddles `len`.
        bins.lowest_from(bin_at_least(len)).map(|bin| bins.heads[bin]).or_else(|| {
            self.bin(usize::from(owner.0), bin_of(len))
                .find(|&id| self.nodes[id as usize].len >= len)
        })
    }

    fn bin(&self, owner: usize, bin: usize) -> impl Iterator<Item = u32> + '_ {
        let first = self.bins[owner].heads[bin];
        std::iter::successors((first != NONE).then_some(first), |&id| {
            let next = self.nodes[id as usize].next;
            (next != NONE).then_some(next)
        })
    }

    /// Takes the first `len` granules of a free block.
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

    /// Joins a block that hangs in no bin with its free neighbours of the same owner; the block
    /// that it is then.
    fn join(&mut self, id: u32) -> u32 {
        let mut id = id;
        let Node { before, after, owner, .. } = self.nodes[id as usize];
        let joins = |this: &Self, other: u32| {
            other != NONE
                && this.nodes[other as usize].is_free()
                && this.nodes[other as usize].owner == owner
        };
        if joins(self, after) {
            self.remove_free(after);
            self.absorb_after(id);
        }
        if joins(self, before) {
            self.remove_free(before);
            self.absorb_after(before);
            id = before;
        }
        id
    }

    fn absorb_after(&mut self, id: u32) {
        let gone = self.nodes[id as usize].after;
        let Node { len, after, .. } = self.nodes[gone as usize];
        self.nodes[id as usize].len += len;
        self.nodes[id as usize].after = after;
        if after != NONE {
            self.nodes[after as usize].before = id;
        }
        self.retire(gone);
    }

    /// A node that stands for nothing any more. Its generation goes on, so that who had it knows.
    fn retire(&mut self, id: u32) {
        self.nodes[id as usize].len = 0;
        self.spare.push(id);
    }

    fn new_node(&mut self, node: Node) -> u32 {
        if let Some(id) = self.spare.pop() {
            let generation = self.nodes[id as usize].generation;
            self.nodes[id as usize] = Node { generation, ..node };
            return id;
        }
        self.nodes.push(node);
        u32::try_from(self.nodes.len() - 1).expect("there are at most as many blocks as granules")
    }

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

fn bed_of(len: u32) -> usize {
    // Fibonacci hashing (Knuth): neighbouring sizes lie apart.
    (len.wrapping_mul(0x9E37_79B9) >> 27) as usize
}

fn place(node: &Node) -> Place {
    let Node { offset, len, owner, range, .. } = *node;
    Place { range, offset, len, owner: Owner(owner), free: node.is_free() }
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
mod tests;
