// SPDX-License-Identifier: MIT OR Apache-2.0
//! A safe interface to io_uring. The ring owns all memory that the kernel writes to, from the
//! submission of an operation to its completion.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::Duration;

use io_uring::types::{Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use ts_pool::{Buffer, HostPool};

use super::Gate;
use crate::scatter::{Block, copy_to, slices};

/// The maximum number of registered files. Further files are read without registration.
const FILE_SLOTS: u32 = 64;
/// The maximum number of registered memory regions.
const REGION_SLOTS: u32 = 64;
/// The length of the largest region that the kernel can register, in bytes.
const REGION_LIMIT: usize = 1 << 30;
/// The `user_data` of the operation that polls the `wake` gate.
const WAKE: u64 = u64::MAX;
/// The `user_data` of operations whose completions are ignored.
const IGNORED: u64 = u64::MAX - 1;

/// An io_uring and its reads. Each read has data `T` of the caller, and at most one operation in
/// flight.
pub(crate) struct Ring<T> {
    uring: IoUring,
    wake: Arc<Gate>,
    /// The reads, by key. Boxed, because the kernel has pointers into slots while the vector grows.
    slots: Vec<Option<Box<Slot<T>>>>,
    /// The registered files, by index. Empty if the kernel cannot register a sparse table, which
    /// needs Linux 5.19.
    files: Vec<Option<Weak<File>>>,
    /// The registered memory, by index.
    regions: Vec<Region>,
    /// The pools that own the registered memory. These handles keep the memory mapped.
    pools: Vec<HostPool>,
    /// The `user_data` of the operations in the submission queue, in order. The kernel has taken
    /// none of them yet.
    queued: VecDeque<u64>,
    /// Operations that wait for space in the submission queue.
    waiting: VecDeque<squeue::Entry>,
    given_up: bool,
}

struct Slot<T> {
    data: T,
    buffers: Vec<Buffer>,
    file: Arc<File>,
    /// The addresses and lengths of the memory that the operation in flight fills. The kernel reads
    /// this vector during the operation.
    vectors: Vec<libc::iovec>,
    /// The duration of the delay in flight. The kernel reads it during the delay.
    time: Timespec,
    /// The bounce buffer, allocated when first needed. The kernel writes to it during an operation.
    block: Option<Box<Block>>,
    /// Whether an operation is in flight.
    busy: bool,
}

// SAFETY: the pointers in `vectors` point into the buffers and the block of the same slot, which
// are themselves `Send`.
unsafe impl<T: Send> Send for Slot<T> {}

/// The address and the length in bytes of registered memory.
struct Region {
    begin: usize,
    len: usize,
}

/// An operation of a read, or a wait before one.
pub(crate) enum Op<'a> {
    /// Read from `offset` of the file into `at..at + len` of the buffers.
    Read { offset: u64, at: usize, len: usize },
    /// Read `len` bytes from `offset` of the file into the bounce buffer.
    ReadBlock { offset: u64, len: usize },
    /// Wait for this long.
    Delay(Duration),
    /// Wait until the gate opens.
    Gate(&'a Gate),
}

impl<T> Ring<T> {
    /// Creates a ring for up to `reads` reads at a time. Opening `wake` ends a
    /// [`wait`](Self::wait).
    pub(crate) fn new(reads: usize, wake: Arc<Gate>) -> io::Result<Self> {
        // Each read needs an entry for an operation and one for a cancellation. The poll of `wake`
        // needs another.
        let entries = u32::try_from(2 * reads + 2).map_err(|_| io::ErrorKind::InvalidInput)?;
        // With cooperative task work (Linux 5.19), the kernel processes completions when this
        // thread makes a call, instead of interrupting it. Deferred task work (Linux 6.1) would
        // process them only in calls of io_uring, so that none would be seen any more if the kernel
        // began to reject these.
        let quiet = IoUring::builder().setup_single_issuer().setup_coop_taskrun().build(entries);
        let uring = quiet.or_else(|_| IoUring::new(entries))?;
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the io_uring of this kernel is too old (expected Linux 5.11 or newer)",
            ));
        }
        let has_files = uring.submitter().register_files_sparse(FILE_SLOTS).is_ok();
        let files = vec![None; if has_files { FILE_SLOTS as usize } else { 0 }];
        let mut this = Self {
            uring,
            wake,
            slots: Vec::new(),
            files,
            regions: Vec::new(),
            pools: Vec::new(),
            queued: VecDeque::new(),
            waiting: VecDeque::new(),
            given_up: false,
        };
        this.poll_wake();
        // A sandbox may permit to create a ring, but not to use it.
        this.uring.submit()?;
        this.note_submitted();
        Ok(this)
    }

    /// Registers a pool's memory with the kernel, as far as the kernel permits.
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
            // SAFETY: the memory is mapped as long as its pool exists, and the ring keeps a handle
            // to the pool. The table entry is empty, so no read in flight refers to it.
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
            self.pools.push(pool.clone());
        }
    }

    /// Adds a read of `file` into `buffers` and returns its key.
    pub(crate) fn insert(&mut self, data: T, file: Arc<File>, buffers: Vec<Buffer>) -> usize {
        let key = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let (vectors, time) = (Vec::new(), Timespec::new());
        let slot = Slot { data, buffers, file, vectors, time, block: None, busy: false };
        self.slots[key] = Some(Box::new(slot));
        key
    }

    /// Unregisters the files that no read in the ring uses, so that they can be closed.
    pub(crate) fn forget_files(&mut self) {
        for index in 0..self.files.len() {
            if self.files[index].is_some()
                && self.slots.iter().flatten().all(|slot| !self.is_file(index, &slot.file))
            {
                // If this fails, a later file replaces the table entry.
                let _ = self.uring.submitter().register_files_update(index as u32, &[-1]);
                self.files[index] = None;
            }
        }
    }

    fn is_file(&self, index: usize, file: &Arc<File>) -> bool {
        self.files[index].as_ref().is_some_and(|known| known.as_ptr() == Arc::as_ptr(file))
    }

    /// Returns the caller's data of a read.
    pub(crate) fn data(&mut self, key: usize) -> &mut T {
        &mut self.slot(key).data
    }

    /// Returns the key and the data of each read.
    pub(crate) fn iter(&mut self) -> impl Iterator<Item = (usize, &mut T)> {
        self.slots
            .iter_mut()
            .enumerate()
            .filter_map(|(key, slot)| Some((key, &mut slot.as_mut()?.data)))
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Removes a read that has no operation in flight. Returns its data and buffers.
    pub(crate) fn remove(&mut self, key: usize) -> (T, Vec<Buffer>) {
        let slot = self.slots[key].take().expect("the key is that of a read in the ring");
        assert!(!slot.busy, "a read cannot be removed while the kernel works on it");
        let Slot { data, buffers, .. } = *slot;
        (data, buffers)
    }

    /// Starts the next operation of a read. [`wait`](Self::wait) returns its result.
    pub(crate) fn start(&mut self, key: usize, op: &Op<'_>) {
        assert!(!self.slot(key).busy, "a read has at most one operation in flight");
        let entry = self.entry(key, op).user_data(key as u64);
        self.slot(key).busy = true;
        // SAFETY: the slot owns the memory that the operation reads and writes. This memory does
        // not move: the slot is boxed, and its vectors, block and buffers are separate allocations.
        // While the slot is busy, the memory is neither accessed nor freed.
        unsafe { self.push(&entry) };
    }

    /// Copies `len` bytes from position `skip` of the bounce buffer to position `at` of the
    /// buffers.
    pub(crate) fn copy_from_block(&mut self, key: usize, skip: usize, at: usize, len: usize) {
        let slot = self.slot(key);
        assert!(!slot.busy, "the kernel no longer writes to the bounce buffer");
        let block = slot.block.as_ref().expect("an operation has filled the bounce buffer");
        copy_to(&mut slot.buffers, at, &block.0[skip..skip + len]);
    }

    /// Asks the kernel to abort a read's operation, which then fails or completes as usual.
    pub(crate) fn cancel(&mut self, key: usize) {
        if !self.given_up && self.slots[key].as_ref().is_some_and(|slot| slot.busy) {
            let entry = opcode::AsyncCancel::new(key as u64).build().user_data(IGNORED);
            // SAFETY: the entry contains no pointers.
            unsafe { self.push(&entry) };
        }
    }

    /// Waits until an operation completes, `wake` is opened, or `limit` has passed. A signal can
    /// end the wait earlier. Returns the keys and results of the completed operations.
    ///
    /// # Errors
    /// Returns the system's error if the kernel rejects the call and no operation has completed.
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
        self.note_submitted();
        let (completed, woken) = self.completed();
        if woken {
            self.wake.close();
            self.poll_wake();
        }
        self.push_waiting();
        match waited {
            // Completions must be consumed before the kernel accepts more (EBUSY).
            Err(_) if woken || !completed.is_empty() => {}
            // The limit has passed, or a signal arrived.
            Err(e) if e.raw_os_error() == Some(libc::ETIME) => {}
            Err(e) if e.raw_os_error() == Some(libc::EINTR) && self.queued.is_empty() => {}
            Err(e) => return Err(e),
            Ok(_) => {}
        }
        Ok(completed)
    }

    /// Gives up using the ring, because the kernel rejects all calls. Returns the keys of the reads
    /// that have no operation in flight. No other operation may be started; [`ended`](Self::ended)
    /// tells when those in flight have ended.
    pub(crate) fn give_up(&mut self) -> Vec<usize> {
        self.given_up = true;
        let _ = self.completed();
        let waiting = std::mem::take(&mut self.waiting);
        let untouched = std::mem::take(&mut self.queued).into_iter();
        for key in untouched.chain(waiting.iter().map(squeue::Entry::get_user_data)) {
            if key != WAKE && key != IGNORED {
                self.slot(key as usize).busy = false;
            }
        }
        let is_free = |slot: &Option<Box<Slot<T>>>| slot.as_ref().is_some_and(|slot| !slot.busy);
        (0..self.slots.len()).filter(|&key| is_free(&self.slots[key])).collect()
    }

    /// Returns the keys of the reads whose operation has ended, without a call of the kernel.
    pub(crate) fn ended(&mut self) -> Vec<usize> {
        self.completed().0.into_iter().map(|(key, _)| key).collect()
    }

    /// Takes the completions of operations, and returns them with whether `wake` was opened.
    fn completed(&mut self) -> (Vec<(usize, io::Result<usize>)>, bool) {
        let (mut completed, mut woken) = (Vec::new(), false);
        for entry in self.uring.completion() {
            match entry.user_data() {
                WAKE => woken = true,
                IGNORED => {}
                key => {
                    let result = entry.result();
                    let result =
                        usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
                    completed.push((key as usize, result));
                }
            }
        }
        for &(key, _) in &completed {
            self.slot(key).busy = false;
        }
        (completed, woken)
    }

    /// Forgets the operations that the kernel has taken from the submission queue.
    fn note_submitted(&mut self) {
        let left = self.uring.submission().len();
        self.queued.drain(..self.queued.len().saturating_sub(left));
    }

    /// Moves waiting operations to the submission queue, as far as it has space.
    fn push_waiting(&mut self) {
        while let Some(entry) = self.waiting.pop_front() {
            // SAFETY: the caller of `push` guaranteed this until the operation completes.
            if unsafe { self.uring.submission().push(&entry) }.is_err() {
                self.waiting.push_front(entry);
                return;
            }
            self.queued.push_back(entry.get_user_data());
        }
    }

    fn slot(&mut self, key: usize) -> &mut Slot<T> {
        self.slots[key].as_mut().expect("the key is that of a read in the ring")
    }

    fn poll_wake(&mut self) {
        let poll = opcode::PollAdd::new(Fd(self.wake.as_raw_fd()), libc::POLLIN as u32);
        // SAFETY: the entry contains no pointers, and the ring keeps the gate's descriptor open.
        unsafe { self.push(&poll.build().user_data(WAKE)) };
    }

    fn entry(&mut self, key: usize, op: &Op<'_>) -> squeue::Entry {
        match *op {
            Op::Read { offset, at, len } => {
                let slot = self.slot(key);
                slot.vectors.clear();
                let vectors = slices(&mut slot.buffers, at, len)
                    .map(|s| vector(s.as_mut_ptr().addr(), s.len()));
                slot.vectors.extend(vectors.take(super::linux::IOV_MAX));
                self.read_entry(key, offset)
            }
            Op::ReadBlock { offset, len } => {
                let slot = self.slot(key);
                let block = slot.block.get_or_insert_with(|| Box::new(Block::zeroed()));
                slot.vectors = vec![vector(block.0.as_mut_ptr().addr(), len)];
                self.read_entry(key, offset)
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

    /// Returns the submission entry of a read into the slot's vectors, with the cheapest opcode.
    fn read_entry(&mut self, key: usize, offset: u64) -> squeue::Entry {
        let file = Arc::clone(&self.slot(key).file);
        let (fixed, file) = (self.fixed_file(&file), file.as_raw_fd());
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

    /// Returns the file's index in the table of registered files. Registers the file if the table
    /// has a free entry, or an entry of a closed file.
    fn fixed_file(&mut self, file: &Arc<File>) -> Option<Fixed> {
        let index = match (0..self.files.len()).find(|&index| self.is_file(index, file)) {
            Some(index) => index,
            None => {
                let is_free = |known: &Option<Weak<File>>| {
                    known.as_ref().is_none_or(|k| k.strong_count() == 0)
                };
                let index = self.files.iter().position(is_free)?;
                let descriptor: [RawFd; 1] = [file.as_raw_fd()];
                self.uring.submitter().register_files_update(index as u32, &descriptor).ok()?;
                // The weak reference prevents another `File` from getting the same address.
                self.files[index] = Some(Arc::downgrade(file));
                index
            }
        };
        Some(Fixed(index as u32))
    }

    /// Queues an operation for submission to the kernel.
    ///
    /// # Safety
    /// Until the operation completes, all memory that `entry` points to must be valid, and nothing
    /// else may access it.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // The queue has space for all entries between two waits, unless the kernel rejects calls.
        self.waiting.push_back(entry.clone());
        self.push_waiting();
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        let _ = self.completed();
        for slot in std::mem::take(&mut self.slots).into_iter().flatten().filter(|slot| slot.busy) {
            // The kernel may still write to this memory, so it is leaked.
            std::mem::forget(slot);
        }
    }
}

fn vector(address: usize, len: usize) -> libc::iovec {
    let base = NonNull::<u8>::dangling().as_ptr().with_addr(address);
    libc::iovec { iov_base: base.cast(), iov_len: len }
}

/// Checks that this process may create a ring.
pub(crate) fn probe_ring() -> io::Result<()> {
    Ring::<()>::new(1, Arc::new(Gate::new()?)).map(drop)
}
