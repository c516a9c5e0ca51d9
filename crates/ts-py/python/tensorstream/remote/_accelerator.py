# SPDX-License-Identifier: MIT OR Apache-2.0
"""Hides the device ``ts`` from ``torch.accelerator``.

A process has one accelerator. If a package registers a device, PyTorch chooses that device instead
of CUDA. ``ts`` has no allocator and no pinned memory on this computer, so PyTorch must not choose
it. The functions that PyTorch calls for the accelerator are therefore redirected to the accelerator
that the process had before ``ts`` was registered.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

#: For each function ``torch._C._accelerator_KEY``, the equivalent function of a device's module.
_FUNCTIONS = {
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


def current() -> torch.device | None:
    """Returns the accelerator of this process, or None. Call it before ``ts`` is registered."""
    return torch._C._accelerator_getAccelerator()


def redirect_to(accelerator: torch.device | None) -> None:
    """Makes PyTorch use ``accelerator``, or none, regardless of the registered devices."""
    # mypy would reject an assignment, because the declared function never returns None.
    setattr(torch._C, "_accelerator_getAccelerator", lambda: accelerator)  # noqa: B010
    module = None if accelerator is None else torch.get_device_module(accelerator)
    for name, replacement_name in _FUNCTIONS.items():
        if not hasattr(torch._C, f"_accelerator_{name}"):
            continue
        replacement = (
            _raise_unavailable if module is None else getattr(module, replacement_name, None)
        )
        if name == "isAllocatorInitialized" and module is None:
            replacement = _false
        if replacement is not None:
            # PyTorch has no setting for this, but looks the functions up at each call.
            setattr(torch._C, f"_accelerator_{name}", replacement)
    if accelerator is not None:
        _redirect_host_cache(accelerator)
        _redirect_generators(accelerator)
    for name in ("pin_memory", "is_pinned"):
        method = _with_accelerator(getattr(torch.Tensor, name), accelerator)
        # PyTorch would otherwise pin memory for ``ts``.
        setattr(torch.Tensor, name, method)


def _raise_unavailable(*_: Any) -> Any:
    # This is the message of PyTorch.
    raise RuntimeError("Cannot access accelerator device when none is available.")


def _false() -> bool:
    return False


def _redirect_host_cache(accelerator: torch.device) -> None:
    empty = getattr(torch._C, "_host_emptyCache", None)
    if accelerator.type == "cuda" and empty is not None:

        def empty_host_cache() -> None:
            if torch.cuda.is_initialized():
                empty()

        torch._C._accelerator_emptyHostCache = empty_host_cache


def _redirect_generators(accelerator: torch.device) -> None:
    def default_generator(device_index: int) -> torch.Generator:
        generators = torch.get_device_module(accelerator).default_generators
        generator: torch.Generator = generators[device_index]
        return generator

    torch._C._accelerator_getDefaultGenerator = default_generator


def _with_accelerator(
    method: Callable[..., Any], accelerator: torch.device | None
) -> Callable[..., Any]:
    """Wraps ``pin_memory`` or ``is_pinned``, so that the default device is ``accelerator``."""
    unavailable = _raise_unavailable if method.__name__ == "pin_memory" else _false

    @functools.wraps(method)
    def call(self: torch.Tensor, device: Any = None) -> Any:
        if device is not None:
            return method(self, device)
        if self.device.type != "cpu":
            return method(self)
        if accelerator is None:
            return unavailable()
        with warnings.catch_warnings():
            # The argument is deprecated, but the default would be ``ts``.
            warnings.simplefilter("ignore", DeprecationWarning)
            return method(self, accelerator.type)

    return call
