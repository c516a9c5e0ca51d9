# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams, their pools and coordinators, and memory in their order."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstream as ts
import torch
from tensorstream.streams import (
    AllocationStrategy,
    CudaStream,
    Device,
    EnergyMeter,
    Event,
    GpuMemoryPool,
    MultiStreamCoordinator,
    PinnedMemoryPool,
    StreamOrderedAllocator,
    StreamPool,
    StreamPriority,
    StreamProfiler,
    WorkloadType,
)


@pytest.fixture(params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


def test_work_runs_in_the_order_of_streams_and_events(device: Device) -> None:
    first, second = CudaStream(device=device), CudaStream(StreamPriority.HIGH, device=device)
    order: list[int] = []
    for number in range(3):
        first.launch_host_fn(lambda number=number: order.append(number))
    second.wait_event(first.record_event())
    second.launch_host_fn(lambda: order.append(3))
    first.wait_stream(second)
    first.launch_host_fn(lambda: order.append(4))
    first.synchronize()
    assert order == [0, 1, 2, 3, 4]
    assert first.query() and first.metrics()["launches"] == 4
    start, end = Event(device=device), Event(device=device)
    start.record(first)
    end.record(first)
    end.synchronize()
    assert start.query() and start.elapsed_time(end) >= 0


def test_an_exception_fails_the_stream_until_it_is_taken(device: Device) -> None:
    stream = CudaStream(device=device)
    called: list[int] = []

    def fail() -> None:
        raise ValueError("not today")

    stream.launch_host_fn(fail)
    with pytest.raises(ts.DeviceError, match="ValueError: not today"):
        stream.synchronize()
    assert "not today" in (stream.take_error() or "")
    stream.launch_host_fn(lambda: called.append(1))
    stream.synchronize()
    assert called == [1]


def test_copies_keep_their_memory(device: Device) -> None:
    stream = CudaStream(device=device)
    buffer = GpuMemoryPool(device).acquire(4096)
    source, expected = np.arange(1024, dtype=np.float32), np.arange(1024, dtype=np.float32)
    alive = weakref.ref(source)
    stream.copy(buffer, source)
    del source
    back = torch.zeros(1024)
    stream.copy(back, buffer)
    stream.synchronize()
    assert np.array_equal(back.numpy(), expected)
    stream.launch_host_fn(lambda: None)
    stream.synchronize()
    gc.collect()
    assert alive() is None
    buffer.write(stream, b"abcd", offset=4)
    stream.fill(bytearray(3), 1)
    assert buffer.read(stream, 3, 6) == expected.tobytes()[3:4] + b"abcd" + expected.tobytes()[8:9]


def test_wrong_memory_is_refused() -> None:
    stream = CudaStream(device="cpu")
    buffer = GpuMemoryPool("cpu").acquire(8)
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: stream.copy(buffer, b"abc"), ts.ConfigurationError, "3 bytes to 8"),
        (lambda: stream.copy(b"12345678", buffer), ts.ConfigurationError, "read-only"),
        (lambda: stream.copy(buffer, np.zeros((4, 4), np.int8)[::2, ::2]), TypeError, "contig"),
        (lambda: stream.copy(buffer, 8), TypeError, "memoryview"),
        (lambda: buffer.read(stream, 4, 5), ValueError, "5 bytes at offset 4"),
        (lambda: buffer.write(stream, bytes(9)), ValueError, "9 bytes at offset 0"),
        (lambda: stream.fill(buffer, 256), OverflowError, "range"),
        (lambda: CudaStream(device="sim").fill(buffer, 1), ts.ConfigurationError, "cannot use"),
        (
            lambda: StreamOrderedAllocator("cpu").record_use(buffer, stream),
            ts.ConfigurationError,
            "another pool",
        ),
        (lambda: Device("tpu"), ts.ConfigurationError, "unknown device"),
        (lambda: CudaStream("urgent", device="cpu"), ValueError, "high"),
        (lambda: StreamPool(2, "fastest", device="cpu"), ValueError, "round_robin"),
        (lambda: StreamPool(device="cpu").get_stream_for_workload("x"), ValueError, "compute"),
        (lambda: MultiStreamCoordinator([]), ValueError, "at least one"),
        (lambda: CudaStream.from_torch(torch.Stream), TypeError, "torch.cuda.Stream"),
    ]  # fmt: skip
    for call, kind, words in wrong:
        with pytest.raises(kind, match=words):
            call()
    if not ts.GpuStatus.detect().is_available:
        with pytest.raises(ts.DeviceUnavailableError):
            CudaStream(device=0)


def test_memory_outlives_work_that_nobody_waits_for(device: Device) -> None:
    stream = CudaStream(device=device)
    buffer = GpuMemoryPool(device).acquire(1 << 20)
    stream.fill(buffer, 7)
    refused: list[str] = []

    def read() -> None:
        try:
            buffer.read(stream)
        except ts.ConfigurationError as error:
            refused.append(str(error))

    stream.launch_host_fn(read)
    stream.synchronize()
    assert refused and "host function" in refused[0]
    assert buffer.read(stream) == bytes([7]) * (1 << 20)
    stream.copy(GpuMemoryPool(device).acquire(0), b"")
    allocator = StreamOrderedAllocator(device)
    for _ in range(20):
        ordered, other = allocator.allocate(1 << 16, stream), CudaStream(device=device)
        other.wait_stream(stream)
        other.fill(ordered, 1)  # another stream than the one that owns the memory
        del ordered
        allocator.free_for_stream(stream)
        allocator.trim()
        other.synchronize()
    assert allocator.stats()["in_use_bytes"] == 0


