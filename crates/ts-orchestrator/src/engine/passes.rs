// SPDX-License-Identifier: MIT OR Apache-2.0
//! Begins and ends passes, and switches to new plans between passes.

use ts_pool::BLOCK_ALIGN;
use ts_streams::Device;

use crate::Error;
use crate::config::{Interrupt, never_interrupt};
use crate::pass::PassId;
use crate::plan::{NeverFits, Plan, PlanRequest, Rates};
use crate::planner::{plan, predict};
use crate::populate::Populator;
use crate::prepared::PreparedUnit;
use crate::state::EngineState;
use crate::stats::PassTimes;
use crate::trace::{TraceEvent, TraceKind};

use super::{Engine, InterruptTimer, Shared};

/// While the current residency still fits, a new plan is used only if it is predicted to save more
/// than this share of a pass's duration.
const REPLAN_GAIN: f64 = 0.05;
/// A new plan reads its resident units again. Within this many passes, it must save more time than
/// this reading takes.
const REPLAN_PASSES: f64 = 8.0;
/// Encoding the units that a new plan keeps compressed must pay off within this many passes. They
/// are encoded once, and a model that is called this often is common: a pass gives one token.
const ENCODE_PASSES: f64 = 64.0;
/// Until the rates of the steady state are known, a plan with units to encode must be predicted to
/// save more than this share of a pass. The first pass also populates memory, and so reads more
/// slowly than later ones. Plans that were made with its rates were slower than those without
/// encoding.
const EARLY_ENCODE_GAIN: f64 = 0.3;

impl<D: Device> Engine<D> {
    /// Begins a pass over the units and starts to prefetch.
    ///
    /// Blocks while [`max_passes`](crate::EngineConfig::max_passes) other passes are running.
    pub fn begin_pass(&self) -> PassId {
        self.begin_pass_interruptible(never_interrupt()).expect("the wait is never interrupted")
    }

    /// Like [`begin_pass`](Self::begin_pass), but calls `interrupt` regularly while it blocks.
    ///
    /// # Errors
    /// Returns [`Error::Interrupted`] if `interrupt` returned `true`.
    pub fn begin_pass_interruptible(&self, interrupt: Interrupt<'_>) -> Result<PassId, Error> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        let this_thread = std::thread::current().id();
        let mut timer = InterruptTimer::new();
        let mut limit_wait = None;
        while state.awaits_limit(&mut limit_wait) || state.passes.running() >= shared.max_passes {
            // A thread that waits here frees no memory. Other threads must take this into account.
            state.waiters.for_pass.insert(this_thread);
            state = shared.wait(state, &mut timer, interrupt, || "another pass to end".into())?;
        }
        state.waiters.for_pass.remove(&this_thread);
        Ok(shared.begin(&mut state))
    }

