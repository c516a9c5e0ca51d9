# SPDX-License-Identifier: MIT OR Apache-2.0
"""The devices ``ts:0``, ``ts:1``, ... of this process: their machines, and the current one."""

from __future__ import annotations

import os
import threading
import types
from typing import Any

import torch

from .. import _native

#: Sessions, by the index of their first device.
SESSIONS: dict[int, Any] = {}
#: "cpu" or "cuda", by device: what its machine runs operators on.
KINDS: dict[int, str] = {}
#: The index of the machine's first device, and the address of the machine, by device.
ADDRESSES: dict[int, tuple[int, str]] = {}
#: Paused machines, by the index of their first device, with the seed to set when they resume: that
#: of the last ``manual_seed_all`` during the pause.
PAUSED: dict[int, int | None] = {}

_current = threading.local()
_process = types.SimpleNamespace(count=0, forked=False)


def add(session: Any, count: int) -> None:
    """Registers a session and its devices."""
    SESSIONS[session.first] = session
    _process.count = max(_process.count, session.first + count)


def count() -> int:
    """Returns the number of devices. Indices of stopped machines count."""
    number: int = _process.count
    return number


def sessions() -> list[Any]:
    """Returns the sessions that are not paused."""
    return [session for first, session in SESSIONS.items() if first not in PAUSED]


def runs_on_cpu(index: int) -> bool:
    """Whether the machine of a device runs operators on its CPU."""
    return KINDS.get(index, "cpu") == "cpu"


def current_device() -> int:
    """Returns the index of this thread's current device."""
    return getattr(_current, "index", 0)


def set_device(device: Any) -> None:
    """Makes a device, or the device of an index, this thread's current one."""
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    if index is not None and index >= 0:
        _current.index = index


def index_of(device: Any) -> int:
    """Returns the index of a device; that of the current device if it has none."""
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    return current_device() if index is None else index


def is_forked() -> bool:
    """Whether this process is a child of the process that has the sessions."""
    forked: bool = _process.forked
    return forked


def _after_fork() -> None:
    _process.forked = True
    _native.remote_forked()


def watch_forks() -> None:
    """Notes in child processes that the sessions belong to the parent."""
    os.register_at_fork(after_in_child=_after_fork)
