// SPDX-License-Identifier: MIT OR Apache-2.0
//! [`PageStore`] on systems other than Linux, where there is none.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use crate::{Buffer, Error};

/// Identifies the content of an entry of a [`PageStore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageKey {
    /// What belongs together, such as all entries of a checkpoint.
    pub group: u64,
    /// The entry. Entries with the same key must have the same content.
    pub entry: u128,
}

/// Memory that processes of one user share. Exists only on Linux.
#[derive(Debug, Clone)]
pub struct PageStore {
    never: std::convert::Infallible,
}

/// New pages of a buffer, which become an entry when they are filled.
#[derive(Debug)]
pub struct NewPages {
    _never: std::convert::Infallible,
}

impl PageStore {
    /// Returns the directory for the stores of this user.
    pub fn default_dir() -> PathBuf {
        "/dev/shm/tensorstream".into()
    }

    /// Returns an error.
    ///
    /// # Errors
    /// Always returns [`Error::Store`].
    pub fn open(dir: &Path) -> Result<Self, Error> {
        Err(Error::Store { path: dir.to_path_buf(), source: io::ErrorKind::Unsupported.into() })
    }

    /// Does nothing.
    pub fn leave_all() {}

    /// Returns the size of all entries of a group, in bytes.
    pub fn group_bytes(&self, _group: u64) -> u64 {
        match self.never {}
    }

    /// Returns the keys of all entries of a group.
    pub fn keys(&self, _group: u64) -> HashSet<u128> {
        match self.never {}
    }

    /// Replaces the memory of a buffer by the pages of an entry.
    pub fn take(&self, _key: PageKey, _buffer: &mut Buffer) -> bool {
        match self.never {}
    }

    /// Replaces the memory of a buffer by new pages.
    pub fn start(&self, _buffer: &mut Buffer) -> Option<NewPages> {
        match self.never {}
    }

    /// Makes the pages of a filled buffer an entry.
    pub fn publish(&self, _key: PageKey, _pages: NewPages, _buffer: &mut Buffer) -> bool {
        match self.never {}
    }

    /// Removes an entry.
    pub fn remove(&self, _key: PageKey) {
        match self.never {}
    }
}
