// SPDX-License-Identifier: MIT OR Apache-2.0
//! Conversions in the background.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;
use tensorstream::io::Source;
use tensorstream::{Checkpoint, Converted, Error, WriteOptions};

use super::convert;
use super::path::PathArgument;
use crate::errors::to_python;
use crate::signals::interruptible;

/// How often a call that waits looks for signals.
const PERIOD: Duration = Duration::from_millis(50);

/// A conversion that runs on a thread of low priority.
///
/// Args:
///     source: The checkpoint: a file, a directory or a URL.
///     target: The file to write, or the directory for several files.
///     codec: "raw", "auto", or the name of a codec.
///     level: The level of the codec; None for its default.
///     jobs: The number of threads that compress.
///     max_shard_bytes: The maximum total size of the tensors in a shard, in bytes; None for 5 GB.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Conversion {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

#[derive(Default)]
struct Shared {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    cancelled: AtomicBool,
    result: Mutex<Option<Result<Converted, Error>>>,
    ended: Condvar,
}

impl Shared {
    fn convert(&self, source: &Path, target: &Path, options: WriteOptions) {
        if source.to_str().is_some_and(Source::is_url) {
            // The first use of the network starts threads for the whole process, which must not
            // have a low priority. The conversion reports errors.
            let _ = Checkpoint::open(source);
        }
        lower_priority();
        let show = |done, total| {
            self.done_bytes.store(done, Ordering::Relaxed);
            self.total_bytes.store(total, Ordering::Relaxed);
        };
        // A panic must not make the calls that wait for the result hang.
        let result = catch_unwind(AssertUnwindSafe(|| {
            tensorstream::convert(source, target, options, &mut |progress| {
                show(progress.done, progress.total);
                self.cancelled.load(Ordering::Relaxed)
            })
        }));
        let result = result.unwrap_or_else(|_| {
            let source = std::io::Error::other("the thread that converts panicked");
            Err(Error::Write { path: target.to_path_buf(), source })
        });
        if let Ok(converted) = &result {
            // If an earlier conversion had done everything, nothing was reported.
            show(converted.bytes, converted.bytes);
        }
        *self.result.lock() = Some(result);
        self.ended.notify_all();
    }

    /// Waits until the conversion ends or until then. Returns whether it has ended.
    fn wait_until(&self, until: Instant) -> bool {
        let mut result = self.result.lock();
        while result.is_none() {
            if self.ended.wait_until(&mut result, until).timed_out() {
                break;
            }
        }
        result.is_some()
    }
}

#[pymethods]
impl Conversion {
    #[new]
    #[pyo3(signature = (source, target, codec, level, jobs, max_shard_bytes))]
    fn new(
        py: Python<'_>,
        source: PathArgument,
        target: PathArgument,
        codec: &str,
        level: Option<i32>,
        jobs: usize,
        max_shard_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let (source, target) = (source.0, target.0);
        let options = convert::options(py, &target, codec, level, jobs, max_shard_bytes)?;
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("ts-convert".into())
            .spawn(move || own.convert(&source, &target, options))
            .map_err(|e| PyOSError::new_err(format!("cannot create a thread: {e}")))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), process: std::process::id() })
    }

    /// Returns how many bytes of tensors were converted, and how many there are. Both are 0 until
    /// the source is open.
    fn progress(&self) -> (u64, u64) {
        let load = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed);
        (load(&self.shared.done_bytes), load(&self.shared.total_bytes))
    }

    /// Makes the conversion end soon. Does not wait for this.
    fn cancel(&self) {
        self.shared.cancelled.store(true, Ordering::Relaxed);
    }

    /// Waits until the conversion has ended, but at most this many seconds.
    ///
    /// Returns:
    ///     None if it is still running, False if it was cancelled, True if it succeeded.
    ///
    /// Raises:
    ///     TensorStreamError: It failed.
    ///     RuntimeError: It was started by the parent of this process.
    fn wait(&self, py: Python<'_>, seconds: f64) -> PyResult<Option<bool>> {
        if self.process != std::process::id() {
            return Err(PyRuntimeError::new_err(
                "the conversion belongs to the parent of this process",
            ));
        }
        let began = Instant::now();
        // Longer than any program runs.
        let patience = Duration::try_from_secs_f64(seconds.clamp(0.0, 1e9)).unwrap_or_default();
        let shared = Arc::clone(&self.shared);
        interruptible(py, |interrupted| {
            loop {
                let left = patience.saturating_sub(began.elapsed());
                if shared.wait_until(Instant::now() + left.min(PERIOD)) || left.is_zero() {
                    return Ok::<(), Error>(());
                }
                if interrupted() {
                    return Ok(());
                }
            }
        })?;
        match &*self.shared.result.lock() {
            None => Ok(None),
            Some(Ok(_)) => Ok(Some(true)),
            Some(Err(Error::Interrupted)) => Ok(Some(false)),
            Some(Err(error)) => Err(to_python(py, error)),
        }
    }
}

impl Drop for Conversion {
    /// Cancels the conversion, and waits until it has ended.
    fn drop(&mut self) {
        let thread = self.thread.get_mut().take();
        if self.process != std::process::id() {
            // The thread does not exist in a forked child.
            std::mem::forget(thread);
            return;
        }
        self.cancel();
        if let Some(thread) = thread {
            Python::attach(|py| py.detach(|| drop(thread.join())));
        }
    }
}

/// Gives the thread, and the threads that it starts, the lowest priority, so that they do not slow
/// down computations.
#[cfg(target_os = "linux")]
fn lower_priority() {
    const NICE: libc::c_int = 19;
    // SAFETY: the call has no pointers. On Linux, 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

#[cfg(not(target_os = "linux"))]
fn lower_priority() {}
