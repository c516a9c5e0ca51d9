// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts statistics and plans to dictionaries.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tensorstream::orchestrator::{CurvePoint, EngineStats, Plan, UnitStats};

/// Converts the statistics of an engine to a dictionary with the keys of `tensorstream.Stats`.
pub(super) fn stats_dict<'py>(
    py: Python<'py>,
    stats: &EngineStats,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("budget_bytes", stats.budget_bytes)?;
    dict.set_item("limit_bytes", stats.limit_bytes)?;
    dict.set_item("reserved_high_water_bytes", stats.reserved_high_water_bytes)?;
    dict.set_item("in_use_high_water_bytes", stats.in_use_high_water_bytes)?;
    dict.set_item("in_use_bytes", stats.in_use_bytes)?;
    dict.set_item("backend", stats.backend)?;
    dict.set_item("passed_over", stats.passed_over.clone())?;
    dict.set_item("watches_writes", stats.watches_writes)?;
    dict.set_item("passes", stats.passes)?;
    let paths = PyDict::new(py);
    for (path, bytes) in &stats.read_bytes {
        paths.set_item(path.name(), bytes)?;
    }
    dict.set_item("read_bytes", stats.total_read_bytes())?;
    dict.set_item("read_bytes_by_path", paths)?;
    dict.set_item("stalls", stats.stalls())?;
    dict.set_item("stall_s", seconds(stats.stall_ns()))?;
    dict.set_item("device_decoded_bytes", stats.device_decoded_bytes)?;
    dict.set_item("device_decode_bytes_per_s", stats.device_decode_bytes_per_s)?;
    dict.set_item("wasted_loads", stats.wasted_loads)?;
    dict.set_item("replans", stats.replans)?;
    let passes = PyList::empty(py);
    for pass in &stats.recent_passes {
        let item = PyDict::new(py);
        item.set_item("kind", pass.kind)?;
        item.set_item("wall_s", seconds(pass.wall_ns))?;
        item.set_item("compute_s", seconds(pass.compute_ns()))?;
        item.set_item("wait_s", seconds(pass.waited_ns))?;
        item.set_item("overhead_s", seconds(pass.calls_ns))?;
        item.set_item("reading_s", seconds(pass.reading_ns))?;
        item.set_item("decoding_s", seconds(pass.decoding_ns))?;
        item.set_item("read_bytes", pass.read_bytes)?;
        item.set_item("decoded_bytes", pass.decoded_bytes)?;
        item.set_item("replans", pass.replans)?;
        item.set_item("bottleneck", pass.bottleneck(stats.workers).to_string())?;
        passes.append(item)?;
    }
    dict.set_item("recent_passes", passes)?;
    dict.set_item("recent_s", seconds(stats.recent_ns))?;
    dict.set_item("workers", stats.workers)?;
    dict.set_item("io_depth", stats.in_flight)?;
    dict.set_item("encoded_bytes", stats.encoded_bytes)?;
    dict.set_item("encode_s", stats.encode_ns as f64 / 1e9)?;
    dict.set_item("read_bytes_per_s", stats.rates.read_bytes_per_s)?;
    dict.set_item("decode_bytes_per_s", stats.rates.decode_bytes_per_s)?;
    let routed = PyDict::new(py);
    routed.set_item("touched", stats.routed.touched)?;
    routed.set_item("touched_bytes", stats.routed.touched_bytes)?;
    routed.set_item("hits", stats.routed.hits)?;
    routed.set_item("evictions", stats.routed.evictions)?;
    routed.set_item("guesses", stats.routed.guesses)?;
    routed.set_item("right_guesses", stats.routed.right_guesses)?;
    routed.set_item("cancelled_guesses", stats.routed.cancelled_guesses)?;
    routed.set_item("guessed_bytes", stats.routed.guessed_bytes)?;
    dict.set_item("routed", routed)?;
    let tables = PyDict::new(py);
    tables.set_item("rows", stats.tables.rows)?;
    tables.set_item("cached_rows", stats.tables.cached_rows)?;
    tables.set_item("read_bytes", stats.tables.read_bytes)?;
    dict.set_item("tables", tables)?;
    dict.set_item("plan", plan_dict(py, &stats.plan)?)?;
    dict.set_item("units", units_list(py, &stats.units)?)?;
    Ok(dict)
}

/// Converts the statistics of units to dictionaries with the keys of `tensorstream.UnitStats`.
pub(super) fn units_list<'py>(
    py: Python<'py>,
    units: &[UnitStats],
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for unit in units {
        let item = PyDict::new(py);
        item.set_item("name", &unit.name)?;
        item.set_item("resident", unit.resident)?;
        item.set_item("compressed", unit.compressed)?;
        item.set_item("shared", unit.shared)?;
        item.set_item("routed", unit.routed)?;
        item.set_item("present", unit.present)?;
        item.set_item("touched", unit.touched)?;
        item.set_item("hits", unit.hits)?;
        item.set_item("slot_bytes", unit.slot_bytes)?;
        item.set_item("loads", unit.loads)?;
        item.set_item("read_bytes", unit.read_bytes)?;
        item.set_item("load_s", seconds(unit.load_ns))?;
        item.set_item("uses", unit.uses)?;
        item.set_item("use_s", seconds(unit.use_ns))?;
        item.set_item("stalls", unit.stalls)?;
        item.set_item("stall_s", seconds(unit.stall_ns))?;
        list.append(item)?;
    }
    Ok(list)
}

/// Converts a curve to dictionaries with the keys of `tensorstream.CurvePoint`.
pub(super) fn curve_list<'py>(
    py: Python<'py>,
    points: &[CurvePoint],
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for point in points {
        let item = PyDict::new(py);
        item.set_item("budget_bytes", point.budget_bytes)?;
        item.set_item("predicted_pass_s", point.predicted_pass_s)?;
        item.set_item("streamed_bytes_per_pass", point.streamed_bytes_per_pass)?;
        item.set_item("bottleneck", point.bottleneck.to_string())?;
        list.append(item)?;
    }
    Ok(list)
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Converts a plan to a dictionary with the keys of `tensorstream.PlanStats`.
pub(super) fn plan_dict<'py>(py: Python<'py>, plan: &Plan) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("resident_bytes", plan.resident_bytes)?;
    dict.set_item("compressed_bytes", plan.compressed_bytes)?;
    dict.set_item("ring_bytes", plan.ring_bytes)?;
    dict.set_item("peak_bytes", plan.peak_bytes())?;
    dict.set_item("streamed_bytes_per_pass", plan.streamed_bytes_per_pass)?;
    dict.set_item("predicted_pass_s", plan.predicted_pass_s)?;
    dict.set_item("bottleneck", plan.bottleneck.to_string())?;
    dict.set_item("smallest_budget_bytes", plan.smallest_budget_bytes)?;
    Ok(dict)
}
