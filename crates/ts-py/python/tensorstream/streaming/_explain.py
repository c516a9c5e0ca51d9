# SPDX-License-Identifier: MIT OR Apache-2.0
"""Explains what the time of an offloaded model goes into."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..devices import Device
from ..errors import ModelError
from ._curve import Curve
from ._offload import stats
from ._report import html_folded, html_table, html_text, mib
from ._state import streaming_of
from ._stats import PassStats, Stats

#: What is left in an explanation of the units that calls waited for.
_LONGEST = 5
#: Other budgets that an explanation predicts, relative to the budget, in bytes.
_OTHER = (-(100 << 20), 0, 1 << 30)


@dataclass(frozen=True)
class Explanation:
    """What the time of forward passes goes into.

    A pass takes ``wall_s``, which is ``compute_s + wait_s + overhead_s``. All three are those of
    the median pass. ``str()`` returns a table, and notebooks show one.

    Attributes:
        passes: The number of passes that were measured: the latest with the current plan, at most
            32, and of these the most frequent kind (``PassStats.kind``). The first one does not
            count if there are others.
        other_passes: How many passes there were of each other kind, such as prefill beside decode,
            and how long the median one of them took, in seconds.
        wall_s: The time of the median pass, in seconds.
        compute_s: The time for everything that the model computes.
        wait_s: The time in which modules waited for weights.
        overhead_s: The time of the other work for streaming, such as bookkeeping.
        between_s: The average time from the end of a pass to the beginning of the next one. It
            belongs to the caller.
        predicted_s: What the plan predicts for a pass.
        bottleneck: What limits the speed: "storage", "decoding" or "compute".
        read_bytes: The bytes that the median pass reads.
        read_bytes_per_s: The measured speed of reading, while anything was read.
        waits: The units whose waits took longest, and the total time of these waits, in seconds.
        curve: Predictions for this budget, 100 MiB less, and 1 GiB more.

    Examples:
        >>> import tensorstream as ts, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> model = ts.offload(model, ts.Config(storage_path="weights", budget="60KiB"))
        >>> with torch.inference_mode():
        ...     for _ in range(3):
        ...         output = model(torch.ones(1, 64))
        >>> explanation = ts.explain(model)
        >>> explanation.passes
        2
    """

    passes: int
    other_passes: tuple[tuple[int, float], ...]
    wall_s: float
    compute_s: float
    wait_s: float
    overhead_s: float
    between_s: float
    predicted_s: float
    bottleneck: str
    read_bytes: int
    read_bytes_per_s: float
    waits: tuple[tuple[str, float], ...]
    curve: Curve
    _units: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [f"{label:<19}{value}" for label, value in self._lines()]
        return "\n".join([*lines, "", str(self.curve)])

    def _repr_html_(self) -> str:
        parts = [
            html_text("\n".join(f"{label:<19}{value}" for label, value in self._lines())),
            html_folded("other budgets", self.curve._repr_html_()),
            html_folded(f"{len(self._units)} units", html_table(_UNIT_HEADER, self._units)),
        ]
        return "".join(parts)

    def _lines(self) -> list[tuple[str, str]]:
        def part(seconds: float) -> str:
            return f"{seconds:10.4f} s   {100 * seconds / max(self.wall_s, 1e-9):3.0f}%"

        off = 100 * (self.predicted_s / max(self.wall_s, 1e-9) - 1)
        waits = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.waits)
        others = ", ".join(f"{count} of {wall_s:.4f} s" for count, wall_s in self.other_passes)
        return [
            ("a pass takes", f"{self.wall_s:10.4f} s   median of {self.passes}"),
            ("  computing", part(self.compute_s)),
            ("  waiting", part(self.wait_s)),
            ("  overhead", part(self.overhead_s)),
            ("other passes", f"  {others or 'none'}"),
            ("between passes", f"{self.between_s:10.4f} s   in the caller's code"),
            ("predicted", f"{self.predicted_s:10.4f} s   {off:+.0f}%"),
            ("limited by", f"{self.bottleneck:>10}"),
            (
                "reads",
                f"{mib(self.read_bytes):>10} MiB a pass, at {self.read_bytes_per_s / 1e9:.2f} GB/s",
            ),
            ("longest waits", waits or "none"),
        ]


_UNIT_HEADER = ("MiB", "reads", "waits", "waited s", "used s", "unit")


def explain(model: nn.Module, *, device: Device | None = None) -> Explanation:
    """Shows where the time of an offloaded model goes, and predicts other budgets.

    Needs at least one finished forward pass. Passes that ran at the same time as others are not
    measured.

    Args:
        model: The model.
        device: One of the devices of a model that is on several ones.

    Raises:
        ConfigurationError: The model is on several devices, and ``device`` is not one of them.
        ModelError: The model is not offloaded, or no pass has been measured.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"weight": torch.eye(4), "bias": torch.zeros(4)}, "linear.ts")
        >>> model = ts.offload(torch.nn.Linear(4, 4), checkpoint="linear.ts", budget="64KiB")
        >>> with torch.inference_mode():
        ...     output = model(torch.ones(1, 4))
        >>> ts.explain(model).bottleneck in ("storage", "compute")
        True
    """
    share = streaming_of(model).share(device)
    measured = stats(model, device=share.device)
    passes, *others = steady_passes(measured)
    if not passes:
        raise ModelError(
            "there is nothing to explain yet: run the model at least once, and not only in "
            "passes at the same time"
        )
    median = median_pass(passes)
    all_passes = measured["recent_passes"]
    inside = sum(own["wall_s"] for own in all_passes)
    between = (measured["recent_s"] - inside) / max(1, len(all_passes) - 1)
    waited = sorted(measured["units"], key=lambda unit: unit["stall_s"], reverse=True)
    budget = measured["budget_bytes"]
    budgets = [budget + other for other in _OTHER if budget + other > 0]
    units = [
        (
            mib(unit["slot_bytes"]),
            str(unit["loads"]),
            str(unit["stalls"]),
            f"{unit['stall_s']:.3f}",
            f"{unit['use_s']:.3f}",
            unit["name"],
        )
        for unit in measured["units"]
    ]
    return Explanation(
        passes=len(passes),
        other_passes=tuple((len(other), median_pass(other)["wall_s"]) for other in others),
        wall_s=median["wall_s"],
        compute_s=median["compute_s"],
        wait_s=median["wait_s"],
        overhead_s=median["overhead_s"],
        between_s=max(0.0, between),
        predicted_s=measured["plan"]["predicted_pass_s"],
        bottleneck=measured["bottleneck"],
        read_bytes=median["read_bytes"],
        read_bytes_per_s=measured["read_bytes_per_s"],
        waits=tuple(
            (unit["name"], unit["stall_s"]) for unit in waited[:_LONGEST] if unit["stall_s"] > 0
        ),
        curve=Curve(share.streamer.curve(budgets)),
        _units=tuple(units),
    )


def steady_passes(measured: Stats) -> list[list[PassStats]]:
    """Returns the latest passes with the current plan, by kind, the most frequent kind first.

    Leaves out the first pass if there are more. If none has run with the current plan, returns the
    latest ones. Returns one empty list if no pass was measured.
    """
    recent = measured["recent_passes"]
    passes = [own for own in recent if own["replans"] == measured["replans"]] or recent
    kinds: dict[int, list[PassStats]] = {}
    for own in passes[1:] or passes:
        kinds.setdefault(own["kind"], []).append(own)
    return sorted(kinds.values(), key=len, reverse=True) or [[]]


def median_pass(passes: list[PassStats]) -> PassStats:
    """Returns the pass whose time is the median."""
    return sorted(passes, key=lambda own: own["wall_s"])[len(passes) // 2]
