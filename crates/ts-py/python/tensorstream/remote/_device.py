# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device ``ts`` as PyTorch knows it: its module, and what of PyTorch takes it for one of its own."""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from .. import _native
from . import _infer, _kernels, _trace
from ._dtypes import DTYPES

#: Sessions by the index of their first device.
SESSIONS: dict[int, Any] = {}
COUNT = 0
#: Machines that are paused, by the index of their first device: the seed that they are to have when they go on, if
#: they were given one.
PAUSED: dict[int, int | None] = {}
_current = threading.local()
_process = types.SimpleNamespace(forked=False)


def count() -> int:
    return COUNT


def current_device() -> int:
    return getattr(_current, "index", 0)


def set_device(device: Any) -> None:
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    if index is not None and index >= 0:
        _current.index = index


def sessions() -> list[Any]:
    """Those that are not paused."""
    return [session for first, session in SESSIONS.items() if first not in PAUSED]


class _On:
    """``with torch.ts.device(index)``."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._device)

    def __exit__(self, *_: object) -> None:
        _current.index = self._before


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of every device."""
    PAUSED.update(dict.fromkeys(PAUSED, seed))
    for index in list(_kernels.PLACES):
        seed_of(index, seed)


def manual_seed(seed: int) -> None:
    seed_of(current_device(), seed)


def seed_of(index: int, seed: int) -> None:
    """Seeds the generator of a device. PyTorch's seeds have 64 bits, with or without a sign."""
    _kernels.SEED(_anchor(index), (int(seed) + 2**63) % 2**64 - 2**63)


def kind_of(index: int) -> str:
    """What a machine runs operators on: "cpu" or "cuda"."""
    return _kernels.KIND(_anchor(index))


def _index(device: Any) -> int:
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    return current_device() if index is None else index


def get_rng_state(device: Any = "ts") -> torch.Tensor:
    """The state of a machine's generator, as its PyTorch has it: on the host."""
    return _kernels.RNG_STATE(_anchor(_index(device))).cpu()


def set_rng_state(state: torch.Tensor, device: Any = "ts") -> None:
    index = _index(device)
    _kernels.SET_RNG_STATE(_anchor(index), state.to(torch.device("ts", index)))


def _anchor(index: int) -> torch.Tensor:
    """A tensor by which a call without one knows its device."""
    return torch.empty(0, dtype=torch.uint8, device=torch.device("ts", index))


def synchronize(device: Any = None) -> None:
    """Waits until all that was asked is done."""
    for session in sessions():
        session.synchronize()


class _NoInductor:
    """Asked for by PyTorch's inductor, which makes kernels itself."""

    supports_caching = False

    def __init__(self, *_: object) -> None:
        raise NotImplementedError(
            "inductor makes kernels for this computer, and the tensors are elsewhere: "
            'torch.compile(..., backend="aot_eager") runs there'
        )


def _module() -> types.ModuleType:
    module = types.ModuleType("torch.ts", "Tensors that are elsewhere: tensorstream.remote.")
    attributes = {
        "device_count": count,
        "is_available": lambda: COUNT > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: _process.forked,
        "_lazy_init": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "device": _On,
        "Scheduling": _NoInductor,
        "PythonWrapperCodegen": _NoInductor,
        "CppWrapperCodegen": _NoInductor,
        "WrapperFxCodegen": _NoInductor,
    }
    for name, value in attributes.items():
        setattr(module, name, value)
    for function in (
        current_device, set_device, manual_seed, manual_seed_all, get_rng_state, set_rng_state, synchronize,
    ):  # fmt: skip
        setattr(module, function.__name__, function)
    return module


def _single_threaded_backward() -> None:
    """The autograd engine takes the device for one with a single index, and starts threads for no more: it is run on
    the thread that calls it."""
    from torch.autograd import graph

    run = graph._engine_run_backward

    @functools.wraps(run)
    def backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(output, torch.Tensor) and _infer.is_ours(output) for output in outputs):
            with torch.autograd.set_multithreading_enabled(False):
                return run(outputs, *args, **kwargs)
        return run(outputs, *args, **kwargs)

    graph._engine_run_backward = torch.autograd._engine_run_backward = backward  # type: ignore[assignment,attr-defined]


def _storages() -> None:
    """PyTorch makes storages by a device's allocator, which this has not: they are those of empty tensors."""
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


def _synchronize() -> None:
    """PyTorch asks devices' own code, in C++, to wait: of this device it asks ours."""
    wait = torch.accelerator.synchronize

    @functools.wraps(wait)
    def accelerator_synchronize(device: Any = None, /) -> None:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type == "ts":
            synchronize(device)
        else:
            wait(device)

    torch.accelerator.synchronize = accelerator_synchronize


def _tied() -> None:
    """A module that goes to the device, or comes from there, has new parameters, each by itself: they are put where
    the old ones were, so that those which are one stay one, and optimisers know them."""
    for name in ("to", "cpu"):
        move = getattr(torch.nn.Module, name)

        @functools.wraps(move)
        def moved(self: torch.nn.Module, *args: Any, _move: Any = move, **kwargs: Any) -> torch.nn.Module:
            future = torch.__future__
            ours = any(_infer.is_ours(parameter) for parameter in self.parameters())
            goes = any(
                torch.device(value).type == "ts" for value in (*args, *kwargs.values()) if _names_device(value)
            )
            if not (ours or goes) or future.get_swap_module_params_on_conversion():
                return _move(self, *args, **kwargs)
            future.set_swap_module_params_on_conversion(True)
            try:
                return _move(self, *args, **kwargs)
            finally:
                future.set_swap_module_params_on_conversion(False)

        setattr(torch.nn.Module, name, moved)


def _names_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "ts")


def _after_fork() -> None:
    _process.forked = True
    _native.remote_forked()


def _set_up() -> None:
    _setup_privateuseone_for_python_backend("ts", backend_module=_module())
    _native.remote_setup({
        "tensor": torch.Tensor,
        "parameter": torch.nn.Parameter,
        "device": torch.device,
        "dtype": torch.dtype,
        "memory_format": torch.memory_format,
        "layout": torch.layout,
        "dtypes": DTYPES,
        "from_dlpack": torch._C._from_dlpack,
        "infer": types.SimpleNamespace(
            infer=_infer.infer, element=_infer.element, to_device=_infer.to_device, plain=_kernels.plain,
            current_device=current_device, drawn=_kernels.drawn, place=_trace.place, log=_trace.log,
        ),
        "as_strided": _infer.as_strided,
        "frame": sys._getframe,
        "logs": _trace.LOG.isEnabledFor,
        "default_dtype": torch.get_default_dtype,
        "libraries": [os.path.dirname(torch.__file__) + os.sep, os.path.dirname(_native.__file__) + os.sep],
    })  # fmt: skip
    _kernels.register()
    _single_threaded_backward()
    _storages()
    _synchronize()
    _tied()
    os.register_at_fork(after_in_child=_after_fork)


_set_up()
