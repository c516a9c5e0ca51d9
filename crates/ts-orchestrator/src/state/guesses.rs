// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads routed units that are likely to be used soon, while no other reads are waiting.

use std::collections::{BTreeMap, VecDeque};

use ts_streams::Device;

use crate::config::Prefetch;
use crate::context::EngineContext;
use crate::unit::UnitId;
use crate::unit_load::{QueuedRead, split_token};

use super::EngineState;

/// Guessed units are read only if at least this share of recent guesses at the same position of the
/// list was right. A wrong guess costs as much storage bandwidth as a right one saves time.
const LEAST_PRECISION: f64 = 0.5;
/// Guesses are made only if at least this share of recent expectations named absent units.
const LEAST_MISSES: f64 = 0.02;
/// The number of positions of a guessed list whose precision is measured.
const POSITIONS: usize = 32;
/// The weight of a new observation in the averages.
const NEW_WEIGHT: f64 = 1.0 / 32.0;
/// The maximum number of guessed reads in flight. An urgent read waits for all of them.
const GUESSES_IN_FLIGHT: usize = 2;

/// The units that a call guessed will be expected next.
#[derive(Debug)]
pub(crate) struct Guesses {
    /// The guessed units that are to be read, the most likely one first.
    wanted: VecDeque<UnitId>,
    /// The units that were absent when they were guessed. They are not idle.
    pub(super) open: BTreeMap<UnitId, Guess>,
    /// The share of recent guesses that were right, by position. The last number is for all later
    /// positions.
    precision: [f64; POSITIONS],
    /// The number of positions that were used so far.
    positions: usize,
    /// The share of recent expectations with absent units.
    misses: f64,
    /// The reads of guessed units that are not submitted yet.
    pub(super) reads: VecDeque<QueuedRead>,
}

/// A unit that was absent when it was guessed.
#[derive(Debug)]
pub(super) struct Guess {
    /// The position in the list.
    position: usize,
    /// Whether a load was started because of the guess.
    started: bool,
}

impl Guesses {
    pub(crate) fn new() -> Self {
        Self {
            wanted: VecDeque::new(),
            open: BTreeMap::new(),
            precision: [LEAST_PRECISION; POSITIONS],
            positions: 1,
            misses: 1.0,
            reads: VecDeque::new(),
        }
    }

    /// Returns whether recent expectations named absent units, and enough recent guesses were
    /// right.
    pub(crate) fn pay(&self) -> bool {
        let is_enough = |&precision: &f64| precision >= LEAST_PRECISION;
        self.precision[..self.positions].iter().any(is_enough) && self.misses >= LEAST_MISSES
    }

    fn is_worthwhile(&self, position: usize) -> bool {
        self.misses >= LEAST_MISSES && self.precision[position] >= LEAST_PRECISION
    }

    fn judge(&mut self, position: usize, right: bool) {
        let precision = &mut self.precision[position];
        *precision += (f64::from(u8::from(right)) - *precision) * NEW_WEIGHT;
    }

    fn record_expectation(&mut self, missed: bool) {
        self.misses += (f64::from(u8::from(missed)) - self.misses) * NEW_WEIGHT;
    }

    /// Takes the next read to submit, unless enough reads are in flight.
    pub(super) fn next_read(&mut self, in_flight: usize) -> Option<QueuedRead> {
        (in_flight < GUESSES_IN_FLIGHT).then(|| self.reads.pop_front()).flatten()
    }

    /// Takes the reads of a load that are not submitted yet.
    fn take_reads(&mut self, load: u32) -> Vec<QueuedRead> {
        let is_its = |read: &QueuedRead| split_token(read.token).0 == load;
        let (own, others) = self.reads.drain(..).partition(is_its);
        self.reads = others;
        Vec::from(own)
    }
}

