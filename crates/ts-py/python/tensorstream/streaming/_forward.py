# SPDX-License-Identifier: MIT OR Apache-2.0
"""Connects the modules of a model to the engine.

While the forward of a module runs, it leases the unit of the module. Unless the forward records
gradients, the dictionary of the module's parameters returns the leased weights. If a module has
several units, or children with parameters, each operation leases the weights that it uses.

While everything is resident, leases are kept from use to use, and the native class of ``Forward``
calls the forward of the module without Python code in between.

References to modules are weak, so deleting a model frees its engine at once, without the cycle
collector. A signal handler can raise an exception between any two bytecode instructions. Therefore
a lease is an object of the native module, and ends when the object is dropped. Only native code
changes state that must stay consistent.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import _native
from ..errors import ModelError
from ._progress import first_pass
from ._replaced_method import ReplacedMethod
from ._streamed_tensor import (
    RESTORE_FIRST,
    StreamedTensor,
    StreamedWeight,
    is_same,
    replace_weights,
)
from ._weights import Weights

#: PyTorch's files whose functions replace parameters for one call (``torch.func``), or keep them in
#: another module (parametrizations).
_MOVERS = ("torch.nn.utils._named_member_accessor", "torch.nn.utils.parametrize")

_raw = dict.__getitem__
_is_grad_enabled = torch.is_grad_enabled


class Parameters(dict[str, Any]):
    """The dictionary of the parameters of a module.

    A streamed parameter is the leased weight itself while the forward of the module runs on this
    thread and lends its weights. At other times, the parameter is a stand-in.

    While gradients are recorded, a streamed parameter does not require gradients, because nothing
    could apply its gradient. Otherwise it has the ``requires_grad`` of the original parameter,
    because PyTorch chooses kernels by it. For example, matmul rounds differently for operands that
    require gradients.
    """

    __slots__ = ("__weakref__", "_current", "_keys", "is_recurrent", "originals", "weights")

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
        #: The keys of the stand-ins in ``originals``, by their ``id``.
        self._keys = {id(each): each.key for each in streamed.values()}
        self._current = weights.streamer.current

    def stand_in(self, name: str) -> StreamedTensor | None:
        """Returns the stand-in of a parameter, or ``None`` if it is not streamed."""
        frozen = dict.get(self, name)
        return frozen if type(frozen) is StreamedTensor and frozen.weights is self.weights else None

    def __getitem__(self, name: str) -> Any:
        frozen = _raw(self, name)
        key = self._keys.get(id(frozen))
        if key is None:
            if type(frozen) is not StreamedTensor or frozen.weights is not self.weights:
                return frozen
            key = frozen.key
        grad = _is_grad_enabled()
        weight = self._current(key, grad)
        if weight is not None:
            return weight
        if grad or frozen.trainable is None or not self.weights.requires_grad(key):
            return frozen
        return frozen.trainable

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
    for name, each in dict.items(module.__dict__.get("_parameters") or {}):
        if type(each) is StreamedTensor:
            yield name, each


class Forward(ReplacedMethod, _native.UnitForward):
    """The forward of a module that uses one unit. Leases the unit while the forward runs."""

    def __new__(cls, module: nn.Module, weights: Weights, unit: int) -> Self:
        is_plain = "forward" not in module.__dict__ and not is_recurrent(module)
        method = type(module).forward if is_plain else None
        return super().__new__(cls, weights.streamer, unit, weakref.ref(module), method)

    def __init__(self, module: nn.Module, weights: Weights, unit: int) -> None:
        super().__init__(module, "forward")
        self._weights = weights
        self._unit = unit
        self._recurrent = recurrent(module)

    def lease_and_call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward. The native class calls this unless the lease of the unit is kept."""
        # An autograd graph of leased weights would keep their memory until backward. A graph of
        # stand-ins does not, because backward leases the weights again.
        lend = not (_is_grad_enabled() and self._records_gradients(args, kwargs))
        use = self._weights.streamer.enter(self._unit, lend, self._recurrent)
        try:
            result = self.original()(*args, **kwargs)
        except BaseException:
            use.close()
            raise
        if use.exit():
            result = self.without_weights(result, use)
            use.close()
        return result

    def without_weights(self, result: Any, use: _native.Use) -> Any:
        """Returns the result of the forward with stand-ins in place of leased weights."""
        return replace_weights(result, self._weights, use)

    def if_present(self, *args: Any) -> Any:
        """Runs the forward if its unit is in memory, and otherwise returns ``None``.

        Also returns ``None`` if the forward fails, or if the user has replaced it. The caller must
        not record gradients.

        Raises:
            ModelError: A weight was written to.
        """
        if self.before is not None:
            return None
        use = self._weights.streamer.enter_if_present(self._unit)
        if use is None:
            return None
        try:
            result = self.original()(*args)
        except Exception:  # it does not accept such arguments
            result = None
        except BaseException:
            use.close()
            raise
        if use.exit():
            use.close()
        return result

    def _records_gradients(self, args: Any, kwargs: Any) -> bool:
        module: Any = self.module()
        return (
            _require_grad(args)
            or (bool(kwargs) and _require_grad(kwargs.values()))
            or _is_trained(module)
        )


