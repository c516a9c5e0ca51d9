# SPDX-License-Identifier: MIT OR Apache-2.0
"""Errors of TensorStream that are also errors of safetensors, for ``tensorstream.torch``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .errors import TensorStreamError

F = TypeVar("F", bound=Callable[..., Any])


def raises_theirs(function: F) -> F:
    """Makes a function raise errors that ``except safetensors.SafetensorError`` catches, too."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TensorStreamError as error:
            kind = _also_theirs(type(error))
            if kind is type(error):
                raise
            theirs = kind(*error.args)
            theirs.__dict__.update(error.__dict__)
            raise theirs.with_traceback(error.__traceback__) from error.__cause__

    return cast(F, call)


def _also_theirs(kind: type[TensorStreamError]) -> type[TensorStreamError]:
    """Returns a class that is derived from ``kind`` and from the class of safetensors."""
    try:
        from safetensors import SafetensorError
    except ImportError:  # nobody can catch it
        return kind
    if issubclass(kind, SafetensorError | TypeError):
        return kind
    if kind not in _made:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _made[kind] = type(kind.__name__, (kind, SafetensorError), names)
    return _made[kind]


_made: dict[type[TensorStreamError], type[TensorStreamError]] = {}
