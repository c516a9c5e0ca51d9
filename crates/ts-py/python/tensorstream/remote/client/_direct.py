# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies tensors from one machine to another, without sending the data through this process.

The source machine sends the tensor to the target machine, or offers it, if it cannot reach the
target, which then fetches it. Both get a ticket at once, so a copy takes one way between the
machines, or a round trip. After a copy has succeeded, the next ones do not wait.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from dataclasses import dataclass, field

import torch

from .. import _registry
from . import _server_operators as operators
from ._trace import LOG

#: The time between a failure and the next attempt, in seconds.
_RETRY_AFTER = 60.0
#: The most copies from a machine, and the most bytes, that nothing has waited for. The machine can
#: offer more at a time (``serve._offers.MAX_OFFERED``).
_MAX_COPIES = 8
_MAX_BYTES = 16 << 20


@dataclass
class _Route:
    """How tensors get from one machine to another.

    Attributes:
        retry_at: The earliest time of the next attempt. Set when an attempt fails.
        works: Whether the last copy that waited has succeeded.
        is_sent: Whether the source has sent that copy.
        pending: The bytes of the copies that nothing has waited for, by their tickets.
        beginning: Those of them whose requests are still being sent. A wait for the target does not
            mean that it has them.
    """

    retry_at: float = 0.0
    works: bool = False
    is_sent: bool = False
    pending: dict[str, int] = field(default_factory=dict)
    beginning: set[str] = field(default_factory=set)

    def claimed(self) -> list[str]:
        """Returns the tickets of copies that the target has after a wait that begins now."""
        return [ticket for ticket in self.pending if ticket not in self.beginning]


#: By the first devices of the source and the target machine.
_ROUTES: dict[tuple[int, int], _Route] = {}
#: Held while the routes are used, but not during requests.
_lock = threading.Lock()


def copy_directly(source: torch.Tensor, to: torch.Tensor) -> str | None:
    """Copies from one machine to another, if they can. May block.

    Returns:
        ``None``, or the reason why the tensor must be copied in another way. It is empty if that is
        known already.
    """
    names = _machines(source, to)
    ticket = secrets.token_hex(16)
    with _lock:
        route = _ROUTES.setdefault(names, _Route())
        if not source.numel() or route.retry_at > time.monotonic():
            return ""
        others = [each.pending for (first, _), each in _ROUTES.items() if first == names[0]]
        count = sum(map(len, others))
        nbytes = sum(sum(pending.values()) for pending in others)
        waits = not route.works or count + 1 >= _MAX_COPIES or nbytes + source.nbytes > _MAX_BYTES
        if not waits:
            route.pending[ticket] = source.nbytes
            route.beginning.add(ticket)
    if waits:
        # Other targets of the source may have most of the copies.
        _await(names[0], but=names[1])
    address = _registry.ADDRESSES[names[0]][1]
    try:
        operators.OFFER(source, ticket, _registry.ADDRESSES[names[1]][1])
        if session := _registry.SESSIONS.get(names[0]):
            session.flush()
        if not waits:
            operators.TAKE(to, address, ticket, source.dtype, route.is_sent)
            return None
    finally:
        with _lock:
            route.beginning.discard(ticket)
    with _lock:
        before = route.claimed()
    reason = "the machine is lost"
    try:
        reason, is_sent = operators.FETCH(to, address, ticket, source.dtype, route.is_sent)
        route.is_sent = is_sent
    finally:
        with _lock:
            route.works = not reason
        # The target has claimed them, unless a copy has failed.
        _withdraw(names[0], route, [*before, ticket])
    return str(reason) or None


def note_failure(source: torch.Tensor, to: torch.Tensor, reason: str) -> None:
    """Stops direct copies for a while, because one of them has failed."""
    if reason:
        with _lock:
            route = _ROUTES.setdefault(_machines(source, to), _Route())
            route.retry_at = time.monotonic() + _RETRY_AFTER
        LOG.info(
            "copies from %s to %s go through this process: %s", source.device, to.device, reason
        )


def leave(first: int) -> None:
    """Completes the copies from a machine that stops, and ends the offers to it.

    Args:
        first: The first device of the machine.
    """
    _await(first)
    with _lock:
        routes = {names: _ROUTES.pop(names) for names in list(_ROUTES) if first in names}
    for (source, target), route in routes.items():
        if target == first:
            with contextlib.suppress(RuntimeError):  # that machine is lost
                _withdraw(source, route, list(route.pending))


def _machines(source: torch.Tensor, to: torch.Tensor) -> tuple[int, int]:
    return _registry.ADDRESSES[source.device.index][0], _registry.ADDRESSES[to.device.index][0]


def _await(source: int, but: int | None = None) -> None:
    """Waits until the targets of a machine, except ``but``, have what it offers them."""
    with _lock:
        pending = {
            target: route.claimed()
            for (first, target), route in _ROUTES.items()
            if first == source and target != but and route.claimed()
        }
    for target, tickets in pending.items():
        session = _registry.SESSIONS.get(target)
        if session is not None and target not in _registry.PAUSED:
            # Its failures are reported by the next wait for a tensor of that machine.
            with contextlib.suppress(RuntimeError):
                operators.DEVICES(operators.anchor(target))
        with _lock:
            route = _ROUTES.get((source, target), _Route())
        with contextlib.suppress(RuntimeError):
            _withdraw(source, route, tickets)


def _withdraw(source: int, route: _Route, tickets: list[str]) -> None:
    """Ends offers, if they were not claimed, and forgets them."""
    with _lock:
        for ticket in tickets:
            route.pending.pop(ticket, None)
    if tickets and source in _registry.ADDRESSES:
        anchor = operators.anchor(source)
        for ticket in tickets:
            operators.WITHDRAW(anchor, ticket)
