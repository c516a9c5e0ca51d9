// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers that a program looks at: known since it looked last, or asked for as soon as what gives
//! them was, because it looked the last time.

use std::collections::{HashMap, HashSet};

use tensorstream::exec::StorageView;

/// Where a number is made: a line of the program, by its function's code and the instruction; the
/// operator; and which of its outputs.
pub(super) type Site = (usize, i32, u32, usize);

/// Numbers of one machine. Whoever asks for one says so here first and then asks; whoever writes to
/// a storage asks for that first and then says so here: a number that is known is never one from
/// before.
#[derive(Default)]
pub(super) struct Scalars {
    /// Where the only elements of storages were made.
    made: HashMap<u64, Site>,
    /// Where numbers are made at which the program looks.
    looked_at: HashSet<Site>,
    numbers: HashMap<u64, (StorageView, Number)>,
    pub(super) cached: u64,
    pub(super) early: u64,
}

enum Number {
    /// Asked for with what gives it, by this answer.
    Early(u64),
    /// Somebody waits for this answer.
    Awaited(u64),
    Known(Vec<u8>),
}

/// What is known of a number.
pub(super) enum Look {
    Known(Vec<u8>),
    /// It was asked for, and this is the answer to wait for.
    Early(u64),
    Unknown,
}

impl Scalars {
    /// A storage has one element, which was made there. Whether it is to be asked for at once.
    pub(super) fn made(&mut self, storage: u64, site: Site) -> bool {
        self.made.insert(storage, site);
        self.looked_at.contains(&site)
    }

    /// It is about to be asked for, with this answer, before anybody has looked.
    pub(super) fn ask_early(&mut self, storage: u64, view: StorageView, reply: u64) {
        self.numbers.insert(storage, (view, Number::Early(reply)));
    }

    /// The program looks at an element. If it is unknown it is asked for with this answer.
    pub(super) fn look(&mut self, storage: u64, view: &StorageView, reply: u64) -> Look {
        match self.numbers.get_mut(&storage) {
            Some((of, number)) if of == view => match number {
                Number::Known(bytes) => {
                    self.cached += 1;
                    return Look::Known(bytes.clone());
                }
                Number::Early(early) => {
                    let early = *early;
                    *number = Number::Awaited(early);
                    self.early += 1;
                    return Look::Early(early);
                }
                // Each answer is told once.
                Number::Awaited(_) => {}
            },
            // That of another view, which somebody may still look at.
            Some((_, Number::Early(_))) => return Look::Unknown,
            _ => {}
        }
        if let Some(site) = self.made.get(&storage) {
            self.looked_at.insert(*site);
        }
        self.numbers.insert(storage, (view.clone(), Number::Awaited(reply)));
        Look::Unknown
    }

    /// The answer has come, or none will.
    pub(super) fn answered(&mut self, storage: u64, reply: u64, bytes: Option<&[u8]>) {
        if let Some((_, number)) = self.numbers.get_mut(&storage)
            && matches!(number, Number::Awaited(awaited) if *awaited == reply)
        {
            match bytes {
                Some(bytes) => *number = Number::Known(bytes.to_vec()),
                None => drop(self.numbers.remove(&storage)),
            }
        }
    }

    /// Something was asked that writes to a storage. An answer for which nobody will wait now.
    pub(super) fn written(&mut self, storage: u64) -> Option<u64> {
        let (_, number) = self.numbers.remove(&storage)?;
        let Number::Early(reply) = number else { return None };
        if let Some(site) = self.made.get(&storage) {
            self.looked_at.remove(site);
        }
        Some(reply)
    }

    /// A storage is gone. An answer for which nobody will wait now.
    pub(super) fn gone(&mut self, storage: u64) -> Option<u64> {
        let unwanted = self.written(storage);
        self.made.remove(&storage);
        unwanted
    }

    /// The session is another.
    pub(super) fn clear(&mut self) {
        self.numbers.clear();
    }
}
