# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fetches tensors from other machines for sessions. Does not import PyTorch."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import _native
from ..errors import ConnectionLost, RemoteTensorError
from ..wire._connection import LIMIT_BYTES, _settings
from ._messages import layout
from ._offers import NOT_YET

#: The timeout of connections to other machines, in seconds.
_TIMEOUT = 5.0
#: The most connections to one machine. Each serves one fetch at a time.
_MAX_CONNECTIONS = 8
#: The longest time that a fetch waits until the tensor is computed and offered, in seconds.
_OFFER_TIMEOUT = 300.0
#: The most bytes of a tensor, if there is no other limit. Sizes are 64-bit numbers.
_MAX_BYTES = 2**62
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

    def claim(self, *arguments: Any) -> bytes:
        """Claims a tensor. See ``_native.PeerSession.claim``.

        If the connection was open before, it may be lost, so another one is tried.
        """
        is_new = self._session is None
        session = self._session = self._session or self._connect()
        try:
            return session.claim(*arguments)
        except RemoteTensorError:
            raise
        except BaseException as error:
            self._session = None
            session.close()
            if is_new or not isinstance(error, ConnectionLost):
                raise
        return self.claim(*arguments)


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

    def fetch(
        self,
        address: str,
        ticket: str,
        metadata: dict[str, Any],
        limit: int | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> bytes:
        """Returns the elements of a tensor that a machine offers or will offer. Blocks.

        Args:
            address: The address of the machine.
            ticket: The ticket of the tensor.
            metadata: The dtype and the sizes of the tensor, as ``pack`` returns them.
            limit: The most bytes to copy. None for no limit.
            wanted: Returns whether to wait longer for the offer.

        Raises:
            RuntimeError: The address is not allowed, the machine cannot be reached, it offers no
                such tensor in 5 minutes, or the tensor has more than ``limit`` bytes.
        """
        if address not in self._allowed and "any" not in self._allowed:
            raise RuntimeError(
                f"the machine is not allowed to fetch from {address}; start the machine with "
                f"`--peer {address}` to allow it"
            )
        if self._tls and "ca" not in self._tls and not address.startswith("unix:"):
            # Without TLS the token would be sent in the clear.
            raise RuntimeError(
                f"the machine cannot verify the TLS certificate of {address}; start the machine "
                "with `--peer-ca FILE`, a file with the authority (PEM) that signed the certificate"
            )
        dtype, sizes, nbytes = layout(metadata)
        limit = _MAX_BYTES if limit is None else limit
        if nbytes > limit:
            raise RuntimeError(
                f"the tensor is too large: it has {nbytes} bytes, and the limit is {limit}"
            )
        end = time.monotonic() + _OFFER_TIMEOUT
        while True:
            # A claim waits for seconds, and then others get the connection.
            with self._borrowed(address, end) as session:
                try:
                    return session.claim(ticket, _NUMBERS[dtype], sizes, nbytes)
                except RemoteTensorError as error:
                    if NOT_YET not in str(error) or time.monotonic() > end or not wanted():
                        raise

    @contextmanager
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
