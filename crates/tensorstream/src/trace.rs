// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes traces: as JSON for viewers of traces, and as a page that needs no viewer.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use ts_orchestrator::{CurvePoint, Trace, TraceEvent, TraceKind};

/// A group of lanes: what its name begins with, and the number of its first lane.
const GROUPS: [(&str, u64); 4] = [("passes", 0), ("model", 100), ("reads", 200), ("workers", 300)];

/// Returns a trace in the Trace Event Format, which <https://ui.perfetto.dev> and
/// `chrome://tracing` open.
///
/// Times are relative to the beginning of the trace. Reads and the work of workers that overlap are
/// on different lanes.
pub fn trace_json(trace: &Trace) -> String {
    let lanes = Lanes::of(trace);
    let mut events: Vec<Value> = Vec::with_capacity(trace.events.len() + 8);
    events.push(
        json!({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "TensorStream"}}),
    );
    for (lane, name) in lanes.names() {
        events.push(json!({"ph": "M", "pid": 1, "tid": lane, "name": "thread_name",
                "args": {"name": name}}));
        events.push(json!({"ph": "M", "pid": 1, "tid": lane, "name": "thread_sort_index",
                "args": {"sort_index": lane}}));
    }
    for (event, &lane) in trace.events.iter().zip(&lanes.of_events) {
        let (at, unit) = (micros(trace, event.begin_ns), unit_name(trace, event));
        let took = (event.end_ns - event.begin_ns.min(event.end_ns)) as f64 / 1e3;
        let kind = kind_name(event.kind);
        events.push(match event.kind {
            TraceKind::Memory => json!({"ph": "C", "pid": 1, "name": "memory", "ts": at,
                "args": {"weights": event.bytes}}),
            TraceKind::Evict | TraceKind::Replan => json!({"ph": "i", "pid": 1, "tid": 0, "s": "p",
                "name": format!("{kind} {unit}").trim_end(), "ts": at, "cat": kind}),
            _ => json!({"ph": "X", "pid": 1, "tid": lane, "name": label(trace, event), "ts": at,
                "dur": took, "cat": kind, "args": {"bytes": event.bytes}}),
        });
    }
    json!({
        "displayTimeUnit": "ms",
        "otherData": {"budget_bytes": trace.budget_bytes, "dropped_events": trace.dropped},
        "traceEvents": events,
    })
    .to_string()
}

/// Returns a trace as one HTML file that opens without a network: a timeline by lane, the memory
/// beside the budget, the units that calls waited for, and predictions for other budgets.
pub fn trace_html(trace: &Trace, curve: &[CurvePoint]) -> String {
    let lanes = Lanes::of(trace);
    let shown = |(event, &lane): (&TraceEvent, &u64)| {
        let took = (event.end_ns - event.begin_ns.min(event.end_ns)) as f64 / 1e3;
        let unit = event.unit.map_or(-1, |unit| i64::from(unit.0));
        let at = micros(trace, event.begin_ns);
        json!([kind_name(event.kind), lane, unit, at, took, event.bytes])
    };
    let events: Vec<Value> = trace.events.iter().zip(&lanes.of_events).map(shown).collect();
    let mut waits: BTreeMap<String, (u64, f64)> = BTreeMap::new();
    for event in trace.events.iter().filter(|event| event.kind == TraceKind::Wait) {
        let of_unit = waits.entry(unit_name(trace, event)).or_default();
        of_unit.0 += 1;
        of_unit.1 += (event.end_ns - event.begin_ns) as f64 / 1e9;
    }
    let mut waits: Vec<_> = waits.into_iter().collect();
    waits.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    let waits: Vec<Value> =
        waits.into_iter().map(|(name, (count, s))| json!([name, count, s])).collect();
    let point = |point: &CurvePoint| {
        json!([point.budget_bytes, point.predicted_pass_s, point.bottleneck.to_string()])
    };
    let names: Vec<Value> =
        lanes.names().into_iter().map(|(lane, name)| json!([lane, name])).collect();
    let data = json!({
        "budget": trace.budget_bytes,
        "dropped": trace.dropped,
        "end": micros(trace, trace.end_ns),
        "units": trace.units,
        "lanes": names,
        "events": events,
        "waits": waits,
        "curve": curve.iter().map(point).collect::<Vec<_>>(),
    });
    // The data are inside a script element, so names must not contain `</script` or `<!--`.
    let data = data.to_string().replace('<', "\\u003c");
    include_str!("trace.html").replace("/*DATA*/null", &data)
}

