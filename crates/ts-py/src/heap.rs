// SPDX-License-Identifier: MIT OR Apache-2.0
//! Returns free memory of the C library's heap to the system when memory is short.
//!
//! PyTorch allocates activations on this heap. Small objects that outlive them, such as the tensors
//! of weights, are allocated between them, mostly in the first pass. Then the C library keeps much
//! of the heap although it is free, and a process near its memory limit is killed.

/// Returns free memory of the heap to the system if less than 128 MiB are available to this
/// process, and at least 16 MiB of the heap are free. Looks at most every 50 ms.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn trim_if_short() {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    const PERIOD_MS: u64 = 50;
    const SHORT: u64 = 128 << 20;
    const WORTHWHILE: usize = 16 << 20;
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    static LOOKED_MS: AtomicU64 = AtomicU64::new(0);

    let now_ms = BEGAN.get_or_init(Instant::now).elapsed().as_millis() as u64;
    let looked_ms = LOOKED_MS.load(Ordering::Relaxed);
    if now_ms < looked_ms + PERIOD_MS
        || LOOKED_MS
            .compare_exchange(looked_ms, now_ms, Ordering::Relaxed, Ordering::Relaxed)
            .is_err()
    {
        return;
    }
    if tensorstream::available_bytes().is_some_and(|available| available < SHORT)
        // SAFETY: the function has no arguments and returns a value.
        && unsafe { libc::mallinfo2() }.fordblks >= WORTHWHILE
    {
        // SAFETY: the function only returns pages to the system that the heap does not use.
        unsafe { libc::malloc_trim(0) };
    }
}

/// Other C libraries have no such function.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn trim_if_short() {}
