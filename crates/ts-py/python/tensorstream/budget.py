# SPDX-License-Identifier: MIT OR Apache-2.0
"""A budget that several models share."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
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
        self._bytes = parse_size(size, "budget to share")
        # Held by a thread whose model joins, so that no share changes before it is in force.
        self._joining = threading.Lock()
        self._lock = threading.Lock()
        self._members: list[_Member] = []
        # The garbage collector may delete a model in the middle of any code, also of this class, so
        # a model that leaves is only noted. Appending to a deque takes no lock of this class.
        self._left: deque[_Member] = deque()

    @property
    def bytes(self) -> int:
        """The memory of all models together, in bytes."""
        return self._bytes

    def shares(self) -> list[int]:
        """Returns the share of each model, in bytes, in the order in which they joined."""
        with self._lock:
            self._remove_left()
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
            self._remove_left()
            return self._shares([*self._members, _Member(smallest, whole)])[-1]

    def add(self, streamer: _native.Streamer, whole: int, buffer_bytes: int = 0) -> None:
        """Adds a model until its streamer is deleted. Blocks until others have given memory back.

        Args:
            streamer: The streamer of the model. Its budget may be that of all models.
            whole: The budget that keeps the whole model in memory.
            buffer_bytes: The part of its share that the streamer does not have.

        Raises:
            BudgetError: The models together need more than the budget, or another one does not give
                memory back.
        """
        with self._joining:
            smallest = streamer.smallest_limit() + buffer_bytes
            member = _Member(smallest, whole, weakref.ref(streamer), buffer_bytes)
            self._join(member, streamer)

    def _join(self, member: _Member, streamer: _native.Streamer) -> None:
        with self._lock:
            self._remove_left()
            others = list(self._members)
            shares = self._shares([*others, member])
            self._members.append(member)
        try:
            set_limits(others, shares[:-1])
            wait_until_given_back(others)
            streamer.set_limit(shares[-1] - member.buffer_bytes, True)
        except BaseException:
            self._leave(member)
            raise
        weakref.finalize(streamer, self._leave, member).atexit = False

    def _leave(self, member: _Member) -> None:
        """Notes that a model has left. The others grow at the end of their next passes."""
        self._left.append(member)
        # If another thread, or a frame below this one, holds the lock, the others grow when the
        # next model joins or leaves.
        if self._lock.acquire(blocking=False):
            try:
                self._remove_left()
                if self._members:
                    set_limits(self._members, self._shares(self._members), now=False)
            finally:
                self._lock.release()

    def _remove_left(self) -> None:
        while self._left:
            member = self._left.popleft()
            if member in self._members:
                self._members.remove(member)

    def _shares(self, members: Sequence[_Member]) -> list[int]:
        needed = sum(member.smallest for member in members)
        if needed > self._bytes:
            own = members[-1].smallest
            raise BudgetError(
                f"a shared budget of {self._bytes} bytes is too small: this model needs {own} "
                f"bytes, and the {len(members) - 1} other models need {needed - own} bytes; the "
                f"smallest shared budget that works is {needed} bytes",
                needed,
            )
        rest = self._bytes - needed
        wanted = [max(0, member.whole - member.smallest) for member in members]
        every = max(1, sum(wanted))
        return [
            member.smallest + min(more, rest * more // every)
            for member, more in zip(members, wanted, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class _Member:
    """A model that shares a budget.

    Attributes:
        smallest_at_first: The smallest share that works when it joins, in bytes.
        whole: The largest share that it can use, in bytes.
        buffer_bytes: The part of the share that the streamer does not have, in bytes.
    """

    smallest_at_first: int
    whole: int
    _streamer: weakref.ref[_native.Streamer] | None = None
    buffer_bytes: int = 0

    @property
    def smallest(self) -> int:
        """The smallest share that works. It grows when a pass uses more units together."""
        streamer = self.streamer()
        if streamer is None:
            return self.smallest_at_first
        return streamer.smallest_limit() + self.buffer_bytes

    def streamer(self) -> _native.Streamer | None:
        return self._streamer() if self._streamer is not None else None


def set_limits(members: Sequence[_Member], limits: Sequence[int], now: bool = True) -> None:
    """Limits the memory of these models, in bytes: now, or at the end of their next passes."""
    for member, limit in zip(list(members), limits, strict=True):
        streamer = member.streamer()
        if streamer is not None:
            streamer.set_limit(limit - member.buffer_bytes, now)


def wait_until_given_back(members: Sequence[_Member]) -> None:
    """Blocks until the limits of these models are in force.

    Raises:
        BudgetError: A model is in use by this thread, or has been in use for a minute.
    """
    end = time.monotonic() + _PATIENCE_S
    for member in members:
        streamer = member.streamer()
        while streamer is not None and not streamer.limit_in_force():
            streamer.apply_limit()
            if streamer.limit_in_force():
                break
            if streamer.in_pass() or time.monotonic() > end:
                raise BudgetError(
                    "another model of the shared budget is in use and cannot give memory back: "
                    "offload models while no forward of the others runs, or between passes"
                )
            time.sleep(0.005)


def parse_size(size: int | str, what: str) -> int:
    """Converts a size to bytes.

    Args:
        size: A number of bytes, or a size such as ``"6GiB"``.
        what: The name of the size in error messages.

    Raises:
        ConfigurationError: The size is neither, or not positive.
    """
    if isinstance(size, str):
        try:
            size = _native.parse_bytes(size)
        except ValueError as error:
            raise ConfigurationError(f"invalid {what}: {error}") from error
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**63:
        raise ConfigurationError(
            f"invalid {what}: {size!r}: expected bytes, or a size such as '6GiB'"
        )
    return size
