// SPDX-License-Identifier: MIT OR Apache-2.0
//! Caches scalars that a program has read, and prefetches those that it will probably read.
//!
//! A scalar is prefetched if the program has read an earlier scalar that the same operator returned
//! at the same call site. After a wasted prefetch, scalars of that call site are not prefetched
//! until the program reads one of them again.

use std::collections::{HashMap, HashSet};

use tensorstream::exec::StorageView;

use super::call_site::CallSiteKey;

/// The call site, kernel and output that compute a scalar.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ScalarSource {
    pub(super) call_site: CallSiteKey,
    /// The number of the kernel.
    pub(super) kernel: u32,
    /// The position among the kernel's outputs.
    pub(super) output: usize,
}

/// The scalars of one session.
///
/// Cached values are never stale, because readers call [`lookup`](Self::lookup) before they submit
/// a read, and writers submit their request before they call [`invalidate`](Self::invalidate).
#[derive(Default)]
pub(super) struct ScalarPrefetch {
    /// The sources of storages that have one element.
    sources: HashMap<u64, ScalarSource>,
    /// Sources whose scalars the program reads.
    read_sources: HashSet<ScalarSource>,
    /// The scalar of each storage, and the view that it was read through.
    scalars: HashMap<u64, (StorageView, Scalar)>,
    /// The number of reads that were answered from the cache.
    pub(super) cached: u64,
    /// The number of reads whose element was prefetched.
    pub(super) prefetched: u64,
}

/// A scalar that was requested.
enum Scalar {
    /// The number of the reply to a prefetch, for which no thread waits.
    Prefetched(u64),
    /// The number of a reply for which a thread waits.
    Awaited(u64),
    /// The bytes of the element.
    Known(Vec<u8>),
}

/// The result of [`ScalarPrefetch::lookup`].
pub(super) enum Lookup {
    /// The element is cached. These are its bytes.
    Known(Vec<u8>),
    /// The element was prefetched. Wait for this reply.
    Prefetched(u64),
    /// The element is unknown. Request it.
    Unknown,
}

impl ScalarPrefetch {
    /// Records the source of a storage's only element. Returns whether to prefetch the element.
    pub(super) fn record(&mut self, storage: u64, source: ScalarSource) -> bool {
        self.sources.insert(storage, source);
        self.read_sources.contains(&source)
    }

    /// Records a prefetch that `reply` will answer. Call this before the request is submitted.
    pub(super) fn announce(&mut self, storage: u64, view: StorageView, reply: u64) {
        self.scalars.insert(storage, (view, Scalar::Prefetched(reply)));
    }

    /// Looks up the element that the program reads. If the element is unknown, the caller must
    /// request it with `reply`.
    pub(super) fn lookup(&mut self, storage: u64, view: &StorageView, reply: u64) -> Lookup {
        match self.scalars.get_mut(&storage) {
            Some((known, scalar)) if known == view => match scalar {
                Scalar::Known(bytes) => {
                    self.cached += 1;
                    return Lookup::Known(bytes.clone());
                }
                Scalar::Prefetched(prefetched) => {
                    let prefetched = *prefetched;
                    *scalar = Scalar::Awaited(prefetched);
                    self.prefetched += 1;
                    return Lookup::Prefetched(prefetched);
                }
                // Only one thread can wait for a reply.
                Scalar::Awaited(_) => {}
            },
            // Another view was prefetched, and may still be read.
            Some((_, Scalar::Prefetched(_))) => return Lookup::Unknown,
            _ => {}
        }
        if let Some(source) = self.sources.get(&storage) {
            self.read_sources.insert(*source);
        }
        self.scalars.insert(storage, (view.clone(), Scalar::Awaited(reply)));
        Lookup::Unknown
    }

    /// Caches the element that arrived with `reply`. `bytes` is `None` if the read failed. Does
    /// nothing if the storage was written to in the meantime.
    pub(super) fn complete(&mut self, storage: u64, reply: u64, bytes: Option<&[u8]>) {
        if let Some((_, scalar)) = self.scalars.get_mut(&storage)
            && matches!(scalar, Scalar::Awaited(awaited) if *awaited == reply)
        {
            match bytes {
                Some(bytes) => *scalar = Scalar::Known(bytes.to_vec()),
                None => drop(self.scalars.remove(&storage)),
            }
        }
    }

    /// Drops the scalar of a storage. Call this after a request that writes to the storage was
    /// submitted. Returns the reply to a prefetch for which no thread will wait.
    pub(super) fn invalidate(&mut self, storage: u64) -> Option<u64> {
        let (_, scalar) = self.scalars.remove(&storage)?;
        let Scalar::Prefetched(reply) = scalar else { return None };
        // The prefetch was wasted. It is not repeated until the program reads this source again.
        if let Some(source) = self.sources.get(&storage) {
            self.read_sources.remove(source);
        }
        Some(reply)
    }

    /// Forgets a freed storage. Returns the reply to a prefetch for which no thread will wait.
    pub(super) fn remove(&mut self, storage: u64) -> Option<u64> {
        let unwanted = self.invalidate(storage);
        self.sources.remove(&storage);
        unwanted
    }

    /// Drops all scalars, because the session has ended.
    pub(super) fn clear(&mut self) {
        self.scalars.clear();
    }
}
