// SPDX-License-Identifier: MIT OR Apache-2.0
//! Caches scalars that a program has read, and prefetches those that it will read.
//!
//! A scalar is prefetched if the program has read the scalar that the same operator returned at the
//! same call site before.

use std::collections::{HashMap, HashSet};

use tensorstream::exec::StorageView;

use super::call_site::CallSiteKey;

/// Where a scalar is computed.
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
    /// The number of reads that found a value.
    pub(super) cached: u64,
    /// The number of reads that found a prefetch.
    pub(super) prefetched: u64,
}

/// A scalar that was requested, by the number of its reply.
enum Scalar {
    /// It was prefetched, and nobody waits for it.
    Prefetched(u64),
    /// A thread waits for it.
    Awaited(u64),
    Known(Vec<u8>),
}

/// The result of [`ScalarPrefetch::lookup`].
pub(super) enum Lookup {
    /// The element is cached.
    Known(Vec<u8>),
    /// The element was prefetched: wait for this reply.
    Prefetched(u64),
    /// The element is unknown: request it.
    Unknown,
}

impl ScalarPrefetch {
    /// Records where the one element of a storage is computed. Returns whether to prefetch it.
    pub(super) fn record(&mut self, storage: u64, source: ScalarSource) -> bool {
        self.sources.insert(storage, source);
        self.read_sources.contains(&source)
    }

    /// Announces a prefetch with this reply. Call it before the request is submitted.
    pub(super) fn announce(&mut self, storage: u64, view: StorageView, reply: u64) {
        self.scalars.insert(storage, (view, Scalar::Prefetched(reply)));
    }

    /// Looks up the element that the program reads. If it is unknown, the caller must request it
    /// with `reply`.
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

    /// Caches the element that arrived with `reply`, or `None` if the read failed. Does nothing if
    /// the storage was written to since.
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

    /// Drops the scalar of a storage. Call it after a request that writes to the storage was
    /// submitted. Returns the reply of a prefetch that nobody will wait for.
    pub(super) fn invalidate(&mut self, storage: u64) -> Option<u64> {
        let (_, scalar) = self.scalars.remove(&storage)?;
        let Scalar::Prefetched(reply) = scalar else { return None };
        // The prefetch was wasted: do not prefetch here until the program reads this source again.
        if let Some(source) = self.sources.get(&storage) {
            self.read_sources.remove(source);
        }
        Some(reply)
    }

    /// Forgets a storage that was freed. Returns the reply of a prefetch that nobody will wait for.
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
