# SPDX-License-Identifier: MIT OR Apache-2.0
"""What sessions offer each other under tickets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: The message of ``LookupError`` if a claim waited in vain. The claimant may try again.
NOT_YET = "no session offers this tensor yet"
#: The longest time that a claim waits for the offer, in seconds.
CLAIM_WAIT = 2.0
#: The most tensors that one session can offer at a time.
MAX_OFFERED = 16
#: The most tensors that all sessions together can offer at a time.
_MAX_OFFERED_TOTAL = 1024


class Offers(Generic[Item]):
    """Items that wait to be claimed, once each. Threads can share it.

    A client can send the ticket to both sides at once, so a claim may arrive before its offer.

    Args:
        discard: Called with an item that was withdrawn.
        size: Returns the size of an item in bytes.
        memory: The most bytes that one session can offer at a time. ``None`` for no limit.
    """

    def __init__(
        self,
        discard: Callable[[Item], None] = lambda item: None,
        size: Callable[[Item], int] = lambda item: 0,
        memory: int | None = None,
    ) -> None:
        self._discard, self._size, self._memory = discard, size, memory
        self._changed = threading.Condition()
        #: By ticket: the session, and the item or the reason why it cannot be offered.
        self._offers: dict[str, tuple[Hashable, Item | str]] = {}

    def add(self, session: Hashable, ticket: str, item: Item) -> str:
        """Offers an item. Returns an empty string, or the reason why it cannot be offered."""
        with self._changed:
            if ticket in self._offers:
                return "invalid offer: its ticket is already in use"
            offered = [each for by, each in self._offers.values() if by == session]
            refusal = self._refusal(offered, item)
            if not refusal:
                self._offers[ticket] = session, item
                self._changed.notify_all()
        return refusal

    def _refusal(self, offered: list[Item | str], item: Item) -> str:
        if len(offered) >= MAX_OFFERED:
            return (
                f"a session can offer {MAX_OFFERED} tensors at a time; try again when another copy "
                "from this session has ended"
            )
        if len(self._offers) >= _MAX_OFFERED_TOTAL:
            return (
                f"all sessions together can offer {_MAX_OFFERED_TOTAL} tensors at a time; try "
                "again later"
            )
        total = sum(self._size(each) for each in (*offered, item) if not isinstance(each, str))
        if self._memory is not None and total > self._memory:
            return (
                f"the session would offer {total} bytes at a time, and the limit of "
                f"--session-memory is {self._memory}"
            )
        return ""

    def refuse(self, session: Hashable, ticket: str, reason: str) -> None:
        """Gives the claimant of a ticket a reason instead of an item."""
        # The reason may be that of another claim, which must not make this one wait again.
        reason = reason.replace(NOT_YET, "no session has offered the tensor in time")
        with self._changed:
            count = sum(by == session for by, _ in self._offers.values())
            is_full = count >= 2 * MAX_OFFERED or len(self._offers) >= _MAX_OFFERED_TOTAL
            if ticket not in self._offers and not is_full:
                self._offers[ticket] = session, reason
                self._changed.notify_all()

    def take(self, ticket: str, wait: float = CLAIM_WAIT) -> Item:
        """Returns the item of a ticket, which is then no longer offered. Blocks up to ``wait``.

        Raises:
            LookupError: There is no such offer, or it was refused.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: ticket in self._offers, wait):
                raise LookupError(NOT_YET)
            _, item = self._offers.pop(ticket)
        if isinstance(item, str):
            raise LookupError(item)
        return item

    def withdraw(self, session: Hashable, ticket: str) -> None:
        """Ends an offer of a session, if it was not claimed."""
        with self._changed:
            if ticket not in self._offers or self._offers[ticket][0] != session:
                return
            _, item = self._offers.pop(ticket)
        if not isinstance(item, str):
            self._discard(item)

    def drop(self, session: Hashable) -> None:
        """Ends all offers of a session."""
        with self._changed:
            tickets = [ticket for ticket, (by, _) in self._offers.items() if by == session]
        for ticket in tickets:
            self.withdraw(session, ticket)
