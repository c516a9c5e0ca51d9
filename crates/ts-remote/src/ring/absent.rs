// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ends of a ring, on systems that cannot pass memory to another process. They do not exist.

use rustix::fd::OwnedFd;

use crate::Error;

/// The writing end of a ring.
#[derive(Debug)]
pub(crate) enum RingWriter {}

impl RingWriter {
    pub(crate) fn set_limit(&mut self, _limit: u64) -> Result<(), Error> {
        match *self {}
    }

    pub(crate) fn is_mapped(&self) -> bool {
        match *self {}
    }

    pub(crate) fn next_len(&self, _left: usize) -> usize {
        match *self {}
    }

    pub(crate) fn write(&mut self, _bytes: &[u8]) {
        match *self {}
    }
}

/// The reading end of a ring.
#[derive(Debug)]
pub(crate) enum RingReader {}

impl RingReader {
    pub(crate) fn open(_descriptor: &OwnedFd, _len: u64) -> Option<Self> {
        None
    }

    pub(crate) fn limit(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn allows(&self, _len: u64) -> bool {
        match *self {}
    }

    pub(crate) fn read(&mut self, _into: &mut [u8], _non_temporal: bool) {
        match *self {}
    }

    pub(crate) fn skip(&mut self, _len: usize) {
        match *self {}
    }

    pub(crate) fn renew_limit(&mut self) -> Option<u64> {
        match *self {}
    }
}
