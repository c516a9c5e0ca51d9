// SPDX-License-Identifier: MIT OR Apache-2.0
//! io_uring, made safe: the ring owns what the system writes to until the system has said that it
//! is done.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::Duration;

use io_uring::types::{Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use ts_pool::{Buffer, HostPool};

use super::Gate;
use crate::memory::{Block, copy_to, pieces};
use crate::source::Source;

/// Files that are registered at once; more are read without.
const FILE_SLOTS: u32 = 64;
/// Pieces of memory that are registered at once.
const REGION_SLOTS: u32 = 64;
/// Largest piece of memory that can be registered as one, by the system's rule.
const REGION_LIMIT: usize = 1 << 30;
/// Names of what no slot has asked for.
const WAKE: u64 = u64::MAX;
const UNNAMED: u64 = u64::MAX - 1;

/// Reads under way, and those between two steps. `T` is what the caller keeps with each.
pub(crate) struct Ring<T> {
    uring: IoUring,
    wake: Arc<Gate>,
    /// Each behind a pointer of its own: slots stay in their places.
    slots: Vec<Option<Box<Slot<T>>>>,
    /// Registered files, by their place; empty where the system has no table for us.
    files: Vec<Option<Weak<Source>>>,
    /// Registered memory, by its place.
    regions: Vec<Region>,
    memory: Vec<HostPool>,
}

struct Slot<T> {
    data: T,
    buffers: Vec<Buffer>,
    source: Arc<Source>,
    /// What the system reads while an operation is in flight.
    vectors: Vec<libc::iovec>,
    time: Timespec,
    block: Option<Box<Block>>,
    busy: bool,
}

// SAFETY: the pointers in `vectors` point into the slot's own buffers, which may go to any thread.
unsafe impl<T: Send> Send for Slot<T> {}

/// Memory that the ring knows.
struct Region {
    begin: usize,
    len: usize,
}

/// What the system is asked for.
pub(crate) enum Op<'a> {
    /// Read from the file's `offset` to `at..at + len` of the buffers.
    Into { offset: u64, at: usize, len: usize },
    /// Read a block of `len` bytes aside.
    Aside { offset: u64, len: usize },
    /// Only let time pass.
    Delay(Duration),
    /// Only wait until a gate is open.
    Gate(&'a Gate),
}

impl<T> Ring<T> {
    /// A ring for so many reads at once. Opening `wake` ends a wait.
    pub(crate) fn new(reads: usize, wake: Arc<Gate>) -> io::Result<Self> {
        // One operation for each read, a cancellation for each, and the wake.
        let entries = u32::try_from(2 * reads + 2).map_err(|_| io::ErrorKind::InvalidInput)?;
        // Completions are handled when this thread waits for them, and not whenever they arrive
        // (Linux 6.1).
        let quiet = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
        let uring = quiet.or_else(|_| IoUring::new(entries))?;
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel's io_uring is older than 5.11",
            ));
        }
        let has_files = uring.submitter().register_files_sparse(FILE_SLOTS).is_ok();
        let files = vec![None; if has_files { FILE_SLOTS as usize } else { 0 }];
        let mut this =
            Self { uring, wake, slots: Vec::new(), files, regions: Vec::new(), memory: Vec::new() };
        this.watch_wake();
        Ok(this)
    }

    /// Registers a pool's memory, as far as the system lets us.
    pub(crate) fn register(&mut self, pool: &HostPool) {
        let memory = pool.as_ptr_range();
        let (begin, end) = (memory.start.addr(), memory.end.addr());
        let submitter = self.uring.submitter();
        if self
            .regions
            .iter()
            .any(|region| (region.begin..region.begin + region.len).contains(&begin))
            || (self.regions.is_empty() && submitter.register_buffers_sparse(REGION_SLOTS).is_err())
        {
            return;
        }
        let before = self.regions.len();
        for begin in (begin..end).step_by(REGION_LIMIT).take(REGION_SLOTS as usize - before) {
            let region = Region { begin, len: REGION_LIMIT.min(end - begin) };
            let vectors = [vector(region.begin, region.len)];
            // SAFETY: the memory is mapped while its pool lives, and the pool is kept as long as
            // the ring. The place is empty, so no read under way refers to it.
            if unsafe {
                submitter.register_buffers_update(self.regions.len() as u32, &vectors, None)
            }
            .is_err()
            {
                break;
            }
            self.regions.push(region);
        }
        if self.regions.len() > before {
            self.memory.push(pool.clone());
        }
    }

    /// Takes a read in and names it.
    pub(crate) fn insert(&mut self, data: T, source: Arc<Source>, buffers: Vec<Buffer>) -> usize {
        let key = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let (vectors, time) = (Vec::new(), Timespec::new());
        let slot = Slot { data, buffers, source, vectors, time, block: None, busy: false };
        self.slots[key] = Some(Box::new(slot));
        key
    }

    /// Has the system let go of files that nobody has open any more.
    pub(crate) fn forget_files(&mut self) {
        for index in 0..self.files.len() {
            if self.files[index].is_some()
                && self.slots.iter().flatten().all(|slot| !self.is_file(index, &slot.source))
            {
                // Should this fail, the place is used again by the next file.
                let _ = self.uring.submitter().register_files_update(index as u32, &[-1]);
                self.files[index] = None;
            }
        }
    }

    fn is_file(&self, index: usize, source: &Arc<Source>) -> bool {
        self.files[index].as_ref().is_some_and(|known| known.as_ptr() == Arc::as_ptr(source))
    }

    /// What the caller keeps with a read.
    pub(crate) fn data(&mut self, key: usize) -> &mut T {
        &mut self.slot(key).data
    }

    /// All reads.
    pub(crate) fn iter(&mut self) -> impl Iterator<Item = (usize, &mut T)> {
        self.slots
            .iter_mut()
            .enumerate()
            .filter_map(|(key, slot)| Some((key, &mut slot.as_mut()?.data)))
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Gives a read back, of which no operation is in flight.
    pub(crate) fn remove(&mut self, key: usize) -> (T, Vec<Buffer>) {
        let slot = self.slots[key].take().expect("the caller has the key of a read");
        assert!(!slot.busy, "a read that the system works on stays where it is");
        let Slot { data, buffers, .. } = *slot;
        (data, buffers)
    }

    /// Begins the next operation of a read; it ends in [`wait`](Self::wait).
    pub(crate) fn start(&mut self, key: usize, op: &Op<'_>) {
        assert!(!self.slot(key).busy, "one operation at a time");
        let entry = self.entry(key, op).user_data(key as u64);
        self.slot(key).busy = true;
        // SAFETY: what the operation writes to and reads belongs to the slot, which stays in its
        // place (the vectors and the block behind their own pointers) and is not touched until it
        // is no longer busy.
        unsafe { self.push(&entry) };
    }

    /// Brings bytes that were read aside to their place.
    pub(crate) fn copy_aside(&mut self, key: usize, skip: usize, at: usize, len: usize) {
        let slot = self.slot(key);
        assert!(!slot.busy, "the system no longer writes");
        let block = slot.block.as_ref().expect("it was read aside");
        copy_to(&mut slot.buffers, at, &block.0[skip..skip + len]);
    }

    /// Asks the system to give up a read's operation, which then ends with an error, or as usual.
    pub(crate) fn cancel(&mut self, key: usize) {
        if self.slots[key].as_ref().is_some_and(|slot| slot.busy) {
            let entry = opcode::AsyncCancel::new(key as u64).build().user_data(UNNAMED);
            // SAFETY: the operation points to nothing.
            unsafe { self.push(&entry) };
        }
    }

    /// Waits until an operation ends, `wake` is opened, or the time is over. Returns what has
    /// ended.
    ///
    /// # Errors
    /// When the system refuses to go on with the ring at all.
    pub(crate) fn wait(
        &mut self,
        limit: Option<Duration>,
    ) -> io::Result<Vec<(usize, io::Result<usize>)>> {
        let time = limit.map(Timespec::from);
        let args = SubmitArgs::new();
        let waited = match &time {
            None => self.uring.submit_and_wait(1),
            Some(time) => self.uring.submitter().submit_with_args(1, &args.timespec(time)),
        };
        match waited {
            Ok(_) => {}
            // The time is over; a signal came; or there is something to take before more is given.
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) => {}
            Err(e) => return Err(e),
        }
        let (mut ended, mut woken) = (Vec::new(), false);
        for entry in self.uring.completion() {
            match entry.user_data() {
                WAKE => woken = true,
                UNNAMED => {}
                key => {
                    let result = entry.result();
                    let result =
                        usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
                    ended.push((key as usize, result));
                }
            }
        }
        for &(key, _) in &ended {
            self.slot(key).busy = false;
        }
        if woken {
            self.wake.shut();
            self.watch_wake();
        }
        Ok(ended)
    }

    fn slot(&mut self, key: usize) -> &mut Slot<T> {
        self.slots[key].as_mut().expect("the caller has the key of a read")
    }

    fn watch_wake(&mut self) {
        let poll = opcode::PollAdd::new(Fd(self.wake.as_raw_fd()), libc::POLLIN as u32);
        // SAFETY: the operation points to nothing, and the ring keeps the gate open.
        unsafe { self.push(&poll.build().user_data(WAKE)) };
    }

    fn entry(&mut self, key: usize, op: &Op<'_>) -> squeue::Entry {
        match *op {
            Op::Into { offset, at, len } => {
                let slot = self.slot(key);
                slot.vectors.clear();
                let vectors = pieces(&mut slot.buffers, at, len)
                    .map(|p| vector(p.as_mut_ptr().addr(), p.len()));
                slot.vectors.extend(vectors.take(super::linux::IOV_MAX));
                self.read(key, offset)
            }
            Op::Aside { offset, len } => {
                let slot = self.slot(key);
                let block = slot.block.get_or_insert_with(|| Box::new(Block::zeroed()));
                slot.vectors = vec![vector(block.0.as_mut_ptr().addr(), len)];
                self.read(key, offset)
            }
            Op::Delay(time) => {
                let slot = self.slot(key);
                slot.time = Timespec::from(time);
                opcode::Timeout::new(&raw const slot.time).build()
            }
            Op::Gate(gate) => {
                opcode::PollAdd::new(Fd(gate.as_raw_fd()), libc::POLLIN as u32).build()
            }
        }
    }

    /// A read to the slot's vectors, in the cheapest form that the system has for it.
    fn read(&mut self, key: usize, offset: u64) -> squeue::Entry {
        let (file, source) = {
            let slot = self.slot(key);
            let file = slot
                .source
                .direct_file()
                .expect("only sources that can be read directly come here");
            (file.as_raw_fd(), Arc::clone(&slot.source))
        };
        let fixed = self.fixed_file(&source, file);
        let [one] = self.slot(key).vectors[..] else {
            let (vectors, count) =
                (self.slot(key).vectors.as_ptr(), self.slot(key).vectors.len() as u32);
            return match fixed {
                Some(fixed) => opcode::Readv::new(fixed, vectors, count).offset(offset).build(),
                None => opcode::Readv::new(Fd(file), vectors, count).offset(offset).build(),
            };
        };
        let (base, len) = (one.iov_base.cast::<u8>(), one.iov_len.min(REGION_LIMIT) as u32);
        let end = base.addr() + len as usize;
        let region =
            self.regions.iter().position(|r| r.begin <= base.addr() && end <= r.begin + r.len);
        match (fixed, region) {
            (Some(fixed), Some(region)) => {
                opcode::ReadFixed::new(fixed, base, len, region as u16).offset(offset).build()
            }
            (None, Some(region)) => {
                opcode::ReadFixed::new(Fd(file), base, len, region as u16).offset(offset).build()
            }
            (Some(fixed), None) => opcode::Read::new(fixed, base, len).offset(offset).build(),
            (None, None) => opcode::Read::new(Fd(file), base, len).offset(offset).build(),
        }
    }

    /// The file's place in the ring's table. Sources that are gone leave theirs to others.
    fn fixed_file(&mut self, source: &Arc<Source>, file: RawFd) -> Option<Fixed> {
        let index = match (0..self.files.len()).find(|&index| self.is_file(index, source)) {
            Some(index) => index,
            None => {
                let gone = |known: &Option<Weak<Source>>| {
                    known.as_ref().is_none_or(|k| k.strong_count() == 0)
                };
                let index = self.files.iter().position(gone)?;
                self.uring.submitter().register_files_update(index as u32, &[file]).ok()?;
                // The weak pointer keeps the address from being used for another source.
                self.files[index] = Some(Arc::downgrade(source));
                index
            }
        };
        Some(Fixed(index as u32))
    }

    /// # Safety
    /// What the entry points to is valid, and otherwise unused, until its completion.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the caller's promise.
        while unsafe { self.uring.submission().push(entry) }.is_err() {
            // The queue is as long as all that is ever in it between two waits; should it be full
            // all the same, handing it over empties it.
            let _ = self.uring.submit();
        }
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        for slot in std::mem::take(&mut self.slots).into_iter().flatten().filter(|slot| slot.busy) {
            // The system may still write there: better lost than used for something else.
            std::mem::forget(slot);
        }
    }
}

fn vector(address: usize, len: usize) -> libc::iovec {
    let base = NonNull::<u8>::dangling().as_ptr().with_addr(address);
    libc::iovec { iov_base: base.cast(), iov_len: len }
}

/// Whether the system lets us have a ring.
pub(crate) fn probe_ring() -> io::Result<()> {
    Ring::<()>::new(1, Arc::new(Gate::new()?)).map(drop)
}
