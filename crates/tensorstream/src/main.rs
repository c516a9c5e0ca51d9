// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program `tensorstream`. It runs [`tensorstream::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    let signals = Signals::catch();
    let status = tensorstream::cli::run(std::env::args_os(), &mut || signals.received().is_some());
    // By convention, a process that stops because of a signal exits with status 128 plus the
    // signal's number.
    match signals.received() {
        Some(signal) if status == 130 => ExitCode::from(128 + signal),
        _ => ExitCode::from(status),
    }
}

/// Handlers of SIGINT, SIGTERM and SIGHUP. The first signal interrupts the command; a second one
/// ends the process immediately.
struct Signals {
    #[cfg(unix)]
    received: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

#[cfg(unix)]
impl Signals {
    fn catch() -> Self {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicBool, AtomicUsize};

        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        use signal_hook::flag;

        let (received, again) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let signals = [SIGINT, SIGTERM, SIGHUP];
        for signal in signals.into_iter().filter(|signal| *signal != SIGHUP || hangs_up()) {
            // The order matters: the shutdown handler checks `again` before the first signal sets
            // it. If that handler cannot be registered, the signal keeps its default effect.
            let _ = flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&again))
                .and_then(|_| flag::register(signal, Arc::clone(&again)))
                .and_then(|_| flag::register_usize(signal, Arc::clone(&received), signal as usize));
        }
        Self { received }
    }

    /// Returns the number of the most recent signal, or `None` if no signal was received.
    fn received(&self) -> Option<u8> {
        let signal = self.received.load(std::sync::atomic::Ordering::Relaxed);
        (signal > 0).then_some(signal as u8)
    }
}

/// Returns whether SIGHUP ends this process, so that it is not ignored as by `nohup`. Only Linux
/// tells; elsewhere, SIGHUP keeps its effect.
#[cfg(unix)]
fn hangs_up() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal_hook::consts::SIGHUP - 1) == 0)
}

/// On systems other than Unix, Ctrl-C ends the process immediately.
#[cfg(not(unix))]
impl Signals {
    fn catch() -> Self {
        Self {}
    }

    fn received(&self) -> Option<u8> {
        None
    }
}
