# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the device ``ts`` changes in PyTorch, once, when the first machine starts.

docs/remote/patches.md lists the changes for users.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import ConfigurationError
from . import _registry
from .client._views import is_ours


def apply() -> None:
    """Applies all changes."""
    _single_threaded_backward()
    _storages()
    _accumulation()
    _tied()


def _single_threaded_backward() -> None:
    """The autograd engine takes the device for one with a single index, and starts threads for no
    more: it is run on the thread that calls it."""
    from torch.autograd import graph

    run = graph._engine_run_backward

    @functools.wraps(run)
    def backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(output, torch.Tensor) and is_ours(output) for output in outputs):
            with torch.autograd.set_multithreading_enabled(False):
                return run(outputs, *args, **kwargs)
        return run(outputs, *args, **kwargs)

    graph._engine_run_backward = backward  # type: ignore[assignment]
    torch.autograd._engine_run_backward = backward  # type: ignore[assignment,attr-defined]


def _storages() -> None:
    """PyTorch makes storages by a device's allocator, which this has not: they are those of empty
    tensors.
    """
    make = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "ts":
            size = args[0] if args else kwargs.get("size", 0)
            if not isinstance(size, int):
                return torch.tensor(list(size), dtype=torch.uint8).to(device).untyped_storage()
            return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        if device is not None:
            kwargs["device"] = device
        return make(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]


def _tied() -> None:
    """A module that goes to the device, or comes from there, has new parameters, each by itself:
    they are put where the old ones were, so that those which are one stay one, and optimisers know
    them."""
    for name in ("to", "cpu"):
        move = getattr(torch.nn.Module, name)

        @functools.wraps(move)
        def moved(
            self: torch.nn.Module, *args: Any, _move: Any = move, **kwargs: Any
        ) -> torch.nn.Module:
            future = torch.__future__
            at = next((p.device for p in self.parameters() if is_ours(p)), None)
            devices = {
                torch.device(value) for value in (*args, *kwargs.values()) if _names_device(value)
            }
            goes = any(device.type == "ts" for device in devices)
            if at is not None and devices and not goes:
                _refuse_trainers(type(self).__name__, at)
            if (at is None and not goes) or future.get_swap_module_params_on_conversion():
                return _move(self, *args, **kwargs)
            future.set_swap_module_params_on_conversion(True)
            try:
                dtype = next(
                    (
                        value
                        for value in (*args, *kwargs.values())
                        if isinstance(value, torch.dtype)
                    ),
                    None,
                )
                with _without_lazy(self, next(iter(devices), None), dtype):
                    return _move(self, *args, **kwargs)
            finally:
                future.set_swap_module_params_on_conversion(False)

        setattr(torch.nn.Module, name, moved)


def _accumulation() -> None:
    """``linear_cross_entropy`` accumulates by the kind of device: on a machine that is a CPU as on
    a CPU.
    """
    try:
        from torch.nn.modules.linear_cross_entropy_options import (
            LinearCrossEntropyOptions as Options,
        )
    except ImportError:  # PyTorch before 2.15
        return
    adjust = Options._adjust
    signature = inspect.signature(adjust)

    @functools.wraps(adjust)
    def as_there(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        device = bound.arguments.get("device")
        if device is not None and device.type == "ts" and _registry.runs_on_cpu(device.index):
            bound.arguments["device"] = torch.device("cpu")
        return adjust(*bound.args, **bound.kwargs)

    Options._adjust = as_there  # type: ignore[method-assign]  # replaced on purpose


@contextlib.contextmanager
def _without_lazy(
    module: torch.nn.Module, device: torch.device | None, dtype: torch.dtype | None
) -> Iterator[None]:
    """Parameters and buffers that have no shape yet cannot be moved: they are made again behind the
    move.
    """
    held = [
        (names, name, value)
        for each in module.modules()
        for names in (each._parameters, each._buffers)
        for name, value in names.items()
        if value is not None and torch.nn.parameter.is_lazy(value)
    ]
    for names, name, _ in held:
        names[name] = None
    try:
        yield
    finally:
        for names, name, value in held:
            at: Any = device or value.device
            make: Any = type(value)
            names[name] = make(
                requires_grad=value.requires_grad, device=at, dtype=dtype or value.dtype
            )


def _names_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (
        isinstance(value, str) and value.partition(":")[0] in _DEVICES
    )


#: Kinds of devices that a model may be moved to by their names.
_DEVICES = ("ts", "cpu", "cuda", "mps", "xpu", "meta")


#: Modules that move a model to the device that they found, without being asked to.
_TRAINERS = ("accelerate.accelerator", "transformers.trainer")


def _refuse_trainers(model: str, at: torch.device) -> None:
    """Refuses what would train a model elsewhere than where it was put."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in _TRAINERS:
            library = name.partition(".")[0]
            raise ConfigurationError(
                f"{library} would move {model} from {at} to this computer and train it here: set "
                "the environment "
                f'variable ACCELERATE_TORCH_DEVICE="{at}" before it chooses a device, which is '
                "when the first Accelerator or TrainingArguments is made"
            )
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
