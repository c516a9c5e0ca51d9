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

/// Handlers of SIGINT and SIGTERM. The first signal interrupts the command; a second one ends the
/// process immediately.
struct Signals {
    #[cfg(unix)]
    received: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

#[cfg(unix)]
impl Signals {
    fn catch() -> Self {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicBool, AtomicUsize};

        use signal_hook::consts::{SIGINT, SIGTERM};
        use signal_hook::flag;

        let (received, again) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        for signal in [SIGINT, SIGTERM] {
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