def _require_grad(inputs: Iterable[Any]) -> bool:
    """Returns whether any tensor in the inputs of a forward requires gradients."""
    for each in inputs:
        if isinstance(each, torch.Tensor):
            if each.requires_grad:
                return True
        elif each is not None and not isinstance(each, int | float | str):
            leaves: Any = tree_leaves(each)
            if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
                return True
    return False


def _is_trained(module: nn.Module) -> bool:
    """Returns whether a module has parameters that require gradients and are not streamed."""
    each: Any
    for own in module.modules() if module._modules else (module,):
        for each in dict.values(own._parameters):
            if each is not None and type(each) is not StreamedTensor and each.requires_grad:
                return True
    return False


def is_recurrent(module: nn.Module) -> bool:
    """Returns whether a module keeps a list of its parameters."""
    return hasattr(module, "_flat_weights_names")


def recurrent(module: nn.Module) -> _native.Recurrent | None:
    """Puts the current parameters of a recurrent module into its list ``_flat_weights``.

    They are stand-ins while the module is offloaded, and ordinary parameters afterwards.

    Returns:
        A native object that puts leased weights into the list during a forward, or ``None`` if the
        module is not recurrent.
    """
    if not is_recurrent(module):
        return None
    names: Any = module._flat_weights_names
    stand_ins: list[Any] = [module._parameters.get(name) for name in names]
    keys: list[int | None] = [
        each.key if type(each) is StreamedTensor else None for each in stand_ins
    ]
    module.__dict__["_flat_weights"] = stand_ins
    return _native.Recurrent(weakref.ref(module), stand_ins, keys)


_NO_WHOLE_GRAPH = (
    "a model that streams cannot be one graph: compile it without fullgraph=True, or "
    "tensorstream.restore(model) first if it fits in memory"
)


class Pass(ReplacedMethod):
    """The forward of the whole model. The outermost call is a pass."""

    def __init__(self, module: nn.Module, weights: Weights) -> None:
        super().__init__(module, "forward")
        self._weights = weights
        self._is_first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_tracing(self._weights.device)
        return self._run(self._weights.streamer.begin_pass(), args, kwargs)

    def _run(self, in_pass: _native.Pass, args: Any, kwargs: Any) -> Any:
        streamer = self._weights.streamer
        try:
            if self._is_first:
                self._is_first = False
                with first_pass(streamer):
                    result = self.original()(*args, **kwargs)
            else:
                result = self.original()(*args, **kwargs)
        except BaseException:
            self._replan_if(in_pass.close())
            raise
        proposed = in_pass.end()
        streamer.forget_casts()
        self._replan_if(proposed)
        return result

    def _replan_if(self, proposed: bool) -> None:
        streamer = self._weights.streamer
        if proposed and not streamer.in_use():
            streamer.replan()


def _refuse_tracing(device: torch.device) -> None:
    """Refuses ``torch.jit.trace`` and CUDA graphs, which would keep addresses of weights.

    Also ends the graph of ``torch.compile``, which says why if it must not end.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ModelError(
            "cannot capture a model that streams in a CUDA graph, which would keep the addresses "
            "of its weights; restore(model) first if it fits on the device"
        )
    if torch._C._get_tracing_state() is not None:
        raise ModelError("cannot trace a model that streams; restore(model) first")
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=_NO_WHOLE_GRAPH)


class PartPass(Pass):
    """The forward of a part of the model, such as an encoder.

    A call from outside of the model is a pass, unless another thread is in a pass. That thread may
    be waiting for this one.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_tracing(self._weights.device)
        in_pass = self._weights.streamer.try_begin_pass()
        if in_pass is None:
            return self.original()(*args, **kwargs)
        return self._run(in_pass, args, kwargs)


#: Modules whose children are elements, and not parts with a role.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def parts(model: nn.Module, streamed: set[int]) -> Iterator[nn.Module]:
    """Yields the modules that users may call instead of the model.

    These are its children and their children, if they have a forward and a module below them has
    streamed weights. The elements of a list, such as the layers, are not among them: each of them
    would be a pass.

    Args:
        model: The model.
        streamed: The ``id`` of each module that owns streamed weights.
    """

    def named(parent: nn.Module) -> list[nn.Module]:
        return [] if isinstance(parent, _LISTS) else list(parent.children())

    children = named(model)
    grandchildren = (below for child in children for below in named(child))
    for part in dict.fromkeys([*children, *grandchildren]):
        below = any(id(module) in streamed for module in part.modules() if module is not part)
        if below and type(part).forward is not nn.Module.forward:
            yield part
