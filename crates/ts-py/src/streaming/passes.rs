// SPDX-License-Identifier: MIT OR Apache-2.0
//! The passes of threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use tensorstream::orchestrator::PassId;

use super::Engine;
use super::shared::Shared;
use super::thread_passes::{PASSES, ThreadPass};
use super::weight::Weight;
use crate::heap;
use crate::signals::interruptible;

/// A pass that was begun on a thread.
pub(super) struct RunningPass {
    engine: Arc<Engine>,
    id: PassId,
    ended: Arc<AtomicBool>,
}

impl Shared {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Returns whether a pass runs on this thread.
    pub(super) fn in_pass(&self) -> bool {
        self.thread_pass(|_| ()).is_some()
    }

    /// Returns something of the pass that runs on this thread, or None.
    pub(super) fn thread_pass<T>(&self, get: impl FnOnce(&ThreadPass) -> T) -> Option<T> {
        PASSES.with_borrow(|passes| {
            let pass = passes.get(&self.address())?;
            (!pass.ended.load(Ordering::Acquire)).then(|| get(pass))
        })
    }

    /// Begins a pass on this thread, or returns None if the thread is already in a pass. Blocks
    /// while the maximum number of passes is running.
    pub(super) fn begin_pass(&self, py: Python<'_>) -> PyResult<Option<RunningPass>> {
        loop {
            let engine = self.engine(py)?;
            if self.in_pass() {
                return Ok(None);
            }
            let id = interruptible(py, |interrupt| engine.begin_pass_interruptible(interrupt))?;
            if self.is_current(&engine) {
                return Ok(Some(self.running(py, engine, id)));
            }
            engine.end_pass(id); // a reload has replaced the engine
        }
    }

    /// Begins a pass on this thread, or returns None if any thread is in a pass.
    pub(super) fn try_begin_pass(&self, py: Python<'_>) -> PyResult<Option<RunningPass>> {
        if self.in_pass() {
            return Ok(None);
        }
        let engine = self.engine(py)?;
        let id = py.detach(|| engine.try_begin_pass());
        if let Some(id) = id.filter(|_| !self.is_current(&engine)) {
            engine.end_pass(id);
            return Ok(None);
        }
        Ok(id.map(|id| self.running(py, engine, id)))
    }

    /// Returns a pass that runs on this thread.
    fn running(&self, py: Python<'_>, engine: Arc<Engine>, id: PassId) -> RunningPass {
        heap::trim_if_short(py);
        let visits = (!self.keep_leases(&engine)).then_some(id);
        let ended = Arc::new(AtomicBool::new(false));
        PASSES.with_borrow_mut(|passes| {
            passes.retain(|_, pass| !pass.ended.load(Ordering::Acquire));
            let own = ThreadPass { visits, ended: Arc::clone(&ended) };
            passes.insert(self.address(), own);
        });
        RunningPass { engine, id, ended }
    }

    /// Ends a pass. Returns whether to replan, and the names of weights that were written to
    /// without PyTorch noticing. Does nothing if the pass has already ended.
    pub(super) fn end_pass(&self, py: Python<'_>, pass: &RunningPass) -> (bool, Option<String>) {
        let RunningPass { engine, id, ended } = pass;
        if ended.swap(true, Ordering::AcqRel) || engine.is_forked() {
            return (false, None);
        }
        (engine.end_pass(*id), self.untracked_writes(py, engine))
    }

    /// Returns the names of weights that were written to without PyTorch noticing, if the engine
    /// detects such writes. The units of these weights are read again for their next use.
    fn untracked_writes(&self, py: Python<'_>, engine: &Engine) -> Option<String> {
        let written = py.detach(|| engine.modified_units());
        if !written.is_empty() {
            self.drop_kept_leases();
        }
        let mut names = Vec::new();
        for (id, tensors) in written {
            let unit = id.0 as usize;
            // The next use gets other memory, so it must not reuse these tensors.
            let before = std::mem::take(&mut *self.entry(unit).lock());
            drop(before);
            engine.discard(id).expect("the unit exists, because the engine reported it");
            let is_written =
                |weight: &&Weight| weight.unit == unit && tensors.contains(&weight.index);
            let found = self.weights.iter().filter(is_written);
            names.extend(found.map(|weight| format!("`{}`", weight.name)));
        }
        // Writes are detected by page. If weights share a page, any of them may have been written.
        (!names.is_empty()).then(|| names.join(" or "))
    }
}
