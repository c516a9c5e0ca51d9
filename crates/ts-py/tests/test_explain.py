# SPDX-License-Identifier: MIT OR Apache-2.0
"""Predicts, explains and traces what streaming costs."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from torch import nn

#: Any of these shows whether a page works.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def streamed(tmp_path: Path, budget: str = "3MiB", **fields: Any) -> nn.Module:
    """Returns an offloaded model of 8 MiB, in 8 units."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    config = ts.Config(storage_path=tmp_path / "weights", budget=budget, **fields)
    return ts.offload(model, config)


def run(model: nn.Module, passes: int) -> float:
    """Runs passes, and returns how long all of them took, in seconds."""
    x = torch.ones(4, 512)
    with torch.inference_mode():
        began = time.perf_counter()
        for _ in range(passes):
            model(x)
        return time.perf_counter() - began


def test_times_add_up_to_what_the_caller_measures(tmp_path: Path) -> None:
    model = streamed(tmp_path)
    run(model, 1)
    total = run(model, 20)
    passes = ts.stats(model)["recent_passes"][-20:]
    for own in passes:
        parts = own["compute_s"] + own["wait_s"] + own["overhead_s"]
        assert parts == pytest.approx(own["wall_s"], abs=1e-8)
    measured = sum(own["wall_s"] for own in passes)
    assert 0.5 * total < measured <= total, "the rest is the caller's loop"
    explanation = ts.explain(model)
    parts = explanation.compute_s + explanation.wait_s + explanation.overhead_s
    assert parts == pytest.approx(explanation.wall_s, abs=1e-8)
    assert explanation.wall_s in [own["wall_s"] for own in ts.stats(model)["recent_passes"]]
    assert explanation.read_bytes > 5 << 20, "the model does not fit"


def test_a_model_that_computes_longer_than_it_reads_is_limited_by_computing(
    tmp_path: Path,
) -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                time.sleep(0.05)
            return x

    config = ts.Config(storage_path=tmp_path, budget="3MiB")
    model = ts.offload(Slow(), config)

    def explained() -> tuple[set[str], float]:
        stats, explanation = ts.stats(model), ts.explain(model)
        assert explanation.compute_s > 0.4
        found = {stats["bottleneck"], stats["plan"]["bottleneck"], explanation.bottleneck}
        return found, explanation.predicted_s / explanation.wall_s

    expected = {"compute"}, pytest.approx(1, rel=0.25)
    run(model, 6)
    # While other programs keep the disk busy, it may be the bottleneck.
    for _ in range(50):
        if explained() == expected:
            break
        run(model, 1)
    assert explained() == expected


def test_an_explanation_needs_a_pass(tmp_path: Path) -> None:
    model = streamed(tmp_path)
    with pytest.raises(ts.ModelError, match="run the model at least once"):
        ts.explain(model)
    with pytest.raises(ts.ModelError, match="not offloaded"):
        ts.explain(nn.Linear(1, 1))


def test_explanations_are_tables(tmp_path: Path) -> None:
    model = streamed(tmp_path)
    run(model, 4)
    explanation = ts.explain(model)
    text = str(explanation)
    for label in ("a pass takes", "computing", "waiting", "overhead", "limited by", "predicted"):
        assert label in text
    page = explanation._repr_html_()
    assert page.count("<details>") == 2
    assert "8 units" in page
    budgets = [point.budget_bytes for point in explanation.curve]
    assert budgets == [3 << 20, (3 << 20) + (1 << 30)], "100 MiB less are not there"
    assert explanation.curve[-1].streamed_bytes_per_pass == 0


def test_a_plan_has_a_curve(tmp_path: Path) -> None:
    tensors = {f"u{i}.weight": torch.zeros(1 << 18) for i in range(8)}
    ts.save_file(tensors, tmp_path / "a.ts")
    plan = ts.plan(tmp_path / "a.ts", budget="4MiB")
    curve = plan.curve()
    seconds = [point.predicted_pass_s for point in curve]
    assert len(curve) == 9
    assert seconds == sorted(seconds, reverse=True)
    assert (curve[0].streamed_bytes_per_pass > 0, curve[-1].streamed_bytes_per_pass) == (True, 0)
    [own] = plan.curve(["4MiB"])
    assert own.predicted_pass_s == plan.predicted_pass_s
    assert plan.curve([4 << 20]) == plan.curve(["4MiB"])
    assert len(str(curve).splitlines()) == 10
    assert curve._repr_html_().count("<tr>") == 10
    assert plan._repr_html_().count("<details>") == 1
    with pytest.raises(ts.ConfigurationError, match="a curve has no shares"):
        plan.curve(["50%"])
    assert ts.plan(tmp_path / "a.ts", budget="4MiB") == plan


