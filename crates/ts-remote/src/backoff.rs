// SPDX-License-Identifier: MIT OR Apache-2.0
//! Delays between retries.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Jittered exponential backoff: delays that double up to a cap.
///
/// Each delay is jittered by up to 25 % in either direction, so that clients that lost the same
/// server do not reconnect at the same moment.
///
/// ```
/// use std::time::Duration;
/// use ts_remote::Backoff;
///
/// let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
/// let delays: Vec<Duration> = (0..5).map(|_| backoff.next_delay()).collect();
/// // 100 ms, 200 ms, 400 ms, 800 ms and 1 s, each within 25 %.
/// assert!(delays[0] >= Duration::from_millis(75) && delays[0] <= Duration::from_millis(125));
/// assert!(delays[4] >= Duration::from_millis(750) && delays[4] <= Duration::from_millis(1250));
/// ```
#[derive(Debug, Clone)]
pub struct Backoff {
    delay: Duration,
    cap: Duration,
    random: u64,
}

impl Backoff {
    /// Creates a backoff whose delays begin at `first` and grow to `cap`, before jitter.
    pub fn new(first: Duration, cap: Duration) -> Self {
        // The standard library seeds each `RandomState` differently, at random for each process.
        Self { delay: first.min(cap), cap, random: RandomState::new().hash_one(0) }
    }

    /// Returns how long to wait before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.delay;
        self.delay = delay.saturating_mul(2).min(self.cap);
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.random;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        // The factor of the jitter, in units of 1/1024: from 3/4 to 5/4.
        let factor = 768 + (bits % 513) as u32;
        delay.checked_mul(factor).map_or(delay, |product| product / 1024)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn within_a_quarter(delay: Duration, expected: Duration) -> bool {
        delay >= expected * 3 / 4 && delay <= expected * 5 / 4
    }

    #[test]
    fn delays_double_up_to_the_cap() {
        let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(70));
        for expected in [10, 20, 40, 70, 70, 70] {
            let delay = backoff.next_delay();
            assert!(within_a_quarter(delay, Duration::from_millis(expected)), "{delay:?}");
        }
    }

    #[test]
    fn delays_are_jittered_over_the_whole_range() {
        let expected = Duration::from_secs(1);
        let mut backoff = Backoff::new(expected, expected);
        let delays: Vec<_> = (0..1000).map(|_| backoff.next_delay()).collect();
        assert!(delays.iter().all(|&delay| within_a_quarter(delay, expected)));
        assert!(delays.iter().any(|&delay| delay < expected * 4 / 5));
        assert!(delays.iter().any(|&delay| delay > expected * 6 / 5));
    }

    #[test]
    fn two_backoffs_have_different_delays() {
        let new = || Backoff::new(Duration::from_secs(1), Duration::from_secs(64));
        let [mut first, mut second] = [new(), new()];
        assert!((0..6).any(|_| first.next_delay() != second.next_delay()));
    }

    #[test]
    fn extreme_delays_do_not_overflow() {
        let mut backoff = Backoff::new(Duration::MAX, Duration::MAX);
        assert_eq!(backoff.next_delay(), Duration::MAX);
        let mut backoff = Backoff::new(Duration::ZERO, Duration::ZERO);
        assert_eq!(backoff.next_delay(), Duration::ZERO);
    }
}
