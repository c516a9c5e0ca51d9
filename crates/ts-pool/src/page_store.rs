// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pages that several processes of a user share.
//!
//! Each entry is a file in a directory in memory (tmpfs) that only its user can access. The file is
//! filled before it gets its name, and does not change afterwards. A process maps it over the
//! memory of a [`Buffer`], copy-on-write. While it does, it holds a shared lock on one byte of the
//! file `locks`, chosen by the key. The system releases the lock if the process crashes. Who can
//! lock the byte exclusively may remove the entry.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::UNIX_EPOCH;

use parking_lot::Mutex;
use rustix::fs::{CWD, FallocateFlags, RenameFlags, fallocate, renameat_with, statfs, statvfs};

use crate::arena::BLOCK_ALIGN;
use crate::{Buffer, Error};

const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Identifies the content of an entry of a [`PageStore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageKey {
    /// What belongs together, such as all entries of a checkpoint.
    pub group: u64,
    /// The entry. Entries with the same key must have the same content.
    pub entry: u128,
}

impl PageKey {
    fn file_name(self) -> String {
        format!("{:016x}-{:032x}", self.group, self.entry)
    }

    fn parse(name: &str) -> Option<Self> {
        let (group, entry) = name.split_once('-')?;
        let (group, entry) =
            (u64::from_str_radix(group, 16).ok()?, u128::from_str_radix(entry, 16).ok()?);
        Some(Self { group, entry })
    }

    /// Returns the position of the byte whose lock protects the entry.
    fn lock_at(self) -> i64 {
        ((self.entry as u64 ^ self.group) >> 1) as i64
    }
}

/// Memory that processes of one user share, entry by entry.
///
/// Do not use the store with a pool that a backend or a device has registered: reads would still go
/// to the pages that the store has replaced.
///
/// An entry exists as long as any process uses it. Entries that a crashed process left are removed
/// when the next store is opened in the directory.
///
/// # Examples
/// ```
/// use ts_pool::{Budget, HostPool, PageKey, PageStore};
///
/// # if cfg!(target_os = "linux") && std::path::Path::new("/dev/shm").exists() {
/// let dir = format!("/dev/shm/ts-pool-example-{}", std::process::id());
/// let (store, key) = (PageStore::open(dir.as_ref())?, PageKey { group: 1, entry: 2 });
/// let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20)?;
/// let mut first = pool.allocate(5)?;
/// assert!(!store.take(key, &mut first), "there is no such entry yet");
/// let pages = store.start(&mut first).expect("there is space");
/// first.copy_from_slice(b"bytes");
/// assert!(store.publish(key, pages, &mut first));
/// // Another process would do the same.
/// let mut second = pool.allocate(5)?;
/// assert!(store.take(key, &mut second));
/// assert_eq!(second[..], *b"bytes");
/// drop((first, second));
/// assert_eq!(store.group_bytes(1), 0, "nobody uses the entry any more");
/// # std::fs::remove_dir_all(dir).unwrap();
/// # }
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PageStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    locks: File,
    /// How many buffers use the entry of each locked byte, and the key.
    used: Mutex<HashMap<i64, (usize, PageKey)>>,
    /// Whether the process is about to end.
    left: AtomicBool,
    /// The process that opened the store. A forked process has the same locks, and must leave them
    /// alone.
    process: u32,
}

/// The stores of this process.
static STORES: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// New pages of a buffer, which become an entry when they are filled.
#[derive(Debug)]
pub struct NewPages {
    /// The use of their temporary name, which ends when this value is dropped.
    used: Used,
}

/// The group of temporary names.
const TEMPORARY: u64 = u64::MAX;
/// One part in this many of the file system is left to others.
const LEFT_FREE: u64 = 8;

impl PageStore {
    /// Returns the directory for the stores of this user, in the memory of the machine.
    pub fn default_dir() -> PathBuf {
        format!("/dev/shm/tensorstream-{}", user()).into()
    }