    /// Begins a pass like [`begin_pass`](Self::begin_pass), or returns `None` if another pass is
    /// running. Does not block.
    pub fn try_begin_pass(&self) -> Option<PassId> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        (state.passes.running() == 0).then(|| shared.begin(&mut state))
    }

    /// Ends a pass and returns whether a better plan is available.
    ///
    /// If so, call [`replan`](Self::replan) once all leases are dropped. If the pass has already
    /// ended, only returns whether a better plan is available.
    pub fn end_pass(&self, pass: PassId) -> bool {
        let shared = &*self.shared;
        let mut state = shared.lock();
        let now_ns = (shared.clock)();
        let totals = state.pass_totals(now_ns);
        let logged = state.pass_log.end(pass, totals, now_ns);
        let compute_s = logged.map_or(0.0, |(_, times)| times.compute_ns() as f64 / 1e9);
        let kind = state.passes.end(pass, compute_s);
        // The times of a pass without visits say nothing about the work with units.
        match (logged, kind) {
            (Some((begun_ns, times)), Some(kind)) => {
                state.pass_log.add(begun_ns, PassTimes { kind, ..times });
            }
            _ => state.pass_log.skip(),
        }
        if let (Some((begun_ns, _)), Some(trace)) = (logged, &mut state.trace) {
            let event = TraceEvent::new(TraceKind::Pass, begun_ns, now_ns);
            trace.add_on(std::thread::current().id(), event.bytes(pass.0));
        }
        if kind.is_some() || state.planning.has_new_limit() {
            let (main, _) = state.passes.kinds().main();
            let (predicted_s, replans) =
                (state.planning.plan.predicted_pass_s, state.counters.replans);
            let changed = state.planning.has_new_limit()
                || state.passes.kinds().is_unplanned()
                || state.planning.is_outdated
                || (state.planning.unsure_of_encoding && state.pass_log.is_steady())
                || state.pass_log.differs(main, predicted_s, replans);
            if changed {
                shared.propose_plan(&mut state);
            } else {
                state.planning.pending = None;
            }
        }
        if state.passes.running() == 0 {
            state.drop_guesses(&shared.context, now_ns);
        }
        state.advance(&shared.context, now_ns);
        let proposed = state.planning.pending.is_some();
        shared.notify(state);
        proposed
    }

    /// Switches to the plan that [`end_pass`](Self::end_pass) announced. Returns whether it
    /// switched.
    ///
    /// Keeps the old plan if a pass is running, a unit is leased, or a tensor of a unit is still
    /// referenced. Unless a pass is running, blocks until reads in flight have ended.
    pub fn replan(&self) -> bool {
        self.replan_interruptible(never_interrupt()).expect("the wait is never interrupted")
    }

    /// Like [`replan`](Self::replan), but calls `interrupt` regularly while it blocks.
    ///
    /// # Errors
    /// Returns [`Error::Interrupted`] if `interrupt` returned `true`.
    pub fn replan_interruptible(&self, interrupt: Interrupt<'_>) -> Result<bool, Error> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        let mut timer = InterruptTimer::new();
        if state.passes.running() == 0 {
            state.drop_guesses(&shared.context, (shared.clock)());
        }
        while state.passes.running() == 0 && state.is_loading() {
            state.prefetching.paused = true;
            state = match shared.wait(state, &mut timer, interrupt, || "reads to end".into()) {
                Ok(state) => state,
                Err(error) => {
                    shared.lock().prefetching.paused = false;
                    return Err(error);
                }
            };
        }
        Ok(shared.switch_plan(&mut state))
    }

    /// Limits the memory for weights and buffers to this many bytes, or to the budget if that is
    /// less.
    ///
    /// Returns the memory of units that are kept beyond the limit and not in use to the system, so
    /// that these units are streamed. The rest takes effect with the next
    /// [`replan`](Self::replan) that succeeds, and [`end_pass`] then returns `true`: it drops all
    /// units, and returns all memory beyond the limit. Buffers keep their size. A larger limit
    /// takes the memory again later.
    ///
    /// Has no effect on the memory of a device with its own memory.
    ///
    /// # Errors
    /// Returns [`Error::NeverFits`] if the limit is lower than before and too small for any plan.
    /// Then the limit stays as it was.
    ///
    /// [`end_pass`]: Self::end_pass
    pub fn set_limit(&self, budget_bytes: usize) -> Result<(), Error> {
        let shared = &*self.shared;
        // Buffers keep their size.
        let buffers = shared.budget.limit_bytes() - shared.slot_budget;
        let slots = budget_bytes.saturating_sub(buffers).min(shared.slot_budget);
        let slots = slots - slots % BLOCK_ALIGN;
        let mut state = shared.lock();
        let before = std::mem::replace(&mut state.planning.slot_limit, slots);
        let refusal = shared.with_request(&state, |request| plan(&request)).err();
        // A larger limit is never refused: the engine works with less.
        if let Some(refusal) = refusal.filter(|_| slots < before) {
            state.planning.slot_limit = before;
            return Err(Error::NeverFits(NeverFits {
                budget_bytes,
                smallest_budget_bytes: refusal.smallest_budget_bytes.saturating_add(buffers),
                ..refusal
            }));
        }
        if slots < before {
            // Memory is short. What is needed gets its pages when it is read.
            state.prefetching.postpones = false;
            if let Some(populator) = &*shared.populator.lock() {
                populator.stop();
            }
        }
        state.give_back(&shared.context);
        if state.planning.has_new_limit() {
            shared.propose_plan(&mut state);
        } else {
            state.planning.pending = None;
        }
        Ok(())
    }

    /// Returns the smallest limit that [`set_limit`](Self::set_limit) accepts, in bytes. It can be
    /// more than the smallest budget, because a larger budget has more buffers.
    pub fn smallest_limit(&self) -> usize {
        let shared = &*self.shared;
        let smallest =
            shared.lock().planning.plan.smallest_budget_bytes.next_multiple_of(BLOCK_ALIGN);
        smallest + shared.budget.limit_bytes() - shared.slot_budget
    }

    /// Returns whether weights and buffers take no more than the limit, although the plan may still
    /// be the one for an earlier limit. Always `true` on a device with its own memory.
    pub fn is_within_limit(&self) -> bool {
        let shared = &*self.shared;
        let slot_limit = shared.lock().planning.slot_limit;
        shared.context.slots.is_staged() || shared.context.slots.left_bytes() <= slot_limit
    }

    /// Returns whether the limit that [`set_limit`](Self::set_limit) set is in force: the plan is
    /// made for it.
    pub fn limit_in_force(&self) -> bool {
        !self.shared.lock().planning.has_new_limit()
    }
}

