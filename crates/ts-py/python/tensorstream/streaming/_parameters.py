# SPDX-License-Identifier: MIT OR Apache-2.0
"""The dictionaries of the parameters of modules whose weights are streamed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ._streamed_tensor import RESTORE_FIRST, StreamedTensor, StreamedWeight, is_same
from ._weights import Weights

#: PyTorch's files whose functions replace parameters for one call (``torch.func``), or keep them in
#: another module (parametrizations).
_MOVERS = ("torch.nn.utils._named_member_accessor", "torch.nn.utils.parametrize")

_raw = dict.__getitem__
_is_grad_enabled = torch.is_grad_enabled


class _Guarded(dict[str, Any]):
    """A dictionary whose methods change it by ``__setitem__`` and ``__delitem__`` only."""

    __slots__ = ()

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


class Parameters(_Guarded):
    """The dictionary of the parameters of a module.

    A streamed parameter is the leased weight itself while the forward of the module runs on this
    thread and lends its weights. At other times, the parameter is a stand-in.

    While gradients are recorded, a streamed parameter does not require gradients, because nothing
    could apply its gradient. Otherwise it has the ``requires_grad`` of the original parameter,
    because PyTorch chooses kernels by it. For example, matmul rounds differently for operands that
    require gradients.
    """

    __slots__ = (
        "__weakref__",
        "is_recurrent",
        "lent_while_not_recording",
        "lent_while_recording",
        "originals",
        "weights",
    )

    def __init__(
        self,
        own: dict[str, Any],
        weights: Weights,
        streamed: dict[str, StreamedTensor],
        is_recurrent: bool,
    ) -> None:
        super().__init__(own | streamed)
        self.weights = weights
        #: The stand-ins at first, by name.
        self.originals = streamed
        #: Whether the module keeps a list of its parameters.
        self.is_recurrent = is_recurrent
        #: What the module has instead of this while all units are leased, by whether gradients are
        #: recorded.
        self.lent_while_recording: LentParameters | None = None
        self.lent_while_not_recording: LentParameters | None = None

    def lend(self, grad: bool) -> LentParameters:
        """Returns a dictionary with the leased weights, while all units are leased."""
        lent = LentParameters(self, grad)
        if grad:
            self.lent_while_recording = lent
        else:
            self.lent_while_not_recording = lent
        return lent

    def forget_lent(self) -> None:
        """Drops the dictionaries with leased weights."""
        self.lent_while_recording = self.lent_while_not_recording = None

    def stand_in(self, name: str) -> StreamedTensor | None:
        """Returns the stand-in of a parameter, or ``None`` if it is not streamed."""
        frozen = dict.get(self, name)
        return frozen if type(frozen) is StreamedTensor and frozen.weights is self.weights else None

    def __getitem__(self, name: str) -> Any:
        frozen = _raw(self, name)
        if type(frozen) is not StreamedTensor or frozen.weights is not self.weights:
            return frozen
        grad = _is_grad_enabled()
        weight = self.weights.streamer.current(frozen.key, grad)
        if weight is not None:
            return weight
        if not grad and self.weights.requires_grad(frozen.key):
            return frozen if frozen.trainable is None else frozen.trainable
        return frozen

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
        if own is not None:
            if is_same(own, value) or value is self[name]:
                return
            if self.is_recurrent or not _called_by_mover():
                raise ModelError(f"cannot replace `{own.name}`: {RESTORE_FIRST}")
        if isinstance(value, StreamedTensor | StreamedWeight):
            value = self._parameter(name, value)
        self.forget_lent()
        dict.__setitem__(self, name, value)

    def _parameter(self, name: str, value: Any) -> StreamedTensor:
        """Returns the stand-in to store for a streamed weight that becomes a parameter."""
        if isinstance(value, StreamedWeight):
            original = self.originals.get(name)
            if original is not None and any(
                value is self.weights.streamer.current(original.key, grad) for grad in (True, False)
            ):
                return original
        elif value.is_parameter and value.weights is self.weights:
            frozen: StreamedTensor | None = value if value.frozen is None else value.frozen()
            if frozen is not None:
                return frozen
        raise ModelError(
            f"cannot set `{name}` to a view of a streamed weight, to a weight that a forward has "
            "leased, or to a weight of another streamed model; use a copy, such as weight.clone()"
        )

    def __delitem__(self, name: str) -> None:
        own = self.stand_in(name)
        if own is not None and not _called_by_mover():
            raise ModelError(f"cannot remove `{own.name}`: {RESTORE_FIRST}")
        self.forget_lent()
        dict.__delitem__(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.items()),)


class LentParameters(_Guarded):
    """The dictionary of the parameters of a module while all units are leased: the weights.

    Divided weights are stand-ins. Changes go to the ``Parameters`` too.
    """

    __slots__ = ("parameters",)

    def __init__(self, parameters: Parameters, grad: bool) -> None:
        super().__init__({name: _lent(parameters, name, grad) for name in dict.keys(parameters)})
        #: A weak reference to the dictionary of the module at other times.
        self.parameters = weakref.ref(parameters)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self and value is self[name]:
            return
        parameters = self.parameters()
        if parameters is not None:
            parameters[name] = value
            value = dict.__getitem__(parameters, name)
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        parameters = self.parameters()
        if parameters is not None:
            del parameters[name]
        dict.__delitem__(self, name)


def _lent(parameters: Parameters, name: str, grad: bool) -> Any:
    stand_in = parameters.stand_in(name)
    if stand_in is None:
        return dict.__getitem__(parameters, name)
    weight = parameters.weights.streamer.lent(stand_in.key, grad)
    return parameters[name] if weight is None else weight


def _called_by_mover() -> bool:
    """Returns whether the caller was called by a function of PyTorch that moves parameters."""
    frame: Any = sys._getframe(2)
    for _ in range(3):  # methods of nn.Module may be in between
        if frame is not None and frame.f_globals.get("__name__") in _MOVERS:
            return True
        frame = frame and frame.f_back
    return False


def own_stand_ins(module: nn.Module) -> Iterator[tuple[str, StreamedTensor]]:
    """Yields the names and stand-ins of the streamed parameters that a module owns itself.

    Parametrizations, and modules that share a parameter, have them in ordinary dictionaries.
    """
    parameters = module.__dict__.get("_parameters") or {}
    if isinstance(parameters, LentParameters):
        parameters = parameters.parameters() or {}
    for name, each in dict.items(parameters):
        if type(each) is StreamedTensor:
            yield name, each
