# SPDX-License-Identifier: MIT OR Apache-2.0
"""plan: what streaming would do, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

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
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


def plan(
    checkpoint: str | os.PathLike[str],
    *,
    budget: int | str | None = None,
    max_passes: int = 1,
) -> Plan:
    """Plans the streaming of a checkpoint by its tensors' names; reads headers only, needs no
    model.

    Units are guessed: tensors whose names differ in the last component. The prediction assumes
    storage of 1 GB/s; a running engine measures.

    Raises:
        BudgetError: The budget is too small; the message gives the smallest that works.
    """
    config = Config(budget=budget, max_passes=max_passes)
    budget_bytes = config.working_bytes()
    planned = _native.plan(
        _native.Checkpoint(checkpoint), budget=budget_bytes, settings=config.settings()
    )
    units = tuple((unit["name"], unit["slot_bytes"], unit["resident"]) for unit in planned["units"])
    return Plan(budget_bytes=budget_bytes, units=units, text=planned["text"], **planned["plan"])
