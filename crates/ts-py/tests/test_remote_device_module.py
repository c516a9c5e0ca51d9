# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that the device ``ts`` has what PyTorch's own tests ask of a device of another package:
streams, events, storages, DLPack, autocast, the profiler, and errors with PyTorch's words."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensorstream.errors import ConfigurationError, DeviceUnavailableError
from tensorstream.remote import RemoteMachine
from torch.nn import functional


@pytest.fixture(scope="module")
def pair() -> Iterator[RemoteMachine]:
    """A machine with two devices."""
    with RemoteMachine.mock(device_count=2) as machine:
        yield machine


@pytest.fixture
def module(pair: RemoteMachine) -> Iterator[Any]:
    """The device module. The first device of the machine is current during a test."""
    module = torch.get_device_module(pair.device())
    with module.device(pair.device()):
        yield module


def test_streams_have_a_device_and_a_number(pair: RemoteMachine, module: Any) -> None:
    first, second = pair.device(0), pair.device(1)
    stream = torch.Stream(second)
    assert isinstance(stream, module.Stream)
    assert (stream.device, stream.device_index) == (second, second.index)
    assert f"device_type=ts, device_index={second.index}" in repr(stream)
    assert torch.Stream(device="ts").device == module.Stream().device == first
    assert stream != torch.Stream(second) != torch.Stream(second)
    fields = (stream.stream_id, stream.device_index, stream.device_type)
    again = torch.Stream(stream_id=fields[0], device_index=fields[1], device_type=fields[2])
    assert again == stream == torch.Stream(*fields) and hash(again) == hash(stream)
    assert isinstance(again, module.Stream)
    assert torch.Stream(second, priority=-1).device == second
    with pytest.raises(RuntimeError, match="device index is out of range"):
        torch.Stream(torch.device("ts", module.device_count()))
    with pytest.raises(RuntimeError):
        torch.Stream("no such device")  # type: ignore[call-overload]


def test_each_thread_has_current_streams(pair: RemoteMachine, module: Any) -> None:
    first, second = pair.device(0), pair.device(1)
    before = module.current_stream()
    assert before == module.default_stream() and before.device == first
    outer, inner = torch.Stream(second), torch.Stream(second)
    with pytest.raises(ValueError, match="leaves both blocks"), outer as entered:
        assert entered is outer
        assert module.current_stream() == outer and module.current_device() == second.index
        assert torch.ones(2, device="ts").device == second
        with module.stream(inner), module.stream(None):
            assert module.current_stream() == inner
            in_thread: list[torch.Stream] = []
            thread = threading.Thread(
                target=lambda: in_thread.append(module.current_stream(second))
            )
            thread.start()
            thread.join()
            assert in_thread == [module.default_stream(second)]
            raise ValueError("leaves both blocks")
    assert module.current_stream() == before and module.current_device() == first.index
    assert module.current_stream(second) == module.default_stream(second)
    module.set_stream(outer)
    assert module.current_stream() == outer and module.current_device() == second.index
    module.set_stream(module.default_stream(second))


def test_streams_and_events_wait_for_the_machine(pair: RemoteMachine, module: Any) -> None:
    stream, other = torch.Stream(pair.device(1)), torch.Stream(pair.device(1))
    event = torch.Event(device="ts")
    assert isinstance(event, module.Event)
    assert event.device.type == "ts" and event.device.index is None and event.event_id == 0
    event.synchronize()
    assert event.query() and stream.query()
    x = torch.ones(3, device=pair.device(1)) + 1
    event.record(stream)
    assert event.device == pair.device(1) and event.event_id
    assert stream.record_event().event_id != event.event_id
    other.wait_event(event)
    other.wait_stream(stream)
    event.wait(other)
    x.record_stream(other)
    requests = pair.stats()
    for wait in (event.synchronize, stream.synchronize):
        wait()
        assert pair.stats() != requests
        requests = pair.stats()
    assert x.tolist() == [2.0] * 3


def test_events_measure_the_time_of_the_machine(pair: RemoteMachine, module: Any) -> None:
    device = pair.device()
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="must be recorded"):
        begin.elapsed_time(end)
    x = torch.rand(300, 300, device=device)
    waits = pair.stats()["waits"]
    begin.record()
    for _ in range(5):
        x = x @ x
    end.record()
    assert pair.stats()["waits"] == waits
    assert 0 < begin.elapsed_time(end) < 60_000
    assert end.elapsed_time(begin) == -begin.elapsed_time(end)
    with pytest.raises(ValueError, match="enable_timing=True"):
        begin.elapsed_time(torch.Stream(device).record_event())
    with RemoteMachine.mock() as machine:
        there = torch.Event(machine.device(), enable_timing=True)
        there.record(torch.Stream(machine.device()))
        with pytest.raises(ConfigurationError, match="different clocks"):
            begin.elapsed_time(there)


