# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams of work on the CPU and on GPUs, and memory pools that follow their order.

PyTorch's own streams order PyTorch's work. These are for programs that overlap copies and functions
of their own, and ``CudaStream.from_torch`` orders both.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypedDict

from ._native import (
    CudaStream,
    Device,
    DeviceBuffer,
    EnergyMeter,
    Event,
    Execution,
    GpuMemoryPool,
    MultiStreamCoordinator,
    PinnedMemoryPool,
    PoolConfig,
    Scope,
    StreamOrderedAllocator,
    StreamPool,
    StreamProfiler,
    TensorCreditTracker,
)

__all__ = [
    "AllocationStrategy",
    "CudaStream",
    "Device",
    "DeviceBuffer",
    "EnergyMeter",
    "Event",
    "Execution",
    "GpuMemoryPool",
    "MultiStreamCoordinator",
    "PinnedMemoryPool",
    "PoolConfig",
    "ProfileReport",
    "ProfileRow",
    "Scope",
    "StreamOrderedAllocator",
    "StreamPool",
    "StreamPriority",
    "StreamProfiler",
    "TensorCreditTracker",
    "WorkloadType",
]


class StreamPriority(StrEnum):
    """The priority of a stream among those of its device."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class WorkloadType(StrEnum):
    """The kind of a piece of work, by what takes most of its time."""

    #: Arithmetic.
    COMPUTE = "compute"
    #: Copies.
    MEMORY = "memory"
    #: Both.
    MIXED = "mixed"
    #: Waits, events and small functions.
    COORDINATION = "coordination"


class AllocationStrategy(StrEnum):
    """How a ``StreamPool`` chooses a stream."""

    #: Each stream in turn.
    ROUND_ROBIN = "round_robin"
    #: The stream with the least pending work.
    LOAD_BALANCED = "load_balanced"
    #: The stream whose priority is nearest to that of the kind of work.
    PRIORITY = "priority"
    #: The stream that is expected to finish first, by measured times.
    WORKLOAD = "workload"
    #: The same, by a linear model of time and bytes that is trained while the pool is used.
    LEARNED = "learned"


class ProfileRow(TypedDict):
    """The times of one activity, in seconds."""

    #: The name of the scope or function, or "transfer".
    name: str
    count: int
    total: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float
    #: The bytes that were copied.
    bytes: int


class ProfileReport(TypedDict):
    """What a ``StreamProfiler`` has measured."""

    #: The number of streams with measured work.
    total_streams: int
    #: The times of each stream, by its ``id``.
    streams: dict[int, list[ProfileRow]]
    #: The times of all streams together.
    all: list[ProfileRow]
    #: The times that the program has measured.
    reported: list[ProfileRow]
    #: The time in which a stream had work.
    busy_seconds: float
    #: The share of this time in which several streams had work.
    overlap_percent: float
    #: The number of scopes that did not end, because their stream failed.
    lost: int
