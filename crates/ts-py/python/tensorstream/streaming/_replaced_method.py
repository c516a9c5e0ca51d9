# SPDX-License-Identifier: MIT OR Apache-2.0
"""Replaces methods of single modules, and gives copies of the modules their own methods again."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ModelError


class _NoFunctionAttributeError(ModelError, AttributeError):
    """Raised because a replaced method lacks the attributes of functions."""


class ReplacedMethod:
    """Replaces a method of one module.

    Hooks do not suffice, because even hooks with ``always_call`` do not run after a
    KeyboardInterrupt.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.before = module.__dict__.get(name)
        self._method: Any = getattr(type(module), name, None)
        self.module = weakref.ref(module)
        # The method does not exist, or has no Python signature.
        with contextlib.suppress(ValueError, AttributeError):
            self.__signature__ = inspect.signature(getattr(module, name))
        self.__doc__ = self._method.__doc__
        self.__name__ = name

    def original(self) -> Callable[..., Any]:
        """Returns the method that this object replaces."""
        if self.before is not None:
            before: Callable[..., Any] = self.before
            return before
        return functools.partial(self._method, self.module())

    def __getattr__(self, name: str) -> Any:
        raise _NoFunctionAttributeError(
            f"{self.__dict__.get('__name__', 'the method')} of an offloaded model has no attribute "
            f"`{name}`; to script or export the model, restore(model) first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not _copying.get():
            self.__reduce_ex__(4)
        if self.before is not None:
            return copy.deepcopy(self.before, memo)
        return _LeftOut(self.__name__, frozenset(self.__dict__))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            f"cannot copy or pickle an offloaded {type(self.module()).__name__}: the copy would "
            "share the streaming state; restore(model) first, or save the model's state_dict()"
        )


#: Whether copies of modules are made in this thread that do not have replaced methods.
_copying: ContextVar[bool] = ContextVar("tensorstream_copying", default=False)


@dataclass(frozen=True)
class _LeftOut:
    """Stands in a copy of a module for a method that is replaced in the original.

    Attributes:
        name: The method.
        attributes: The names of the attributes of the ``ReplacedMethod``.
    """

    name: str
    attributes: frozenset[str]


@contextlib.contextmanager
def copied_without_replaced_methods() -> Iterator[None]:
    """Lets ``copy.deepcopy`` copy modules with replaced methods. See ``remove_left_out``."""
    token = _copying.set(True)
    try:
        yield
    finally:
        _copying.reset(token)


def is_copied_without_replaced_methods() -> bool:
    """Returns whether this thread is in a context of ``copied_without_replaced_methods``."""
    return _copying.get()


def remove_left_out(module: nn.Module) -> None:
    """Gives a copy of a module the methods of its class where the original has replaced ones."""
    for name, value in list(module.__dict__.items()):
        if isinstance(value, _LeftOut):
            del module.__dict__[name]
            if name != value.name:  # another library keeps the method, to wrap it
                module.__dict__[name] = _own_method(module, value.name)
        elif isinstance(left_out := _wrapped(value), _LeftOut):
            _rewrap(value, _own_method(module, left_out.name), left_out.attributes)


def _own_method(module: nn.Module, name: str) -> Any:
    return getattr(type(module), name).__get__(module)


def _wrapped(value: Any) -> Any:
    """Returns what a function wraps. Hooks of accelerate, for example, wrap ``forward``."""
    return value.__dict__.get("__wrapped__") if isinstance(value, functools.partial) else None


def _rewrap(wrapper: Any, method: Any, attributes: Iterable[str]) -> None:
    """Makes a wrapper of a replaced method forget it. It got copies of its attributes, too."""
    for name in attributes:
        wrapper.__dict__.pop(name, None)
    wrapper.__wrapped__ = method


def replace_method(module: nn.Module, replaced: ReplacedMethod) -> None:
    """Replaces a method of a module until ``restore_methods``."""
    module.__dict__[replaced.__name__] = replaced


def restore_methods(module: nn.Module) -> None:
    """Undoes every ``replace_method`` of a module."""
    for name in list(module.__dict__):
        while isinstance(replaced := module.__dict__.get(name), ReplacedMethod):
            del module.__dict__[name]
            if replaced.before is not None:
                module.__dict__[name] = replaced.before
            elif name != replaced.__name__:  # another library keeps the method, to wrap it
                module.__dict__[name] = replaced.original()
        if isinstance(wrapped := _wrapped(module.__dict__.get(name)), ReplacedMethod):
            _rewrap(module.__dict__[name], wrapped.original(), wrapped.__dict__)
