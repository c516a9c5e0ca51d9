# SPDX-License-Identifier: MIT OR Apache-2.0
"""The statistics of an offloaded model."""

from __future__ import annotations

from typing import Any, TypedDict


class PlanStats(TypedDict):
    """The current plan for the units of an offloaded model.

    Examples:
        >>> import tensorstream as ts, torch
        >>> config = ts.Config(storage_path="weights", budget="64KiB")
        >>> model = ts.offload(torch.nn.Linear(4, 4), config)
        >>> ts.stats(model)["plan"]["streamed_bytes_per_pass"]
        0
    """

    #: Memory for units that stay in memory.
    resident_bytes: int
    #: Memory for units that stay in memory compressed.
    compressed_bytes: int
    #: Memory through which the other units are streamed.
    ring_bytes: int
    #: All memory that the plan uses.
    peak_bytes: int
    #: Bytes that each forward pass reads.
    streamed_bytes_per_pass: int
    #: Predicted seconds of a forward pass.
    predicted_pass_s: float
    #: The resource that limits the predicted speed: "storage", "decoding" or "compute".
    bottleneck: str
    #: The smallest budget that works.
    smallest_budget_bytes: int
    #: Memory for the persistent buffers of the model, which stay in memory. It is part of all sizes
    #: of memory that are not those of units.
    buffer_bytes: int


class UnitStats(TypedDict):
    """Statistics of a unit, which is the parameters of one module.

    Examples:
        >>> import tensorstream as ts, torch
        >>> config = ts.Config(storage_path="weights", budget="64KiB")
        >>> model = ts.offload(torch.nn.Linear(4, 4), config)
        >>> [unit["resident"] for unit in ts.stats(model)["units"]]
        [True]
    """

    name: str
    #: Whether the plan keeps the unit in memory.
    resident: bool
    #: Whether the plan keeps the unit in memory compressed.
    compressed: bool
    #: Whether the unit is kept in memory that other processes can share (``Config.shared_cache``).
    shared: bool
    #: Whether a pass uses the unit only for some inputs. True for experts and parts of embeddings.
    routed: bool
    #: Whether the unit is in memory now.
    present: bool
    #: How often a router chose the unit, and how often it was then in memory or being read. 0 for
    #: units that are not routed.
    touched: int
    hits: int
    #: Memory for the unit.
    slot_bytes: int
    #: The number of times that the unit was read, the bytes read, and the time.
    loads: int
    read_bytes: int
    load_s: float
    #: The number of times that a forward or an operation leased the unit, and the time. While
    #: everything is resident, leases are kept, and further uses do not count.
    uses: int
    use_s: float
    #: The number of times that a module waited for the unit, and the time.
    stalls: int
    stall_s: float


class PassStats(TypedDict):
    """What the time of one forward pass went into, in seconds.

    ``wall_s`` is ``compute_s + wait_s + overhead_s``.

    Examples:
        >>> import tensorstream as ts, torch
        >>> config = ts.Config(storage_path="weights", budget="64KiB")
        >>> model = ts.offload(torch.nn.Linear(4, 4), config)
        >>> output = model(torch.ones(1, 4))
        >>> len(ts.stats(model)["recent_passes"])
        1
    """

    #: The number of the kind of the pass. Passes are of the same kind if they visit the same units
    #: in the same order, and compute for about as long. 0 if the pass visited no unit.
    kind: int
    wall_s: float
    #: Everything that the model computes.
    compute_s: float
    #: Waiting for weights.
    wait_s: float
    #: The other work for streaming, such as bookkeeping.
    overhead_s: float
    #: The time with at least one read in flight.
    reading_s: float
    #: The processor time of decoding.
    decoding_s: float
    read_bytes: int
    decoded_bytes: int
    #: How many times the plan had changed before the pass.
    replans: int
    #: What limited the speed: "storage", "decoding" or "compute".
    bottleneck: str


class RoutedStats(TypedDict):
    """Statistics of the experts of a mixture. Each parameter of an expert is a unit.

    Examples:
        >>> import tensorstream as ts, torch
        >>> config = ts.Config(storage_path="weights", budget="64KiB")
        >>> model = ts.offload(torch.nn.Linear(4, 4), config)
        >>> ts.stats(model)["routed"]["touched"]  # the model has no experts
        0
    """

    #: The number of times that a router chose a unit, and the bytes to read without a cache.
    touched: int
    touched_bytes: int
    #: How many of these times the chosen unit was in memory or being read.
    hits: int
    #: The number of evictions of routed units (``UnitStats.routed``).
    evictions: int
    #: The number of units that were read because the next layer was likely to choose them, how many
    #: of them it did choose, how many reads were cancelled, and the bytes read.
    guesses: int
    right_guesses: int
    cancelled_guesses: int
    guessed_bytes: int


class ExpertsStats(TypedDict):
    """Statistics of the experts of one layer. Each parameter of an expert is a unit.

    Examples:
        >>> import tensorstream as ts, torch
        >>> config = ts.Config(storage_path="weights", budget="64KiB")
        >>> model = ts.offload(torch.nn.Linear(4, 4), config)
        >>> ts.stats(model)["experts"]  # the model has no experts
        []
    """

    #: The name of the module that contains the experts.
    name: str
    #: The number of units, and how many of them are in memory now.
    units: int
    present: int
    #: How often the router chose a unit, and how often the unit was in memory or being read.
    touched: int
    hits: int
    #: The bytes that were read.
    read_bytes: int


