# SPDX-License-Identifier: MIT OR Apache-2.0
"""The connections that sessions open to programs, to send them tensors. Needs no PyTorch."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Hashable
from typing import Any

from .. import _native
from ..errors import ConfigurationError
from ..wire._connection import LIMIT_BYTES, _settings
from ._peers import Peers

#: The most connections of one session at a time.
_MAX_CONNECTIONS = 8
#: The longest timeouts that clients can request, in seconds.
_MAX_TIMEOUT = 600.0
#: The most bytes of a message. A larger one is refused before it is read.
_MAX_MESSAGE = 64 << 10


class Outgoing:
    """The connections that sessions have opened. Each session uses its own, in one thread.

    Args:
        peers: The machines and programs to which sessions can connect.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._lock = threading.Lock()
        #: By session, and by number.
        self._connections: dict[Hashable, dict[int, _native.Connection]] = {}

    def connect(self, session: Hashable, address: str, options: dict[str, Any]) -> tuple[int, str]:
        """Connects to a program. Blocks.

        Args:
            session: The session.
            address: Its address.
            options: "token", "tls", "idle_timeout", "stall_timeout" and "shared_memory", as
                ``RemoteMachine.connect``.

        Returns:
            The number of the connection, and the address of the program.

        Raises:
            ConfigurationError: An option is invalid, the session has too many connections, or the
                server does not allow connections to this address.
            TensorStreamError: The connection failed, with the errors of ``ts.connect``.
        """
        match options:
            case {
                "token": None | str() as token, "tls": bool(tls),
                "idle_timeout": int() | float() as idle, "stall_timeout": int() | float() as stall,
                "shared_memory": bool(shared),
            }:  # fmt: skip
                if max(idle, stall) > _MAX_TIMEOUT:
                    raise ConfigurationError(
                        f"a machine waits for at most {_MAX_TIMEOUT:.0f} s: reduce the timeouts"
                    )
            case _:
                raise ConfigurationError("invalid options of a connection")
        with self._lock:
            if len(self._connections.get(session, ())) >= _MAX_CONNECTIONS:
                raise ConfigurationError(
                    f"a session can have {_MAX_CONNECTIONS} connections at a time; close one"
                )
        settings = _settings(token, idle, stall, shared, None, LIMIT_BYTES)
        connection = self._peers.connect(address, settings, tls)
        # Random, because a client may still have numbers of an earlier session.
        number = secrets.randbits(48)
        with self._lock:
            self._connections.setdefault(session, {})[number] = connection
        return number, connection.peer

    def send(
        self,
        session: Hashable,
        number: int,
        tensor: _native.Tensor,
        options: dict[str, Any],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends a tensor, or a message. Blocks until the operating system has its bytes.

        Args:
            session: The session.
            number: The number of the connection.
            tensor: The tensor, or the bytes of the message.
            options: ``{"message": True}``; or "name", "metadata", "compression" and "checksums", as
                ``Connection.send``.
            check: Called about ten times a second. Ends the transfer with an exception.

        Raises:
            ConfigurationError: An option is invalid, or the connection is closed.
            TensorStreamError: As ``Connection.send``.
        """
        connection = self._connection(session, number)
        match options:
            case {"message": True}:
                if tensor.nbytes > _MAX_MESSAGE:
                    raise ConfigurationError(
                        f"a message has at most {_MAX_MESSAGE} bytes, got {tensor.nbytes}"
                    )
                connection.send_message(tensor.tobytes())
            case {
                "name": str(name), "metadata": dict(metadata),
                "compression": None | str() as compression, "checksums": bool(checksums),
            }:  # fmt: skip
                named = _native.Tensor.from_dlpack(tensor, name=name, metadata=metadata)
                connection._send(
                    [(named, 0, False)],
                    compression=compression,
                    checksums=checksums,
                    progress=lambda sent, expected: check(),
                )
            case _:
                raise ConfigurationError("invalid options of a tensor to send")

    def close(self, session: Hashable, number: int, reason: str | None) -> None:
        """Closes a connection, after everything that was sent. Blocks.

        Args:
            session: The session.
            number: The number of the connection.
            reason: A reason, for the program. ``None`` drops what is not sent yet.

        Raises:
            TensorStreamError: As ``Connection.close``.
        """
        connection = self._connection(session, number)
        with self._lock:
            del self._connections[session][number]
        if reason is not None:
            connection.close(reason)

    def drop(self, session: Hashable) -> None:
        """Drops the connections of a session that has ended."""
        with self._lock:
            self._connections.pop(session, None)

    def _connection(self, session: Hashable, number: int) -> _native.Connection:
        with self._lock:
            connection = self._connections.get(session, {}).get(number)
        if connection is None:
            raise ConfigurationError("the connection is closed: the session has no such connection")
        return connection
