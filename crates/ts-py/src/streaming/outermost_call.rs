// SPDX-License-Identifier: MIT OR Apache-2.0
//! The outermost call of a module on each thread, which is a pass.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;

use super::passes::RunningPass;
use super::shared::Shared;
use crate::errors::written_error;
use crate::signals::interruptible;

thread_local! {
    /// How many calls of modules run on this thread.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// Whether there were modes that see functions when the outermost of these calls began.
    static FUNCTION_MODES: Cell<bool> = const { Cell::new(false) };
    /// The outermost of these calls.
    static OUTERMOST: RefCell<Outermost> = RefCell::default();
}

/// The outermost call of a module on a thread.
#[derive(Default)]
struct Outermost {
    module: Option<Py<PyAny>>,
    passes: Vec<PassOfCall>,
}

/// What the outermost call of a module is to a streamer.
struct PassOfCall {
    shared: Arc<Shared>,
    /// The pass, unless the call is not one.
    pass: Option<RunningPass>,
    /// Shows the progress of the first pass until it is closed.
    progress: Option<Py<PyAny>>,
    /// Whether PyTorch's profiler runs.
    profiled: bool,
}

/// A call of a module. It ends when it is dropped.
pub(super) struct Call;

impl Call {
    /// `function_modes` returns whether there are modes that see functions.
    pub(super) fn begin(
        module: &Bound<'_, PyAny>,
        function_modes: impl FnOnce() -> PyResult<bool>,
    ) -> PyResult<Self> {
        let depth = DEPTH.get();
        if depth == 0 {
            FUNCTION_MODES.set(function_modes()?);
            OUTERMOST.with_borrow_mut(|outermost| outermost.module = Some(module.clone().unbind()));
        }
        DEPTH.set(depth + 1);
        Ok(Self)
    }
}

/// Returns whether there were modes that see functions, such as those of users, when the outermost
/// call on this thread began.
pub(super) fn has_function_modes() -> bool {
    FUNCTION_MODES.get()
}

impl Drop for Call {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Begins a pass if the outermost call of a module on this thread is one that has not begun yet.
/// Blocks while other passes run, if the call is one of the whole model. Returns whether PyTorch's
/// profiler ran when the call began: it refers weakly to the implementations of tensors that
/// operations use.
pub(super) fn ensure_pass(py: Python<'_>, shared: &Arc<Shared>) -> PyResult<bool> {
    if DEPTH.get() == 0 {
        return Ok(false);
    }
    let known = OUTERMOST.with_borrow(|outermost| {
        let known = outermost.passes.iter().find(|pass| Arc::ptr_eq(&pass.shared, shared));
        known.map(|known| known.profiled)
    });
    if let Some(profiled) = known {
        return Ok(profiled);
    }
    let module = OUTERMOST
        .with_borrow(|outermost| outermost.module.as_ref().map(|module| module.clone_ref(py)));
    let Some(module) = module else { return Ok(false) };
    let profiled = shared.torch.is_profiler_enabled(py)?;
    let mut known = PassOfCall { shared: Arc::clone(shared), pass: None, progress: None, profiled };
    if let Some(passes) = shared.passes(py) {
        if profiled {
            shared
                .torch
                .uncompiled(py, || passes.call_method0(intern!(py, "profiled")).map(drop))?;
        }
        let kind = shared.torch.uncompiled(py, || {
            passes.call_method1(intern!(py, "kind"), (module,))?.extract::<u8>()
        })?;
        known.pass = match kind {
            0 => None,
            1 => shared.try_begin_pass(py)?,
            _ => shared.begin_pass(py)?,
        };
        if known.pass.is_some() {
            let progress =
                shared.torch.uncompiled(py, || passes.call_method0(intern!(py, "progress")))?;
            known.progress = (!progress.is_none()).then(|| progress.unbind());
        }
    }
    OUTERMOST.with_borrow_mut(|outermost| outermost.passes.push(known));
    Ok(profiled)
}

/// Ends the passes of the outermost call, if no call of a module runs on this thread any more.
/// Returns the error if weights were written to.
pub(super) fn end_passes(py: Python<'_>, succeeded: bool) -> Option<PyErr> {
    if DEPTH.get() > 0 {
        return None;
    }
    let Outermost { module, passes } = OUTERMOST.take();
    drop(module);
    let mut failed = None;
    for PassOfCall { shared, pass, progress, .. } in passes {
        if let Some(progress) = progress
            && let Err(error) = progress.call_method0(py, intern!(py, "close"))
        {
            failed = Some(error);
        }
        let Some(pass) = pass else { continue };
        let (proposed, written) = shared.end_pass(py, &pass);
        if let Some(names) = written {
            failed = Some(written_error(py, &names));
        }
        let finished = if succeeded { shared.torch.clear_autocast_cache(py) } else { Ok(()) }
            .and_then(|()| if proposed { replan_if_idle(py, &shared) } else { Ok(()) });
        failed = finished.err().or(failed);
    }
    failed
}

fn replan_if_idle(py: Python<'_>, shared: &Shared) -> PyResult<()> {
    if shared.is_in_use() {
        return Ok(());
    }
    let engine = shared.engine(py)?;
    shared.drop_cached(py);
    interruptible(py, |interrupt| engine.replan_interruptible(interrupt)).map(|_: bool| ())
}
