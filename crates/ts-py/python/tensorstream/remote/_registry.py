# SPDX-License-Identifier: MIT OR Apache-2.0
"""The devices ``ts:0``, ``ts:1``, ... of this process, their machines, and the current device."""

from __future__ import annotations

import os
import threading
import types
from typing import Any

import torch

from .. import _native
from ..errors import DeviceUnavailableError

#: The sessions, by the index of their first device.
SESSIONS: dict[int, Any] = {}
#: By device index: the type of device on which the machine runs operators, as PyTorch names it.
KINDS: dict[int, str] = {}
#: By device index: the index of the first device of the same machine, and the machine's address.
#: Devices of paused and stopped machines are absent.
ADDRESSES: dict[int, tuple[int, str]] = {}
#: The machines that see the files of this computer, by the index of their first device.
SHARING_FILES: set[int] = set()
#: The paused machines, by the index of their first device. The value is the last seed of
#: ``manual_seed_all`` during the pause, or None. The machine gets this seed when it resumes.
PAUSED: dict[int, int | None] = {}

_current = threading.local()
_process = types.SimpleNamespace(count=0, forked=False)


def add(session: Any, count: int) -> None:
    """Registers a session and its devices."""
    SESSIONS[session.first] = session
    _process.count = max(_process.count, session.first + count)


def count() -> int:
    """Returns the number of devices, including those of stopped machines."""
    number: int = _process.count
    return number


def sessions() -> list[Any]:
    """Returns the sessions that are not paused."""
    return [session for first, session in SESSIONS.items() if first not in PAUSED]


def runs_on_cpu(index: int) -> bool:
    """Returns whether the machine of a device runs operators on a CPU."""
    return KINDS.get(index, "cpu") == "cpu"


def current_device() -> int:
    """Returns the index of this thread's current device."""
    return getattr(_current, "index", 0)


def set_device(device: Any) -> None:
    """Sets this thread's current device. Does nothing if the index is negative or missing.

    Raises:
        RuntimeError: There is no such device.
    """
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    if index is not None and index >= 0:
        require(index)
        _current.index = index


def require(index: int) -> None:
    """Requires that this process has a device. The first one may have no machine yet.

    Raises:
        RuntimeError: The device does not exist. The message contains that of PyTorch.
    """
    if index >= max(count(), 1):
        raise RuntimeError(
            f"invalid device ts:{index}: The device index is out of range (this process has "
            f"{count()} devices)"
        )


def index_of(device: Any) -> int:
    """Returns the index of a device, or that of the current device if ``device`` has no index."""
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    return current_device() if index is None else index


def is_forked() -> bool:
    """Returns whether this process was forked from the process that owns the sessions."""
    forked: bool = _process.forked
    return forked


def init() -> None:
    """Does nothing, except in a forked child: the device needs no initialization.

    Raises:
        DeviceUnavailableError: This process was forked from the one that owns the machines. The
            message is PyTorch's.
    """
    if is_forked():
        raise DeviceUnavailableError(
            "Cannot re-initialize ts in forked subprocess. To use ts with multiprocessing, you "
            "must use the 'spawn' start method"
        )


def _after_fork() -> None:
    _process.forked = True
    _native.remote_forked()


def watch_forks() -> None:
    """Registers a fork handler, so that a child process does not use the parent's sessions."""
    os.register_at_fork(after_in_child=_after_fork)