def test_workloads_get_streams_of_their_own() -> None:
    kinds = (WorkloadType.COMPUTE, WorkloadType.MEMORY, WorkloadType.COORDINATION)
    for strategy in AllocationStrategy:
        pool = StreamPool(4, strategy, device="cpu")
        together = threading.Barrier(2)
        streams = [pool.get_stream_for_workload(kind) for kind in kinds]
        assert len({stream.id for stream in streams}) == 3, strategy
        for stream in streams[:2]:
            stream.launch_host_fn(lambda wait=together.wait: wait(60))
        for stream in streams:
            stream.synchronize()
    pool.strategy = AllocationStrategy.ROUND_ROBIN
    assert pool.strategy == AllocationStrategy.ROUND_ROBIN.value
    pool.record_workload_completion(streams[0], WorkloadType.COMPUTE, 0.25)
    assert pool.average_workload_time(WorkloadType.COMPUTE) is not None
    assert pool.has_ready_streams() and pool.wait_for_any_ready(1).query()
    pool.resize(2)
    assert len(pool) == 2 and len(StreamPool(1, max_count=3, device="cpu")) == 1


def test_a_coordinator_orders_tasks(device: Device) -> None:
    coordinator = MultiStreamCoordinator([CudaStream(device=device) for _ in range(3)])
    done: list[str] = []
    names = ["a", "b", "c", "d"]
    tasks: dict[str, Callable[[], object]] = {
        name: lambda name=name: done.append(name) for name in names
    }
    execution = coordinator.execute(tasks, {"d": ["b", "c"], "b": ["a"], "c": ["a"]})
    ended: list[bool] = []
    last = coordinator.streams[0]
    execution.on_complete(last, lambda: ended.append(True))
    execution.wait(60)
    last.synchronize()
    assert done[0] == "a" and done[-1] == "d" and sorted(done) == names and ended == [True]
    with pytest.raises(ts.ConfigurationError, match="a"):
        coordinator.execute(tasks, {"a": ["b"], "b": ["a"]})
    with pytest.raises(ValueError, match="no task has the name"):
        coordinator.execute(tasks, {"a": ["z"]})
    coordinator.barrier()
    coordinator.execute_parallel([lambda: done.append("e")] * 2).wait()
    assert done[-2:] == ["e", "e"]


def test_a_wait_ends_at_its_timeout() -> None:
    stream, leave = CudaStream(device="cpu"), threading.Event()
    stream.launch_host_fn(leave.wait)
    with pytest.raises(TimeoutError):
        stream.synchronize(timeout=0.01)
    leave.set()
    stream.synchronize()


def test_a_profiler_reports_each_stream() -> None:
    profiler = StreamProfiler(device="cpu")
    streams = [CudaStream(device="cpu") for _ in range(2)]
    for stream in streams:
        with profiler.scope(stream, "layer"), profiler.transfer(stream, 8):
            stream.fill(bytearray(8), 1)
    profiler.enabled = False
    with profiler.launch(streams[0], "unseen"):
        pass
    report = profiler.report()
    assert report["total_streams"] == 2 and report["streams"].keys() == {s.id for s in streams}
    rows = {row["name"]: row for row in report["all"]}
    assert rows.keys() == {"layer", "transfer"} and rows["transfer"]["bytes"] == 16
    assert "layer" in profiler.table() and "traceEvents" in profiler.chrome_trace()


def test_a_learned_pool_knows_how_long_work_is() -> None:
    pool = StreamPool(2, AllocationStrategy.LEARNED, device="cpu")
    assert pool.strategy == "learned" and pool.expected_time(WorkloadType.MEMORY) is None
    stream = pool.get_stream_for_workload(WorkloadType.MEMORY, 1 << 20)
    for nbytes in (1 << 10, 1 << 20):
        pool.record_workload_completion(stream, "memory", 1e-5 + nbytes * 1e-9, nbytes)
    assert pool.expected_time("memory", 1 << 30) == pytest.approx(1.07, rel=0.02)


def test_energy_is_read_from_the_counters(tmp_path: Path) -> None:
    with pytest.raises(ts.DeviceUnavailableError, match="no energy counters"):
        EnergyMeter(tmp_path)
    for entry, name in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core")):
        counter = tmp_path / entry
        counter.mkdir()
        (counter / "name").write_text(name + "\n")
        (counter / "max_energy_range_uj").write_text("262143328850\n")
        (counter / "energy_uj").write_text("1000000\n")
    meter = EnergyMeter(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("3500000\n")
    assert meter.read() == {"package-0": 2.5, "package-0/core": 0.0, "total": 2.5}


def test_pools_count_their_memory() -> None:
    pools: list[Any] = [GpuMemoryPool("cpu"), PinnedMemoryPool(ts.PoolConfig(), device="cpu")]
    for pool in pools:
        for _ in range(2):
            buffer = pool.acquire(100_000)
            assert buffer.nbytes == len(buffer) == 100_000
            assert pool.stats()["in_use_buffers"] == 1
            del buffer
        assert 30 < pool.stats()["hit_rate"] <= 50 and pool.stats()["in_use_bytes"] == 0
    stream = CudaStream(device="cpu")
    allocator = StreamOrderedAllocator("cpu", limit_bytes=64 << 20)
    buffer = allocator.allocate(1 << 20, stream)
    allocator.record_use(buffer, CudaStream(device="cpu"))
    assert allocator.stats()["in_use_bytes"] == 1 << 20
    assert allocator.free_for_stream(stream) == 1 << 20
    with pytest.raises(ts.ConfigurationError):
        stream.fill(buffer, 1)
    with pytest.raises(ts.OutOfMemoryError):
        allocator.allocate(1 << 30, stream)