impl<D: Device> Shared<D> {
    pub(super) fn begin(&self, state: &mut EngineState<D>) -> PassId {
        state.counters.passes += 1;
        if state.counters.passes == 1 {
            self.populate_ahead(state);
        }
        let alone = state.passes.running() == 0;
        let id = state.passes.begin();
        state.routed.begin_pass();
        let now_ns = (self.clock)();
        let totals = state.pass_totals(now_ns);
        state.pass_log.begin(id, alone, totals, now_ns);
        state.advance(&self.context, now_ns);
        id
    }

    /// Starts to pre-fault memory, that of streamed units first.
    fn populate_ahead(&self, state: &mut EngineState<D>) {
        let mut populator = self.populator.lock();
        if populator.is_none() && self.populate_in_passes > 0 && !state.planning.has_new_limit() {
            let pool = &self.context.slots.host;
            let begun =
                Populator::new(pool, self.populate_in_passes, state.planning.plan.resident_bytes);
            state.prefetching.postpones = begun.has_threads();
            *populator = Some(begun);
        }
    }

    /// Switches to a new plan like [`Engine::replan`], if no read is in flight. Returns
    /// whether none was. Does not block.
    pub(crate) fn try_replan(&self) -> bool {
        let mut state = self.lock();
        if state.is_loading() {
            return false;
        }
        self.switch_plan(&mut state);
        true
    }

    fn switch_plan(&self, state: &mut EngineState<D>) -> bool {
        let applied = state.passes.running() == 0 && state.apply_pending_plan(&self.context);
        if let Some(trace) = state.trace.as_mut().filter(|_| applied) {
            let now_ns = (self.clock)();
            trace.add(TraceEvent::new(TraceKind::Replan, now_ns, now_ns));
        }
        state.prefetching.paused = false;
        state.retry_prefetch();
        // Before the first pass, nothing is read.
        if state.counters.passes > 0 {
            state.advance(&self.context, (self.clock)());
        }
        applied
    }

    /// Computes a plan from the measurements, and makes it the pending plan if it is worth
    /// switching to.
    fn propose_plan(&self, state: &mut EngineState<D>) {
        let residency = state.residency();
        let new_limit = state.planning.has_new_limit();
        let (steady, mut unsure) = (state.pass_log.is_steady(), false);
        let plans = self.with_request(state, |request| {
            // Assumes that the streamed units will need as much memory as before.
            let least_ring_bytes = request.least_ring_bytes.max(state.planning.streamed_high_water);
            let mut request = PlanRequest { least_ring_bytes, ..request };
            let mut better = plan(&request);
            if better.is_err() {
                // The units that were found to be needed together may not fit once for each pass.
                // Then passes wait for each other.
                request.max_passes = 1;
                better = plan(&request);
            }
            let mut better = better.ok()?;
            let mut encode_s = 0.0;
            if let Some(needed_s) = state.encode_s(&self.context, &better, request.rates) {
                let units = request.unencoded_units();
                let plain = plan(&PlanRequest { units: &units, ..request }).ok()?;
                let gain_s = plain.mean_pass_s - better.mean_pass_s;
                let gain = if steady { REPLAN_GAIN } else { EARLY_ENCODE_GAIN };
                if gain_s > gain * plain.mean_pass_s && gain_s * ENCODE_PASSES > needed_s {
                    encode_s = needed_s;
                } else {
                    (better, unsure) = (plain, !steady);
                }
            }
            Some((better, predict(&request, &residency), request.rates, encode_s))
        });
        state.planning.unsure_of_encoding = unsure;
        let Some((better, kept, rates, encode_s)) = plans else { return };
        // A new plan reads units that it keeps again, and this must pay off within a few passes.
        // All slots together have the size of the first plan's peak, so a larger plan cannot be
        // used.
        let host_bytes = state.new_host_bytes(&self.context, &better);
        let kept_bytes = better.resident_bytes + better.compressed_bytes + host_bytes;
        let staying_bytes = state.staying_bytes(&self.context, &better);
        let fresh_start_s =
            kept_bytes.saturating_sub(staying_bytes) as f64 / rates.read_bytes_per_s;
        let pays = kept.as_ref().is_none_or(|kept| {
            let gain_s = kept.mean_pass_s - better.mean_pass_s;
            gain_s > REPLAN_GAIN * kept.mean_pass_s
                && gain_s * REPLAN_PASSES > fresh_start_s
                && gain_s * ENCODE_PASSES > fresh_start_s + encode_s
        });
        state.planning.is_outdated = false;
        if (pays || new_limit) && better.peak_bytes() <= self.context.slots.capacity_bytes() {
            state.planning.unsure_of_encoding |= encode_s > 0.0;
            state.planning.pending = Some(better);
        } else if let Some(kept) = kept {
            state.planning.plan = kept;
            state.passes.set_planned();
            state.planning.pending = None;
        }
    }

