# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device ``ts`` in PyTorch: its module ``torch.ts``, its hooks, and its registration."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ...errors import ConfigurationError, ConnectionLost
from .. import _accelerator, _patches, _registry
from .._registry import current_device, index_of, init, set_device
from . import _bridge, _kernels
from . import _server_operators as _operators
from ._streams import Event, Stream, current_stream, default_stream, set_stream, stream


class _DeviceContext:
    """The context manager ``torch.ts.device(index)``, which sets the current device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._previous = current_device()
        set_device(self._device)

    def __exit__(self, *_: object) -> None:
        set_device(self._previous)


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices. Paused machines get the seed when they resume."""
    _registry.PAUSED.update(dict.fromkeys(_registry.PAUSED, seed))
    for index in list(_registry.ADDRESSES):
        # A lost machine is seeded when it starts again. The others must be seeded nevertheless.
        with contextlib.suppress(ConnectionLost):
            seed_of(index, seed)


def manual_seed(seed: int) -> None:
    """Seeds the generator of the current device."""
    seed_of(current_device(), seed)


def seed() -> None:
    """Seeds the generator of the current device with a random number."""
    manual_seed(_random_seed())


def seed_all() -> None:
    """Seeds the generators of all devices with one random number."""
    manual_seed_all(_random_seed())


def _random_seed() -> int:
    return int.from_bytes(os.urandom(8), "little")


def initial_seed() -> int:
    """Returns the seed of the current device's generator. Blocks."""
    # The states of PyTorch's generators, of a CPU and of CUDA, begin with the seed.
    return int(get_rng_state()[:8].view(torch.int64).item()) % 2**64


def seed_of(index: int, seed: int) -> None:
    """Seeds the generator of a device. ``seed`` has 64 bits, signed or unsigned."""
    _operators.SEED(_operators.anchor(index), (int(seed) + 2**63) % 2**64 - 2**63)


def kind_of(index: int) -> tuple[str, int]:
    """Returns the type and number of a machine's devices. ``index`` is any of them. Blocks.

    Returns:
        The type, such as "cpu" or "cuda", and the number.
    """
    tensor = _operators.anchor(index)
    return _operators.KIND(tensor), _operators.DEVICES(tensor)


def gpu_of(index: int) -> tuple[str, int]:
    """Returns the name and the memory in bytes of the GPU that is a device of a machine. Blocks."""
    tensor = _operators.anchor(index)
    return _operators.GPU_NAME(tensor), _operators.GPU_BYTES(tensor)


def get_rng_state(device: Any = "ts") -> torch.Tensor:
    """Returns the state of a device's generator, as a tensor on the host. Blocks."""
    return _operators.RNG_STATE(_operators.anchor(index_of(device))).cpu()


def set_rng_state(state: torch.Tensor, device: Any = "ts") -> None:
    """Sets the state of a device's generator to one that ``get_rng_state`` returned."""
    index = index_of(device)
    _operators.SET_RNG_STATE(_operators.anchor(index), state.to(torch.device("ts", index)))