    /// Opens the store in a directory, which is created if it does not exist. Removes the entries
    /// that nobody uses.
    ///
    /// # Errors
    /// Returns [`Error::Store`] if the directory is not in memory (tmpfs), belongs to another user,
    /// or can be accessed by others, and if the system refuses. On systems other than Linux, and if
    /// pages are larger than [`BLOCK_ALIGN`], `open` always fails.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Store { path: dir.to_path_buf(), source };
        Self::try_open(dir).map_err(failed)
    }

    fn try_open(dir: &Path) -> io::Result<Self> {
        if rustix::param::page_size() > BLOCK_ALIGN {
            return Err(io::Error::other("the pages of this system are too large"));
        }
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let found = dir.symlink_metadata()?;
        if !found.is_dir() || found.uid() != user() || found.mode() & 0o077 != 0 {
            return Err(io::Error::other(
                "it is not a directory that only this user can access; remove it, or choose \
                 another one",
            ));
        }
        if statfs(dir)?.f_type as i64 != TMPFS_MAGIC {
            return Err(io::Error::other("it is not in memory (tmpfs), as /dev/shm is"));
        }
        let locks = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(dir.join("locks"))?;
        let (dir, process) = (dir.to_path_buf(), std::process::id());
        let (used, left) = (Mutex::default(), AtomicBool::new(false));
        let inner = Arc::new(Inner { dir, locks, used, left, process });
        inner.entries()?.into_iter().for_each(|(key, _)| inner.remove_unused(key));
        let mut stores = STORES.lock();
        stores.retain(|store| store.strong_count() > 0);
        stores.push(Arc::downgrade(&inner));
        Ok(Self { inner })
    }

    /// Removes the entries that only this process uses, of all its stores. Its buffers keep their
    /// pages. Call this before the process ends without dropping its buffers. The entries would
    /// otherwise stay until another process opens a store in the directory.
    pub fn leave_all() {
        let stores: Vec<_> = STORES.lock().iter().filter_map(Weak::upgrade).collect();
        stores.iter().for_each(|store| store.leave());
    }

    /// Returns the size of all entries of a group, in bytes.
    pub fn group_bytes(&self, group: u64) -> u64 {
        let entries = self.inner.entries().unwrap_or_default();
        entries.iter().filter(|(key, _)| key.group == group).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the keys of all entries of a group.
    pub fn keys(&self, group: u64) -> HashSet<u128> {
        let entries = self.inner.entries().unwrap_or_default();
        entries.iter().filter(|(key, _)| key.group == group).map(|(key, _)| key.entry).collect()
    }

    /// Replaces the memory of a buffer by the pages of an entry, until the block of the buffer is
    /// freed. A later write to the buffer changes only this buffer. Returns whether it did: there
    /// is an entry, of the size of the buffer's block, and the buffer is a whole block of mapped
    /// memory.
    pub fn take(&self, key: PageKey, buffer: &mut Buffer) -> bool {
        let Some(used) = Inner::lock_for_use(&self.inner, key) else { return false };
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(used.path());
        let Ok(file) = file else { return false };
        // SAFETY: the file got its name only after it was filled, and no process opens it for
        // writing afterwards. Only this user can access the directory.
        unsafe { buffer.map_pages(&file, false, Box::new(used)) }
    }

    /// Replaces the memory of a buffer by new pages, until the block of the buffer is freed. What
    /// is written to the buffer is written to these pages. Returns `None` if less than an eighth of
    /// the file system would be left, or if the buffer is not a whole block of mapped memory. The
    /// content of the buffer is lost.
    pub fn start(&self, buffer: &mut Buffer) -> Option<NewPages> {
        let len = buffer.len().next_multiple_of(BLOCK_ALIGN).max(BLOCK_ALIGN) as u64;
        let space = statvfs(&self.inner.dir).ok()?;
        if space.f_bavail * space.f_frsize < len + space.f_blocks * space.f_frsize / LEFT_FREE {
            return None;
        }
        let used = Inner::lock_for_use(&self.inner, temporary_key())?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o400)
            .open(used.path())
            .ok()?;
        // Allocates the pages now, because writing to a page that cannot be allocated would kill
        // the process.
        fallocate(&file, FallocateFlags::empty(), 0, len).ok()?;
        // SAFETY: no other process opens a file with a temporary name.
        unsafe { buffer.map_pages(&file, true, Box::new(())) }.then_some(NewPages { used })
    }

    /// Makes the pages of a filled buffer an entry. A later write to the buffer changes only this
    /// buffer. Returns whether the buffer shares its pages now: if another process was faster, they
    /// are those of the other one.
    ///
    /// `buffer` must be the one that [`start`](Self::start) gave the pages to.
    pub fn publish(&self, key: PageKey, pages: NewPages, buffer: &mut Buffer) -> bool {
        let NewPages { used: temporary } = pages;
        let Ok(file) = File::open(temporary.path()) else { return false };
        let Some(used) = Inner::lock_for_use(&self.inner, key) else { return false };
        let to = used.path();
        // SAFETY: the file is filled, and nobody writes to it from now on: this replaces the shared
        // mapping, before others can find the file.
        if !unsafe { buffer.map_pages(&file, false, Box::new(used)) } {
            return false;
        }
        match renameat_with(CWD, temporary.path(), CWD, to, RenameFlags::NOREPLACE) {
            Ok(()) => true,
            Err(rustix::io::Errno::EXIST) => self.take(key, buffer),
            Err(_) => false,
        }
    }

    /// Removes an entry, so that it is not taken any more. Those who use it keep its pages.
    pub fn remove(&self, key: PageKey) {
        self.inner.remove(key);
    }
}

