# SPDX-License-Identifier: MIT OR Apache-2.0
"""Counters of all offloaded models as text for Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from .. import _native
from ..errors import ModelError
from ._live import live_models
from ._offload import stats
from ._stats import Stats

#: A metric: its name, its type, what it is, and the labels and the value of each of its samples.
Samples = Iterable[tuple[dict[str, str], float]]
_METRICS: tuple[tuple[str, str, str, Callable[[Stats], Samples]], ...] = (
    ("passes_total", "counter", "Forward passes.", lambda own: [({}, own["passes"])]),
    (
        "read_bytes_total",
        "counter",
        "Bytes of weights that were read, by path.",
        lambda own: [({"path": path}, count) for path, count in own["read_bytes_by_path"].items()],
    ),
    ("waits_total", "counter", "Waits for weights.", lambda own: [({}, own["stalls"])]),
    ("wait_seconds_total", "counter", "Time of waits.", lambda own: [({}, own["stall_s"])]),
    ("replans_total", "counter", "Changes of the plan.", lambda own: [({}, own["replans"])]),
    (
        "wasted_loads_total",
        "counter",
        "Units that were read and evicted before they were used.",
        lambda own: [({}, own["wasted_loads"])],
    ),
    (
        "expert_uses_total",
        "counter",
        "Parameters of experts that routers chose, in memory or not.",
        lambda own: [
            ({"in_memory": "yes"}, own["routed"]["hits"]),
            ({"in_memory": "no"}, own["routed"]["touched"] - own["routed"]["hits"]),
        ],
    ),
    ("budget_bytes", "gauge", "Memory for weights.", lambda own: [({}, own["budget_bytes"])]),
    (
        "limit_bytes",
        "gauge",
        "The part of the budget that may be used now.",
        lambda own: [({}, own["limit_bytes"])],
    ),
    (
        "in_use_bytes",
        "gauge",
        "Memory that contains weights now.",
        lambda own: [({}, own["in_use_bytes"])],
    ),
    (
        "pass_seconds",
        "gauge",
        "What the time of the latest measured pass went into.",
        lambda own: [
            sample
            for latest in own["recent_passes"][-1:]
            for sample in (
                ({"part": "computing"}, latest["compute_s"]),
                ({"part": "waiting"}, latest["wait_s"]),
                ({"part": "overhead"}, latest["overhead_s"]),
            )
        ],
    ),
)


def metrics() -> str:
    """Returns counters of all offloaded models of this process, in the text format of Prometheus.

    Each sample of a model has the label ``model``, the class of the model and a number. Does not
    wait for I/O.

    Examples:
        >>> import tensorstream as ts, torch
        >>> config = ts.Config(storage_path="weights", budget="64KiB")
        >>> model = ts.offload(torch.nn.Linear(4, 4), config)
        >>> [line for line in ts.metrics().splitlines() if "budget_bytes{" in line]
        ['tensorstream_budget_bytes{model="Linear-...
    """
    measured = []
    for name, model in live_models():
        with contextlib.suppress(ModelError):  # another thread has restored it
            measured.append((name, stats(model)))
    lines = [
        "# HELP tensorstream_kept_bytes Memory of deleted tensors, which `trim` returns.",
        "# TYPE tensorstream_kept_bytes gauge",
        f"tensorstream_kept_bytes {_native.kept_bytes()}",
    ]
    for name, kind, text, samples in _METRICS:
        lines += [f"# HELP tensorstream_{name} {text}", f"# TYPE tensorstream_{name} {kind}"]
        for model_name, own in measured:
            for labels, value in samples(own):
                all_labels = {"model": model_name, **labels}
                inside = ",".join(f'{label}="{text}"' for label, text in all_labels.items())
                lines.append(f"tensorstream_{name}{{{inside}}} {value:.12g}")
    return "\n".join([*lines, ""])
