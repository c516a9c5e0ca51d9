# SPDX-License-Identifier: MIT OR Apache-2.0
"""What joins a model's modules to the engine: leases in, parameters swapped, leases out.

Nothing here refers back to a module but by its ``_parameters`` dictionary, so a model that is deleted frees
its engine at once, without the cycle collector.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import dlpack

from . import _native
from ._placeholder import StreamedTensor
from .errors import ModelError


@dataclass(frozen=True)
class Weight:
    """One distinct parameter: what it is, and which tensor of which unit."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    unit: int
    index: int
    requires_grad: bool


class Streamer:
    """Gives the tensors of units, to whoever asks on whatever thread."""

    def __init__(self, engine: _native.Engine, weights: list[Weight]) -> None:
        self.engine = engine
        self.weights = weights
        self._thread = threading.local()

    @property
    def pass_id(self) -> int | None:
        """The pass that runs on this thread."""
        return getattr(self._thread, "pass_id", None)

    @pass_id.setter
    def pass_id(self, pass_id: int | None) -> None:
        self._thread.pass_id = pass_id

    def acquire(self, unit: int) -> _native.Lease:
        """Waits until a unit is in memory."""
        return self.engine.acquire(unit, self.pass_id)

    def materialize(self, key: int) -> torch.Tensor:
        """One weight, for a use outside its module's forward. It stays valid while it is referenced."""
        weight = self.weights[key]
        lease = self.acquire(weight.unit)
        try:
            return as_parameter(lease.tensors()[weight.index], weight)
        finally:
            lease.release()


def as_parameter(capsule: object, weight: Weight) -> nn.Parameter:
    """The parameter whose bytes a capsule of the engine holds. Frozen: nothing could keep what it learns."""
    # An inference tensor could not be saved for backward; these can, whatever mode the caller is in.
    with torch.inference_mode(False):
        tensor = dlpack.from_dlpack(capsule)
        if tensor.dtype != weight.dtype:
            tensor = tensor.view(weight.dtype).view(weight.shape)
        return nn.Parameter(tensor, requires_grad=False)


class Site:
    """A module whose own parameters are one unit: there while its forward runs."""

    def __init__(self, module: nn.Module, streamer: Streamer, unit: int, keys: dict[str, int]) -> None:
        self._parameters = module._parameters
        self._placeholders = {name: module._parameters[name] for name in keys}
        self._streamer = streamer
        self._unit = unit
        self._keys = keys
        self._lock = threading.RLock()
        self._leases: dict[object, _native.Lease] = {}
        self._tensors: dict[str, nn.Parameter] | None = None
        self._resident = False

    @property
    def in_use(self) -> bool:
        """Whether a forward runs."""
        return bool(self._leases)

    def enter(self, use: object) -> None:
        """Brings the parameters in, for ``use``."""
        with self._lock:
            lease = self._streamer.acquire(self._unit)
            if self._tensors is None:
                capsules, weights = lease.tensors(), self._streamer.weights
                self._resident = lease.resident
                self._tensors = {
                    name: as_parameter(capsules[weights[key].index], weights[key])
                    for name, key in self._keys.items()
                }
                self._parameters.update(self._tensors)
            self._leases[use] = lease

    def exit(self, use: object) -> None:
        """Ends ``use``, if it began; the last one lets the parameters go unless the plan keeps them."""
        with self._lock:
            lease = self._leases.pop(use, None)
            try:
                if lease is not None and not self._leases:
                    self._check_unwritten()
                    if not self._resident:
                        self.let_go()
            finally:
                if lease is not None:
                    lease.release()

    def let_go(self) -> None:
        """Puts the stand-ins back."""
        with self._lock:
            self._parameters.update(self._placeholders)
            self._tensors = None

    def _check_unwritten(self) -> None:
        for name, tensor in (self._tensors or {}).items():
            if tensor._version != 0:
                weight = self._streamer.weights[self._keys[name]]
                self._resident = False
                self.let_go()
                raise ModelError(
                    f"`{weight.name}` was written to in place: a streamed weight cannot be changed; "
                    "restore(model) first"
                )

    def wrap(self, module: nn.Module) -> None:
        """Makes the module's forward bring its parameters in."""
        flat = getattr(module, "_flat_weights_names", None)

        def around(call: Callable[[], Any]) -> Any:
            use = object()
            try:
                self.enter(use)
                if flat is not None:  # recurrent modules keep a list of their own
                    refresh_flat_weights(self._parameters, module_ref(), flat)
                return call()
            finally:
                self.exit(use)

        module_ref = weakref.ref(module)
        wrap_forward(module, around)


def refresh_flat_weights(parameters: dict[str, Any], module: nn.Module | None, names: list[str]) -> None:
    """Points a recurrent module's list of weights at its present parameters."""
    if module is not None:
        module.__dict__["_flat_weights"] = [parameters.get(name) for name in names]


def wrap_forward(module: nn.Module, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Replaces ``module.forward`` by one that runs inside ``around``.

    A replaced method and no hook, because hooks that always run do not when the exception is a
    KeyboardInterrupt.
    """
    before: Any = module.__dict__.get("forward")
    if before is not None:
        inner = before
    else:
        method, module_ref = type(module).forward, weakref.ref(module)

        def inner(*args: Any, **kwargs: Any) -> Any:
            return method(module_ref(), *args, **kwargs)

    @functools.wraps(type(module).forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(lambda: inner(*args, **kwargs))

    del forward.__wrapped__
    forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    forward._before = before  # type: ignore[attr-defined]
    module.__dict__["forward"] = forward


def unwrap_forward(module: nn.Module) -> None:
    """Undoes the last :func:`wrap_forward`."""
    before = module.__dict__.pop("forward")._before
    if before is not None:
        module.__dict__["forward"] = before


class Streaming:
    """A model's streaming: kept in the model as ``_tensorstream``."""

    def __init__(
        self, checkpoint: _native.Checkpoint, units: list[Any], streamer: Streamer, sites: list[Site]
    ) -> None:
        self.checkpoint = checkpoint
        self.units = units
        self.streamer = streamer
        self.sites = sites

    def wrap(self, model: nn.Module) -> None:
        """Makes each outermost forward of the model a pass."""

        def around(call: Callable[[], Any]) -> Any:
            streamer = self.streamer
            if streamer.pass_id is not None:
                return call()
            pass_id = None
            try:
                pass_id = streamer.pass_id = streamer.engine.begin_pass()
                result = call()
            finally:
                streamer.pass_id = None
                proposed = pass_id is not None and streamer.engine.end_pass(pass_id)
            if proposed:
                self.replan()
            return result

        wrap_forward(model, around)

    def replan(self) -> None:
        """Lets all kept parameters go and puts the engine's better plan in force, if nothing is in use."""
        if not any(site.in_use for site in self.sites):
            for site in self.sites:
                site.let_go()
            self.streamer.engine.replan()


def streaming_of(model: nn.Module) -> Streaming:
    """The streaming of an offloaded model."""
    streaming = model.__dict__.get("_tensorstream")
    if not isinstance(streaming, Streaming):
        raise ModelError(f"this {type(model).__name__} is not offloaded")
    return streaming


def is_placeholder(tensor: object) -> bool:
    """Whether a parameter stands in for a streamed weight."""
    return isinstance(tensor, StreamedTensor)
