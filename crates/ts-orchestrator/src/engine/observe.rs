// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an engine says about itself: its plan, statistics and traces.

use std::ops::Range;

use ts_io::ReadPath;
use ts_pool::WriteWatch;
use ts_streams::Device;

use crate::layout::Placement;
use crate::plan::{CurvePoint, Plan};
use crate::state::{EngineState, UnitState};
use crate::stats::{EngineStats, TableStats, add_bytes};
use crate::trace::{Trace, TraceLog};
use crate::unit::UnitId;

use super::{Engine, Shared};

impl<D: Device> Engine<D> {
    /// Returns the number of units. Their ids are 0 to this number minus 1.
    pub fn unit_count(&self) -> usize {
        self.shared.context.units.len()
    }

    /// Returns the current plan.
    pub fn plan(&self) -> Plan {
        let shared = &*self.shared;
        shared.lock().planning.plan.clone().with_buffers(shared.least_buffer_bytes)
    }

    /// Returns what passes would be like with each of these budgets, in bytes, as far as the
    /// measurements so far can tell. Leaves out budgets that are too small.
    pub fn curve(&self, budgets: &[usize]) -> Vec<CurvePoint> {
        let shared = &*self.shared;
        let state = shared.lock();
        shared.with_request(&state, |request| {
            shared.overhead.curve(request, &shared.tables, shared.context.prefetch, budgets)
        })
    }

    /// Returns all measurements so far. Does not block on I/O.
    pub fn stats(&self) -> EngineStats {
        let shared = &*self.shared;
        let slots = &shared.context.slots;
        let (in_use_bytes, in_use_high_water_bytes) = shared.occupied_bytes();
        let state = shared.lock();
        let mut read_bytes: Vec<_> = ReadPath::ALL.map(|path| (path, 0)).to_vec();
        for &(path, bytes) in &state.counters.read_bytes {
            add_bytes(&mut read_bytes, path, bytes);
        }
        EngineStats {
            budget_bytes: shared.budget.limit_bytes(),
            limit_bytes: shared.budget.limit_bytes() - shared.slot_budget
                + state.planning.slot_limit,
            reserved_high_water_bytes: shared.budget.high_water_bytes(),
            in_use_high_water_bytes,
            in_use_bytes,
            staging_bytes: slots.staging_bytes(),
            backend: shared.choice.provider.name(),
            passed_over: shared.choice.passed_over.clone(),
            watches_writes: slots.watches_writes(),
            passes: state.counters.passes,
            read_bytes,
            device_decoded_bytes: state.counters.device_decoded.bytes,
            device_decode_bytes_per_s: state.counters.device_decoded.bytes_per_s,
            wasted_loads: state.counters.wasted_loads,
            replans: state.counters.replans,
            plan: shared.predicted_plan(&state),
            recent_passes: state.pass_log.passes(),
            recent_ns: state.pass_log.span_ns(),
            workers: shared.worker_count,
            encoded_bytes: state.counters.encoded_bytes,
            encode_ns: state.counters.encode_ns,
            in_flight: state
                .transfers
                .backend
                .as_ref()
                .map_or(0, |b| b.capabilities().max_in_flight),
            rates: shared.measured_rates(&state),
            compute: state.compute_times(&shared.compute, shared.measured_rates(&state)),
            streams: slots.stream_stats(),
            routed: state.routed.stats,
            tables: TableStats {
                rows: state.counters.gathered_rows,
                cached_rows: state.counters.cached_rows,
                read_bytes: state.counters.gathered_bytes,
            },
            units: state.units.iter().map(UnitState::snapshot).collect(),
        }
    }

    /// Returns the resident units whose memory was written to since they were read.
    ///
    /// Each entry contains the id of a unit, and the indices of its tensors that overlap a modified
    /// page. Drop the tensors of these units and call [`discard`](Self::discard). The result is
    /// always empty unless [`EngineConfig::watch_writes`](crate::EngineConfig::watch_writes) is set
    /// and supported ([`EngineStats::watches_writes`]).
    ///
    /// Queries the kernel for modified pages, and does not read the units' bytes.
    pub fn modified_units(&self) -> Vec<(UnitId, Vec<usize>)> {
        let shared = &*self.shared;
        // Queries the kernel without the lock, so that other threads do not wait for the scan.
        let watched = shared.lock().watched();
        if !WriteWatch::any_written(watched.iter().map(|(_, bytes)| &**bytes)) {
            return Vec::new();
        }
        let tensors = |id: UnitId, written: &[Range<usize>]| {
            let touched = |at: &usize| {
                let Placement { offset, len } = shared.unit(id).layout.tensors[*at];
                written.iter().any(|bytes| bytes.start < offset + len && offset < bytes.end)
            };
            (0..shared.unit(id).layout.tensors.len()).filter(touched).collect()
        };
        let written = watched.into_iter().map(|(id, bytes)| (id, bytes.written()));
        let written = written.filter(|(_, bytes)| !bytes.is_empty());
        written.map(|(id, bytes)| (id, tensors(id, &bytes))).collect()
    }

    /// Returns a stream for computations with units, or `None` if units live in host memory. It
    /// comes from the pool of the engine's streams. The engine itself submits no work to it.
    ///
    /// The stream waits for the copy of a unit after
    /// [`Lease::record_stream`](crate::Lease::record_stream). Computations may use other streams
    /// instead.
    pub fn compute_stream(&self) -> Option<&D::Stream> {
        self.shared.context.slots.compute_stream()
    }

    /// Begins to record what the engine does. A trace that is running is dropped.
    ///
    /// A trace takes about 50 bytes of memory for each event, beside the budget, and at most 13 MB.
    pub fn begin_trace(&self) {
        let shared = &*self.shared;
        let now_ns = (shared.clock)();
        let mut state = shared.lock();
        state.trace = Some(TraceLog::new(now_ns));
        shared.trace_memory(&mut state, now_ns);
    }

    /// Ends the running trace, and returns it. `None` if none is running.
    pub fn end_trace(&self) -> Option<Trace> {
        let shared = &*self.shared;
        let log = shared.lock().trace.take()?;
        let names = shared.context.units.iter().map(|unit| unit.unit.name.clone()).collect();
        Some(log.end((shared.clock)(), shared.budget.limit_bytes(), names))
    }
}

impl<D: Device> Shared<D> {
    pub(super) fn trace_memory(&self, state: &mut EngineState<D>, now_ns: u64) {
        if let Some(trace) = &mut state.trace {
            trace.memory(self.occupied_bytes().0, now_ns);
        }
    }

    /// Returns the memory that units and buffers occupy, now and at most, in bytes.
    fn occupied_bytes(&self) -> (usize, usize) {
        let slots = &self.context.slots;
        let (in_use, high_water) = slots.in_use_bytes();
        let buffers = self.budget.high_water_bytes() - slots.capacity_bytes();
        (in_use + buffers, high_water + buffers)
    }
}
