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

from . import _native
from ._lend import as_tensor
from ._streamed_tensor import StreamedTensor
from .errors import ModelError

UNCHANGEABLE = "a streamed weight cannot be changed; restore(model) first"


@dataclass(frozen=True)
class Weight:
    """One distinct parameter: what it is, and which tensor of which unit."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    unit: int
    index: int
    requires_grad: bool
    #: Where they are not those of a row-major tensor.
    strides: tuple[int, ...] | None
    #: The shape in which its bytes are row-major: another order of its dimensions, for some strides.
    stored_shape: list[int]


class _Thread(threading.local):
    """What runs on this thread."""

    in_pass: _native.Pass | None = None


class Streamer:
    """Gives the tensors of units, to whoever asks on whatever thread."""

    symbolic = False

    def __init__(self, engine: _native.Engine, weights: list[Weight]) -> None:
        self.engine = engine
        self.weights = weights
        self.thread = _Thread()

    def acquire(self, unit: int) -> _native.Lease:
        """Waits until a unit is in memory."""
        return self.engine.acquire(unit, self.thread.in_pass)

    def materialize(self, tensor: StreamedTensor) -> torch.Tensor:
        """A stand-in's weight, for a use outside its module's forward. It stays valid while it is referenced."""
        return self.read(tensor.key)

    def discard(self, tensor: StreamedTensor) -> None:
        """The weight was written to: its unit is read anew for the next use."""
        self.engine.discard(self.weights[tensor.key].unit)

    def read(self, key: int) -> torch.Tensor:
        """One weight."""
        weight = self.weights[key]
        lease = self.acquire(weight.unit)
        try:
            return as_parameter(lease.tensors()[weight.index], weight)
        finally:
            lease.release()


def as_parameter(capsule: object, weight: Weight) -> nn.Parameter:
    """The parameter whose bytes a capsule of the engine holds."""
    requires_grad = asks_for_grad(weight)
    with torch.inference_mode(False):
        tensor = as_tensor(capsule, weight.dtype, weight.stored_shape)
        if weight.strides is not None:
            tensor = tensor.as_strided(weight.shape, weight.strides)
        return nn.Parameter(tensor, requires_grad=requires_grad)


def asks_for_grad(weight: Weight) -> bool:
    """Whether a weight says now that it requires a gradient.

    Where gradients are recorded it is frozen: nothing could keep what it learns. Where none are it says what the
    model's own did, because torch asks: matmul folds a batch, and so rounds otherwise, for an operand that does.
    """
    return weight.requires_grad and not torch.is_grad_enabled()


class Site:
    """A module whose own parameters are one unit: there while its forward runs."""

    def __init__(self, module: nn.Module, streamer: Streamer, unit: int, keys: dict[str, int]) -> None:
        self._parameters = module._parameters
        self._stand_ins = {name: module._parameters[name] for name in keys}
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
        """Brings the parameters in, for ``use``.

        Raises:
            ModelError: A parameter was replaced: its value would be lost.
        """
        with self._lock:
            self._check_own()
            lease = self._leases[use] = self._streamer.acquire(self._unit)
            if self._tensors is None:
                capsules, weights = lease.tensors(), self._streamer.weights
                tensors = {
                    name: as_parameter(capsules[weights[key].index], weights[key]) for name, key in self._keys.items()
                }
                self._resident, self._tensors = lease.resident, tensors
                self._swap(tensors)
            elif len(self._leases) == 1 or torch.is_grad_enabled():
                for name, tensor in self._tensors.items():
                    tensor.requires_grad = asks_for_grad(self._streamer.weights[self._keys[name]])

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
                lease.discard()
            lease.release()
            if written is not None or not (self._leases or self._resident):
                self.let_go()
        if written is not None:
            raise ModelError(f"`{written}` was written to in place: {UNCHANGEABLE}")

    def let_go(self) -> None:
        """Puts the stand-ins back."""
        with self._lock:
            self._swap(self._stand_ins)
            self._tensors = None

    def _swap(self, parameters: Mapping[str, Any]) -> None:
        self._parameters.update(parameters)
        module = self._recurrent() if self._recurrent is not None else None
        if module is not None:
            refresh_flat_weights(module)

    def _check_own(self) -> None:
        own: Mapping[str, Any] = self._stand_ins if self._tensors is None else self._tensors
        for name, key in self._keys.items():
            if self._parameters.get(name) is not own[name]:
                raise ModelError(f"`{self._streamer.weights[key].name}` was replaced: {UNCHANGEABLE}")

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


class Forward:
    """Stands in for a module's ``forward`` and runs it inside ``around``.

    A replaced method and no hook, because hooks that always run do not when the exception is a
    KeyboardInterrupt.
    """

    def __init__(self, module: nn.Module, around: Callable[[Callable[[], Any]], Any]) -> None:
        self.before = module.__dict__.get("forward")
        self._method = type(module).forward
        self._module = weakref.ref(module)
        self._around = around
        self.__signature__ = inspect.signature(module.forward)
        self.__doc__ = self._method.__doc__
        self.__name__ = "forward"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self._around(functools.partial(self.before, *args, **kwargs))
        return self._around(functools.partial(self._method, self._module(), *args, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            f"an offloaded {type(self._module()).__name__} cannot be copied or pickled: the copy would stream into "
            "the original; restore(model) first, or save its state_dict()"
        )


def wrap_forward(module: nn.Module, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Replaces ``module.forward`` by one that runs inside ``around``."""
    module.__dict__["forward"] = Forward(module, around)


def unwrap_forward(module: nn.Module) -> None:
    """Undoes every :func:`wrap_forward` of a module."""
    while isinstance(forward := module.__dict__.get("forward"), Forward):
        del module.__dict__["forward"]
        if forward.before is not None:
            module.__dict__["forward"] = forward.before


class Streaming:
    """A model's streaming: kept in the model as ``_tensorstream``."""

    def __init__(
        self,
        checkpoint: _native.Checkpoint,
        units: list[Any],
        streamer: Streamer,
        sites: list[Site],
        passed_over: list[tuple[str, str]],
    ) -> None:
        self.checkpoint = checkpoint
        self.units = units
        self.streamer = streamer
        self.sites = sites
        #: Backends that were asked for and are not built, and why.
        self.passed_over = passed_over

    def wrap(self, model: nn.Module) -> None:
        """Makes each outermost forward of the model a pass."""

        streamer = self.streamer

        def around(call: Callable[[], Any]) -> Any:
            thread, in_pass, proposed = streamer.thread, None, False
            if thread.in_pass is not None:
                return call()
            try:
                thread.in_pass = in_pass = streamer.engine.begin_pass()
                result = call()
            finally:
                thread.in_pass = None
                if in_pass is not None:
                    proposed = in_pass.end()
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
