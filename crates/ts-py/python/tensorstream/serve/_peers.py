# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fetches tensors from other machines for sessions, and sends them. Does not import PyTorch."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .. import _native
from ..errors import ConnectionLost, ConnectionTimeout, RemoteTensorError
from ..wire._connection import LIMIT_BYTES, _settings
from ._messages import layout
from ._offers import CLAIM_WAIT, MAX_OFFERED, NOT_YET, SENT, Offers

_log = logging.getLogger("tensorstream.remote")

Item = TypeVar("Item")

#: The timeout of connections to other machines, in seconds.
_TIMEOUT = 5.0
#: How long to wait for a tensor that should be sent before it is fetched, in seconds.
_SENT_WAIT = 1.0
#: How long tensors are not sent to a machine after that has failed, in seconds.
_RETRY_AFTER = 60.0
#: The threads that send the tensors of one session, and the most tensors that were sent and that
#: the client has not withdrawn. Clients withdraw them all, usually after they were claimed.
_SENDING_THREADS, _MAX_SENT = 4, 4 * MAX_OFFERED
#: The most connections to one machine. Each serves one fetch at a time.
_MAX_CONNECTIONS = 8
#: The longest time that a fetch waits until the tensor is computed and offered, in seconds.
_OFFER_TIMEOUT = 300.0
#: The most bytes of a tensor if sessions have no limit of memory. Sizes are 64-bit numbers.
_MAX_BYTES = 2**62
#: The largest tensor that is sent, in bytes, and the most at a time. Larger ones are fetched.
_MAX_SENT_BYTES, _MAX_SENDING = 16 << 20, 16
#: The most machines whose failures are remembered.
_MAX_FAILED = 1024
#: PyTorch's numbers of dtypes, by their names.
_NUMBERS = {name: number for name, _, number, _ in _native.DTYPES}


class _Connection:
    """A connection to a machine, which is opened when it is needed.

    Args:
        connect: Opens it.
    """

    def __init__(self, connect: Callable[[], _native.PeerSession]) -> None:
        self._connect = connect
        self._session: _native.PeerSession | None = None

    def is_open(self) -> bool:
        return self._session is not None

    def use(self, request: Callable[[_native.PeerSession], Item]) -> Item:
        """Returns the result of a request.

        If the connection was open before, it may be lost, so another one is tried.
        """
        is_new = self._session is None
        session = self._session = self._session or self._connect()
        try:
            return request(session)
        except RemoteTensorError:
            raise
        except BaseException as error:
            self._session = None
            session.close()
            if is_new or not isinstance(error, ConnectionLost):
                raise
        return self.use(request)

    def withdraw(self, ticket: str) -> None:
        """Ends a deposit, unless the connection was lost, which also ends it."""
        if session := self._session:
            with contextlib.suppress(Exception):
                session.withdraw(ticket)


