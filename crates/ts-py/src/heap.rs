// SPDX-License-Identifier: MIT OR Apache-2.0
//! Returns free memory of the C library's heap, and memory of deleted tensors, to the system when
//! memory is short.
//!
//! PyTorch allocates activations on this heap. Small objects that outlive them, such as the tensors
//! of weights, are allocated between them, mostly in the first pass. Then the C library keeps much
//! of the heap although it is free, and a process near its memory limit is killed.

/// Returns memory of deleted tensors to the system if less than 128 MiB are available to this
/// process, and free memory of the heap if this is at least 16 MiB. Looks at most every 50 ms, and
/// less often while this frees little: fragments whose pages were returned still count as free.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn trim_if_short(py: pyo3::Python<'_>) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use std::time::Instant;

    const PERIOD_MS: (u64, u64) = (50, 3200);
    const SHORT: u64 = 128 << 20;
    const WORTHWHILE: u64 = 16 << 20;
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    static NEXT_MS: AtomicU64 = AtomicU64::new(PERIOD_MS.0);
    static PERIOD: AtomicU64 = AtomicU64::new(PERIOD_MS.0);

    let now_ms = BEGAN.get_or_init(Instant::now).elapsed().as_millis() as u64;
    let next_ms = NEXT_MS.load(Relaxed);
    let later_ms = now_ms + PERIOD.load(Relaxed);
    if now_ms < next_ms || NEXT_MS.compare_exchange(next_ms, later_ms, Relaxed, Relaxed).is_err() {
        return;
    }
    py.detach(|| {
        let Some(before) = tensorstream::available_bytes().filter(|bytes| *bytes < SHORT) else {
            return PERIOD.store(PERIOD_MS.0, Relaxed);
        };
        tensorstream::trim();
        // SAFETY: the function has no arguments and returns a value.
        if (unsafe { libc::mallinfo2() }.fordblks as u64) < WORTHWHILE {
            return;
        }
        // SAFETY: the function only returns pages to the system that the heap does not use.
        unsafe { libc::malloc_trim(0) };
        let freed = tensorstream::available_bytes().unwrap_or(before).saturating_sub(before);
        let period_ms = match freed >= WORTHWHILE {
            true => PERIOD_MS.0,
            false => (2 * PERIOD.load(Relaxed)).min(PERIOD_MS.1),
        };
        PERIOD.store(period_ms, Relaxed);
    });
}

/// Other C libraries have no such function.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn trim_if_short(_: pyo3::Python<'_>) {}

/// Returns free memory between small objects to the system. Call this before a unit gets its first
/// tensors: it looks only at every 16th call, and only returns memory if what is free has grown by
/// 4 MiB since.
///
/// In the first pass, each layer leaves objects in the memory of its activations, so that the next
/// layer needs other memory.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn trim_fragments() {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    const CALLS: u64 = 16;
    const GROWTH: u64 = 4 << 20;
    static CALL: AtomicU64 = AtomicU64::new(0);
    static FREE: AtomicU64 = AtomicU64::new(0);

    if !CALL.fetch_add(1, Relaxed).is_multiple_of(CALLS) {
        return;
    }
    // SAFETY: the function has no arguments and returns a value.
    let free = unsafe { libc::mallinfo2() }.fordblks as u64;
    let before = FREE.fetch_min(free, Relaxed).min(free);
    if free >= before + GROWTH {
        // SAFETY: the function only returns pages to the system that the heap does not use.
        unsafe { libc::malloc_trim(0) };
        FREE.store(free, Relaxed);
    }
}

/// Other C libraries have no such function.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn trim_fragments() {}
