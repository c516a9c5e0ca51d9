// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decides how much memory to use while other programs need memory too.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the available memory is looked at.
const PERIOD: Duration = Duration::from_millis(100);
/// Memory must be plentiful for this long before more of it is used.
const CALM: Duration = Duration::from_secs(3);
/// The least and the most memory that is left to others, in bytes.
const RESERVE: (usize, usize) = (64 << 20, 512 << 20);

/// Decides how many bytes to use, between a least and a most number.
///
/// Leaves a reserve, an eighth of the most, but at least 64 MiB and at most 512 MiB. If less than
/// the reserve is available, gives back what is missing to twice the reserve. If more than three
/// times the reserve is available for three seconds, takes what exceeds twice the reserve.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use tensorstream::Governor;
///
/// let mut governor = Governor::new(100 << 20, 1000 << 20, 1000 << 20);
/// let second = Duration::from_secs;
/// assert_eq!(governor.next(200 << 20, second(0)), None);
/// // Less than 125 MiB are available.
/// assert_eq!(governor.next(50 << 20, second(1)), Some(800 << 20));
/// assert_eq!(governor.next(900 << 20, second(2)), None);
/// assert_eq!(governor.next(900 << 20, second(5)), Some(1000 << 20));
/// ```
#[derive(Debug, Clone)]
pub struct Governor {
    least: usize,
    most: usize,
    limit: usize,
    /// Since when memory has been plentiful.
    calm_since: Option<Duration>,
}

impl Governor {
    /// Returns a governor that begins with `limit` bytes.
    pub fn new(least: usize, limit: usize, most: usize) -> Self {
        Self { least, most, limit, calm_since: None }
    }

    /// Returns the new limit if it changes. `available` is the memory that can still be used, in
    /// bytes, and `now` is the time since any fixed moment.
    pub fn next(&mut self, available: u64, now: Duration) -> Option<usize> {
        let available = usize::try_from(available).unwrap_or(usize::MAX);
        let reserve = (self.most / 8).clamp(RESERVE.0, RESERVE.1);
        let limit = if available < reserve {
            self.calm_since = None;
            self.limit.saturating_sub(2 * reserve - available).max(self.least).min(self.limit)
        } else if available < 3 * reserve || self.limit >= self.most {
            self.calm_since = None;
            self.limit
        } else if now.saturating_sub(*self.calm_since.get_or_insert(now)) < CALM {
            self.limit
        } else {
            self.calm_since = None;
            self.limit.saturating_add(available - 2 * reserve).min(self.most)
        };
        let changed = limit != self.limit;
        self.limit = limit;
        changed.then_some(limit)
    }

    /// Returns the limit to set now, if any, after an attempt to set the limit of the governor.
    /// While that limit is not in force, returns it again, or a lower one, but none that is lower
    /// while memory that was to be returned is still in use: it is not available yet.
    fn after(&mut self, latest: Option<Resized>, available: u64, now: Duration) -> Option<usize> {
        let Some(Resized { is_within: within, in_force: false, .. }) = latest else {
            return self.next(available, now);
        };
        let limit = self.limit;
        if within {
            self.next(available, now);
            self.limit = self.limit.min(limit);
        }
        Some(self.limit)
    }
}

/// The result of setting a limit.
#[derive(Debug, Clone, Copy)]
pub struct Resized {
    /// The limit that was set, in bytes.
    pub limit_bytes: usize,
    /// Whether no more memory than that is used.
    pub is_within: bool,
    /// Whether the plan is made for the limit. If not, it must be set again.
    pub in_force: bool,
}

/// A thread that watches the available memory, until this object is dropped.
#[derive(Debug)]
pub struct PressureMonitor {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl PressureMonitor {
    /// Starts the thread, which calls `resize` with each new limit of the governor, in bytes, and
    /// again while the limit is not in force.
    ///
    /// The thread ends when `resize` returns `None`, or when the available memory cannot be
    /// detected. Dropping the object on another thread waits for a call of `resize` that is
    /// running.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn new(
        mut governor: Governor,
        mut resize: impl FnMut(usize) -> Option<Resized> + Send + 'static,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        let began = Instant::now();
        let mut latest = None;
        let watch = move || {
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                let Some(available) = crate::available_bytes() else { return };
                let Some(limit) = governor.after(latest, available, began.elapsed()) else {
                    continue;
                };
                let Some(resized) = resize(limit) else { return };
                governor.limit = resized.limit_bytes;
                latest = Some(resized);
            }
        };
        let thread = std::thread::Builder::new().name("ts-pressure".into());
        let thread = thread.stack_size(512 << 10).spawn(watch)?;
        Ok(Self { stop: Some(stop), thread: Some(thread), process: std::process::id() })
    }
}

impl Drop for PressureMonitor {
    fn drop(&mut self) {
        let (stop, thread) = (self.stop.take(), self.thread.take());
        if self.process != std::process::id() {
            // The thread does not exist in a forked child.
            std::mem::forget((stop, thread));
            return;
        }
        drop(stop);
        if let Some(thread) = thread.filter(|own| own.thread().id() != std::thread::current().id())
        {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn the_limit_never_leaves_its_range() {
        let mut governor = Governor::new(200 * MIB, 800 * MIB, 1000 * MIB);
        let mut now = Duration::ZERO;
        for available in [0, 0, 0, 10 << 30, 10 << 30, u64::MAX, 0, 1 << 40].repeat(5) {
            now += Duration::from_secs(2);
            governor.next(available, now);
            assert!((200 * MIB..=1000 * MIB).contains(&governor.limit));
        }
    }

    #[test]
    fn a_short_calm_changes_nothing() {
        let mut governor = Governor::new(MIB, 500 * MIB, 1000 * MIB);
        for second in 0..20 {
            // Every third second, memory is neither short nor plentiful.
            let available = if second % 3 == 2 { 200 << 20 } else { 900 << 20 };
            assert_eq!(governor.next(available, Duration::from_secs(second)), None);
        }
    }

    #[test]
    fn a_limit_that_is_not_in_force_can_only_fall() {
        let mut governor = Governor::new(100 * MIB, 800 * MIB, 1000 * MIB);
        let second = Duration::from_secs;
        let pending = |is_within| Some(Resized { limit_bytes: 0, is_within, in_force: false });
        let plenty = 4 << 30;
        assert_eq!(governor.after(pending(true), plenty, second(1)), Some(800 * MIB));
        assert_eq!(governor.after(pending(true), plenty, second(9)), Some(800 * MIB));
        assert_eq!(governor.after(pending(true), 0, second(10)), Some(550 * MIB));
        // The memory that is to be returned is still in use.
        assert_eq!(governor.after(pending(false), 0, second(11)), Some(550 * MIB));
        assert_eq!(governor.after(pending(true), 0, second(12)), Some(300 * MIB));
        let in_force = Some(Resized { limit_bytes: 0, is_within: true, in_force: true });
        assert_eq!(governor.after(in_force, 200 << 20, second(13)), None);
    }

    #[test]
    fn under_lasting_pressure_the_limit_falls_to_the_least() {
        let mut governor = Governor::new(100 * MIB, 1000 * MIB, 1000 * MIB);
        let limits: Vec<_> =
            (0..10).map_while(|tenth| governor.next(0, Duration::from_millis(tenth))).collect();
        assert_eq!(limits.last(), Some(&(100 * MIB)));
        assert!(limits.is_sorted_by(|more, less| more > less));
    }
}
