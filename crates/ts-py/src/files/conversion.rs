// SPDX-License-Identifier: MIT OR Apache-2.0
//! Conversions in the background.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use tensorstream::{Converted, Error, WriteOptions};

use super::writer::write_options;
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
    fn convert(&self, source: &std::path::Path, target: &std::path::Path, options: WriteOptions) {
        lower_priority();
        let result = tensorstream::convert(source, target, options, &mut |progress| {
            self.done_bytes.store(progress.done, Ordering::Relaxed);
            self.total_bytes.store(progress.total, Ordering::Relaxed);
            self.cancelled.load(Ordering::Relaxed)
        });
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
        source: PathBuf,
        target: PathBuf,
        codec: &str,
        level: Option<i32>,
        jobs: usize,
        max_shard_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let mut options = write_options(py, &target, codec, level, jobs)?;
        options.max_shard_bytes = max_shard_bytes.unwrap_or(options.max_shard_bytes);
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
    fn wait(&self, py: Python<'_>, seconds: f64) -> PyResult<Option<bool>> {
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
