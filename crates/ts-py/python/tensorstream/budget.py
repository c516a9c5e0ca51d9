# SPDX-License-Identifier: MIT OR Apache-2.0
"""A budget that several models share."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import _native
from .errors import BudgetError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds after which a model that is in use all the time counts as unable to give memory back.
_PATIENCE_S = 60.0


class Budget:
    """Memory for weights that several models of this process share.

    Give it as the ``budget`` of each model. Each model gets what it needs at least, and the rest is
    divided by the sizes of the models. When a model is offloaded, the others give memory back
    between their passes; when it is restored or deleted, the others get its memory.

    Args:
        size: Bytes, or a size such as ``"6GiB"``.

    Raises:
        ConfigurationError: The size is invalid.

    Examples:
        >>> import tensorstream as ts, torch
        >>> shared = ts.Budget("200KiB")
        >>> config = ts.Config(storage_path="weights", budget=shared)
        >>> first = ts.offload(torch.nn.Linear(128, 128), config)
        >>> second = ts.offload(torch.nn.Linear(128, 64), config)
        >>> [len(shared.shares()), sum(shared.shares()) <= 200 << 10]
        [2, True]
    """

    def __init__(self, size: int | str) -> None:
        if isinstance(size, str):
            try:
                size = _native.parse_bytes(size)
            except ValueError as error:
                raise ConfigurationError(f"invalid budget to share: {error}") from error
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**63:
            raise ConfigurationError(
                f"invalid budget to share: {size!r}: expected bytes, or a size such as '6GiB'"
            )
        self._bytes = size
        # A model may be deleted, and leave, while this thread holds the lock.
        self._lock = threading.RLock()
        self._members: list[_Member] = []

    @property
    def bytes(self) -> int:
        """The memory of all models together, in bytes."""
        return self._bytes

    def shares(self) -> list[int]:
        """Returns the share of each model, in bytes, in the order in which they joined."""
        with self._lock:
            return self._shares(self._members)

    def __repr__(self) -> str:
        return f"Budget({self._bytes} bytes, {len(self._members)} models)"

    def share_of(self, smallest: int, whole: int) -> int:
        """Returns the share that another model would get, in bytes.

        Args:
            smallest: The smallest budget that works for the model.
            whole: The budget that keeps the whole model in memory.

        Raises:
            BudgetError: The models together need more than the budget.
        """
        with self._lock:
            return self._shares([*self._members, _Member(smallest, whole)])[-1]

    def add(self, streamer: _native.Streamer, whole: int) -> None:
        """Adds a model until its streamer is deleted. Blocks until others have given memory back.

        Args:
            streamer: The streamer of the model. Its budget may be that of all models.
            whole: The budget that keeps the whole model in memory.

        Raises:
            BudgetError: The models together need more than the budget, or another one does not give
                memory back.
        """
        with self._lock:
            member = _Member(streamer.smallest_limit(), whole, weakref.ref(streamer))
            self._shares([*self._members, member])
            others = list(self._members)
            self._members.append(member)
            try:
                self._divide()
                wait_until_given_back(others)
            except BaseException:
                self._remove(member)
                raise
            weakref.finalize(streamer, self._remove, member).atexit = False

    def _remove(self, member: _Member) -> None:
        with self._lock:
            self._members.remove(member)
            self._divide()

    def _shares(self, members: Sequence[_Member]) -> list[int]:
        needed = sum(member.smallest for member in members)
        if needed > self._bytes:
            own = members[-1].smallest
            raise BudgetError(
                f"a shared budget of {self._bytes} bytes is too small: this model needs {own} "
                f"bytes, and the {len(members) - 1} other models need {needed - own} bytes; the "
                f"smallest shared budget that works is {needed} bytes"
            )
        rest = self._bytes - needed
        wanted = [max(0, member.whole - member.smallest) for member in members]
        every = max(1, sum(wanted))
        return [
            member.smallest + min(more, rest * more // every)
            for member, more in zip(members, wanted, strict=True)
        ]

    def _divide(self) -> None:
        for member, share in zip(self._members, self._shares(self._members), strict=True):
            streamer = member.streamer()
            if streamer is not None:
                streamer.set_limit(share)


@dataclass(frozen=True, eq=False)
class _Member:
    """A model that shares a budget: its smallest and its largest useful share, in bytes."""

    smallest: int
    whole: int
    _streamer: weakref.ref[_native.Streamer] | None = None

    def streamer(self) -> _native.Streamer | None:
        return self._streamer() if self._streamer is not None else None


def wait_until_given_back(members: Sequence[_Member]) -> None:
    """Blocks until the limits of these models are in force.

    Raises:
        BudgetError: A model is in use by this thread, or has been in use for a minute.
    """
    end = time.monotonic() + _PATIENCE_S
    for member in members:
        streamer = member.streamer()
        while streamer is not None and not streamer.limit_in_force():
            if streamer.in_pass() or time.monotonic() > end:
                raise BudgetError(
                    "another model of the shared budget is in use and cannot give memory back: "
                    "offload models while no forward of the others runs, or between passes"
                )
            time.sleep(0.005)
