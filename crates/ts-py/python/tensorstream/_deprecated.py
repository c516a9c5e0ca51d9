# SPDX-License-Identifier: MIT OR Apache-2.0
"""Accepts deprecated names of arguments, with a ``DeprecationWarning``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def renamed(
    **names: str,
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Returns a decorator that accepts deprecated names of keyword arguments.

    Args:
        names: The current name of each argument, by its deprecated name.
    """

    def decorate(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> _Result:
            for old in kwargs.keys() & names.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(
                        f"{function.__name__}() got both {new!r} and {old!r}, a deprecated name of "
                        f"the same argument; pass only {new!r}"
                    )
                warnings.warn(
                    f"argument {old!r} is deprecated; use {new!r}", DeprecationWarning, stacklevel=2
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
