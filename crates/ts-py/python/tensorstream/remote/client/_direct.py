# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies tensors from one machine to another, without sending the data through this process.

The source machine offers the tensor under a ticket, and the target machine fetches it. Both get the
ticket at once, so a copy costs one hop from the source to the target. After a copy has succeeded,
the next ones do not wait.
"""

from __future__ import annotations

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
#: The most copies, and the most bytes, after which a copy waits for itself and those before it.
_MAX_COPIES = 8
_MAX_BYTES = 16 << 20


@dataclass
class _Route:
    """How tensors get from one machine to another.

    Attributes:
        retry_at: The earliest time of the next attempt. Set when an attempt fails.
        works: Whether the last copy that waited has succeeded.
        tickets: Those of copies that nothing has waited for.
        nbytes: The bytes of these copies.
        source: The index of the device that has offered last.
    """

    retry_at: float = 0.0
    works: bool = False
    tickets: list[str] = field(default_factory=list)
    nbytes: int = 0
    source: int = -1
    lock: threading.Lock = field(default_factory=threading.Lock)


#: By the addresses of the source and the target machine.
_ROUTES: dict[tuple[str, str], _Route] = {}
_routes_lock = threading.Lock()


def copy_directly(
    source: torch.Tensor, to: torch.Tensor, source_address: str, target_address: str
) -> str | None:
    """Copies from one machine to another, if they can. May block.

    Returns:
        ``None``, or the reason why the tensor must be copied in another way. It is empty if that is
        known already.
    """
    route = _route(source_address, target_address)
    if not source.numel() or route.retry_at > time.monotonic():
        return ""
    ticket = secrets.token_hex(16)
    with route.lock:
        route.nbytes += source.nbytes
        route.source = source.device.index
        waits = (
            not route.works or len(route.tickets) + 1 >= _MAX_COPIES or route.nbytes > _MAX_BYTES
        )
        if not waits:
            route.tickets.append(ticket)
    operators.OFFER(source, ticket)
    session = _registry.SESSIONS.get(_registry.ADDRESSES[source.device.index][0])
    if session is not None:
        session.flush()
    if not waits:
        operators.TAKE(to, source_address, ticket, source.dtype)
        return None
    try:
        reason = operators.FETCH(to, source_address, ticket, source.dtype)
    except BaseException:
        _withdraw(route, ticket)
        raise
    if reason:
        _withdraw(route, ticket)
        return str(reason)
    with route.lock:
        route.works, route.nbytes = True, 0
        route.tickets.clear()
    return None


def note_failure(source_address: str, target_address: str, reason: str) -> None:
    """Stops direct copies for a while, because one of them has failed."""
    if reason:
        route = _route(source_address, target_address)
        route.retry_at = time.monotonic() + _RETRY_AFTER
        LOG.info(
            "copies from %s to %s go through this process: %s",
            source_address, target_address, reason,
        )  # fmt: skip


def forget(address: str) -> None:
    """Ends the offers to a machine that has stopped, and forgets how tensors got there."""
    with _routes_lock:
        routes = {names: _ROUTES.pop(names) for names in list(_ROUTES) if address in names}
    for (_, target), route in routes.items():
        if target == address:
            _withdraw(route)


def _withdraw(route: _Route, *tickets: str) -> None:
    """Ends the offers that the target has not claimed."""
    with route.lock:
        tickets = (*route.tickets, *tickets)
        route.tickets.clear()
        route.works, route.nbytes = False, 0
    if tickets and route.source in _registry.ADDRESSES:
        anchor = operators.anchor(route.source)
        for each in tickets:
            operators.WITHDRAW(anchor, each)


def _route(source_address: str, target_address: str) -> _Route:
    with _routes_lock:
        return _ROUTES.setdefault((source_address, target_address), _Route())