@pytest.mark.parametrize("strategy", list(ts.PrefetchStrategy))
def test_prefetch_strategies_have_different_plans(
    tmp_path: Path, strategy: ts.PrefetchStrategy
) -> None:
    model = streamed(tmp_path, budget="6MiB", prefetch_strategy=strategy)
    unit = ts.stats(model)["units"][0]["slot_bytes"]
    ring = ts.stats(model)["plan"]["ring_bytes"]
    if strategy == ts.PrefetchStrategy.NONE:
        assert ring < 2 * unit, "there is nothing to read ahead"
    if strategy == ts.PrefetchStrategy.AGGRESSIVE:
        assert ring >= (5 << 20) / 2
    with ts.trace(model, tmp_path / "run.json"):
        run(model, 3)
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    uses = [own for own in events if own.get("cat") == "use"]
    reads = [own for own in events if own.get("cat") in ("direct", "buffered")]
    early = [
        read
        for read in reads
        if any(
            use["ts"] < read["ts"] + read["dur"] and read["ts"] < use["ts"] + use["dur"]
            for use in uses
        )
    ]
    if strategy == ts.PrefetchStrategy.NONE:
        assert not early, "nothing is read while the model computes"
    else:
        assert early, "units are read while the model computes"


def test_a_trace_has_everything_that_happened(tmp_path: Path) -> None:
    model = streamed(tmp_path)
    run(model, 1)
    before = ts.stats(model)
    with ts.trace(model, tmp_path / "run.json"):
        run(model, 3)
    after = ts.stats(model)
    trace = json.loads((tmp_path / "run.json").read_text())
    events = trace["traceEvents"]
    of_kind = {
        kind: [own for own in events if own.get("cat") == kind]
        for kind in ("pass", "use", "wait", "direct", "buffered", "evict")
    }
    assert len(of_kind["pass"]) == 3
    assert len(of_kind["use"]) == 24
    waits = after["stalls"] - before["stalls"]
    assert len(of_kind["wait"]) == waits
    seconds = sum(own["dur"] for own in of_kind["wait"]) / 1e6
    assert seconds == pytest.approx(after["stall_s"] - before["stall_s"], rel=1e-6)
    read = sum(own["args"]["bytes"] for own in of_kind["direct"] + of_kind["buffered"])
    assert read > 5 << 20
    assert of_kind["evict"]
    memory = [own["args"]["weights"] for own in events if own["ph"] == "C"]
    assert memory
    assert max(memory) <= trace["otherData"]["budget_bytes"] == 3 << 20
    assert all(own["ts"] >= 0 for own in of_kind["use"] + of_kind["wait"])
    with ts.trace(model, tmp_path / "run.json"):
        pass
    assert len(json.loads((tmp_path / "run.json").read_text())["traceEvents"]) < 20


def test_a_trace_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    model = streamed(tmp_path)
    with pytest.raises(ts.ConfigurationError, match=r"must end in \.html or \.json"):
        ts.trace(model, tmp_path / "run.txt")
    with pytest.raises(ts.ConfigurationError, match="directory does not exist"):
        ts.trace(model, tmp_path / "absent" / "run.json")
    with pytest.raises(ts.ModelError, match="not offloaded"), ts.trace(nn.Linear(1, 1), "a.json"):
        pass
    with (
        ts.trace(model, tmp_path / "a.json"),
        pytest.raises(ts.ModelError, match="is running"),
        ts.trace(model, tmp_path / "b.json"),
    ):
        pass
    assert not (tmp_path / "b.json").exists()


def test_a_trace_survives_errors_threads_and_restore(tmp_path: Path) -> None:
    model = streamed(tmp_path, max_passes=2)
    with pytest.raises(ZeroDivisionError), ts.trace(model, tmp_path / "run.json"):
        threads = [threading.Thread(target=run, args=(model, 2)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ts.restore(model)
        raise ZeroDivisionError
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    used_on = {own["tid"] for own in events if own.get("cat") == "use"}
    assert len(used_on) == 2


def test_a_page_with_a_trace_works_in_a_browser(tmp_path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    model = streamed(tmp_path)
    with ts.trace(model, tmp_path / "run.html"):
        run(model, 3)
    text = (tmp_path / "run.html").read_text()
    assert "/*DATA*/" not in text
    for outside in ("http://", "https://", "src=", "href=", "@import"):
        assert outside not in text, "the page opens without a network"
    if browser is None:
        pytest.skip("no browser: run `apt-get install chromium-headless-shell` to test pages")
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--virtual-time-budget=3000",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (tmp_path / "run.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    assert 'data-drawn="' in done.stdout, "the script ran to its end"
    assert "3 passes" in done.stdout
    assert done.stdout.count("<tr>") > 1
