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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import dlpack

from . import _native
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
        # Recurrent modules keep a list of their parameters beside the dictionary.
        self._recurrent = weakref.ref(module) if hasattr(module, "_flat_weights_names") else None
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
                self._swap(self._tensors)
            self._leases[use] = lease

    def exit(self, use: object) -> None:
        """Ends ``use``, if it began; the last one lets the parameters go unless the plan keeps them.

        Raises:
            ModelError: A parameter was written to. Its bytes are read anew for the next use.
        """
        with self._lock:
            lease = self._leases.pop(use, None)
            if lease is None:
                return
            written = self._written()
            if written is not None:
                self.let_go()
                lease.discard()
                raise ModelError(
                    f"`{written}` was written to in place: a streamed weight cannot be changed; "
                    "restore(model) first"
                )
            if not self._leases and not self._resident:
                self.let_go()
            lease.release()

    def let_go(self) -> None:
        """Puts the stand-ins back."""
        with self._lock:
            self._swap(self._placeholders)
            self._tensors = None

    def _swap(self, parameters: Mapping[str, Any]) -> None:
        self._parameters.update(parameters)
        module = self._recurrent() if self._recurrent is not None else None
        if module is not None:
            refresh_flat_weights(module)

    def _written(self) -> str | None:
        for name, tensor in (self._tensors or {}).items():
            if tensor._version != 0:
                return self._streamer.weights[self._keys[name]].name
        return None

    def wrap(self, module: nn.Module) -> None:
        """Makes the module's forward bring its parameters in."""

        def around(call: Callable[[], Any]) -> Any:
            use = object()
            try:
                self.enter(use)
                return call()
            finally:
                self.exit(use)

        wrap_forward(module, around)


def refresh_flat_weights(module: nn.Module) -> None:
    """Points a recurrent module's own list of parameters at its present ones."""
    names = getattr(module, "_flat_weights_names", None)
    if names is not None:
        module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in names]


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
