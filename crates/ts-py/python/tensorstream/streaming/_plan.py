# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans streaming without a model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .. import _native
from ..config import Config, expanded
from ..errors import BudgetError
from ..files._places import find
from ._curve import Curve, budgets_in_bytes
from ._report import html_folded, html_table, html_text, mib
from ._transformers import plan_checkpoint
from ._weights import Divided


@dataclass(frozen=True)
class Plan:
    """A plan for streaming a checkpoint. Sizes are in bytes. ``str()`` returns a table.

    Attributes:
        budget_bytes: The memory for weights.
        resident_bytes: Memory for units that stay in memory.
        compressed_bytes: Memory for units that stay in memory compressed.
        ring_bytes: Memory through which the other units are streamed.
        peak_bytes: All memory that the plan uses.
        smallest_budget_bytes: The smallest budget that works.
        buffer_bytes: The part of the budget for buffers that the checkpoint has, which stay in
            memory. 0 if the model is unknown.
        streamed_bytes_per_pass: Bytes that each forward pass reads.
        predicted_pass_s: The predicted time of a forward pass, in seconds.
        expert_bytes_per_token: The size of the experts that a token needs, in memory or not.
            ``None`` if there are none, or if their number is unknown.
        bottleneck: The resource that limits the speed, "storage", "decoding" or
            "compute".
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
    compressed_bytes: int
    ring_bytes: int
    peak_bytes: int
    smallest_budget_bytes: int
    buffer_bytes: int
    streamed_bytes_per_pass: int
    predicted_pass_s: float
    bottleneck: str
    units: tuple[tuple[str, int, bool], ...]
    expert_bytes_per_token: int | None
    text: str = field(repr=False)
    _preview: _native.Preview = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        rows = [
            (mib(size), "kept" if kept else "streamed", name) for name, size, kept in self.units
        ]
        table = html_table(("MiB", "", "unit"), rows)
        return html_text(self.text) + html_folded(f"{len(rows)} units", table)

    def curve(self, budgets: Iterable[int | str] | None = None) -> Curve:
        """Predicts passes with other budgets.

        Budgets that are too small for the units of this plan are left out. A plan for a smaller
        budget may divide layers, and so need less.

        Args:
            budgets: Budgets in bytes, or sizes such as "600MiB". By default, nine budgets from the
                smallest that works to about the size of all weights.

        Raises:
            ConfigurationError: A budget is not a size.

        Examples:
            >>> import tensorstream as ts, torch
            >>> ts.save_file({"a.weight": torch.zeros(1000), "b.weight": torch.zeros(500)}, "a.ts")
            >>> print(ts.plan("a.ts", budget="1MiB").curve(["1MiB"]))  # doctest: +ELLIPSIS
            budget MiB   s a pass   reads MiB   limited by
                   1.0     0.0000         0.0   compute
        """
        return Curve(self._preview.curve(None if budgets is None else budgets_in_bytes(budgets)))


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
    component are one unit, and all of them are parameters. Buffers stay in memory, so a model that
    has large ones needs a larger budget.

    The prediction uses the speeds that earlier runs have measured on this machine, for the file
    system and for the model. Without such a run, it assumes that storage reads 1 GB/s and that
    computation takes little time. It ignores experts and rows of embeddings, because inputs decide
    which of them a pass needs. For experts, the table says what a token reads if all of them are
    chosen equally often.

    Args:
        checkpoint: A file, a shard index, a directory with one of them, a URL, or the name of a
            model on the Hugging Face Hub, which is downloaded first.
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
    place = find(expanded(checkpoint))
    files = _native.Checkpoint(place.weights)
    found = plan_checkpoint(place, files, config)
    divided: list[Divided] = []
    chosen: int | None = None
    if found is None:
        budget_bytes = config.working_bytes()
        planned = _plan_by_names(files, budget_bytes, config)
    else:
        budget_bytes, planned, divided, chosen = found
    experts = [each for each in divided if each.blocks is None and not each.batched]
    needed = None
    if experts and chosen is not None:
        needed = sum(_size(each) // each.shape[0] * min(chosen, each.shape[0]) for each in experts)
    lines = [
        planned["text"],
        *_divided_lines(divided),
        *_expert_lines(experts, needed, planned["plan"]),
        *_buffer_lines(None if found is None else planned["plan"]["buffer_bytes"]),
    ]
    return Plan(
        budget_bytes=budget_bytes,
        units=tuple((own["name"], own["slot_bytes"], own["resident"]) for own in planned["units"]),
        expert_bytes_per_token=needed,
        text="\n".join(lines),
        _preview=planned["preview"],
        **planned["plan"],
    )


def _plan_by_names(
    checkpoint: _native.Checkpoint, budget_bytes: int, config: Config
) -> dict[str, Any]:
    """Plans the streaming of a checkpoint whose model is unknown."""
    settings = config.settings()
    smallest, _ = _native.requirement(
        checkpoint, None, together=[], settings=settings, any_phase=True
    )
    if budget_bytes < smallest:
        largest = max(
            _native.plan(checkpoint, budget=smallest, settings=settings)["units"],
            key=lambda own: own["slot_bytes"],
        )
        raise BudgetError(
            f"a budget of {budget_bytes} bytes is too small: the smallest budget that works is "
            f"{smallest} bytes, of which `{largest['name']}` needs {largest['slot_bytes']} bytes "
            "at once",
            smallest,
        )
    planned = _native.plan(checkpoint, budget=budget_bytes, settings=settings)
    plan = planned["plan"]
    plan["smallest_budget_bytes"] = max(plan["smallest_budget_bytes"], smallest)
    plan["buffer_bytes"] = 0
    return planned


def _buffer_lines(size: int | None) -> list[str]:
    """Returns the lines of the table about buffers. ``None`` stands for those of no model."""
    if size is None:
        return ["assumes that all tensors are parameters; buffers of a model stay in memory"]
    return [_line("buffers", size, "stay in memory")] if size else []


def _divided_lines(divided: list[Divided]) -> list[str]:
    """Returns the lines of the table about parameters that are divided, except chosen experts."""
    kinds = {
        "by rows": [each for each in divided if each.table is not None and not each.multiplied],
        "in blocks": [each for each in divided if each.blocks and each.multiplied],
        "in slices": [each for each in divided if each.batched],
    }
    return [
        _line(f"read {how}", sum(map(_size, own)), ", ".join(each.name for each in own[:3]))
        for how, own in kinds.items()
        if own
    ]


def _expert_lines(experts: list[Divided], needed: int | None, plan: dict[str, Any]) -> list[str]:
    """Returns the lines of the table about experts."""
    whole = sum(map(_size, experts))
    if not whole:
        return []
    lines = [_line("experts", whole, "each is read when a router chooses it")]
    if needed is not None:
        # The memory of units that are streamed is theirs if there are no such units.
        room = 0 if plan["streamed_bytes_per_pass"] else plan["ring_bytes"]
        absent = round(needed * max(0.0, 1 - room / whole))
        lines += [
            _line("a token needs", needed, "of the experts"),
            _line("a token reads", absent, "if all experts are chosen equally often"),
        ]
    return lines


def _line(label: str, size: int, note: str) -> str:
    return f"{label:<19}{mib(size):>10} MiB   {note}"


def _size(divided: Divided) -> int:
    """Returns the size of a parameter in bytes."""
    return math.prod(divided.shape) * divided.dtype.itemsize
