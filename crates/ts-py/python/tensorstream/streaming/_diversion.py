# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lets other libraries load models that stream.

Pipelines of diffusers, SentenceTransformers and the like load their models with ``from_pretrained``
of transformers' and diffusers' base classes. Within ``streamed_models``, these load streamed models
in the same thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from ..config import Config

#: Loads a model: its class, the path or name, the settings, and the other arguments.
Load = Callable[[type[Any], Any, Config, dict[str, Any]], Any]

_settings: ContextVar[Config | None] = ContextVar("tensorstream_settings", default=None)
_lock = threading.Lock()
#: The number of contexts for each base class whose method is replaced, and the method.
_replaced: dict[type[Any], tuple[int, Any]] = {}


@contextlib.contextmanager
def streamed_models(settings: Config, loaders: dict[type[Any], Load]) -> Iterator[None]:
    """Makes ``from_pretrained`` of base classes load streamed models, in this thread.

    Args:
        settings: The settings of each model.
        loaders: A function for each base class, which loads a model of a class derived from it.
    """
    for base, load in loaders.items():
        _replace(base, load)
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)
        for base in loaders:
            _put_back(base)


def _replace(base: type[Any], load: Load) -> None:
    with _lock:
        count, original = _replaced.get(base, (0, None))
        if count == 0:
            original = vars(base)["from_pretrained"]

            def from_pretrained(cls: type[Any], name: Any, *args: Any, **kwargs: Any) -> Any:
                settings = _settings.get()
                # Without a name, a model is built from a state dict.
                if settings is None or name is None:
                    return original.__get__(None, cls)(name, *args, **kwargs)
                return load(cls, name, settings, kwargs)

            from_pretrained.__doc__ = original.__func__.__doc__
            base.from_pretrained = classmethod(from_pretrained)
        _replaced[base] = (count + 1, original)


def _put_back(base: type[Any]) -> None:
    with _lock:
        count, original = _replaced.pop(base)
        if count > 1:
            _replaced[base] = (count - 1, original)
        else:
            base.from_pretrained = original