impl Inner {
    /// Returns the keys and the sizes of all entries, in bytes.
    fn entries(&self) -> io::Result<Vec<(PageKey, u64)>> {
        let entry = |entry: io::Result<std::fs::DirEntry>| {
            let entry = entry.ok()?;
            let key = PageKey::parse(entry.file_name().to_str()?)?;
            Some((key, entry.metadata().ok()?.len()))
        };
        Ok(self.dir.read_dir()?.filter_map(entry).collect())
    }

    /// Locks the byte of a key as a user of its entry. Returns `None` if it is being removed.
    fn lock_for_use(this: &Arc<Self>, key: PageKey) -> Option<Used> {
        if !this.is_own() || this.left.load(Ordering::Acquire) {
            return None;
        }
        let mut used = this.used.lock();
        let (count, _) = used.entry(key.lock_at()).or_insert((0, key));
        if *count == 0 && !lock(this.locks.as_raw_fd(), key.lock_at(), libc::F_RDLCK) {
            used.remove(&key.lock_at());
            return None;
        }
        *count += 1;
        Some(Used { store: Arc::clone(this), key })
    }

    /// Returns whether this process opened the store, and is not a fork of that one.
    fn is_own(&self) -> bool {
        self.process == std::process::id()
    }

    fn leave(&self) {
        if self.is_own() {
            self.left.store(true, Ordering::Release);
            let used = std::mem::take(&mut *self.used.lock());
            for (at, (_, key)) in used {
                lock(self.locks.as_raw_fd(), at, libc::F_UNLCK);
                self.remove_unused(key);
            }
        }
    }

    /// Removes an entry unless any process uses it.
    fn remove_unused(&self, key: PageKey) {
        let used = self.used.lock();
        let (fd, at) = (self.locks.as_raw_fd(), key.lock_at());
        if !used.contains_key(&at) && lock(fd, at, libc::F_WRLCK) {
            self.remove(key);
            lock(fd, at, libc::F_UNLCK);
        }
    }

    fn remove(&self, key: PageKey) {
        let _ = std::fs::remove_file(self.dir.join(key.file_name()));
    }
}

/// A use of an entry. Dropping the last one of all processes removes the entry.
#[derive(Debug)]
struct Used {
    store: Arc<Inner>,
    key: PageKey,
}

impl Used {
    fn path(&self) -> PathBuf {
        self.store.dir.join(self.key.file_name())
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        if !self.store.is_own() {
            return;
        }
        let at = self.key.lock_at();
        {
            let mut used = self.store.used.lock();
            let Some((count, _)) = used.get_mut(&at) else {
                return; // the store was left
            };
            *count -= 1;
            if *count > 0 {
                return;
            }
            used.remove(&at);
            // If two processes did not unlock before they try to lock exclusively, both could fail.
            lock(self.store.locks.as_raw_fd(), at, libc::F_UNLCK);
        }
        self.store.remove_unused(self.key);
    }
}

/// Locks or unlocks a byte of a file for its open file description. Does not wait. Returns whether
/// it succeeded.
fn lock(fd: RawFd, at: i64, kind: libc::c_int) -> bool {
    let range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: at,
        l_len: 1,
        // Must be 0 for this kind of lock.
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the structure is valid during the call.
    unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const range) == 0 }
}

/// Returns a key that no other call returns. If one of another process does, its file cannot be
/// created.
fn temporary_key() -> PageKey {
    static LATEST: AtomicU32 = AtomicU32::new(0);
    let number = LATEST.fetch_add(1, Ordering::Relaxed);
    let now = UNIX_EPOCH.elapsed().map_or(0, |now| now.as_nanos());
    let entry = now << 64 | u128::from(std::process::id()) << 32 | u128::from(number);
    PageKey { group: TEMPORARY, entry }
}