/// Returns a moment in microseconds since the beginning of the trace.
fn micros(trace: &Trace, at_ns: u64) -> f64 {
    (at_ns as f64 - trace.begin_ns as f64) / 1e3
}

fn unit_name(trace: &Trace, event: &TraceEvent) -> String {
    match event.unit.map(|unit| trace.units.get(unit.0 as usize)) {
        Some(Some(name)) => name.clone(),
        _ if event.kind == TraceKind::Wait => "rows".into(),
        _ => String::new(),
    }
}

/// Returns the name of an event on its lane.
fn label(trace: &Trace, event: &TraceEvent) -> String {
    match event.kind {
        TraceKind::Pass => format!("pass {}", event.bytes),
        TraceKind::Use => unit_name(trace, event),
        _ => format!("{} {}", kind_name(event.kind), unit_name(trace, event)),
    }
}

fn kind_name(kind: TraceKind) -> &'static str {
    match kind {
        TraceKind::Pass => "pass",
        TraceKind::Wait => "wait",
        TraceKind::Use => "use",
        TraceKind::Read(path) => path.name(),
        TraceKind::Decode => "decode",
        TraceKind::Copy => "copy",
        TraceKind::Check => "check",
        TraceKind::Encode => "encode",
        TraceKind::Evict => "evict",
        TraceKind::Memory => "memory",
        TraceKind::Replan => "replan",
        _ => "other",
    }
}

/// The lane of each event. Events on a lane do not overlap, except that uses may be nested.
struct Lanes {
    of_events: Vec<u64>,
}

impl Lanes {
    fn of(trace: &Trace) -> Self {
        let mut by_begin: Vec<usize> = (0..trace.events.len()).collect();
        by_begin.sort_by_key(|&i| trace.events[i].begin_ns);
        let mut of_events = vec![0; trace.events.len()];
        // The end of the last event on each lane of a group.
        let mut ends: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for i in by_begin {
            let event = &trace.events[i];
            let first = match event.kind {
                TraceKind::Wait | TraceKind::Use => {
                    of_events[i] = GROUPS[1].1 + u64::from(event.thread);
                    continue;
                }
                // These have no bars.
                TraceKind::Memory | TraceKind::Evict | TraceKind::Replan => continue,
                TraceKind::Read(_) => GROUPS[2].1,
                TraceKind::Decode | TraceKind::Copy | TraceKind::Check | TraceKind::Encode => {
                    GROUPS[3].1
                }
                _ => GROUPS[0].1,
            };
            let lanes = ends.entry(first).or_default();
            let free = lanes.iter().position(|&end| end <= event.begin_ns);
            let lane = free.unwrap_or(lanes.len()).min(98);
            match lanes.get_mut(lane) {
                Some(end) => *end = event.end_ns,
                None => lanes.push(event.end_ns),
            }
            of_events[i] = first + lane as u64;
        }
        Self { of_events }
    }

    /// Returns the number and the name of each lane that has events.
    fn names(&self) -> Vec<(u64, String)> {
        let mut used: Vec<u64> = self.of_events.clone();
        used.sort_unstable();
        used.dedup();
        let name = |lane: u64| {
            let (name, first) = GROUPS[usize::try_from(lane / 100).unwrap_or(0).min(3)];
            if lane == first { name.to_owned() } else { format!("{name} {}", lane - first + 1) }
        };
        used.into_iter().map(|lane| (lane, name(lane))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ts_io::Source;
    use ts_orchestrator::{Engine, EngineConfig, Unit, UnitId};

    #[test]
    fn names_cannot_leave_the_data() {
        let name = "</script><!--<script>\"\\\n";
        let engine = Engine::new(
            vec![Unit::new(name, Vec::new())],
            Vec::<std::sync::Arc<Source>>::new(),
            EngineConfig::with_budget(1 << 20),
        )
        .unwrap();
        engine.begin_trace();
        let pass = engine.begin_pass();
        drop(engine.acquire(Some(pass), UnitId(0)).unwrap());
        engine.end_pass(pass);
        let trace = engine.end_trace().unwrap();
        assert!(engine.end_trace().is_none());
        let page = trace_html(&trace, &[]);
        assert_eq!(page.matches("</script>").count(), 1);
        assert!(!page.contains("<!--<script>"));
        let data = page.split_once("const data = ").unwrap().1.split_once(";\n").unwrap().0;
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["units"][0], name);
        let events: Value = serde_json::from_str(&trace_json(&trace)).unwrap();
        let named = |event: &Value| event["name"] == name;
        assert!(events["traceEvents"].as_array().unwrap().iter().any(named));
    }
}
