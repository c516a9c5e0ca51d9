# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans streaming without a model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .. import _native
from ..config import Config


@dataclass(frozen=True)
class Plan:
    """How a checkpoint would be kept in memory. Sizes are bytes. ``str()`` returns a table.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a.weight": torch.zeros(1000), "b.weight": torch.zeros(500)}, "a.ts")
        >>> plan = ts.plan("a.ts", budget="1MiB")
        >>> plan.budget_bytes, plan.streamed_bytes_per_pass
        (1048576, 0)
    """

    budget_bytes: int
    resident_bytes: int
    ring_bytes: int
    peak_bytes: int
    smallest_budget_bytes: int
    streamed_bytes_per_pass: int
    predicted_pass_s: float
    bottleneck: str
    units: tuple[tuple[str, int, bool], ...]
    """The name and the size of each unit, and whether it stays in memory."""
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


def plan(
    checkpoint: str | os.PathLike[str],
    *,
    budget: int | str | None = None,
    max_passes: int = 1,
) -> Plan:
    """Plans the streaming of a checkpoint. Reads headers only, and needs no model.

    Units are inferred from tensor names: tensors whose names differ only in the last component are
    one unit. The prediction assumes that storage reads 1 GB/s; an engine measures the speed.

    Args:
        checkpoint: A file, a shard index, a directory with one of them, or a URL.
        budget: The memory for weights, as of ``Config``.
        max_passes: Forward passes that can run at once.

    Raises:
        BudgetError: The budget is too small. The message gives the smallest that works.
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointError: It is damaged.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a.weight": torch.zeros(1000), "b.weight": torch.zeros(500)}, "a.ts")
        >>> plan = ts.plan("a.ts", budget="1MiB")
        >>> [(name, kept) for name, _, kept in plan.units]
        [('a', True), ('b', True)]
    """
    config = Config(budget=budget, max_passes=max_passes)
    budget_bytes = config.working_bytes()
    planned = _native.plan(
        _native.Checkpoint(checkpoint), budget=budget_bytes, settings=config.settings()
    )
    units = tuple((unit["name"], unit["slot_bytes"], unit["resident"]) for unit in planned["units"])
    return Plan(budget_bytes=budget_bytes, units=units, text=planned["text"], **planned["plan"])
