# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans streaming without a model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .. import _native
from ..config import Config
from ._transformers import plan_checkpoint


@dataclass(frozen=True)
class Plan:
    """A plan for streaming a checkpoint. Sizes are in bytes. ``str()`` returns a table.

    Attributes:
        budget_bytes: The memory for weights.
        resident_bytes: Memory for units that stay in memory.
        ring_bytes: Memory through which the other units are streamed.
        peak_bytes: All memory that the plan uses.
        smallest_budget_bytes: The smallest budget that works.
        streamed_bytes_per_pass: Bytes that each forward pass reads.
        predicted_pass_s: The predicted time of a forward pass, in seconds.
        bottleneck: The resource that limits the speed, "storage" or "compute".
        units: The name and the size of each unit, and whether it stays in memory.
        text: The table.

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

    If the checkpoint is the directory of a transformers model and transformers is installed, the
    plan is that of the model: experts are separate units, and embeddings can be read by rows.
    Otherwise, units are inferred from tensor names: tensors whose names differ only in the last
    component are one unit.

    The prediction assumes that storage reads 1 GB/s. It ignores units that a pass uses only for
    some inputs, such as experts. Streaming measures the real speed.

    Args:
        checkpoint: A file, a shard index, a directory with one of them, or a URL.
        budget: The memory for weights. See ``Config``.
        max_passes: The most forward passes that run at once.

    Raises:
        BudgetError: The budget is too small. The message contains the smallest that works.
        CheckpointNotFoundError: There is no checkpoint at this path.
        CheckpointError: The checkpoint is damaged.
        CheckpointPermissionError: The process may not read the checkpoint.
        StorageError: Reading failed.
        ConfigurationError: An argument is invalid.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a.weight": torch.zeros(1000), "b.weight": torch.zeros(500)}, "a.ts")
        >>> plan = ts.plan("a.ts", budget="1MiB")
        >>> [(name, kept) for name, _, kept in plan.units]
        [('a', True), ('b', True)]
    """
    config = Config(budget=budget, max_passes=max_passes)
    files = _native.Checkpoint(checkpoint)
    found = plan_checkpoint(checkpoint, files, config)
    if found is None:
        budget_bytes = config.working_bytes()
        planned = _native.plan(files, budget=budget_bytes, settings=config.settings())
    else:
        budget_bytes, planned = found
    units = tuple((unit["name"], unit["slot_bytes"], unit["resident"]) for unit in planned["units"])
    return Plan(budget_bytes=budget_bytes, units=units, text=planned["text"], **planned["plan"])
