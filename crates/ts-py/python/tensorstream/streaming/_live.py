# SPDX-License-Identifier: MIT OR Apache-2.0
"""The offloaded models of this process."""

from __future__ import annotations

import itertools
import threading
import weakref

from torch import nn

from ._state import is_offloaded

_names = itertools.count(1)
_lock = threading.Lock()
_live: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def add_live(model: nn.Module) -> None:
    """Adds a model, until it is restored or deleted."""
    with _lock:
        _live[model] = f"{type(model).__name__}-{next(_names)}"


def live_models() -> list[tuple[str, nn.Module]]:
    """Returns the offloaded models, each with a name that no other one has."""
    with _lock:
        models = list(_live.items())
    return [(name, model) for model, name in models if is_offloaded(model)]
