# SPDX-License-Identifier: MIT OR Apache-2.0
"""What joins a model's modules to the engine: forwards that lease units, and dictionaries that hand
weights out.

Nothing here refers back to a module but weakly, so a model that is deleted frees its engine at
once, without the cycle collector. Leases are objects of the native module that end when they are
lost, and nothing that must stay consistent is changed by bytecode: a signal's exception can arrive
between any two instructions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import _native
from ..errors import ModelError
from ._streamed_tensor import FIRST, StreamedTensor, StreamedWeight, is_same, unlent
from ._weights import Weights

_raw = dict.__getitem__
_is_grad_enabled = torch.is_grad_enabled


class Parameters(dict[str, Any]):
    """A module's parameters. A streamed one is the weight itself while the module's forward runs on
    this thread, and a stand-in at other times.

    Where gradients are recorded neither requires one: nothing could keep what it learns. Where none
    are they say what the model's own did, because PyTorch asks: matmul folds a batch, and so rounds
    otherwise, for an operand that requires a gradient.
    """

    __slots__ = ("__weakref__", "free", "weights")

    def __init__(self, own: dict[str, Any], weights: Weights) -> None:
        super().__init__(own)
        self.weights = weights
        #: By name, the stand-ins that require gradients.
        self.free: dict[str, StreamedTensor] = {}

    def bind(self, name: str, frozen: StreamedTensor, free: StreamedTensor | None) -> None:
        """Puts a weight's stand-ins in a parameter's place."""
        dict.__setitem__(self, name, frozen)
        if free is not None:
            self.free[name] = free

    def stand_in(self, name: str) -> StreamedTensor | None:
        """The stand-in of a streamed parameter, else ``None``."""
        frozen = dict.get(self, name)
        return frozen if type(frozen) is StreamedTensor and frozen.weights is self.weights else None

    def __getitem__(self, name: str) -> Any:
        frozen = _raw(self, name)
        if type(frozen) is not StreamedTensor:
            return frozen
        grad = _is_grad_enabled()
        lent = self.weights.streamer.current(frozen.key, grad)
        if lent is not None:
            return lent
        return (
            self.free.get(name, frozen) if not grad and self.weights.learns(frozen.key) else frozen
        )

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __setitem__(self, name: str, value: Any) -> None:
        own = self.stand_in(name)
        if own is None:
            dict.__setitem__(self, name, value)
        elif not (is_same(own, value) or (type(value) is StreamedWeight and value is self[name])):
            raise ModelError(f"`{own.name}` cannot be replaced: {FIRST}")

    def __delitem__(self, name: str) -> None:
        own = self.stand_in(name)
        if own is not None:
            raise ModelError(f"`{own.name}` cannot be removed: {FIRST}")
        dict.__delitem__(self, name)

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            value = self[name]
            del self[name]
            return value
        return dict.pop(self, name, *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def popitem(self) -> Any:
        name = next(reversed(self))
        return name, self.pop(name)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.items()),)


def streamed_of(module: nn.Module) -> Iterator[tuple[str, StreamedTensor]]:
    """The names and stand-ins of a module's own streamed parameters."""
    parameters = module.__dict__.get("_parameters")
    if isinstance(parameters, Parameters):
        for name in parameters:
            stand_in = parameters.stand_in(name)
            if stand_in is not None:
                yield name, stand_in


class _NotAFunction(ModelError, AttributeError):
    """A replaced method lacks what functions have."""


