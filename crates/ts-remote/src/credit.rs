// SPDX-License-Identifier: MIT OR Apache-2.0
//! Byte credits.

use parking_lot::{Mutex, MutexGuard};

/// What a [`TensorCreditTracker`] has if nothing else is said, in bytes.
const DEFAULT_CREDIT: u64 = 256 << 10;

/// An account of bytes that may be under way: for senders of one's own.
/// [`Connection`](crate::Connection) keeps such accounts of its streams by itself.
///
/// One side [consumes](Self::try_consume) credit for what it sends, the other [grants](Self::grant)
/// it again when it has been used. Between the two marks [`should_pause`](Self::should_pause) keeps
/// what it said last, so that a sender does not stop and go with every message. May be shared by
/// threads.
///
/// ```
/// use ts_remote::TensorCreditTracker;
///
/// let credit = TensorCreditTracker::default();
/// assert!(credit.try_consume(200 << 10));
/// assert!(!credit.try_consume(100 << 10), "there are 56 KiB left");
/// assert!(credit.should_pause());
/// credit.grant(100 << 10);
/// assert!(!credit.should_pause());
/// ```
#[derive(Debug)]
pub struct TensorCreditTracker {
    initial: u64,
    high_water: u64,
    low_water: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    available: u64,
    paused: bool,
}

impl Default for TensorCreditTracker {
    /// 256 KiB, to pause when 192 KiB are under way, and to go on when no more than 128 KiB are.
    fn default() -> Self {
        Self::new(DEFAULT_CREDIT, DEFAULT_CREDIT / 4 * 3, DEFAULT_CREDIT / 2)
    }
}

impl TensorCreditTracker {
    /// So many bytes may be under way; a sender should pause when `high_water` are, and go on when
    /// at most `low_water` are. Marks that could not be reached are lowered: the upper to what
    /// there is in all, the lower to below the upper, so that who pauses also goes on.
    pub fn new(initial: u64, high_water: u64, low_water: u64) -> Self {
        let high_water = high_water.clamp(1, initial.max(1));
        let low_water = low_water.min(high_water - 1);
        Self {
            initial,
            high_water,
            low_water,
            state: Mutex::new(State { available: initial, paused: false }),
        }
    }

    /// Takes credit for so many bytes, all or nothing; whether there was so much.
    pub fn try_consume(&self, bytes: u64) -> bool {
        let mut state = self.state();
        let left = state.available.checked_sub(bytes);
        state.available = left.unwrap_or(state.available);
        self.update(&mut state);
        left.is_some()
    }

    /// Takes credit for as much as there is, at most so many bytes; how many.
    pub fn consume_up_to(&self, bytes: u64) -> u64 {
        let mut state = self.state();
        let taken = state.available.min(bytes);
        state.available -= taken;
        self.update(&mut state);
        taken
    }

    /// So many bytes are no longer under way. More than there were is as many as there were.
    pub fn grant(&self, bytes: u64) {
        let mut state = self.state();
        state.available = state.available.saturating_add(bytes).min(self.initial);
        self.update(&mut state);
    }

    /// Whether whoever sends should wait: from when the upper mark is reached until no more than
    /// the lower is under way.
    pub fn should_pause(&self) -> bool {
        self.state().paused
    }

    /// Bytes that may be sent now.
    pub fn available(&self) -> u64 {
        self.state().available
    }

    /// Bytes under way.
    pub fn in_flight(&self) -> u64 {
        self.initial - self.available()
    }

    fn update(&self, state: &mut State) {
        let in_flight = self.initial - state.available;
        state.paused = in_flight >= self.high_water || (state.paused && in_flight > self.low_water);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// What the receiving end of a stream has granted.
#[derive(Debug)]
pub(crate) struct Granted {
    window: u64,
    /// Everything up to here, in bytes since the stream began, may be sent.
    limit: u64,
    /// Everything up to here has arrived.
    received: u64,
    /// Everything up to here takes no memory of the connection's any more.
    consumed: u64,
}

impl Granted {
    pub(crate) fn new(window: u64) -> Self {
        let window = window.max(1);
        Self { window, limit: window, received: 0, consumed: 0 }
    }

    /// So much arrives. `whole` is what is never cut: it needs credit for its first byte only.
    /// Whether it was granted.
    pub(crate) fn receive(&mut self, bytes: u64, whole: bool) -> bool {
        let needed = if whole { bytes.min(1) } else { bytes };
        let granted = self.received.checked_add(needed).is_some_and(|end| end <= self.limit);
        self.received = self.received.saturating_add(bytes);
        granted
    }

    pub(crate) fn consume(&mut self, bytes: u64) {
        self.consumed = self.consumed.saturating_add(bytes);
        debug_assert!(self.consumed <= self.received);
    }

    /// What is to be granted now, if that is worth a frame: a new limit. `ahead` are bytes still to
    /// come that have their place.
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
            let mut under_way = 0;
            for (send, bytes) in steps {
                if send {
                    if credit.try_consume(bytes) {
                        under_way += bytes;
                    }
                } else {
                    credit.grant(bytes.min(under_way));
                    under_way -= bytes.min(under_way);
                }
                prop_assert_eq!(credit.in_flight(), under_way);
                prop_assert!(under_way <= initial);
            }
            under_way += credit.consume_up_to(u64::MAX);
            prop_assert_eq!(under_way, initial);
            prop_assert!(credit.should_pause());
            credit.grant(u64::MAX);
            prop_assert!(!credit.should_pause());
            prop_assert_eq!(credit.available(), initial);
        }
    }
}