impl<D: Device> EngineState<D> {
    /// Guesses that the next expectation will name these units. Starts to read those that are
    /// absent. Replaces earlier guesses.
    pub(crate) fn guess(&mut self, context: &EngineContext<D>, units: &[UnitId], now_ns: u64) {
        self.drop_guesses(context, now_ns);
        for (i, &id) in units.iter().enumerate() {
            self.restore_evicted(id);
            if self.units[id].is_absent() && !self.routed.guesses.open.contains_key(&id) {
                let position = i.min(POSITIONS - 1);
                self.routed.guesses.open.insert(id, Guess { position, started: false });
                self.routed.guesses.positions = self.routed.guesses.positions.max(position + 1);
                if self.routed.guesses.is_worthwhile(position) {
                    self.routed.guesses.wanted.push_back(id);
                }
            }
        }
        self.advance(context, now_ns);
    }

    /// Compares the guesses with the units that are now expected. Cancels the reads of those that
    /// are not.
    pub(super) fn judge_guesses(
        &mut self,
        context: &EngineContext<D>,
        uses: &[(UnitId, u32)],
        now_ns: u64,
    ) {
        self.routed.guesses.wanted.clear();
        let missed =
            |id: UnitId| self.units[id].is_absent() || self.routed.guesses.open.contains_key(&id);
        self.routed.guesses.record_expectation(uses.iter().any(|&(id, _)| missed(id)));
        for (id, guess) in std::mem::take(&mut self.routed.guesses.open) {
            let right = uses.iter().any(|&(used, _)| used == id);
            self.routed.guesses.judge(guess.position, right);
            if right {
                self.routed.stats.right_guesses += u64::from(guess.started);
                self.promote_guess(id);
            } else {
                self.cancel_guess(context, id, now_ns);
                self.update_idle(id);
            }
        }
    }

    /// Ends all guesses, and cancels their reads. Returns whether it cancelled any.
    pub(crate) fn drop_guesses(&mut self, context: &EngineContext<D>, now_ns: u64) -> bool {
        self.routed.guesses.wanted.clear();
        let mut cancelled = false;
        for id in std::mem::take(&mut self.routed.guesses.open).into_keys() {
            cancelled |= self.cancel_guess(context, id, now_ns);
            self.update_idle(id);
        }
        cancelled
    }

    /// Puts the reads of a guessed unit before other reads, because the unit is needed now.
    pub(crate) fn promote_guess(&mut self, id: UnitId) {
        if let Some(load) = self.guessed_load(id) {
            self.transfers.reads.push_urgent(self.routed.guesses.take_reads(load));
        }
    }

    /// Cancels the reads of a guessed unit that are not submitted yet. Returns whether there were
    /// any.
    fn cancel_guess(&mut self, context: &EngineContext<D>, id: UnitId, now_ns: u64) -> bool {
        if !self.units[id].waiters.is_empty() {
            self.promote_guess(id);
            return false;
        }
        let Some(load_id) = self.guessed_load(id) else { return false };
        let reads = self.routed.guesses.take_reads(load_id);
        if reads.is_empty() {
            return false;
        }
        self.transfers.loads.get_mut(load_id).cancelled = true;
        self.routed.stats.cancelled_guesses += 1;
        for read in reads {
            self.return_part(
                context,
                load_id,
                split_token(read.token).1,
                Some(read.target),
                now_ns,
            );
        }
        true
    }

    /// Returns the load of a guessed unit, if the unit is being loaded.
    fn guessed_load(&self, id: UnitId) -> Option<u32> {
        let is_loading = self.units[id].is_loading();
        is_loading.then(|| self.transfers.loads.guessed(id)).flatten()
    }

    /// Starts to load guessed units if no other reads are waiting. Evicts only idle routed units.
    pub(super) fn load_guessed(&mut self, context: &EngineContext<D>, now_ns: u64) {
        if context.prefetch == Prefetch::None || !self.transfers.reads.is_empty() {
            return;
        }
        while let Some(&id) = self.routed.guesses.wanted.front() {
            if !self.units[id].is_absent() || self.units[id].failure.is_some() {
                self.routed.guesses.wanted.pop_front();
                continue;
            }
            let Some(buffers) = self.allocate_over_idle(context, id) else { return };
            self.routed.guesses.wanted.pop_front();
            if let Some(guess) = self.routed.guesses.open.get_mut(&id) {
                guess.started = true;
            }
            self.routed.stats.guesses += 1;
            let work = self.start_load(context, id, buffers, now_ns, true);
            self.routed.guesses.reads.extend(work.reads);
        }
    }
}
