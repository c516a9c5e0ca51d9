# SPDX-License-Identifier: MIT OR Apache-2.0
"""Keeps this computer's own accelerator the one that PyTorch uses.

PyTorch has one accelerator a process, and prefers a device that was registered from outside to
CUDA. ``ts`` is no accelerator of this computer: it has no streams, no allocator and no pinned
memory here. So what PyTorch asks its accelerator goes to that which it had before ``ts`` was
registered.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

#: PyTorch's questions, and the functions of a device's module that answer them.
_ANSWERS = {
    "getDeviceIndex": "current_device",
    "setDeviceIndex": "set_device",
    "exchangeDevice": "_exchange_device",
    "maybeExchangeDevice": "_maybe_exchange_device",
    "getStream": "current_stream",
    "setStream": "set_stream",
    "synchronizeDevice": "synchronize",
    "emptyCache": "empty_cache",
    "isAllocatorInitialized": "is_initialized",
    "getDeviceStats": "memory_stats_as_nested_dict",
    "resetAccumulatedStats": "reset_accumulated_memory_stats",
    "resetPeakStats": "reset_peak_memory_stats",
    "getMemoryInfo": "mem_get_info",
    "hooks_device_count": "device_count",
    "hooks_exchange_device": "_exchange_device",
    "hooks_get_current_device": "current_device",
    "hooks_maybe_exchange_device": "_maybe_exchange_device",
    "hooks_set_current_device": "set_device",
}


def own() -> torch.device | None:
    """The accelerator that PyTorch was built for: to be asked before ``ts`` is registered."""
    return torch._C._accelerator_getAccelerator()


def _refuse(*_: Any) -> Any:
    raise RuntimeError("Cannot access accelerator device when none is available.")


def keep(own: torch.device | None) -> None:
    """Has PyTorch ask this accelerator, or none, from now on."""
    # Its type says that there is one.
    setattr(torch._C, "_accelerator_getAccelerator", lambda: own)  # noqa: B010
    module = None if own is None else torch.get_device_module(own)
    for question, name in _ANSWERS.items():
        if not hasattr(torch._C, f"_accelerator_{question}"):
            continue
        answer = _refuse if module is None else getattr(module, name, None)
        if question == "isAllocatorInitialized" and module is None:
            answer = _no
        if answer is not None:
            setattr(torch._C, f"_accelerator_{question}", answer)
    if own is not None:
        _host_cache(own)
        _generators(own)
    for name in ("pin_memory", "is_pinned"):
        setattr(torch.Tensor, name, _pinned(getattr(torch.Tensor, name), own))


def _no() -> bool:
    return False


def _host_cache(own: torch.device) -> None:
    empty = getattr(torch._C, "_host_emptyCache", None)
    if own.type == "cuda" and empty is not None:

        def empty_host_cache() -> None:
            if torch.cuda.is_initialized():
                empty()

        torch._C._accelerator_emptyHostCache = empty_host_cache


def _generators(own: torch.device) -> None:
    def default_generator(index: int) -> torch.Generator:
        generators = torch.get_device_module(own).default_generators
        given: torch.Generator = generators[index]
        return given

    # As above.
    setattr(torch._C, "_accelerator_getDefaultGenerator", default_generator)  # noqa: B010


def _pinned(method: Callable[..., Any], own: torch.device | None) -> Callable[..., Any]:
    """A method about pinned memory, which is that of the accelerator unless the caller names a
    device.
    """
    without = _refuse if method.__name__ == "pin_memory" else _no

    @functools.wraps(method)
    def asked(self: torch.Tensor, device: Any = None) -> Any:
        if device is not None:
            return method(self, device)
        if self.device.type != "cpu":
            return method(self)
        if own is None:
            return without()
        with warnings.catch_warnings():
            # Naming it is deprecated where there is only one.
            warnings.simplefilter("ignore", DeprecationWarning)
            return method(self, own.type)

    return asked