def get_rng_state_all() -> list[torch.Tensor]:
    """Returns the states of the generators of all devices of machines that run. Blocks."""
    return [get_rng_state(index) for index in sorted(_registry.ADDRESSES)]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Sets the states of the generators of all devices to those of ``get_rng_state_all``."""
    for index, state in zip(sorted(_registry.ADDRESSES), states, strict=True):
        set_rng_state(state, index)


def synchronize(device: Any = None) -> None:
    """Blocks until all machines that are not paused have run all operators called so far.

    Args:
        device: Ignored.

    Raises:
        DeviceUnavailableError: This process was forked from the one that owns the machines.
    """
    init()
    for session in _registry.sessions():
        session.synchronize()


def memory_allocated(device: Any = None) -> int:
    """Returns the size of the tensors on a device, in bytes. Blocks.

    Args:
        device: The device. The default is the current one.

    Raises:
        ConfigurationError: No machine that is running has the device.
    """
    index = _known(device)
    session = _registry.SESSIONS[_registry.ADDRESSES[index][0]]
    return sum(
        size for _, size, ordinal, _ in session.storages() if session.first + ordinal == index
    )


def empty_cache() -> None:
    """Makes machines with accelerators free memory that PyTorch keeps for later tensors."""
    for index in list(_registry.ADDRESSES):
        if not _registry.runs_on_cpu(index):
            with contextlib.suppress(ConnectionLost):  # the others do so nevertheless
                _operators.EMPTY_CACHE(_operators.anchor(index))


def get_device_name(device: Any = None) -> str:
    """Returns the name of a GPU, or of a CPU with the address of its machine. May block.

    Args:
        device: The device. The default is the current one.

    Raises:
        ConfigurationError: No machine that is running has the device.
    """
    index = _known(device)
    if not _registry.runs_on_cpu(index):
        return _operators.GPU_NAME(_operators.anchor(index))
    return f"CPU of the machine at {_registry.ADDRESSES[index][1]}"


def _known(device: Any) -> int:
    """Returns the index of a device of a machine that is running."""
    init()
    index = current_device() if device is None else index_of(device)
    if index not in _registry.ADDRESSES:
        raise ConfigurationError(
            f"no machine that is running has the device ts:{index}: start one, or resume it"
        )
    return index


def _no_inductor(*_: object) -> Any:
    raise NotImplementedError(
        "the inductor backend cannot compile for a remote machine; use "
        'torch.compile(..., backend="aot_eager")'
    )


class _NoInductor:
    """Raises an error when inductor schedules or writes code for the device."""

    supports_caching = False
    __init__ = _no_inductor
    create = staticmethod(_no_inductor)


class _NoOverrides:
    """Raises an error when inductor calls any function of the device's overrides."""

    def __getattr__(self, name: str) -> Any:
        return _no_inductor


class _Module(types.ModuleType):
    @property
    def Scheduling(self) -> type:
        """Returns the class that schedules code for inductor.

        The first use of inductor reads this property. The property also registers the overrides
        of the device, because an earlier registration would import inductor.
        """
        from torch._inductor.codegen import common

        overrides: Any = _NoOverrides()
        common.register_device_op_overrides("ts", overrides)
        return _NoInductor


def _module() -> types.ModuleType:
    module = _Module("torch.ts", "Tensors on remote machines (tensorstream.remote).")
    attributes = {
        "device_count": _registry.count,
        "is_available": lambda: _registry.count() > 0,
        "is_initialized": lambda: True,
        # torch.utils.checkpoint keeps the states of generators only of devices with this attribute.
        "_initialized": True,
        "_is_in_bad_fork": _registry.is_forked,
        "_lazy_init": init,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "device": _DeviceContext,
        "PythonWrapperCodegen": _NoInductor,
        "CppWrapperCodegen": _NoInductor,
        "WrapperFxCodegen": _NoInductor,
    }
    for name, value in attributes.items():
        setattr(module, name, value)
    for member in (
        current_device, set_device, init, manual_seed, manual_seed_all, seed, seed_all,
        initial_seed, get_rng_state, set_rng_state, get_rng_state_all, set_rng_state_all,
        synchronize, memory_allocated, empty_cache, get_device_name, Stream, Event,
        current_stream, default_stream, set_stream, stream,
    ):  # fmt: skip
        setattr(module, member.__name__, member)
    return module


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """The hooks with which PyTorch queries the device from C++."""

    def is_available(self) -> bool:
        return _registry.count() > 0

    def has_primary_context(self, index: int) -> bool:
        return index < _registry.count()

    def is_built(self) -> bool:
        return True


_setting_up = threading.Lock()


def set_up() -> None:
    """Registers the device with PyTorch. Later calls do nothing."""
    with _setting_up:
        _set_up()


@functools.cache
def _set_up() -> None:
    accelerator = _accelerator.current()
    numbered = torch.device(0).type
    try:
        _setup_privateuseone_for_python_backend("ts", backend_module=_module(), hook=_Hooks())
    except RuntimeError as error:
        raise ConfigurationError(
            "cannot add the device ts to PyTorch: a process can have one device of a package "
            f"({error}); set TORCH_DEVICE_BACKEND_AUTOLOAD=0 if PyTorch has loaded the other one"
        ) from error
    _accelerator.redirect_to(accelerator)
    _bridge.connect()
    _kernels.register()
    _patches.apply(accelerator, numbered)
    _registry.watch_forks()
