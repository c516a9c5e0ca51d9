# SPDX-License-Identifier: MIT OR Apache-2.0
"""plan: what streaming would do, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import _native
from .config import Config


@dataclass(frozen=True)
class Plan:
    """How a checkpoint would be held under a budget. Sizes in bytes; printing it gives a table."""

    budget_bytes: int
    resident_bytes: int
    ring_bytes: int
    peak_bytes: int
    smallest_budget_bytes: int
    streamed_bytes_per_pass: int
    predicted_pass_s: float
    bottleneck: str
    units: tuple[tuple[str, int, bool], ...]
    """Name, size and whether it is kept, of each unit."""

    def __str__(self) -> str:
        kept = sum(1 for _, _, resident in self.units if resident)
        largest = max(self.units, key=lambda unit: unit[1], default=("-", 0, False))

        def mib(size: int) -> str:
            return f"{size / 2**20:10.1f} MiB"

        return "\n".join(
            [
                f"budget             {mib(self.budget_bytes)}",
                f"smallest budget    {mib(self.smallest_budget_bytes)}",
                f"kept in memory     {mib(self.resident_bytes)}   {kept} of {len(self.units)} units",
                f"ring               {mib(self.ring_bytes)}   for the units that are streamed",
                f"streamed per pass  {mib(self.streamed_bytes_per_pass)}",
                f"largest unit       {mib(largest[1])}   {largest[0]}",
                f"predicted          {self.predicted_pass_s:10.3f} s a pass at 1 GB/s, limited by {self.bottleneck}",
            ]
        )


def plan(
    checkpoint: str | os.PathLike[str],
    *,
    budget: int | str | None = None,
    max_passes: int = 1,
) -> Plan:
    """Plans the streaming of a checkpoint by its tensors' names; reads headers only, needs no model.

    Units are guessed: tensors whose names differ in the last component. The prediction assumes storage of 1 GB/s;
    a running engine measures.

    Raises:
        BudgetError: The budget can never work; the message names the smallest that would do.
    """
    budget_bytes = Config(budget=budget, max_passes=max_passes).budget_bytes()
    stats = _native.plan(_native.Checkpoint(checkpoint), budget=budget_bytes, max_passes=max_passes)
    units = tuple((unit["name"], unit["slot_bytes"], unit["resident"]) for unit in stats["units"])
    return Plan(budget_bytes=budget_bytes, units=units, **stats["plan"])