class Replaced:
    """Stands in for a method of one module.

    A replaced method and no hook, because hooks that always run do not when the exception is a
    KeyboardInterrupt.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.before = module.__dict__.get(name)
        self._method = getattr(type(module), name)
        self.module = weakref.ref(module)
        with contextlib.suppress(ValueError):  # a method that is not Python's
            self.__signature__ = inspect.signature(getattr(module, name))
        self.__doc__ = self._method.__doc__
        self.__name__ = name

    def original(self) -> Callable[..., Any]:
        """What it stands in for."""
        if self.before is not None:
            before: Callable[..., Any] = self.before
            return before
        return functools.partial(self._method, self.module())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        raise _NotAFunction(
            f"an offloaded model's {self.__dict__.get('__name__', 'method')} has no `{name}`: it "
            "cannot be scripted or exported; restore(model) first"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            f"an offloaded {type(self.module()).__name__} cannot be copied or pickled: the copy "
            "would stream into the original; restore(model) first, or save its state_dict()"
        )


def replace(module: nn.Module, replaced: Replaced) -> None:
    """Puts a replacement of one of the module's methods in its place."""
    module.__dict__[replaced.__name__] = replaced


def put_back(module: nn.Module) -> None:
    """Undoes every ``replace`` of a module."""
    for name in list(module.__dict__):
        while isinstance(replaced := module.__dict__.get(name), Replaced):
            del module.__dict__[name]
            if replaced.before is not None:
                module.__dict__[name] = replaced.before


class Forward(Replaced):
    """The forward of a module whose parameters are a unit: it is in memory while it runs."""

    def __init__(self, module: nn.Module, weights: Weights, unit: int) -> None:
        super().__init__(module, "forward")
        self._weights = weights
        self._unit = unit
        self._recurrent = recurrent(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A graph that holds the weights would hold their memory until backward; one of stand-ins
        # leases them again.
        lend = not (_is_grad_enabled() and self._learns(args, kwargs))
        use = self._weights.streamer.enter(self._unit, lend, self._recurrent)
        try:
            result = self.original()(*args, **kwargs)
        except BaseException:
            use.close()
            raise
        if use.exit():
            result = unlent(result, self._weights, use)
            use.close()
        return result

    def _learns(self, args: Any, kwargs: Any) -> bool:
        inputs: Any = tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in inputs):
            return True
        module: Any = self.module()
        return any(type(p) is not StreamedTensor and p.requires_grad for p in module.parameters())


def recurrent(module: nn.Module) -> _native.Recurrent | None:
    """What the native module has to know of a recurrent module, which keeps a list of its
    parameters beside the dictionary."""
    names = getattr(module, "_flat_weights_names", None)
    if names is None:
        return None
    stand_ins: list[Any] = [module._parameters.get(name) for name in names]
    keys: list[int | None] = [
        each.key if type(each) is StreamedTensor else None for each in stand_ins
    ]
    module.__dict__["_flat_weights"] = stand_ins
    return _native.Recurrent(weakref.ref(module), stand_ins, keys)


class Pass(Replaced):
    """The forward of the whole model: the outermost one is a pass."""

    def __init__(self, module: nn.Module, weights: Weights) -> None:
        super().__init__(module, "forward")
        self._weights = weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        streamer = self._weights.streamer
        in_pass = streamer.begin_pass()
        try:
            result = self.original()(*args, **kwargs)
        except BaseException:
            in_pass.close()
            raise
        proposed = in_pass.end()
        streamer.forget_casts()
        if proposed and not streamer.in_use():
            streamer.replan()
        return result


class Streaming:
    """A model's streaming: kept in the model as ``_tensorstream``."""

    def __init__(
        self,
        checkpoint: _native.Checkpoint,
        units: list[Any],
        weights: Weights,
        passed_over: list[tuple[str, str]],
    ) -> None:
        self.checkpoint = checkpoint
        self.units = units
        self.weights = weights
        #: Backends that were asked for and are not built, and why.
        self.passed_over = passed_over


def streaming_of(model: nn.Module) -> Streaming:
    """The streaming of an offloaded model."""
    streaming = model.__dict__.get("_tensorstream") if isinstance(model, nn.Module) else None
    if not isinstance(streaming, Streaming):
        raise ModelError(f"this {type(model).__name__} is not offloaded")
    return streaming
