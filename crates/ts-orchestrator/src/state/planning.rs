// SPDX-License-Identifier: MIT OR Apache-2.0
//! The current plan of an engine, its pending plan, and the changes that require a new plan.

use std::time::{Duration, Instant};

use crate::plan::Plan;
use crate::stats::PassTimes;
use crate::unit::UnitId;

/// The current plan, the pending plan, and the changes since they were made.
#[derive(Debug)]
pub(crate) struct Planning {
    pub(crate) plan: Plan,
    /// A better plan, to switch to when nothing is in use.
    pub(crate) pending: Option<Plan>,
    /// The sets of units that operations need at the same time. No set contains another.
    together: Vec<Vec<UnitId>>,
    /// Whether to compute a new plan: a new set of units was used together, or a resident unit had
    /// to be evicted.
    pub(crate) is_outdated: bool,
    /// Whether to consider encoding units again: too little was measured to be sure that this pays
    /// off, or the plan that does it is not in use yet.
    pub(crate) unsure_of_encoding: bool,
    /// The most memory that streamed units needed when a resident unit was evicted, in bytes.
    pub(crate) streamed_high_water: usize,
    /// The memory for slots, in bytes.
    pub(crate) slot_limit: usize,
    /// The memory for slots for which the plan was made, in bytes.
    planned_limit: usize,
    /// Whether memory was given back or taken again since the plan was made.
    resized: bool,
    /// The latest limit that a pass has waited for in vain, and when this wait ended.
    waited_limit: Option<(usize, Instant)>,
}

impl Planning {
    /// For how long passes do not wait for a limit after one has waited in vain.
    const PAUSE: Duration = Duration::from_secs(60);

    /// Follows a plan that was made for this much memory for slots, in bytes.
    pub(crate) fn new(plan: Plan, slot_limit: usize) -> Self {
        Self {
            plan,
            pending: None,
            together: Vec::new(),
            is_outdated: false,
            unsure_of_encoding: false,
            streamed_high_water: 0,
            slot_limit,
            planned_limit: slot_limit,
            resized: false,
            waited_limit: None,
        }
    }

    /// Remembers that an operation needs these units at the same time. The set must not be known.
    pub(super) fn add_together(&mut self, set: Vec<UnitId>) {
        self.together.retain(|known| !includes(&set, known));
        self.together.push(set);
        self.is_outdated = true;
    }

    /// Returns whether it is known that these units are used at the same time.
    pub(super) fn knows(&self, set: &[UnitId]) -> bool {
        set.len() < 2 || self.together.iter().any(|known| includes(known, set))
    }

    /// The sets of units that operations need at the same time.
    pub(crate) fn together(&self) -> &[Vec<UnitId>] {
        &self.together
    }

    /// Returns whether the plan was made for another limit, or for other memory than there is.
    pub(crate) fn has_new_limit(&self) -> bool {
        self.slot_limit != self.planned_limit || self.resized
    }

    /// Returns whether units may move: another plan is needed, or waits to be applied.
    pub(super) fn is_changing(&self) -> bool {
        self.is_outdated || self.pending.is_some() || self.has_new_limit()
    }

    /// Switches to the pending plan. Returns whether there was one.
    pub(super) fn switch(&mut self) -> bool {
        let Some(plan) = self.pending.take() else { return false };
        self.plan = plan;
        true
    }

    /// Records that the memory has the size of the limit again.
    pub(super) fn set_in_force(&mut self) {
        self.planned_limit = self.slot_limit;
        self.resized = false;
        self.waited_limit = None;
    }

    /// Records that memory was given back or taken again.
    pub(super) fn set_resized(&mut self) {
        self.resized = true;
    }

    /// The larger of the limit and the limit that the plan was made for, in bytes.
    pub(super) fn larger_limit(&self) -> usize {
        self.slot_limit.max(self.planned_limit)
    }

    /// Returns whether a plan for a new limit is pending, for which a pass may wait now.
    pub(super) fn may_await_limit(&self, now: Instant) -> bool {
        let waited =
            |(limit, then): (usize, Instant)| limit == self.slot_limit && now - then < Self::PAUSE;
        self.has_new_limit() && self.pending.is_some() && !self.waited_limit.is_some_and(waited)
    }

