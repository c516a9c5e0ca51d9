# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lets other libraries load and save models that stream.

Pipelines of diffusers, SentenceTransformers and the like load their models with ``from_pretrained``
of transformers' and diffusers' base classes. Within ``streamed_models``, these load streamed models
in the same thread. ``replaced`` replaces a function of a library for the duration of a context.
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

#: The first parameter of ``from_pretrained``.
_NAME = "pretrained_model_name_or_path"

_settings: ContextVar[Config | None] = ContextVar("tensorstream_settings", default=None)
_lock = threading.Lock()
#: The number of contexts for each attribute that is replaced, and its value before.
_replaced: dict[tuple[Any, str], tuple[int, Any]] = {}


@contextlib.contextmanager
def streamed_models(settings: Config, loaders: dict[type[Any], Load]) -> Iterator[None]:
    """Makes ``from_pretrained`` of base classes load streamed models, in this thread.

    Args:
        settings: The settings of each model.
        loaders: A function for each base class, which loads a model of a class derived from it.
    """
    with contextlib.ExitStack() as stack:
        for base, load in loaders.items():
            stack.enter_context(replaced(base, "from_pretrained", _diverted(load)))
        token = _settings.set(settings)
        try:
            yield
        finally:
            _settings.reset(token)


def _diverted(load: Load) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def from_pretrained(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
            settings = _settings.get()
            name = args[0] if args else kwargs.get(_NAME)
            # Without a name, a model is built from a state dict. Further arguments are those of the
            # constructor, for a model that is not in the files.
            if settings is None or name is None or len(args) > 1:
                return original.__get__(None, cls)(*args, **kwargs)
            return load(cls, name, settings, {k: v for k, v in kwargs.items() if k != _NAME})

        from_pretrained.__doc__ = original.__func__.__doc__
        return classmethod(from_pretrained)

    return make


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute of a class or module, in all threads, until the last context ends.

    Args:
        owner: The class or module.
        name: The attribute, which the class or module itself has.
        make: Returns the new value, given the value before. It must behave like the value before
            for calls that do not concern the caller. Of contexts for the same attribute, the first
            one determines the new value.
    """
    with _lock:
        count, original = _replaced.get((owner, name), (0, vars(owner)[name]))
        if count == 0:
            setattr(owner, name, make(original))
        _replaced[owner, name] = (count + 1, original)
    try:
        yield
    finally:
        with _lock:
            count, original = _replaced.pop((owner, name))
            if count > 1:
                _replaced[owner, name] = (count - 1, original)
            else:
                setattr(owner, name, original)
