# SPDX-License-Identifier: MIT OR Apache-2.0
"""What sessions offer each other under tickets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: The message of ``LookupError`` if a claim waited in vain. The claimant may try again.
NOT_YET = "no session offers this tensor yet"
#: That of a claim whose item is being sent to the claimant, where it is offered then.
SENT = "this tensor is being sent to the machine that claims it"
#: The longest time that a claim waits for the offer, in seconds.
CLAIM_WAIT = 2.0
#: The most tensors that one session can offer at a time.
MAX_OFFERED = 16
#: The most tensors that all sessions together can offer at a time, and those of one client.
_MAX_OFFERED_TOTAL, _MAX_OFFERED_CLIENT = 1024, 512


@dataclass
class _Offer(Generic[Item]):
    """An item that is offered.

    Attributes:
        session: The session that offers it.
        item: The item, or the reason why it cannot be offered.
        is_sent: Whether it is being sent to another machine.
    """

    session: Hashable
    item: Item | str
    is_sent: bool = False


class Offers(Generic[Item]):
    """Items that wait to be claimed, once each. Threads can share it.

    A client can send the ticket to both sides at once, so a claim may arrive before its offer.

    Args:
        discard: Called with an item that was withdrawn.
        size: Returns the size of an item in bytes.
        memory: The most bytes that one session can offer at a time. ``None`` for no limit.
        client: Returns the client of a session. By default, each session has its own.
    """

    def __init__(
        self,
        discard: Callable[[Item], None] = lambda item: None,
        size: Callable[[Item], int] = lambda item: 0,
        memory: int | None = None,
        client: Callable[[Hashable], Hashable] = lambda session: session,
    ) -> None:
        self._discard, self._size, self._memory, self._client = discard, size, memory, client
        self._changed = threading.Condition()
        #: By ticket.
        self._offers: dict[str, _Offer[Item]] = {}

    def add(self, session: Hashable, ticket: str, item: Item, is_sent: bool = False) -> str:
        """Offers an item. Returns an empty string, or the reason why it cannot be offered.

        Args:
            session: The session that offers it.
            ticket: The ticket with which it can be claimed.
            item: The item.
            is_sent: Whether it is being sent to the claimant's machine. It cannot be claimed here
                until ``keep`` is called.
        """
        with self._changed:
            if ticket in self._offers:
                return "invalid offer: its ticket is already in use"
            offered = [each.item for each in self._offers.values() if each.session == session]
            refusal = self._refusal(session, offered, item)
            if not refusal:
                self._offers[ticket] = _Offer(session, item, is_sent)
                self._changed.notify_all()
        return refusal

    def keep(self, ticket: str) -> None:
        """Makes an item that was being sent claimable here, whether it has been sent or not.

        If the other machine loses it, the claim comes here.
        """
        with self._changed:
            if ticket in self._offers:
                self._offers[ticket].is_sent = False
                self._changed.notify_all()

    def __contains__(self, ticket: str) -> bool:
        with self._changed:
            return ticket in self._offers

    def receive(self, ticket: str, wait: float) -> Item:
        """Returns the item of a ticket, as ``take``. Also waits while the item is being sent.

        A machine can be told to send items to itself.
        """

        def is_there() -> bool:
            return ticket in self._offers and not self._offers[ticket].is_sent

        with self._changed:
            if not self._changed.wait_for(is_there, wait):
                raise LookupError(NOT_YET)
            return self.take(ticket, 0.0)

    def _refusal(self, session: Hashable, offered: list[Item | str], item: Item) -> str:
        if len(offered) >= MAX_OFFERED:
            return (
                f"a session can offer {MAX_OFFERED} tensors at a time; try again when another copy "
                "from this session has ended"
            )
        if self._is_full_for(session):
            return (
                f"all sessions together can offer {_MAX_OFFERED_TOTAL} tensors at a time, and "
                f"those of one client {_MAX_OFFERED_CLIENT}; try again later"
            )
        total = sum(self._size(each) for each in (*offered, item) if not isinstance(each, str))
        if self._memory is not None and total > self._memory:
            return (
                f"the session would offer {total} bytes at a time, and the limit of "
                f"--session-memory is {self._memory}"
            )
        return ""

    def _is_full_for(self, session: Hashable) -> bool:
        """Returns whether all sessions together, or those of a client, offer too much."""
        client = self._client(session)
        own = sum(self._client(each.session) == client for each in self._offers.values())
        return len(self._offers) >= _MAX_OFFERED_TOTAL or own >= _MAX_OFFERED_CLIENT

    def refuse(self, session: Hashable, ticket: str, reason: str) -> None:
        """Gives the claimant of a ticket a reason instead of an item."""
        # The reason may be that of another claim, which must not make this one wait again.
        reason = reason.replace(NOT_YET, "no session has offered the tensor in time")
        with self._changed:
            count = sum(each.session == session for each in self._offers.values())
            is_full = count >= 2 * MAX_OFFERED or self._is_full_for(session)
            if ticket not in self._offers and not is_full:
                self._offers[ticket] = _Offer(session, reason)
                self._changed.notify_all()

    def take(self, ticket: str, wait: float = CLAIM_WAIT) -> Item:
        """Returns the item of a ticket, which is then no longer offered. Blocks up to ``wait``.

        Raises:
            LookupError: There is no such offer, it was refused, or the item is being sent.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: ticket in self._offers, wait):
                raise LookupError(NOT_YET)
            if self._offers[ticket].is_sent:
                raise LookupError(SENT)
            item = self._offers.pop(ticket).item
        if isinstance(item, str):
            raise LookupError(item)
        return item

    def withdraw(self, session: Hashable, ticket: str) -> None:
        """Ends an offer of a session, if it was not claimed."""
        with self._changed:
            offer = self._offers.get(ticket)
            if offer is None or offer.session != session:
                return
            del self._offers[ticket]
        if not isinstance(offer.item, str):
            self._discard(offer.item)

    def drop(self, session: Hashable) -> None:
        """Ends all offers of a session."""
        with self._changed:
            offers = self._offers.items()
            tickets = [ticket for ticket, each in offers if each.session == session]
        for ticket in tickets:
            self.withdraw(session, ticket)
