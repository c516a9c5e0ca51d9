# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device ``ts`` as PyTorch knows it: its module, and what of PyTorch takes it for one of its
own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ...errors import ConnectionLost
from .. import _accelerator, _patches, _registry
from .._registry import current_device, index_of, set_device
from . import _bridge, _kernels


class _On:
    """``with torch.ts.device(index)``."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._device)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of every device."""
    _registry.PAUSED.update(dict.fromkeys(_registry.PAUSED, seed))
    for index in list(_registry.ADDRESSES):
        # A lost machine is seeded when it starts again. The others must not fail because of it.
        with contextlib.suppress(ConnectionLost):
            seed_of(index, seed)


def manual_seed(seed: int) -> None:
    seed_of(current_device(), seed)


def seed_of(index: int, seed: int) -> None:
    """Seeds the generator of a device. PyTorch's seeds have 64 bits, with or without a sign."""
    _kernels.SEED(anchor(index), (int(seed) + 2**63) % 2**64 - 2**63)


def kind_of(index: int) -> tuple[str, int]:
    """What a machine runs operators on, "cpu" or "cuda", and how many such devices it has."""
    at = anchor(index)
    return _kernels.KIND(at), _kernels.DEVICES(at)


def get_rng_state(device: Any = "ts") -> torch.Tensor:
    """The state of a machine's generator, as its PyTorch has it: on the host."""
    return _kernels.RNG_STATE(anchor(index_of(device))).cpu()


def set_rng_state(state: torch.Tensor, device: Any = "ts") -> None:
    index = index_of(device)
    _kernels.SET_RNG_STATE(anchor(index), state.to(torch.device("ts", index)))


def anchor(index: int) -> torch.Tensor:
    """A tensor by which a call without one knows its device."""
    return torch.empty(0, dtype=torch.uint8, device=torch.device("ts", index))


def synchronize(device: Any = None) -> None:
    """Waits until all that was asked is done."""
    for session in _registry.sessions():
        session.synchronize()


def _no_inductor(*_: object) -> Any:
    raise NotImplementedError(
        "inductor makes kernels for this computer, and the tensors are elsewhere: "
        'torch.compile(..., backend="aot_eager") runs there'
    )


class _NoInductor:
    """Asked for by PyTorch's inductor, which makes kernels itself."""

    supports_caching = False
    __init__ = _no_inductor
    create = staticmethod(_no_inductor)


class _NoOverrides:
    """The same, of what inductor writes into its programs."""

    def __getattr__(self, name: str) -> Any:
        return _no_inductor


class _Module(types.ModuleType):
    @property
    def Scheduling(self) -> type:
        """Asked for when inductor begins: the time to tell it the rest."""
        from torch._inductor.codegen import common

        # It has every name.
        common.register_device_op_overrides("ts", _NoOverrides())  # type: ignore[arg-type]
        return _NoInductor


def _module() -> types.ModuleType:
    module = _Module("torch.ts", "Tensors that are elsewhere: tensorstream.remote.")
    attributes = {
        "device_count": _registry.count,
        "is_available": lambda: _registry.count() > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": _registry.is_forked,
        "_lazy_init": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "device": _On,
        "PythonWrapperCodegen": _NoInductor,
        "CppWrapperCodegen": _NoInductor,
        "WrapperFxCodegen": _NoInductor,
    }
    for name, value in attributes.items():
        setattr(module, name, value)
    for function in (
        current_device, set_device, manual_seed, manual_seed_all, get_rng_state, set_rng_state,
        synchronize,
    ):  # fmt: skip
        setattr(module, function.__name__, function)
    return module


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """What PyTorch asks in C++."""

    def is_available(self) -> bool:
        return _registry.count() > 0

    def has_primary_context(self, index: int) -> bool:
        return index < _registry.count()

    def is_built(self) -> bool:
        return True


_setting_up = threading.Lock()


def set_up() -> None:
    """Tells PyTorch of the device, which a process that has no machine does not see.

    Does nothing the second time.
    """
    with _setting_up:
        _set_up()


@functools.cache
def _set_up() -> None:
    own = _accelerator.own()
    _setup_privateuseone_for_python_backend("ts", backend_module=_module(), hook=_Hooks())
    _accelerator.keep(own)
    _bridge.connect()
    _kernels.register()
    _patches.apply()
    _registry.watch_forks()
