# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device ``ts`` as PyTorch knows it: its module, and what of PyTorch takes it for one of its
own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from .. import _native
from ..errors import ConfigurationError, ConnectionLost
from . import _accelerator, _infer, _kernels, _trace
from ._composites import KINDS
from ._dtypes import DTYPES

#: Sessions by the index of their first device.
SESSIONS: dict[int, Any] = {}
COUNT = 0
#: Machines that are paused, by the index of their first device: the seed that they are to have when
#: they go on, if they were given one.
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
        # A lost machine is seeded when it starts again. The others must not fail because of it.
        with contextlib.suppress(ConnectionLost):
            seed_of(index, seed)


def manual_seed(seed: int) -> None:
    seed_of(current_device(), seed)


def seed_of(index: int, seed: int) -> None:
    """Seeds the generator of a device. PyTorch's seeds have 64 bits, with or without a sign."""
    _kernels.SEED(_anchor(index), (int(seed) + 2**63) % 2**64 - 2**63)


def kind_of(index: int) -> tuple[str, int]:
    """What a machine runs operators on, "cpu" or "cuda", and how many such devices it has."""
    anchor = _anchor(index)
    return _kernels.KIND(anchor), _kernels.DEVICES(anchor)


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
        "device_count": count,
        "is_available": lambda: COUNT > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: _process.forked,
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


def _single_threaded_backward() -> None:
    """The autograd engine takes the device for one with a single index, and starts threads for no
    more: it is run on the thread that calls it."""
    from torch.autograd import graph

    run = graph._engine_run_backward

    @functools.wraps(run)
    def backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(output, torch.Tensor) and _infer.is_ours(output) for output in outputs):
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
            at = next((p.device for p in self.parameters() if _infer.is_ours(p)), None)
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
        if device is not None and device.type == "ts" and KINDS.get(device.index, "cpu") == "cpu":
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


def is_forked() -> bool:
    """Whether this process is a child of the one that has the sessions."""
    forked: bool = _process.forked
    return forked


def _after_fork() -> None:
    _process.forked = True
    _native.remote_forked()


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """What PyTorch asks in C++."""

    def is_available(self) -> bool:
        return COUNT > 0

    def has_primary_context(self, index: int) -> bool:
        return index < COUNT

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
            infer=_infer.infer, element=_infer.element, to_device=_infer.to_device,
            current_device=current_device, drawn=_kernels.drawn, place=_trace.place, log=_trace.log,
        ),
        "as_strided": _infer.as_strided,
        "frame": sys._getframe,
        "logs": _trace.LOG.isEnabledFor,
        "default_dtype": torch.get_default_dtype,
        "libraries": [os.path.dirname(torch.__file__) + os.sep,
        os.path.dirname(_native.__file__) + os.sep],
    })  # fmt: skip
    _kernels.register()
    _single_threaded_backward()
    _storages()
    _accumulation()
    _tied()
    os.register_at_fork(after_in_child=_after_fork)