    /// Returns the current plan, with a prediction from all measurements so far.
    pub(super) fn predicted_plan(&self, state: &EngineState<D>) -> Plan {
        let residency = state.residency();
        let predicted = self.with_request(state, |request| predict(&request, &residency));
        predicted
            .unwrap_or_else(|| state.planning.plan.clone())
            .with_buffers(self.least_buffer_bytes)
    }

    /// Calls a function with a request that contains all measurements so far.
    pub(super) fn with_request<T>(
        &self,
        state: &EngineState<D>,
        use_request: impl FnOnce(PlanRequest<'_>) -> T,
    ) -> T {
        let rates = self.measured_rates(state);
        let compute = state.compute_times(&self.compute, rates);
        let units = self.context.units.iter().map(|unit| &**unit);
        let mut demands = PreparedUnit::demands(units, &compute, rates);
        state.add_encoded(&self.context, &mut demands, rates);
        if let Some(sharing) = &self.context.sharing {
            sharing.mark(&mut demands);
        }
        let least_ring_bytes = self.context.prefetch.least_ring_bytes(state.planning.slot_limit);
        let kinds = state.passes.kinds();
        let ((_, order), others) = (kinds.main(), kinds.others());
        let request = PlanRequest::new(&demands, order, state.planning.slot_limit)
            .with_host_bytes(self.context.slots.host_tier_bytes())
            .with_together(state.planning.together())
            .with_max_passes(self.max_passes)
            .with_rates(rates)
            .with_reach(self.context.prefetch.reach())
            .with_least_ring_bytes(least_ring_bytes)
            .with_other_compute_s(compute.other_s)
            .with_others(&others);
        use_request(request)
    }

    /// Returns the bandwidth while reads were in flight, and the rate of decoding: in the latest
    /// passes, or in all of the time if these have read too little. The rate of copying to a device
    /// is the best of all copies, because a copy also waits for the work that used its slot before.
    /// Where too little was measured, returns the configured rate.
    pub(super) fn measured_rates(&self, state: &EngineState<D>) -> Rates {
        const SAMPLE_NS: u64 = 20_000_000;
        let rate = |bytes: u64, ns: u64| {
            (bytes > 0 && ns >= SAMPLE_NS).then(|| bytes as f64 / (ns as f64 / 1e9))
        };
        let (recent, all) = (state.pass_log.sum(), &state.counters);
        let read = rate(recent.read_bytes, recent.reading_ns)
            .or_else(|| rate(state.read_bytes(), all.busy_ns));
        let decode = rate(recent.decoded_bytes, recent.decoding_ns)
            .or_else(|| rate(all.decoded_bytes, all.decode_ns));
        let copy = Some(all.copy_bytes_per_s).filter(|&copy| copy > 0.0);
        let assumed = self.rates;
        Rates {
            read_bytes_per_s: read.unwrap_or(assumed.read_bytes_per_s),
            decode_bytes_per_s: decode.unwrap_or(assumed.decode_bytes_per_s),
            copy_bytes_per_s: copy.unwrap_or(assumed.copy_bytes_per_s),
            // A small budget has memory for fewer decoders.
            processors: assumed.processors.min(self.worker_count),
            ..assumed
        }
    }
}
