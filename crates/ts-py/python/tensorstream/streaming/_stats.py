# SPDX-License-Identifier: MIT OR Apache-2.0
"""The statistics of an offloaded model."""

from __future__ import annotations

from typing import TypedDict


class PlanStats(TypedDict):
    """The current plan."""

    #: Memory for units that stay in memory.
    resident_bytes: int
    #: Memory through which the other units are streamed.
    ring_bytes: int
    #: All memory that the plan uses.
    peak_bytes: int
    #: Bytes that each forward pass reads.
    streamed_bytes_per_pass: int
    #: Predicted seconds of a forward pass.
    predicted_pass_s: float
    #: What limits the speed: "read" or "compute", for example.
    bottleneck: str
    #: The smallest budget that works.
    smallest_budget_bytes: int


class UnitStats(TypedDict):
    """Statistics of a unit, which is the parameters of one module."""

    name: str
    #: Whether the plan keeps it in memory.
    resident: bool
    #: Memory for the unit.
    slot_bytes: int
    #: How often it was read.
    loads: int
    read_bytes: int
    load_s: float
    #: How often a forward or an operation used it, and for how long.
    uses: int
    use_s: float
    #: How often and how long its module waited for it.
    stalls: int
    stall_s: float


class Stats(TypedDict):
    """Statistics of an offloaded model, since it was offloaded."""

    budget_bytes: int
    #: The most memory that was reserved. Never exceeds the budget.
    reserved_high_water_bytes: int
    #: The most memory that held weights.
    in_use_high_water_bytes: int
    #: Memory that holds weights now.
    in_use_bytes: int
    #: The I/O backend.
    backend: str
    #: Backends that could not be used, with the reason.
    passed_over: list[tuple[str, str]]
    #: Whether writes past PyTorch to resident weights are detected: on Linux 6.7 or later, if
    #: userfaultfd is allowed.
    watches_writes: bool
    #: Forward passes.
    passes: int
    read_bytes: int
    #: ``read_bytes`` by path, such as the page cache or direct I/O.
    read_bytes_by_path: dict[str, int]
    #: How often and how long modules waited for weights.
    stalls: int
    stall_s: float
    #: Units that were read and evicted before they were used.
    wasted_loads: int
    #: How often the plan was changed.
    replans: int
    plan: PlanStats
    units: list[UnitStats]