class TableStats(TypedDict):
    """Statistics of embeddings whose rows are read one by one.

    Examples:
        >>> import tensorstream as ts, torch
        >>> config = ts.Config(storage_path="weights", budget="64KiB")
        >>> model = ts.offload(torch.nn.Linear(4, 4), config)
        >>> ts.stats(model)["tables"]["rows"]  # the model has no embedding
        0
    """

    #: The number of rows that were looked up.
    rows: int
    #: The number of these rows that were in memory from earlier lookups.
    cached_rows: int
    #: The bytes read for the other rows. Aligned direct reads contain more than the rows.
    read_bytes: int


class Stats(TypedDict):
    """Statistics of a model since it was offloaded. Sizes are bytes, and times are seconds.

    Examples:
        >>> import tensorstream as ts, torch
        >>> config = ts.Config(storage_path="weights", budget="64KiB")
        >>> model = ts.offload(torch.nn.Linear(4, 4), config)
        >>> ts.stats(model)["budget_bytes"]
        65536
    """

    budget_bytes: int
    #: The part of the budget that may be used now. All of it, except with
    #: ``MemoryPressureMode.ADAPTIVE`` and ``LENIENT``.
    limit_bytes: int
    #: The most memory that was reserved. Never exceeds the budget.
    reserved_high_water_bytes: int
    #: The most memory that contained weights.
    in_use_high_water_bytes: int
    #: Memory that contains weights now.
    in_use_bytes: int
    #: The I/O backend.
    backend: str
    #: Backends that could not be used, with the reason.
    passed_over: list[tuple[str, str]]
    #: Whether a write to a resident weight is detected even if the write bypasses PyTorch. This
    #: needs Linux 6.7 or later, and permission to use userfaultfd.
    watches_writes: bool
    #: The number of forward passes.
    passes: int
    read_bytes: int
    #: ``read_bytes`` by I/O path, such as the page cache or direct I/O.
    read_bytes_by_path: dict[str, int]
    #: The number of times that modules waited for weights, and the time.
    stalls: int
    stall_s: float
    #: Bytes that the device decoded, counted after that, and the best rate.
    device_decoded_bytes: int
    device_decode_bytes_per_s: float
    #: Units that were read and evicted before they were used.
    wasted_loads: int
    #: The number of times that the plan was changed.
    replans: int
    #: What limits the speed: "storage", "decoding" or "compute". Measured if a pass has run alone,
    #: and otherwise predicted.
    bottleneck: str
    #: The latest passes that ran alone, the latest last; at most 32. Passes are not measured while
    #: leases are kept, because everything is resident.
    recent_passes: list[PassStats]
    #: The time of these passes and between them, without times in which other passes ended.
    recent_s: float
    #: The number of threads that copy, decode, encode and verify.
    workers: int
    #: The number of reads in flight at most.
    io_depth: int
    #: The bytes that were encoded to keep weights in memory compressed, and the processor time.
    encoded_bytes: int
    encode_s: float
    #: The speed of reading, while anything was read, and of decoding with one thread. Measured as
    #: far as possible.
    read_bytes_per_s: float
    decode_bytes_per_s: float
    routed: RoutedStats
    #: ``routed`` by layer, in the order of the model.
    experts: list[ExpertsStats]
    tables: TableStats
    plan: PlanStats
    units: list[UnitStats]


#: Numbers of which those of several devices are not added up, but the largest counts.
_LARGEST = frozenset(("passes", "recent_s", "predicted_pass_s", "kind", "wall_s"))


def merged(devices: list[Stats]) -> Stats:
    """Returns the statistics of several devices together.

    A pass runs on all devices, and while one computes, the others count this as computing, too.
    Therefore, the computing time of a pass is its time without all waits and overheads.
    """
    if len(devices) == 1:
        return devices[0]
    whole: Any = _together([dict(each) for each in devices])
    latest = zip(*(reversed(each["recent_passes"]) for each in devices), strict=False)
    whole["recent_passes"] = [_pass_of([dict(own) for own in each]) for each in latest][::-1]
    slowest = max(devices, key=lambda each: each["stall_s"])
    whole["plan"]["bottleneck"] = slowest["plan"]["bottleneck"]
    whole["bottleneck"] = slowest["bottleneck"]
    stats: Stats = whole
    return stats


def _pass_of(devices: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a pass over several devices."""
    whole = _together(devices)
    busy = whole["wait_s"] + whole["overhead_s"]
    whole["compute_s"] = max(0.0, whole["wall_s"] - busy)
    whole["bottleneck"] = max(devices, key=lambda each: each["wait_s"])["bottleneck"]
    return whole


def _together(devices: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a dictionary with the sum of each number, and all elements of each list."""
    whole: dict[str, Any] = {}
    for key, first in devices[0].items():
        values = [each[key] for each in devices]
        if isinstance(first, dict):
            keys = dict.fromkeys(key for each in values for key in each)
            whole[key] = _together([{key: each.get(key, 0) for key in keys} for each in values])
        elif isinstance(first, list):
            whole[key] = [each for value in values for each in value]
        elif isinstance(first, bool):
            whole[key] = all(values)
        elif isinstance(first, int | float):
            whole[key] = max(values) if key in _LARGEST else sum(values)
        else:
            whole[key] = first
    return whole