class Peers:
    """The machines from which sessions are allowed to fetch tensors.

    Args:
        allowed: The addresses of the machines. "any" allows all.
        token: The secret that the machines require.
        tls: The parameters ``ca``, ``cert`` and ``key`` of ``RemoteMachine``, for connections to
            the machines. If any is set, connections use TLS, except through Unix sockets.
    """

    def __init__(
        self,
        allowed: tuple[str, ...] = (),
        token: str | None = None,
        tls: dict[str, Any] | None = None,
    ) -> None:
        self._allowed, self._token = allowed, token
        self._tls = {name: value for name, value in (tls or {}).items() if value is not None}
        #: By address: the connections that no claim uses now, and the number of all.
        self._idle: dict[str, list[_Connection]] = collections.defaultdict(list)
        self._count: dict[str, int] = collections.defaultdict(int)
        self._freed = threading.Condition()
        #: The times until which tensors are not sent to machines, because that has failed.
        self._failed: dict[str, float] = {}
        #: Limits the tensors that are being sent, which are in the memory of this process.
        self.sending = threading.BoundedSemaphore(_MAX_SENDING)

    def fetch(
        self,
        address: str,
        ticket: str,
        metadata: dict[str, Any],
        limit: int | None = None,
        *,
        wanted: Callable[[], bool] = lambda: True,
        sent: Callable[[str, float], Item] | None = None,
        is_sent: bool = False,
    ) -> bytes | Item:
        """Gets a tensor that a machine offers or sends, or will do so. Blocks.

        Args:
            address: The address of the machine.
            ticket: The ticket of the tensor.
            metadata: The dtype and the sizes of the tensor, as ``pack`` returns them.
            limit: The most bytes to copy. None for no limit.
            wanted: Returns whether to wait longer for the offer.
            sent: Waits for an item with a ticket that was sent, as ``Offers.take``.
            is_sent: Whether the machine probably sends the tensor.

        Returns:
            The elements, or the item that was sent.

        Raises:
            RuntimeError: The address is not allowed, the machine cannot be reached, it offers no
                such tensor in 5 minutes, or the tensor has more than ``limit`` bytes.
        """
        if refusal := self._refusal(address):
            raise RuntimeError(refusal)
        dtype, sizes, nbytes = layout(metadata)
        limit = _MAX_BYTES if limit is None else limit
        if nbytes > limit:
            raise RuntimeError(
                f"the tensor is too large: it has {nbytes} bytes, and the limit is {limit}"
            )
        arguments = ticket, _NUMBERS[dtype], sizes, nbytes
        end, wait = time.monotonic() + _OFFER_TIMEOUT, _SENT_WAIT if is_sent else 0.0
        while True:
            if sent:
                try:
                    return sent(ticket, wait)
                except LookupError as error:
                    if str(error) != NOT_YET:
                        raise RuntimeError(str(error)) from error
            # A claim waits for seconds, and then others get the connection.
            with self._borrowed(address, end) as connection:
                try:
                    return connection.use(lambda session: session.claim(*arguments))
                except RemoteTensorError as error:
                    is_sent, is_late = SENT in str(error), NOT_YET in str(error)
                    if not (is_sent or is_late) or time.monotonic() > end or not wanted():
                        raise
            wait = CLAIM_WAIT if is_sent else 0.0

    def reaches(self, address: str) -> bool:
        """Returns whether to try to send a tensor to a machine."""
        is_failing = self._failed.get(address, 0.0) > time.monotonic()
        return not is_failing and not self._refusal(address)

    def send(
        self, address: str, ticket: str, metadata: dict[str, Any], elements: bytes
    ) -> _Connection:
        """Sends a tensor to a machine, where it can be claimed with the ticket. Blocks.

        Returns:
            The connection that was used, for ``withdraw``.

        Raises:
            RuntimeError: The machine cannot be reached, or refuses the tensor.
        """
        dtype, sizes, nbytes = layout(metadata)
        if len(elements) != nbytes:
            raise RuntimeError(f"invalid offer: expected {nbytes} bytes, got {len(elements)}")
        try:
            with self._borrowed(address, time.monotonic() + _TIMEOUT) as connection:
                refusal = connection.use(
                    lambda session: session.deposit(ticket, _NUMBERS[dtype], sizes, elements)
                )
        except (ConnectionLost, ConnectionTimeout):
            if len(self._failed) >= _MAX_FAILED:
                self._failed.clear()
            self._failed[address] = time.monotonic() + _RETRY_AFTER
            raise
        if refusal:
            raise RuntimeError(refusal)
        return connection

    def _refusal(self, address: str) -> str:
        """Returns the reason why sessions cannot exchange tensors with a machine, or ""."""
        if address not in self._allowed and "any" not in self._allowed:
            return (
                f"the machine is not allowed to fetch from {address}; start the machine with "
                f"`--peer {address}` to allow it"
            )
        if self._tls and "ca" not in self._tls and not address.startswith("unix:"):
            # Without TLS the token would be sent in the clear.
            return (
                f"the machine cannot verify the TLS certificate of {address}; start the machine "
                "with `--peer-ca FILE`, a file with the authority (PEM) that signed the certificate"
            )
        return ""

    @contextlib.contextmanager
    def _borrowed(self, address: str, end: float) -> Iterator[_Connection]:
        """Lends a connection to a machine, which is free or new. Waits until ``end`` for one.

        Several are necessary, because a claim may wait for its offer.
        """
        with self._freed:
            if not self._freed.wait_for(
                lambda: self._idle[address] or self._count[address] < _MAX_CONNECTIONS,
                max(0.0, end - time.monotonic()),
            ):
                raise RuntimeError(
                    f"{_MAX_CONNECTIONS} other copies from {address} wait for their tensors"
                )
            connection = self._idle[address].pop() if self._idle[address] else None
            self._count[address] += connection is None
        connection = connection or _Connection(lambda: self._connect(address))
        try:
            yield connection
        finally:
            with self._freed:
                if connection.is_open():
                    self._idle[address].append(connection)
                else:
                    self._count[address] -= 1
                    if not self._count[address]:
                        del self._count[address]
                        self._idle.pop(address, None)
                self._freed.notify()

    def _connect(self, address: str) -> _native.PeerSession:
        tls = {} if address.startswith("unix:") else self._tls
        settings = _settings(self._token, _TIMEOUT, 300.0, True, None, LIMIT_BYTES)
        return _native.PeerSession(address, settings, _TIMEOUT, **tls)