/// Returns the id of the user of this process.
fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

impl Buffer {
    /// Maps the pages of a file over the memory of the block, until the block is freed, and drops
    /// `owner` then. `shared` says whether writes go to the file. Returns whether it did.
    ///
    /// # Safety
    /// Nobody may write to the file or truncate it, except through this buffer if it is `shared`.
    unsafe fn map_pages(
        &mut self,
        file: &File,
        shared: bool,
        owner: Box<dyn Any + Send + Sync>,
    ) -> bool {
        let Some(block) = self.whole_block() else { return false };
        if !file.metadata().is_ok_and(|file| file.len() == block.size() as u64) {
            return false;
        }
        // SAFETY: this buffer is the only one of the block, and is borrowed mutably. The rest is
        // the caller's obligation.
        unsafe { block.map_pages(file, shared, owner) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Budget, HostPool, WriteWatch};

    const MIB: usize = 1 << 20;

    /// A directory in memory that is removed at the end.
    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let dir = format!("/dev/shm/ts-pool-test-{name}-{}", std::process::id());
            let _ = std::fs::remove_dir_all(&dir);
            Self(dir.into())
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn key(entry: u128) -> PageKey {
        PageKey { group: 7, entry }
    }

    fn filled(store: &PageStore, pool: &HostPool, entry: u128, byte: u8) -> Buffer {
        let mut buffer = pool.allocate(MIB - 100).unwrap();
        let pages = store.start(&mut buffer).unwrap();
        buffer.fill(byte);
        assert!(store.publish(key(entry), pages, &mut buffer));
        buffer
    }

    /// Two stores in one directory behave as those of two processes: locks belong to the open file.
    fn two(dir: &Dir) -> (PageStore, PageStore) {
        (PageStore::open(&dir.0).unwrap(), PageStore::open(&dir.0).unwrap())
    }

    #[test]
    fn an_entry_lives_as_long_as_any_store_uses_it() {
        let dir = Dir::new("lives");
        let ((a, b), pool) = (two(&dir), HostPool::new(&Budget::new(8 * MIB), 8 * MIB).unwrap());
        let first = filled(&a, &pool, 1, 5);
        let mut second = pool.allocate(MIB - 100).unwrap();
        assert!(b.take(key(1), &mut second));
        drop(first);
        assert_eq!((a.group_bytes(7), a.keys(7).len()), (MIB as u64, 1));
        assert!(second.iter().all(|&byte| byte == 5));
        drop(second);
        assert_eq!((b.group_bytes(7), b.group_bytes(8)), (0, 0));
        assert!(!a.take(key(1), &mut pool.allocate(MIB - 100).unwrap()));
    }

    #[test]
    fn a_write_is_seen_by_nobody_else() {
        let dir = Dir::new("write");
        let ((a, b), pool) = (two(&dir), HostPool::new(&Budget::new(8 * MIB), 8 * MIB).unwrap());
        let mut first = filled(&a, &pool, 1, 5);
        let mut second = pool.allocate(MIB - 100).unwrap();
        assert!(b.take(key(1), &mut second));
        first[0] = 9;
        second[1] = 8;
        assert_eq!((first[0], first[1], second[0], second[1]), (9, 5, 5, 8));
    }

    #[test]
    fn freed_memory_is_private_again() {
        let dir = Dir::new("freed");
        let (store, pool) =
            (PageStore::open(&dir.0).unwrap(), HostPool::new(&Budget::new(MIB), MIB).unwrap());
        drop(filled(&store, &pool, 1, 5));
        let mut reused = pool.allocate(MIB).unwrap();
        assert!(reused.iter().all(|&byte| byte == 0), "new pages");
        reused.fill(6);
        drop(reused);
        let kept = filled(&store, &pool, 1, 7).freeze();
        drop(kept.set_aside().unwrap());
        assert_eq!(store.group_bytes(7), 0);
        assert!(pool.allocate(MIB).unwrap().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn of_two_that_publish_both_share_one() {
        let dir = Dir::new("both");
        let ((a, b), pool) = (two(&dir), HostPool::new(&Budget::new(8 * MIB), 8 * MIB).unwrap());
        let (mut slow, fast) = (pool.allocate(MIB - 100).unwrap(), filled(&b, &pool, 1, 5));
        let pages = a.start(&mut slow).unwrap();
        slow.fill(5);
        assert!(a.publish(key(1), pages, &mut slow));
        assert_eq!(a.group_bytes(7), MIB as u64);
        drop(fast);
        assert_eq!((a.group_bytes(7), slow[MIB - 101]), (MIB as u64, 5));
    }

    #[test]
    fn what_a_crashed_process_left_is_removed() {
        let dir = Dir::new("crash");
        let (a, pool) = (
            PageStore::open(&dir.0).unwrap(),
            HostPool::new(&Budget::new(8 * MIB), 8 * MIB).unwrap(),
        );
        std::fs::write(dir.0.join(key(3).file_name()), [1; 4096]).unwrap();
        let kept = filled(&a, &pool, 4, 2);
        let b = PageStore::open(&dir.0).unwrap();
        assert_eq!(b.keys(7), HashSet::from([4]), "what is used stays");
        drop(kept);
    }

    #[test]
    fn a_store_that_is_left_leaves_nothing_and_keeps_its_pages() {
        let dir = Dir::new("leave");
        let ((a, b), pool) = (two(&dir), HostPool::new(&Budget::new(8 * MIB), 8 * MIB).unwrap());
        let (alone, both) = (filled(&a, &pool, 1, 5), filled(&a, &pool, 2, 6));
        let mut second = pool.allocate(MIB - 100).unwrap();
        assert!(b.take(key(2), &mut second));
        a.inner.leave();
        assert_eq!(b.keys(7), HashSet::from([2]));
        assert_eq!((alone[0], both[0]), (5, 6));
        drop((alone, both));
        assert_eq!(b.keys(7), HashSet::from([2]), "it is still used");
        drop(second);
        assert_eq!(b.keys(7), HashSet::new());
    }

    #[test]
    fn an_entry_of_another_size_and_a_part_of_a_block_are_refused() {
        let dir = Dir::new("sizes");
        let (store, pool) = (
            PageStore::open(&dir.0).unwrap(),
            HostPool::new(&Budget::new(8 * MIB), 8 * MIB).unwrap(),
        );
        let _kept = filled(&store, &pool, 1, 5);
        let mut other = pool.allocate(MIB + 1).unwrap();
        assert!(!store.take(key(1), &mut other));
        let mut part = pool.allocate(MIB).unwrap();
        let rest = part.split_off(MIB / 2);
        assert!(!store.take(key(1), &mut part) && store.start(&mut part).is_none());
        drop(rest);
    }

    #[test]
    fn the_directory_must_be_private_and_in_memory() {
        use std::os::unix::fs::PermissionsExt;
        let dir = Dir::new("private");
        std::fs::create_dir(&dir.0).unwrap();
        std::fs::set_permissions(&dir.0, PermissionsExt::from_mode(0o755)).unwrap();
        let error = PageStore::open(&dir.0).unwrap_err().to_string();
        assert!(error.contains("only this user"), "{error}");
        let on_disk = std::env::temp_dir().join(format!("ts-pool-test-{}", std::process::id()));
        if statfs(std::env::temp_dir().as_path()).unwrap().f_type as i64 != TMPFS_MAGIC {
            let error = PageStore::open(&on_disk).unwrap_err().to_string();
            assert!(error.contains("tmpfs"), "{error}");
        }
        let _ = std::fs::remove_dir(on_disk);
    }

    #[test]
    fn writes_to_shared_pages_are_detected() {
        let dir = Dir::new("watch");
        let (store, pool) = (
            PageStore::open(&dir.0).unwrap(),
            HostPool::new(&Budget::new(8 * MIB), 8 * MIB).unwrap(),
        );
        let Some(watch) = WriteWatch::try_new(&pool).map(Arc::new) else { return };
        for round in 0..3 {
            let first = filled(&store, &pool, 1, 5);
            let mut second = pool.allocate(MIB - 100).unwrap();
            assert!(store.take(key(1), &mut second));
            for buffer in [first, second] {
                let watched = watch.watch(buffer.freeze()).unwrap();
                assert!(watched.written().is_empty(), "round {round}");
                let at = watched.buffer()[5000..].as_ptr().cast_mut();
                // SAFETY: nobody else accesses the buffer now.
                unsafe { at.write(1) };
                assert_eq!(watched.written(), vec![4096..8192], "round {round}");
            }
            // The memory is watched too once it is not mapped any more.
            let mut plain = pool.allocate(MIB).unwrap();
            plain.fill(1);
            let watched = watch.watch(plain.freeze()).unwrap();
            assert!(watched.written().is_empty());
        }
    }
}
