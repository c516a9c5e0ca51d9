// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds and traces the lines of the program that call operators.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::intern;
use pyo3::prelude::*;

use super::torch::{Torch, torch};

/// The maximum size of the cache that records which functions are part of the program.
const MAX_KNOWN_CODE: usize = 16 << 10;

/// Identifies a call site: the address of a function's code, and the instruction.
pub(super) type CallSiteKey = (usize, i32);

/// A line of the program: the code of a function, and an instruction in it.
pub(super) struct CallSite {
    code: Py<PyAny>,
    instruction: i32,
}

impl CallSite {
    /// Returns the call site in the innermost frame that is neither in PyTorch nor in this package,
    /// or `None` if there is no such frame.
    pub(super) fn current(py: Python<'_>, torch: &Torch) -> Option<Self> {
        let mut frame = torch.getframe.bind(py).call0().ok()?;
        loop {
            let code = frame.getattr(intern!(py, "f_code")).ok()?;
            let address = code.as_ptr() as usize;
            let mut known = torch.known_code.lock();
            let in_program = match known.get(&address) {
                Some((_, in_program)) => *in_program,
                None => {
                    let file: String =
                        code.getattr(intern!(py, "co_filename")).ok()?.extract().ok()?;
                    let in_program =
                        !torch.hooks.libraries.iter().any(|library| file.starts_with(library));
                    if known.len() >= MAX_KNOWN_CODE {
                        known.clear();
                    }
                    known.insert(address, (code.clone().unbind(), in_program));
                    in_program
                }
            };
            drop(known);
            if in_program {
                let instruction = frame.getattr(intern!(py, "f_lasti")).ok()?.extract().ok()?;
                return Some(Self { code: code.unbind(), instruction });
            }
            frame = frame.getattr(intern!(py, "f_back")).ok()?;
            if frame.is_none() {
                return None;
            }
        }
    }

    /// Returns the key of the call site, which is unique as long as the call site exists.
    pub(super) fn key(&self) -> CallSiteKey {
        (self.code.as_ptr() as usize, self.instruction)
    }

    pub(super) fn clone_ref(&self, py: Python<'_>) -> Self {
        Self { code: self.code.clone_ref(py), instruction: self.instruction }
    }

    /// Returns the file, line and function of the call site, or "?" if they cannot be determined.
    pub(super) fn location(&self, py: Python<'_>) -> String {
        let location = torch(py).and_then(|torch| {
            torch.hooks.source_line.call1(py, (&self.code, self.instruction))?.extract(py)
        });
        location.unwrap_or_else(|_| "?".into())
    }
}

/// A call of an operator, or a wait.
struct TraceEvent {
    what: String,
    call_site: CallSite,
    waited: Option<Duration>,
}

static TRACING: AtomicBool = AtomicBool::new(false);
static TRACE: Mutex<Vec<TraceEvent>> = Mutex::new(Vec::new());

/// Records an event, if tracing is on. `waited` is `None` for an operator.
pub(super) fn trace(py: Python<'_>, what: &str, call_site: &CallSite, waited: Option<Duration>) {
    if TRACING.load(Ordering::Relaxed) {
        let event =
            TraceEvent { what: what.to_string(), call_site: call_site.clone_ref(py), waited };
        TRACE.lock().push(event);
    }
}

/// Starts or stops tracing.
///
/// Returns:
///     The events since the last call. Each has the operator or the cause of the wait, the line of
///     the program, and the seconds waited (None for an operator).
#[pyfunction]
pub(crate) fn remote_trace(py: Python<'_>, on: bool) -> Vec<(String, String, Option<f64>)> {
    TRACING.store(on, Ordering::Relaxed);
    let events = std::mem::take(&mut *TRACE.lock());
    events
        .into_iter()
        .map(|TraceEvent { what, call_site, waited }| {
            (what, call_site.location(py), waited.map(|time| time.as_secs_f64()))
        })
        .collect()
}
