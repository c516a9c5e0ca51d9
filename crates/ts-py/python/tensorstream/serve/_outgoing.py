# SPDX-License-Identifier: MIT OR Apache-2.0
"""The connections that sessions open to programs, to send them tensors. Needs no PyTorch."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Hashable
from typing import Any

from .. import _native
from ..errors import ConfigurationError, ConnectionTimeout
from ..wire._connection import _settings

#: The most connections of one session at a time.
_MAX_CONNECTIONS = 8
#: The longest timeouts that clients can request, in seconds. A server also waits so long for a
#: session that has ended.
_MAX_IDLE, _MAX_STALL = 60.0, 600.0
#: The most bytes of a message.
_MAX_MESSAGE = 64 << 10
#: The most bytes of a tensor from a program, and the most tensors and messages that are dropped at
#: a time. All that programs send is dropped.
_MAX_RECEIVED, _MAX_DROPPED = 64 << 10, 64


class Outgoing:
    """The connections that sessions have opened. Each session uses its own, in one thread.

    Args:
        allowed: The addresses of programs to which sessions can connect. "any" allows all.
        ca: A file of certificates (PEM) to trust, for connections with TLS.
    """

    def __init__(self, allowed: tuple[str, ...] = (), ca: str | None = None) -> None:
        self._allowed, self._ca = allowed, ca
        # Reentrant, because the garbage collector may drop a session at any time.
        self._lock = threading.RLock()
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
        if address not in self._allowed and "any" not in self._allowed:
            raise ConfigurationError(
                f"the machine is not allowed to connect to {address}; start it with "
                f"`--send-to {address}` to allow it"
            )
        match options:
            case {
                "token": None | str() as token, "tls": bool(tls),
                "idle_timeout": int() | float() as idle, "stall_timeout": int() | float() as stall,
                "shared_memory": bool(shared),
            }:  # fmt: skip
                pass
            case _:
                raise ConfigurationError("invalid options of a connection")
        if idle > _MAX_IDLE or stall > _MAX_STALL:
            raise ConfigurationError(
                f"a machine accepts an idle_timeout of at most {_MAX_IDLE:.0f} s, and a "
                f"stall_timeout of at most {_MAX_STALL:.0f} s"
            )
        if tls and self._ca is None:
            raise ConfigurationError(
                f"the machine cannot verify the TLS certificate of {address}; start it with "
                "`--peer-ca FILE`, a file with the authority (PEM) that signed the certificate"
            )
        with self._lock:
            if len(self._connections.get(session, ())) >= _MAX_CONNECTIONS:
                raise ConfigurationError(
                    f"a session can have {_MAX_CONNECTIONS} connections at a time; close one"
                )
        settings = _settings(token, idle, stall, shared, None, _MAX_RECEIVED)
        connection = _native.connect(address, settings, self._ca if tls else None, None, None)
        connection._allow_abort()
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

        If the transfer fails, the connection is closed.

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
        try:
            _send(connection, tensor, options, check)
            _raise_if_refused(connection)
        except ConfigurationError:
            raise
        except BaseException:
            # It keeps what it has queued.
            self._take(session, number)
            raise

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
        try:
            if reason is not None:
                _raise_if_refused(connection)
                connection.close(reason)
        finally:
            self._take(session, number)

    def abort(self, session: Hashable) -> None:
        """Ends the connections of a session, also while it uses them. Does not block."""
        with self._lock:
            connections = list(self._connections.get(session, {}).values())
        for connection in connections:
            connection._abort()

    def drop(self, session: Hashable) -> None:
        """Drops the connections of a session that has ended."""
        with self._lock:
            connections = self._connections.pop(session, None)
        del connections  # not while the lock is held

    def _connection(self, session: Hashable, number: int) -> _native.Connection:
        with self._lock:
            connection = self._connections.get(session, {}).get(number)
        if connection is None:
            raise ConfigurationError(
                "the connection is closed: it has failed before, or the session that opened it has "
                "ended"
            )
        return connection

    def _take(self, session: Hashable, number: int) -> None:
        with self._lock:
            connection = self._connections.get(session, {}).pop(number, None)
        del connection  # not while the lock is held


def _send(
    connection: _native.Connection,
    tensor: _native.Tensor,
    options: dict[str, Any],
    check: Callable[[], None],
) -> None:
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
        } if all(isinstance(text, str) for text in metadata.values()):  # fmt: skip
            named = _native.Tensor.from_dlpack(tensor, name=name, metadata=metadata)
            connection._send(
                [(named, 0, False)],
                compression=compression,
                checksums=checksums,
                progress=lambda sent, expected: check(),
            )
        case _:
            raise ConfigurationError(
                "invalid options of a tensor: the name, and the metadata by key, must be texts"
            )


def _raise_if_refused(connection: _native.Connection) -> None:
    """Raises an error if the program has refused a tensor, or ended the connection.

    Raises:
        ConnectionLost: The program has cancelled a transfer.
    """
    # The program may send without end.
    with contextlib.suppress(ConnectionTimeout):
        for _ in range(_MAX_DROPPED):
            connection._recv(timeout=0.0)
