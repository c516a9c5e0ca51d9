# SPDX-License-Identifier: MIT OR Apache-2.0
"""Connects the modules of a model to the engine.

While the forward of a module runs, it leases the unit of the module. Unless the forward records
gradients, the dictionary of the module's parameters returns the leased weights. If a module has
several units, or children with parameters, each operation leases the weights that it uses.

References to modules are weak, so deleting a model frees its engine at once, without the cycle
collector. A signal handler can raise an exception between any two bytecode instructions. Therefore
a lease is an object of the native module, and ends when the object is dropped. Only native code
changes state that must stay consistent.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import _native
from ..errors import ModelError
from ._profile import Profile
from ._progress import first_pass
from ._replaced_method import ReplacedMethod
from ._streamed_tensor import StreamedTensor, replace_weights
from ._weights import Weights

_is_grad_enabled = torch.is_grad_enabled


class Forward(ReplacedMethod):
    """The forward of a module that uses one unit. Leases the unit while the forward runs."""

    def __init__(self, module: nn.Module, weights: Weights, unit: int) -> None:
        super().__init__(module, "forward")
        self._weights = weights
        self._unit = unit
        self._recurrent = recurrent(module)
        #: Whether the forward only leases the unit and calls the method of the module's class.
        self.only_leases = self._recurrent is None and self.before is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # An autograd graph of leased weights would keep their memory until backward. A graph of
        # stand-ins does not, because backward leases the weights again.
        lend = not records_gradients(self.module(), args, kwargs)
        use = self._weights.streamer.enter(self._unit, lend, self._recurrent)
        try:
            result = self.original()(*args, **kwargs)
        except BaseException:
            use.close()
            raise
        if use.exit():
            result = replace_weights(result, self._weights, use)
            use.close()
        return result

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


def has_leasing_forward(module: nn.Module) -> bool:
    """Returns whether the forward of a module only leases a unit."""
    forward = module.__dict__.get("forward")
    return type(forward) is Forward and forward.only_leases


def records_gradients(module: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a forward records gradients, by its inputs and the module's parameters."""
    if not _is_grad_enabled():
        return False
    inputs: Any = tree_leaves((args, kwargs))
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in inputs):
        return True
    # `nn.Module.parameters` would lease weights, and is slower.
    below, seen = [module], set()
    while below:
        each = below.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        for p in dict.values(each._parameters):
            if type(p) is not StreamedTensor and p is not None and p.requires_grad:
                return True
        below += each._modules.values()
    return False


def recurrent(module: nn.Module) -> _native.Recurrent | None:
    """Puts the current parameters of a recurrent module into its list ``_flat_weights``.

    They are stand-ins while the module is offloaded, and ordinary parameters afterwards.

    Returns:
        A native object that puts leased weights into the list during a forward, or ``None`` if the
        module is not recurrent.
    """
    names = getattr(module, "_flat_weights_names", None)
    if names is None:
        return None
    stand_ins: list[Any] = [module._parameters.get(name) for name in names]
    keys: list[int | None] = [
        each.key if type(each) is StreamedTensor else None for each in stand_ins
    ]
    module.__dict__["_flat_weights"] = stand_ins
    return _native.Recurrent(weakref.ref(module), stand_ins, keys)


_NO_PROGRESS = contextlib.nullcontext()


class Pass(ReplacedMethod):
    """The forward of the whole model. The outermost call is a pass."""

    def __init__(self, module: nn.Module, weights: Weights) -> None:
        super().__init__(module, "forward")
        self._weights = weights
        self._is_first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_tracing()
        return self._run(self._weights.streamer.begin_pass(), args, kwargs)

    def _run(self, in_pass: _native.Pass, args: Any, kwargs: Any) -> Any:
        streamer = self._weights.streamer
        is_first, self._is_first = self._is_first, False
        progress = first_pass(streamer) if is_first else _NO_PROGRESS
        try:
            if records_gradients(self.module(), args, kwargs):
                streamer.take_back()  # a pass around this one may have lent the weights
            else:
                in_pass.lend(_is_grad_enabled())
            with progress:
                result = self.original()(*args, **kwargs)
                use = in_pass.take_back()
                if use is not None:
                    if use.exit():
                        result = replace_weights(result, self._weights, use)
                    use.close()
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


def _refuse_tracing() -> None:
    """Refuses ``torch.jit.trace``, which would keep all weights in its graph."""
    if torch._C._get_tracing_state() is not None:
        raise ModelError("cannot trace a model that streams; restore(model) first")


class PartPass(Pass):
    """The forward of a part of the model, such as an encoder.

    A call from outside of the model is a pass, unless another thread is in a pass. That thread may
    be waiting for this one.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_tracing()
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


class Streaming:
    """The streaming state of a model, which is its attribute ``_tensorstream``."""

    def __init__(
        self,
        checkpoint: _native.Checkpoint,
        sources: dict[int, Any],
        weights: Weights,
        passed_over: list[tuple[str, str]],
        profile: Profile,
        expert_units: dict[str, list[int]],
    ) -> None:
        self.checkpoint = checkpoint
        #: The stored tensor of each parameter, as a ``TensorSpec``, by key.
        self.sources = sources
        self.weights = weights
        #: Requested backends that are not built yet, with the reason.
        self.passed_over = passed_over
        self.profile = profile
        #: The units of the experts of each layer, by the name of the module that contains them.
        self.expert_units = expert_units
        #: Whether a trace is being recorded.
        self.traced = False


def is_offloaded(model: nn.Module) -> bool:
    """Returns whether a model streams."""
    return "_tensorstream" in model.__dict__


def offloaded_in(model: nn.Module) -> nn.Module:
    """Returns the model itself if it is offloaded, else the only offloaded model that it contains.

    For example, a ``PeftModel`` contains its base model.

    Raises:
        ModelError: The model contains no offloaded model, or several.
    """
    found = {}
    if isinstance(model, nn.Module):
        modules = [("", model)] if is_offloaded(model) else model.named_modules()
        found = {name: each for name, each in modules if is_offloaded(each)}
    if len(found) > 1:
        raise ModelError(
            f"this {type(model).__name__} contains several offloaded models "
            f"({', '.join(f'`{name}`' for name in found)}); pass one of them"
        )
    if not found:
        raise ModelError(f"this {type(model).__name__} is not offloaded; call offload(model) first")
    return next(iter(found.values()))


def streaming_of(model: nn.Module) -> Streaming:
    """Returns the streaming state of an offloaded model, which another model may contain.

    Raises:
        ModelError: The model is not offloaded.
    """
    streaming = offloaded_in(model).__dict__["_tensorstream"]
    assert isinstance(streaming, Streaming)
    return streaming
