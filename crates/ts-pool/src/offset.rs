// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocation of offsets: which part of ranges of granules is taken, and by whom what is free may be taken. Touches no memory.
//!
//! Free blocks hang in bins of rounded sizes, eight to a power of two, found by two bitmaps as in TLSF
//! (Masmano et al., 2004); neighbours are linked so that a freed block joins them. All steps are O(1), but for
//! a last look through one bin when no larger bin has a block: a pool that is meant to be full should not
//! refuse a block that fits exactly.
//!
//! Each free block has an owner, whose bins it hangs in. Neighbours join if their owner is the same.
//!
//! Programs ask for the same sizes again and again. So a block of such a size that is freed first rests as it is, and joins its
//! neighbours only when memory is short. Nothing that is known of it changes meanwhile, and nothing of it is looked at: of a hundred
//! thousand blocks that is in no cache.

const NONE: u32 = u32::MAX;
/// Places to rest of each owner, and how many blocks of one size fit in one.
const BEDS: usize = 32;
const BED_LEN: usize = 16;
/// How often in a row a size is asked for before its blocks rest, and after how many others they do no more.
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
    const EMPTY: Self =
        Self { len: 0, count: 0, trust: 0, blocks: [BlockId { node: NONE, generation: 0 }; BED_LEN] };

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
    const EMPTY: Self =
        Self { beds: [Bed::EMPTY; BEDS], heads: [NONE; BIN_COUNT], used: [0; BIN_COUNT / 32], free: 0 };

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

    /// Takes `len` granules of what is another's, the best that fits, where `may_take` allows it, and makes it `owner`'s.
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

    /// Gives a block back to its owner, joined with its free neighbours. Whether it was still taken.
    pub(crate) fn release(&mut self, block: BlockId) -> bool {
        let live = self.is_live(block);
        if live {
            self.join_bins(block);
        }
        live
    }

    /// Gives a block back that is taken, of this length and owner, to rest. Nobody may ask for it by its name any more.
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

    /// Takes a block back with its range, all of which it is; the range's number. `None` when it was not taken any more.
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

    /// Makes what is free and of those that `may_take` allows `owner`'s, and joins what can be joined.
    pub(crate) fn give(&mut self, owner: Owner, mut may_take: impl FnMut(Owner) -> bool) {
        self.wake_all();
        for id in 0..self.nodes.len() as u32 {
            let node = self.nodes[id as usize];
            if node.len > 0 && node.is_free() && node.owner != owner.0 && may_take(Owner(node.owner)) {
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
        let live = |(_, node): &(usize, &Node)| node.len > 0 && !node.is_free() && node.owner == owner.0;
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
        let mut places: Vec<Place> = self.nodes.iter().filter(|node| node.len > 0).map(place).collect();
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
        // Any block of a bin whose smallest size is enough will do; else one of the bin that straddles `len`.
        bins.lowest_from(bin_at_least(len)).map(|bin| bins.heads[bin]).or_else(|| {
            self.bin(usize::from(owner.0), bin_of(len)).find(|&id| self.nodes[id as usize].len >= len)
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
            let rest =
                Node { offset: node.offset + len, len: node.len - len, before: id, generation: 0, ..node };
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

    /// Joins a block that hangs in no bin with its free neighbours of the same owner; the block that it is then.
    fn join(&mut self, id: u32) -> u32 {
        let mut id = id;
        let Node { before, after, owner, .. } = self.nodes[id as usize];
        let joins = |this: &Self, other: u32| {
            other != NONE && this.nodes[other as usize].is_free() && this.nodes[other as usize].owner == owner
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
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    const ONLY: Owner = Owner(0);

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
        let id = a.allocate(1733, ONLY).unwrap();
        assert!(a.allocate(1, ONLY).is_none());
        assert!(a.release(id));
        assert!(!a.release(id), "once");
        let again = a.allocate(1733, ONLY).unwrap();
        assert_eq!(a.place(again).unwrap().offset, 0);
    }

    /// The classic that wastes least: the smallest free block that is long enough, wherever it is.
    #[derive(Default)]
    struct BestFit {
        by_offset: BTreeMap<u64, u64>,
        by_len: BTreeSet<(u64, u64)>,
        end: u64,
    }

    impl BestFit {
        fn allocate(&mut self, len: u64) -> u64 {
            let found = self.by_len.range((len, 0)..).next().copied();
            let (have, offset) = found.unwrap_or_else(|| {
                // The end grows, behind what is free there.
                let last = self.by_offset.last_key_value().filter(|(at, have)| *at + *have == self.end);
                last.map_or((0, self.end), |(at, have)| (*have, *at))
            });
            if have > 0 {
                self.remove(offset, have);
            }
            self.end = self.end.max(offset + len);
            if have > len {
                self.insert(offset + len, have - len);
            }
            offset
        }

        fn release(&mut self, mut offset: u64, mut len: u64) {
            if let Some(&after) = self.by_offset.get(&(offset + len)) {
                self.remove(offset + len, after);
                len += after;
            }
            let before = self.by_offset.range(..offset).next_back().map(|(&at, &have)| (at, have));
            if let Some((at, have)) = before.filter(|(at, have)| at + have == offset) {
                self.remove(at, have);
                (offset, len) = (at, have + len);
            }
            self.insert(offset, len);
        }

        fn insert(&mut self, offset: u64, len: u64) {
            self.by_offset.insert(offset, len);
            self.by_len.insert((len, offset));
        }

        fn remove(&mut self, offset: u64, len: u64) {
            self.by_offset.remove(&offset);
            self.by_len.remove(&(len, offset));
        }
    }

    /// RMM's random allocations: sizes of up to 1 MiB, an allocation or a free by the toss of a coin.
    #[test]
    fn no_more_memory_is_needed_than_by_best_fit_and_a_tenth() {
        for (seed, count) in [(1u64, 1000), (2, 10_000), (3, 100_000)] {
            let (mut ours, mut best, mut end) = (OffsetAllocator::new(u32::MAX - 1), BestFit::default(), 0);
            let (mut live, mut state) = (Vec::new(), seed);
            let mut below = |n: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % n
            };
            let mut allocated = 0;
            while allocated < count {
                if live.is_empty() || below(2) == 0 {
                    let len = 1 + below((1 << 20) / 512);
                    let block = ours.allocate(len as u32, ONLY).unwrap();
                    let place = ours.place(block).unwrap();
                    end = end.max(u64::from(place.offset) + len);
                    live.push((block, best.allocate(len), len));
                    allocated += 1;
                } else {
                    let (block, offset, len) = live.swap_remove(below(live.len() as u64) as usize);
                    ours.release(block);
                    best.release(offset, len);
                }
            }
            let ratio = end as f64 / best.end as f64;
            println!("{count} allocations: {ratio:.3} of best fit");
            assert!(ratio <= 1.1, "{count} allocations: {ratio}");
        }
    }

    /// The naive oracle: for each granule of each range who may have it, or nobody while it is taken.
    type Oracle = Vec<Vec<Option<Owner>>>;

    /// The longest run of an owner's free granules.
    fn longest(oracle: &Oracle, owner: Option<Owner>) -> u32 {
        let runs = oracle.iter().flat_map(|range| range.chunk_by(|a, b| a == b));
        let free = runs.filter(|run| run[0].is_some() && (owner.is_none() || run[0] == owner));
        free.map(<[_]>::len).max().unwrap_or(0) as u32
    }

    #[derive(Debug, Clone)]
    enum Step {
        Allocate { len: u32, owner: u16 },
        Steal { len: u32, owner: u16, keep: bool },
        Release(usize),
        ReleaseSized(usize),
        ReleaseAll { owner: u16 },
        Give { owner: u16 },
        AddRange { len: u32, owner: u16 },
        RemoveRanges,
    }

    fn step() -> impl Strategy<Value = Step> {
        let owner = 0..3u16;
        prop_oneof![
            4 => (1..80u32, owner.clone()).prop_map(|(len, owner)| Step::Allocate { len, owner }),
            // What is asked for again and again.
            8 => (prop::sample::select(vec![3, 7, 20]), owner.clone())
                .prop_map(|(len, owner)| Step::Allocate { len, owner }),
            4 => any::<usize>().prop_map(Step::Release),
            6 => any::<usize>().prop_map(Step::ReleaseSized),
            2 => (1..80u32, owner.clone(), any::<bool>())
                .prop_map(|(len, owner, keep)| Step::Steal { len, owner, keep }),
            1 => owner.clone().prop_map(|owner| Step::ReleaseAll { owner }),
            1 => owner.clone().prop_map(|owner| Step::Give { owner }),
            1 => (1..200u32, owner).prop_map(|(len, owner)| Step::AddRange { len, owner }),
            1 => Just(Step::RemoveRanges),
        ]
    }

    proptest! {
        #[test]
        fn random_programs_agree_with_one_owner_per_granule(
            capacity in 1u32..300,
            program in prop::collection::vec((step(), prop::bool::weighted(0.1)), 1..200),
        ) {
            let mut a = OffsetAllocator::new(capacity);
            (0..3).for_each(|owner| a.add_owner(Owner(owner)));
            let mut oracle: Oracle = vec![vec![Some(ONLY); capacity as usize]];
            let mut live: Vec<(BlockId, Place)> = Vec::new();
            let granules = |place: &Place| place.offset as usize..(place.offset + place.len) as usize;
            for (step, look) in program {
                match step {
                    Step::Allocate { len, owner } => match a.allocate(len, Owner(owner)) {
                        Some(id) => {
                            let place = a.place(id).unwrap();
                            prop_assert_eq!((place.len, place.owner), (len, Owner(owner)));
                            for granule in &mut oracle[usize::from(place.range)][granules(&place)] {
                                prop_assert_eq!(granule.take(), Some(Owner(owner)), "overlap");
                            }
                            live.push((id, place));
                        }
                        None => prop_assert!(longest(&oracle, Some(Owner(owner))) < len),
                    },
                    Step::Steal { len, owner, keep } => match a.steal(len, Owner(owner), |other| other != Owner(1)) {
                        Some((id, from)) => {
                            let place = a.place(id).unwrap();
                            prop_assert!(from != Owner(owner) && from != Owner(1));
                            if !keep {
                                a.unsteal(id, from);
                                prop_assert!(!a.is_live(id));
                                continue;
                            }
                            for granule in &mut oracle[usize::from(place.range)][granules(&place)] {
                                prop_assert_eq!(granule.take(), Some(from), "overlap");
                            }
                            live.push((id, place));
                        }
                        None => {
                            let others = (0..3).filter(|&other| other != 1 && other != owner);
                            prop_assert!(others.map(Owner).all(|other| longest(&oracle, Some(other)) < len));
                        }
                    },
                    Step::Release(n) if !live.is_empty() => {
                        let (id, place) = live.swap_remove(n % live.len());
                        prop_assert!(a.release(id) && !a.release(id));
                        oracle[usize::from(place.range)][granules(&place)].fill(Some(place.owner));
                    }
                    Step::ReleaseSized(n) if !live.is_empty() => {
                        let (id, place) = live.swap_remove(n % live.len());
                        a.release_sized(id, place.len, place.owner);
                        oracle[usize::from(place.range)][granules(&place)].fill(Some(place.owner));
                    }
                    Step::Release(_) | Step::ReleaseSized(_) => {}
                    Step::ReleaseAll { owner } => {
                        let (gone, left): (Vec<_>, Vec<_>) =
                            live.into_iter().partition(|(_, place)| place.owner == Owner(owner));
                        live = left;
                        let found = a.live_of(Owner(owner));
                        prop_assert_eq!(found.len(), gone.len());
                        for (id, place) in gone {
                            prop_assert!(found.contains(&id) && a.release(id));
                            oracle[usize::from(place.range)][granules(&place)].fill(Some(place.owner));
                        }
                    }
                    Step::Give { owner } => {
                        // Of the third only itself may take.
                        let may_take = |other: Owner| other != Owner(2);
                        a.give(Owner(owner), may_take);
                        let given = oracle.iter_mut().flatten().flatten().filter(|granule| may_take(**granule));
                        given.for_each(|granule| *granule = Owner(owner));
                    }
                    Step::AddRange { len, owner } => {
                        a.add_range(oracle.len() as u16, len, Owner(owner));
                        oracle.push(vec![Some(Owner(owner)); len as usize]);
                    }
                    Step::RemoveRanges => {
                        let mut removed = a.remove_ranges(|place| place.owner == Owner(2));
                        removed.sort_unstable();
                        let is_whole = |range: &Vec<Option<Owner>>| {
                            !range.is_empty() && range.iter().all(|granule| *granule == Some(Owner(2)))
                        };
                        let expected: Vec<u16> =
                            (0..oracle.len()).filter(|&i| is_whole(&oracle[i])).map(|i| i as u16).collect();
                        prop_assert_eq!(&removed, &expected);
                        removed.iter().for_each(|&i| oracle[usize::from(i)].clear());
                    }
                }
                prop_assert!(live.iter().all(|(id, _)| a.is_live(*id)));
                let free = oracle.iter().flatten().flatten();
                prop_assert_eq!(a.free(), free.clone().count() as u64);
                if !look {
                    // To look wakes what rests.
                    continue;
                }
                prop_assert_eq!(a.largest_free(), longest(&oracle, None));
                let free = oracle.iter().flatten().flatten();
                prop_assert_eq!(a.free(), free.clone().count() as u64);
                for owner in (0..3).map(Owner) {
                    prop_assert_eq!(a.free_of(owner) as usize, free.clone().filter(|of| **of == owner).count());
                }
                let taken: u32 = a.places().iter().filter(|place| !place.free).map(|place| place.len).sum();
                prop_assert_eq!(taken, live.iter().map(|(_, place)| place.len).sum::<u32>());
            }
        }
    }
}
