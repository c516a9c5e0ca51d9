# SPDX-License-Identifier: MIT OR Apache-2.0
"""Connects calls of modules to the engine.

``nn.Module.__call__`` is replaced once for the process, as soon as a model streams. Nothing is
stored in a module: its forward, its class, its hooks and its parameters are looked up at each call,
as PyTorch does. While the forward of a module runs, its streamed parameters have the leased memory,
unless the forward records gradients. If a module has several units, or children with parameters,
each operation leases the weights that it uses; so does a ``forward`` that is called by itself.

A signal handler can raise an exception between any two bytecode instructions. Therefore only native
code changes state that must stay consistent.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import _native
from ..errors import ModelError
from . import _tree as tree
from ._streamed_tensor import CopiedTensor, StreamedTensor, StreamedWeight, replace_weights

_NO_WHOLE_GRAPH = (
    "a model that streams cannot be one graph: compile it without fullgraph=True, or "
    "tensorstream.restore(model) first if it fits in memory"
)

#: Functions that announce what a module is about to use, by the ``id`` of the module. Their
#: arguments are those of the call, and the result is ``None`` or has a method ``close``.
_announcers: dict[int, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {}


def announce(
    module: nn.Module, announcer: Callable[[tuple[Any, ...], dict[str, Any]], Any]
) -> None:
    """Calls a function before each call of a module, until the module no longer exists."""
    _announcers[id(module)] = announcer
    weakref.finalize(module, _announcers.pop, id(module), None)


def announcer_of(module: nn.Module) -> Any:
    """Returns the function that is called before each call of a module, or ``None``."""
    return _announcers.get(id(module))


def call_if_present(module: nn.Module, *args: Any) -> Any:
    """Calls the forward of a module if its unit is in memory, and otherwise returns ``None``.

    Also returns ``None`` if the forward fails, or if the user has replaced it. The caller must not
    record gradients.

    Raises:
        ModelError: A weight was written to.
    """
    if _module_calls is None or "forward" in module.__dict__:
        return None
    try:
        return _module_calls.forward_if_present(module, args)
    except ModelError:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError):  # it does not accept such arguments
        return None


def stand_ins_below(module: nn.Module) -> Iterable[tuple[str, StreamedTensor]]:
    """Yields the names and streamed parameters that a module and those below it own."""
    for each in tree.modules(module):
        yield from own_stand_ins(each)


def own_stand_ins(module: nn.Module) -> Iterable[tuple[str, StreamedTensor]]:
    """Yields the names and streamed parameters that a module owns itself."""
    for name, each in module._parameters.items():
        if each is not None and "_ref" in each.__dict__:
            yield name, each  # type: ignore[misc]


def _records_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether autograd would record the forward of a module.

    Args:
        args: The module, and the positional arguments of its forward.
        kwargs: The other arguments.
    """
    module: nn.Module = args[0]
    return (
        bool(module._forward_pre_hooks)  # they can change the arguments
        or _require_grad(args[1:])
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
    return any(
        each is not None
        and not isinstance(each, StreamedTensor | StreamedWeight)
        and each.requires_grad
        for own in tree.modules(module)
        for each in own._parameters.values()
    )


def _without_weights(result: Any, use: _native.Use, ref: _native.WeightRef) -> Any:
    """Returns the result of a forward with stand-ins in place of leased weights."""
    return replace_weights(result, ref.weights, use)


_module_calls: _native.ModuleCalls | None = None


def replace_calls() -> None:
    """Replaces ``nn.Module.__call__``, unless this has happened before."""
    global _module_calls  # noqa: PLW0603
    if _module_calls is not None:
        return
    original: Any = nn.Module.__call__
    classes: list[type] = [StreamedTensor, StreamedWeight, CopiedTensor]
    calls = _native.ModuleCalls(
        original, _records_gradients, _without_weights, _announcers, classes
    )
    call, is_compiling = calls.call, torch.compiler.is_dynamo_compiling
    loaded = sys.modules
    dynamo_knows = False

    # PyTorch's profiler looks for an argument of this name.
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal dynamo_knows
        if is_compiling():
            if not _streams(self):
                return original(self, *args, **kwargs)
            torch._dynamo.graph_break(msg=_NO_WHOLE_GRAPH)
        elif not dynamo_knows and _DYNAMO[-1] in loaded:
            dynamo_knows = _tell_dynamo(original, __call__.__code__)
        return call(self, args, kwargs)

    functools.update_wrapper(__call__, original)
    nn.Module.__call__ = __call__  # type: ignore[method-assign]
    _module_calls = calls


def _streams(module: nn.Module) -> bool:
    """Returns whether a module has a streamed parameter. ``torch.compile`` can inline this."""
    for each in module.modules():
        for parameter in each._parameters.values():
            if isinstance(parameter, StreamedTensor | StreamedWeight):
                return True
    return False


#: The modules of torch.compile that remember PyTorch's own ``nn.Module.__call__``.
_DYNAMO = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")


def _tell_dynamo(original: Any, replacement: CodeType) -> bool:
    """Tells ``torch.compile``, if it is in use, that ``nn.Module.__call__`` is replaced.

    It inlines the replacement for modules that do not stream, and otherwise runs it as it is. It
    does not compile the functions that run operations on streamed weights.

    Returns:
        Whether it is in use.
    """
    loaded = [module for name in _DYNAMO if (module := sys.modules.get(name)) is not None]
    if len(loaded) < len(_DYNAMO):
        return False
    for module in loaded:
        module.unpatched_nn_module_call = original  # type: ignore[attr-defined]
    own = [replacement]
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{__package__}."):
            own += (each.__code__ for each in _functions(vars(module).values(), name))
    while own:
        code = own.pop()
        torch._dynamo.eval_frame.skip_code(code)
        own += (each for each in code.co_consts if isinstance(each, CodeType))
    return True


def _functions(values: Iterable[Any], module: str) -> Iterator[FunctionType]:
    """Yields functions, and methods of classes, that a module defines."""
    for value in values:
        found = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if getattr(found, "__module__", None) != module:
            continue
        if isinstance(found, FunctionType):
            yield found
        elif isinstance(found, type):
            yield from _functions(vars(found).values(), module)