    /// Records that a pass has waited for the limit in vain.
    pub(super) fn give_up_waiting(&mut self, now: Instant) {
        self.waited_limit = Some((self.slot_limit, now));
    }
}

/// A wait of a pass for a new limit.
#[derive(Debug)]
pub(crate) struct LimitWait {
    /// The times of calls when they last changed, and when this was.
    calls: PassTimes,
    active: Instant,
    /// When other passes were last seen running.
    busy: Instant,
}

impl LimitWait {
    /// How long a pass waits while no other pass acquires units.
    const PATIENCE: Duration = Duration::from_secs(30);
    /// How long a pass waits after the last other pass has ended.
    const IDLE_PATIENCE: Duration = Duration::from_secs(1);

    pub(super) fn new(calls: PassTimes, now: Instant) -> Self {
        Self { calls, active: now, busy: now }
    }

    /// Returns whether to wait on. `runs` says whether other passes run, and `calls` has the times
    /// of their calls.
    pub(super) fn goes_on(&mut self, runs: bool, calls: PassTimes, now: Instant) -> bool {
        if runs {
            self.busy = now;
        }
        if self.calls != calls {
            (self.calls, self.active) = (calls, now);
        }
        now - self.active < Self::PATIENCE && now - self.busy < Self::IDLE_PATIENCE
    }
}

/// Returns whether a set of units contains another one.
fn includes(larger: &[UnitId], smaller: &[UnitId]) -> bool {
    smaller.iter().all(|id| larger.contains(id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PlanRequest;
    use crate::planner::plan;

    fn a_plan() -> Plan {
        plan(&PlanRequest::new(&[], &[], 100)).expect("no units need no memory")
    }

    fn planning() -> Planning {
        Planning::new(a_plan(), 100)
    }

    fn ids(ids: &[u32]) -> Vec<UnitId> {
        ids.iter().copied().map(UnitId).collect()
    }

    #[test]
    fn sets_replace_those_that_they_contain() {
        let mut planning = planning();
        assert!(!planning.is_changing());
        planning.add_together(ids(&[0, 1]));
        assert!(planning.knows(&ids(&[1, 0])) && planning.knows(&ids(&[5])));
        assert!(!planning.knows(&ids(&[0, 2])));
        planning.add_together(ids(&[0, 1, 2]));
        assert_eq!(planning.together(), [ids(&[0, 1, 2])]);
        assert!(planning.knows(&ids(&[0, 2])) && planning.is_changing());
    }

    #[test]
    fn a_limit_is_new_until_it_is_in_force() {
        let mut planning = planning();
        planning.slot_limit = 50;
        assert!(planning.has_new_limit());
        assert_eq!(planning.larger_limit(), 100);
        planning.set_in_force();
        assert_eq!((planning.has_new_limit(), planning.larger_limit()), (false, 50));
        planning.set_resized();
        assert!(planning.has_new_limit());
    }

    #[test]
    fn a_pass_waits_once_a_minute_for_a_limit() {
        let (mut planning, now) = (planning(), Instant::now());
        planning.slot_limit = 50;
        assert!(!planning.may_await_limit(now), "no plan is pending");
        planning.pending = Some(a_plan());
        assert!(planning.may_await_limit(now));
        planning.give_up_waiting(now);
        assert!(!planning.may_await_limit(now + Duration::from_secs(59)));
        assert!(planning.may_await_limit(now + Duration::from_secs(60)));
        planning.slot_limit = 40;
        assert!(planning.may_await_limit(now), "it has not waited for this limit");
        assert!(planning.switch() && !planning.switch());
    }

    #[test]
    fn a_wait_ends_without_activity() {
        let (calls, begun) = (PassTimes::default(), Instant::now());
        let more = PassTimes { calls_ns: 1, ..calls };
        let at = |s: f64| begun + Duration::from_secs_f64(s);
        let mut wait = LimitWait::new(calls, begun);
        assert!(wait.goes_on(true, calls, at(29.0)));
        assert!(wait.goes_on(true, more, at(29.5)), "a call has ended");
        assert!(wait.goes_on(true, more, at(59.0)));
        assert!(!wait.goes_on(true, more, at(59.5)), "30 s without a call");
        let mut wait = LimitWait::new(calls, begun);
        assert!(wait.goes_on(false, calls, at(0.9)));
        assert!(!wait.goes_on(false, calls, at(1.0)), "no pass runs");
    }
}