def test_streams_of_other_devices_are_those_of_pytorch(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(torch.Stream("cpu")) is torch.Stream
    assert type(torch.Event("cpu")) is torch.Event
    assert torch.Event("cpu").device.type == "cpu"
    if torch.version.cuda and not torch.cuda.is_available():
        assert torch.Event().device.type == torch.Stream().device.type == "ts"
        assert torch.Stream(module.current_device()).device_index == module.current_device()
        # With a GPU, programs that name no device get its streams, as without machines.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        numbered: Any = 0  # PyTorch's stubs lack it
        assert torch.Event().device.type == torch.Event(numbered).device.type == "cuda"


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x, lambda x: x[1:], lambda x: x[64:68], lambda x: x[::3],
        lambda x: x.view(10, 10).T, lambda x: x.view(10, 10)[2:, 3], lambda x: x.view(torch.int16),
    ],
)  # fmt: skip
def test_from_dlpack_shares_memory(
    view: Callable[[torch.Tensor], torch.Tensor], pair: RemoteMachine
) -> None:
    x = torch.arange(100, dtype=torch.float32)
    there = view(x.to(pair.device(1)))
    kind, index = there.__dlpack_device__()
    assert kind == torch.utils.dlpack.DLDeviceType.kDLExtDev and index == pair.device(1).index
    taken = torch.from_dlpack(there)
    assert taken.device == there.device and taken.stride() == there.stride()
    assert torch.equal(taken.cpu(), view(x))
    taken.zero_()
    assert not there.cpu().any()
    assert torch.ones(2).__dlpack_device__() == (torch.utils.dlpack.DLDeviceType.kDLCPU, 0)


def test_a_forked_child_gets_the_error_of_pytorch(module: Any, pair: RemoteMachine) -> None:
    x = torch.ones(2, device=pair.device())
    calls = [
        module.init,
        module.synchronize,
        module.memory_allocated,
        torch.Stream("ts").synchronize,
    ]

    def child(errors: Any) -> None:
        for call in (*calls, lambda: x + 1):
            try:
                call()
            except Exception as error:
                errors.put(error)

    fork = multiprocessing.get_context("fork")
    errors = fork.Queue()
    process = fork.Process(target=child, args=(errors,))
    process.start()
    for _ in calls:
        error = errors.get(timeout=30)
        assert isinstance(error, DeviceUnavailableError)
        assert isinstance(error, RuntimeError) and isinstance(error, ConfigurationError)
        assert str(error).startswith("Cannot re-initialize ts in forked subprocess. To use ts with")
    assert "fork" in str(errors.get(timeout=30))
    process.join()
    assert (x + 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("untyped", [False, True])
def test_storages_move_to_the_device(untyped: bool, pair: RemoteMachine, module: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # storages with dtypes are deprecated
        x = torch.arange(5.0)
        here: Any = x.untyped_storage() if untyped else x.storage()
        there = here.ts()
        assert there.is_ts and not here.is_ts
        assert here.ts(pair.device(1)).device == pair.device(1)
        assert there.ts() is there or not untyped
        assert there.cpu().tolist() == here.tolist()


def test_autocast_refuses_what_it_refuses_on_a_gpu(device: torch.device) -> None:
    x, y = torch.rand(3, device=device), torch.rand(3, device=device)
    with torch.autocast("ts"), pytest.raises(RuntimeError, match="are unsafe to autocast"):
        functional.binary_cross_entropy(x, y)
    with torch.autocast("ts"), torch.autocast("ts", enabled=False):
        assert functional.binary_cross_entropy(x, y).isfinite()
    with pytest.warns(UserWarning, match=r"dtypes of torch\.float16, torch\.bfloat16"):
        torch.autocast("ts", dtype=torch.float32)


def test_generators_name_their_device(pair: RemoteMachine, module: Any) -> None:
    device = pair.device(1)
    generator = torch.Generator(device).manual_seed(3)
    assert generator.device == device and torch.Generator("ts").device == pair.device(0)
    drawn = torch.randn(4, generator=generator, device=device)
    assert torch.equal(drawn.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(3)))
    for copied in (copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))):
        assert torch.equal(copied.get_state(), generator.get_state())


@pytest.mark.parametrize("use_kineto", [False, True])
def test_profiles_have_operators_and_no_errors(
    use_kineto: bool, device: torch.device, capfd: pytest.CaptureFixture[str]
) -> None:
    with torch.autograd.profiler.profile(use_device="ts", use_kineto=use_kineto) as profile:
        x = torch.rand(8, 8, device=device)
        (x @ x).relu()
    assert {"aten::mm", "aten::relu"} <= {event.name for event in profile.function_events}
    assert "aten::mm" in profile.key_averages().table()
    assert "frame #" not in capfd.readouterr().err
