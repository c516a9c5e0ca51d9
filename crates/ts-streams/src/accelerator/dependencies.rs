// SPDX-License-Identifier: MIT OR Apache-2.0
//! The failures that propagate from stream to stream.

use std::sync::{Arc, OnceLock};

use crate::Error;

/// The streams that a point depends on, each with the number of its last operation before the
/// point. The failures of these streams show whether a host function failed before the point.
#[derive(Debug, Clone, Default)]
pub(super) struct Dependencies {
    pub(super) own: Arc<Failure>,
    pub(super) operations: u64,
    pub(super) others: Vec<(Arc<Failure>, u64)>,
}

/// The first failure of a stream: the number of the failed operation, and the error.
pub(super) type Failure = OnceLock<(u64, Error)>;

impl Dependencies {
    /// Returns a known failure among the dependencies, if there is one.
    pub(super) fn failure(&self) -> Option<&Error> {
        let others = self
            .others
            .iter()
            .filter_map(|(failure, until)| failure.get().filter(|(at, _)| at <= until));
        self.own.get().into_iter().chain(others).map(|(_, error)| error).next()
    }

    /// Adds the dependencies of `other`, including its own stream.
    pub(super) fn join(&mut self, other: &Dependencies) {
        let all = other.others.iter().cloned().chain([(Arc::clone(&other.own), other.operations)]);
        for (failure, until) in all.filter(|(failure, _)| !Arc::ptr_eq(failure, &self.own)) {
            match self.others.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &failure)) {
                Some((_, known)) => *known = (*known).max(until),
                None => self.others.push((failure, until)),
            }
        }
        // If no other reference exists, the stream was dropped and has no pending host functions,
        // so it cannot fail any more.
        self.others
            .retain(|(failure, _)| Arc::strong_count(failure) > 1 || failure.get().is_some());
    }
}
