# SPDX-License-Identifier: MIT OR Apache-2.0
"""A plugin for pytest that streams every model in transformers' own model tests.

Run it in a checkout of transformers at the installed version, with this directory on `PYTHONPATH`:

    python -m pytest -p streamed_transformers tests/models/bert/test_modeling_bert.py

The first forward or `generate` of a model in eval mode offloads it to a file first, with half of
its weights as the budget, or with the smallest budget that works. Models that are not on the CPU or
that cannot stream stay in memory. Some tests fail in memory too: compare with a run without the
plugin. The summary says how many models streamed, and why others did not.

`--streamed-sample=N` runs every N-th test. `--streamed-compare` also computes the first result of
each model in memory, with a copy of the model, and compares the bits.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import random
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import pytest
import tensorstream as ts
import torch
import transformers
from torch import nn
from transformers.generation import GenerationMixin

#: The class of parameters that stream.
_STAND_IN = "StreamedTensor"
_STREAMS = "streams already"

_counts: collections.Counter[str] = collections.Counter()


class _Calls(threading.local):
    """Whether a call of a model is running in this thread."""

    running = False


class _Session:
    """What all tests share."""

    #: Where the weights of the current test are.
    directory: str | None = None
    compares = False


_calls = _Calls()
_session = _Session()


def stream(model: nn.Module) -> bool:
    """Offloads a model, and returns whether it did."""
    reason = _why_not(model)
    if reason is not None:
        if reason != _STREAMS:
            _counts[f"left in memory: {reason}"] += 1
        return False
    whole = sum(each.nbytes for each in model.parameters())
    budget = whole // 2
    for _ in range(3):
        try:
            ts.offload(model, ts.Config(storage_path=_of_test(), budget=budget))
        except ts.BudgetError as error:
            if error.smallest is None:
                raise
            budget = error.smallest
        except ts.ModelError as error:
            _counts[f"refused: {re.sub('`[^`]*`', '`...`', str(error))}"] += 1
            return False
        else:
            _counts["streamed below their size" if budget < whole else "streamed"] += 1
            return True
    raise AssertionError(f"no budget works for {type(model).__name__}")


def _why_not(model: nn.Module) -> str | None:
    """Returns why a model is not to be offloaded, or `None`."""
    parameters = list(model.parameters())
    if not parameters:
        return "no parameters"
    if model.training:
        return "in training mode"
    if any(base.__name__ == _STAND_IN for each in parameters for base in type(each).__mro__):
        return _STREAMS
    if any(type(each) is not nn.Parameter for each in parameters):
        return "other kinds of parameters"
    if any(each.device.type != "cpu" for each in parameters):
        return "not on the CPU"
    return None


def _of_test() -> str:
    """Returns a directory for the weights of the current test."""
    if _session.directory is None:
        _session.directory = tempfile.mkdtemp(prefix="streamed-transformers-")
    return _session.directory


def _run(model: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of a model, which streams if it is the outermost one."""
    if _calls.running or torch.compiler.is_compiling():
        return function(model, *args, **kwargs)
    expected = None
    _calls.running = True
    try:
        if _session.compares and _why_not(model) is None:
            expected = _in_memory(model, function, args, kwargs)
        streams = stream(model)
        result = function(model, *args, **kwargs)
    finally:
        _calls.running = False
    if streams and expected is not None:
        _counts["compared"] += 1
        different = list(_differences(expected, result, ""))
        if different:
            _counts["different"] += 1
            raise AssertionError(f"{type(model).__name__}: wrong numbers in {different[:5]}")
    return result


def _in_memory(model: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Returns what a copy of a model computes, or `None` if that fails."""
    with _same_random_numbers():
        try:
            copied = copy.deepcopy(model)
            for own, parameter in zip(copied.parameters(), model.parameters(), strict=True):
                own.data = _at_same_phase(parameter.data)
            own_args, own_kwargs = copy.deepcopy((args, kwargs))
            return function(copied, *own_args, **own_kwargs)
        except Exception:
            _counts["not compared, because it fails in memory"] += 1
            return None


def _at_same_phase(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same address modulo 64, because kernels are chosen by it."""
    if not tensor.is_contiguous() or tensor.data_ptr() % tensor.itemsize:
        return tensor.clone()
    memory = torch.empty(tensor.nbytes + 64, dtype=torch.uint8)
    start = (tensor.data_ptr() - memory.data_ptr()) % 64
    copied = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copied.copy_(tensor)


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restores the states of all generators of random numbers."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _differences(expected: Any, got: Any, where: str) -> Iterator[str]:
    """Yields the places where two results differ."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor) or _bits(expected) != _bits(got):
            yield where
    elif isinstance(expected, Mapping):
        for name, each in expected.items():
            yield from _differences(each, got.get(name), f"{where}.{name}")
    elif isinstance(expected, list | tuple):
        if not isinstance(got, list | tuple) or len(expected) != len(got):
            yield where
            return
        for index, each in enumerate(expected):
            yield from _differences(each, got[index], f"{where}[{index}]")
    elif isinstance(expected, transformers.Cache) or hasattr(expected, "keys"):
        yield from _differences(vars(expected), vars(got), where)
    elif isinstance(expected, float | int | str | None) and expected != got:
        yield where


def _bits(tensor: torch.Tensor) -> Any:
    """Returns what two equal tensors have in common."""
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense.contiguous()
    return dense.dtype, tuple(dense.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--streamed-sample", type=int, default=1)
    parser.addoption("--streamed-compare", action="store_true")


def pytest_configure(config: Any) -> None:
    _session.compares = config.getoption("--streamed-compare")
    torch.set_num_threads(1)
    generate: Any = GenerationMixin.generate

    # TensorStream replaces nn.Module.__call__, so it is looked up at each call.
    @functools.wraps(nn.Module.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, nn.Module.__call__, args, kwargs)

    @functools.wraps(generate)
    def streamed_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, generate, args, kwargs)

    transformers.PreTrainedModel.__call__ = call
    GenerationMixin.generate = streamed_generate


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    items[:] = items[:: config.getoption("--streamed-sample")]


def pytest_runtest_logfinish() -> None:
    if _session.directory is not None:
        shutil.rmtree(_session.directory, ignore_errors=True)
        _session.directory = None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for what, count in _counts.most_common():
        terminalreporter.write_line(f"models {what}: {count}")
