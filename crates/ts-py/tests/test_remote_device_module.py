# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that the device ``ts`` has what PyTorch's own tests ask of a device of another package:
streams, events, storages, DLPack, autocast, the profiler, and errors with PyTorch's words."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
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


def test_a_forked_child_gets_the_error_of_pytorch(module: Any, pair: RemoteMachine) -> None:
    x = torch.ones(2, device=pair.device())
    calls = [module.init, module.synchronize, module.memory_allocated]

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


def test_autocast_refuses_what_it_refuses_on_a_gpu(device: torch.device) -> None:
    x, y = torch.rand(3, device=device), torch.rand(3, device=device)
    with torch.autocast("ts"), pytest.raises(RuntimeError, match="are unsafe to autocast"):
        functional.binary_cross_entropy(x, y)
    with torch.autocast("ts"), torch.autocast("ts", enabled=False):
        assert functional.binary_cross_entropy(x, y).isfinite()
    with pytest.warns(UserWarning, match=r"dtypes of torch\.float16, torch\.bfloat16"):
        torch.autocast("ts", dtype=torch.float32)
