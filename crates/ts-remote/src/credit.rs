// SPDX-License-Identifier: MIT OR Apache-2.0
//! Flow control by byte credits.

use parking_lot::{Mutex, MutexGuard};

/// The default credit of a [`TensorCreditTracker`], in bytes.
const DEFAULT_CREDIT: u64 = 256 << 10;

/// A thread-safe counter of byte credits, for programs with their own protocol. A
/// [`Connection`](crate::Connection) does its own flow control.
///
/// A sender [consumes](Self::try_consume) credit before it sends, and [grants](Self::grant) it
/// again when the receiver has processed the bytes. [`should_pause`](Self::should_pause) changes to
/// true at a high-water mark and back to false at a low-water mark, so that a sender does not stop
/// and start for every message.
///
/// ```
/// use ts_remote::TensorCreditTracker;
///
/// let credit = TensorCreditTracker::default();
/// assert!(credit.try_consume(200 << 10));
/// assert!(!credit.try_consume(100 << 10), "56 KiB are left");
/// assert!(credit.should_pause());
/// credit.grant(100 << 10);
/// assert!(!credit.should_pause());
/// ```
#[derive(Debug)]
pub struct TensorCreditTracker {
    initial: u64,
    high_water: u64,
    low_water: u64,
    state: Mutex<CreditState>,
}

#[derive(Debug)]
struct CreditState {
    available: u64,
    paused: bool,
}

impl Default for TensorCreditTracker {
    /// Creates a tracker that allows 256 KiB in flight, with a high-water mark of 192 KiB and a
    /// low-water mark of 128 KiB.
    fn default() -> Self {
        Self::new(DEFAULT_CREDIT, DEFAULT_CREDIT / 4 * 3, DEFAULT_CREDIT / 2)
    }
}

impl TensorCreditTracker {
    /// Creates a tracker that allows `initial` bytes in flight. A sender should pause once
    /// `high_water` bytes are in flight, until at most `low_water` are.
    ///
    /// `high_water` is limited to between 1 and `initial`, so that a pause can begin and end.
    /// `low_water` is limited to less than `high_water`.
    pub fn new(initial: u64, high_water: u64, low_water: u64) -> Self {
        let high_water = high_water.clamp(1, initial.max(1));
        let low_water = low_water.min(high_water - 1);
        Self {
            initial,
            high_water,
            low_water,
            state: Mutex::new(CreditState { available: initial, paused: false }),
        }
    }

    /// Takes credit for `bytes` bytes. Returns false and takes nothing if there is not enough.
    pub fn try_consume(&self, bytes: u64) -> bool {
        let mut state = self.state();
        let left = state.available.checked_sub(bytes);
        state.available = left.unwrap_or(state.available);
        self.update(&mut state);
        left.is_some()
    }

    /// Takes the available credit, at most `bytes` bytes. Returns how many it took.
    pub fn consume_up_to(&self, bytes: u64) -> u64 {
        let mut state = self.state();
        let taken = state.available.min(bytes);
        state.available -= taken;
        self.update(&mut state);
        taken
    }

    /// Makes the credit for `bytes` bytes available again, because they are no longer in flight.
    /// Restores at most as much credit as is in flight.
    pub fn grant(&self, bytes: u64) {
        let mut state = self.state();
        state.available = state.available.saturating_add(bytes).min(self.initial);
        self.update(&mut state);
    }

    /// Returns whether a sender should pause. Becomes true when the bytes in flight reach the
    /// high-water mark, and false when they fall to the low-water mark.
    pub fn should_pause(&self) -> bool {
        self.state().paused
    }

    /// Returns how many bytes may be sent now.
    pub fn available(&self) -> u64 {
        self.state().available
    }

    /// Returns how many bytes are in flight.
    pub fn in_flight(&self) -> u64 {
        self.initial - self.available()
    }

    fn update(&self, state: &mut CreditState) {
        let in_flight = self.initial - state.available;
        state.paused = in_flight >= self.high_water || (state.paused && in_flight > self.low_water);
    }

    fn state(&self) -> MutexGuard<'_, CreditState> {
        self.state.lock()
    }
}

/// The credit that the receiver of a stream has granted to the sender. All counts are in bytes
/// since the stream began.
#[derive(Debug)]
pub(crate) struct GrantedCredit {
    window: u64,
    /// The credit limit: the number of bytes that the sender may send in total.
    limit: u64,
    /// The number of bytes that have arrived.
    received: u64,
    /// The number of bytes that no longer use memory of the connection.
    consumed: u64,
}

impl GrantedCredit {
    pub(crate) fn new(window: u64) -> Self {
        let window = window.max(1);
        Self { window, limit: window, received: 0, consumed: 0 }
    }

    /// Counts bytes that arrive. If `whole` is set, the bytes are one frame that is not split, and
    /// need credit only for the first byte. Returns whether there was credit for the bytes.
    pub(crate) fn receive(&mut self, bytes: u64, whole: bool) -> bool {
        let needed = if whole { bytes.min(1) } else { bytes };
        let granted = self.received.checked_add(needed).is_some_and(|end| end <= self.limit);
        self.received = self.received.saturating_add(bytes);
        granted
    }

    /// Counts bytes that no longer use memory of the connection.
    pub(crate) fn consume(&mut self, bytes: u64) {
        self.consumed = self.consumed.saturating_add(bytes);
        debug_assert!(self.consumed <= self.received);
    }

    /// Returns a new limit for the sender, if the increase is worth a frame. `ahead` is the number
    /// of bytes that have not arrived but already have memory.
    pub(crate) fn renew(&mut self, ahead: u64) -> Option<u64> {
        let limit = self.consumed.saturating_add(ahead).saturating_add(self.window);
        let more = limit.saturating_sub(self.limit);
        let worth = more >= (self.window / 2).max(1);
        worth.then(|| {
            self.limit = limit;
            limit
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn credit_is_conserved_and_a_pause_ends(
            initial in 1u64..1000, high in 0u64..2000, low in 0u64..2000,
            steps in prop::collection::vec((any::<bool>(), 0u64..400), 0..100),
        ) {
            let credit = TensorCreditTracker::new(initial, high, low);
            let mut in_flight = 0;
            for (send, bytes) in steps {
                if send {
                    if credit.try_consume(bytes) {
                        in_flight += bytes;
                    }
                } else {
                    credit.grant(bytes.min(in_flight));
                    in_flight -= bytes.min(in_flight);
                }
                prop_assert_eq!(credit.in_flight(), in_flight);
                prop_assert!(in_flight <= initial);
            }
            in_flight += credit.consume_up_to(u64::MAX);
            prop_assert_eq!(in_flight, initial);
            prop_assert!(credit.should_pause());
            credit.grant(u64::MAX);
            prop_assert!(!credit.should_pause());
            prop_assert_eq!(credit.available(), initial);
        }
    }
}