class Sender:
    """Sends the tensors that one session offers to other machines, on up to 4 threads.

    A tensor stays offered until the client withdraws it, and the other machine claims it if it was
    not sent, or was lost there.

    Args:
        peers: The machines.
        offers: The offers of all sessions.
    """

    def __init__(self, peers: Peers, offers: Offers[Any]) -> None:
        self._peers, self._offers = peers, offers
        self._threads = 0
        self._queue: queue.SimpleQueue[tuple[str, str, dict[str, Any], int] | None]
        self._queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        #: By ticket: the connections through which tensors were sent that may not be claimed yet,
        #: the latest last.
        self._sent: collections.OrderedDict[str, _Connection] = collections.OrderedDict()

    def send(self, address: str, ticket: str, metadata: dict[str, Any], descriptor: int) -> None:
        """Begins to send an offered tensor. Takes ownership of the descriptor of its elements."""
        is_large = os.fstat(descriptor).st_size > _MAX_SENT_BYTES
        # Withdrawn tensors may still be in the queue.
        if is_large or self._queue.qsize() >= MAX_OFFERED:
            os.close(descriptor)
            return self._offers.keep(ticket)
        self._queue.put((address, ticket, metadata, descriptor))
        if self._threads < _SENDING_THREADS:
            self._threads += 1
            threading.Thread(target=self._run, name="tensorstream-sender", daemon=True).start()

    def withdraw(self, ticket: str) -> None:
        """Ends what the other machine offers, if it was not claimed."""
        with self._lock:
            connection = self._sent.pop(ticket, None)
        if connection:
            connection.withdraw(ticket)

    def close(self) -> None:
        """Withdraws all tensors, and ends the threads. The offers must have been withdrawn."""
        for _ in range(self._threads):
            self._queue.put(None)
        for ticket in list(self._sent):
            self.withdraw(ticket)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            address, ticket, metadata, descriptor = task
            try:
                if ticket in self._offers and self._peers.reaches(address):
                    self._send(address, ticket, metadata, descriptor)
            except Exception as error:
                _log.info("cannot send a tensor to %.100s: %.200s", address, error)
            finally:
                os.close(descriptor)
                self._offers.keep(ticket)

    def _send(self, address: str, ticket: str, metadata: dict[str, Any], descriptor: int) -> None:
        if not self._peers.sending.acquire(timeout=_SENT_WAIT):
            raise RuntimeError(f"{_MAX_SENDING} other tensors are being sent")
        try:
            elements = os.pread(descriptor, _MAX_SENT_BYTES, 0)
            connection = self._peers.send(address, ticket, metadata, elements)
        finally:
            self._peers.sending.release()
        with self._lock:
            self._sent[ticket] = connection
            first = next(iter(self._sent)) if len(self._sent) > _MAX_SENT else None
        if first:
            self.withdraw(first)
        if ticket not in self._offers:
            self.withdraw(ticket)  # the client has withdrawn it meanwhile
