# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sends tensors between processes: ``tensorstream.connect`` and ``tensorstream.listen``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NotRequired, TypedDict

from .. import _native
from .._deprecated import renamed
from .._native import PoolConfig, Tensor

__all__ = ["Connection", "Listener", "connect", "listen"]

Compression = Literal["lz4", "zstd", "split", "auto"]
Path = str | PathLike[str]

#: The default of ``limit_bytes``, in bytes.
LIMIT_BYTES = 64 << 30


@renamed(timeout="idle_timeout", patience="stall_timeout")
def connect(
    address: str,
    *,
    token: str | None = None,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    idle_timeout: float = 30.0,
    stall_timeout: float = 300.0,
    shared_memory: bool = True,
    pool: PoolConfig | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Connection:
    """Connects to a ``Listener``. Blocks until the handshake is done.

    Args:
        address: "HOST:PORT" or "unix:PATH".
        token: The secret that the listener requires.
        ca: A file of certificates (PEM) to trust. The connection then uses TLS.
        cert: A certificate (PEM) of this side, if the listener requires one.
        key: Its key (PEM).
        idle_timeout: Seconds without a byte from the peer after which the connection is lost.
        stall_timeout: Seconds without progress after which a transfer fails, even if the peer is
            alive.
        shared_memory: Send large tensors through shared memory, if the address is a Unix socket.
        pool: Receive tensors into a pool of memory blocks. A block returns to the pool when its
            tensor is deleted. Receiving into reused memory is several times as fast as into new
            memory.
        limit_bytes: Refuse tensors that are larger.

    Raises:
        ConnectionLost: The listener cannot be reached, or refuses.
        ConnectionTimeout: It does not answer.
        ProtocolError: It speaks another protocol.
        ConfigurationError: An argument is invalid.

    Examples:
        >>> import tensorstream as ts, threading
        >>> def server(listener):
        ...     with listener.accept() as connection:
        ...         connection.send_message(b"hello")
        >>> with ts.listen("unix:a.socket") as listener:
        ...     thread = threading.Thread(target=server, args=[listener])
        ...     thread.start()
        ...     with ts.connect("unix:a.socket") as connection:
        ...         print(connection.recv())
        ...     thread.join()
        b'hello'
    """
    settings = _settings(token, idle_timeout, stall_timeout, shared_memory, pool, limit_bytes)
    return Connection(_native.connect(address, settings, ca, cert, key))


@renamed(timeout="idle_timeout", patience="stall_timeout")
def listen(
    address: str,
    *,
    token: str | None = None,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    insecure: bool = False,
    idle_timeout: float = 30.0,
    stall_timeout: float = 300.0,
    shared_memory: bool = True,
    pool: PoolConfig | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Listener:
    """Listens for connections. Does not block.

    Args:
        address: "HOST:PORT", with port 0 for a free port, or "unix:PATH".
        token: The secret that clients must know.
        ca: Accept only clients with a certificate of these authorities (a file, PEM).
        cert: A certificate (PEM) of this side. Connections then use TLS.
        key: Its key (PEM).
        insecure: Allow an address that other machines can reach without a token or certificates.
        idle_timeout: See ``connect``.
        stall_timeout: See ``connect``.
        shared_memory: See ``connect``.
        pool: See ``connect``.
        limit_bytes: See ``connect``.

    Raises:
        ConnectionLost: The address cannot be used.
        ConfigurationError: An argument is invalid.

    Examples:
        >>> import tensorstream as ts
        >>> listener = ts.listen("127.0.0.1:0")
        >>> listener.address
        '127.0.0.1:...'
        >>> listener.close()
    """
    settings = _settings(token, idle_timeout, stall_timeout, shared_memory, pool, limit_bytes)
    return Listener(_native.listen(address, settings, ca, cert, key, insecure))


def _settings(
    token: str | None,
    idle_timeout: float,
    stall_timeout: float,
    shared_memory: bool,
    pool: PoolConfig | None,
    limit_bytes: int,
) -> dict[str, Any]:
    return {
        "token": token,
        "idle_timeout": idle_timeout,
        "stall_timeout": stall_timeout,
        "shared_memory": shared_memory,
        "pool": pool,
        "limit_bytes": limit_bytes,
    }


class BlockPoolStats(TypedDict):
    """Statistics of the pool of a connection."""

    #: The share of tensors that were received into reused memory, from 0 to 1.
    hit_rate: float
    in_use_bytes: int
    available_bytes: int


class ConnectionStats(TypedDict):
    """Statistics of a connection."""

    sent_bytes: int
    received_bytes: int
    #: Payload bytes that were copied after they were read. The others were read in place.
    copied_bytes: int
    #: Seconds since the connection began.
    seconds: float
    pool: NotRequired[BlockPoolStats]


class Connection:
    """One side of a connection. One thread can use it at a time.

    A tensor must not be written to until ``send`` returns. Delivery is only certain after
    ``close``, or the end of a ``with`` block.

    Examples:
        >>> import tensorstream as ts, threading, torch
        >>> listener = ts.listen("unix:a.socket")
        >>> def send():
        ...     with ts.connect("unix:a.socket") as connection:
        ...         connection.send(torch.arange(3), "a")
        >>> thread = threading.Thread(target=send)
        >>> thread.start()
        >>> with listener.accept() as connection:
        ...     for tensor in connection:
        ...         print(tensor.name, tensor.to_torch())
        a tensor([0, 1, 2])
        >>> thread.join()
        >>> listener.close()
    """

    def __init__(self, native: _native.Connection) -> None:
        self._native = native

    @property
    def peer(self) -> str:
        """The address of the other side."""
        return self._native.peer

    def send(
        self,
        tensor: Any,
        name: str | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        compression: Compression | None = None,
        checksums: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Sends a tensor. Blocks until the system has all of it.

        Args:
            tensor: A ``Tensor``, or any object in host memory that supports DLPack. Strides
                are preserved.
            name: Its name at the receiver.
            metadata: Text by key, for the receiver.
            compression: A codec for the payload.
            checksums: Whether to send checksums, which the receiver verifies.
            progress: Called about ten times a second with the bytes sent and to be sent.

        Raises:
            ConnectionLost: The other side is gone, or has cancelled.
            ConnectionTimeout: It is silent, or makes no progress.
        """
        described = _tensor(tensor, name, metadata)
        self._native._send(
            [(described, 0, False)], compression=compression, checksums=checksums, progress=progress
        )

    def send_state_dict(
        self,
        tensors: Mapping[str, Any],
        *,
        compression: Compression | None = None,
        checksums: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Sends named tensors. Blocks as ``send``, and has the same arguments.

        Tensors that share a storage, such as tied weights, share one at the receiver. Its bytes are
        sent once.
        """
        self._native._send(
            list(_by_storage(tensors)),
            compression=compression,
            checksums=checksums,
            apart=True,
            progress=progress,
        )

    def send_message(self, message: bytes) -> None:
        """Sends a message of at most 64 KiB. It overtakes tensors of other streams."""
        self._native.send_message(message)

    def recv(
        self,
        *,
        into: Any = None,
        timeout: float | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Tensor | bytes | None:
        """Returns the next tensor or message. Blocks.

        Args:
            into: Memory for the tensor: contiguous, writable, of exactly its size, and supporting
                DLPack.
            timeout: Seconds to wait.
            progress: Called about ten times a second with the bytes received so far.

        Returns:
            A ``Tensor``, the bytes of a message, or None at the end.

        Raises:
            ConnectionTimeout: Nothing arrived within ``timeout``, and the connection stays usable.
                Or the other side is silent.
            ConnectionLost: The other side is gone.
            OutOfMemoryError: There is not enough memory for the tensor. The connection stays
                usable.
        """
        target = None if into is None else Tensor.from_dlpack(_detached(into))
        received: Tensor | bytes | None = self._native._recv(
            into=target, timeout=timeout, progress=progress
        )
        return received

    def recv_state_dict(
        self, *, timeout: float | None = None, progress: Callable[[int], object] | None = None
    ) -> dict[str, Tensor] | None:
        """Returns the tensors of one ``send_state_dict`` by name, or None at the end. Blocks.

        Arguments and errors are those of ``recv``. After a timeout, the next call continues.
        """
        tensors = self._native._recv_all(timeout=timeout, progress=progress)
        return None if tensors is None else {tensor.name: tensor for tensor in tensors}

    def stats(self) -> ConnectionStats:
        """Returns the statistics of the connection."""
        return self._native.stats()

    def close(self, reason: str = "it was closed") -> None:
        """Closes the connection after everything that was sent.

        Blocks until the operating system of the other side has received it, which may be before it
        is read. Does nothing if the connection is already closed.
        """
        self._native.close(reason)

    def __iter__(self) -> Iterator[Tensor | bytes]:
        """Yields tensors and messages until the end."""
        while (received := self.recv()) is not None:
            yield received

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.close()


class Listener:
    """Accepts connections.

    Examples:
        >>> import tensorstream as ts, threading
        >>> def client(address):
        ...     with ts.connect(address) as connection:
        ...         connection.send_message(b"hello")
        >>> with ts.listen("127.0.0.1:0") as listener:
        ...     thread = threading.Thread(target=client, args=[listener.address])
        ...     thread.start()
        ...     with listener.accept() as connection:
        ...         print(connection.recv())
        ...     thread.join()
        b'hello'
    """

    def __init__(self, native: _native.Listener) -> None:
        self._native = native

    @property
    def address(self) -> str:
        """The address to connect to."""
        return self._native.address

    def accept(self, *, timeout: float | None = None) -> Connection:
        """Returns the next connection, after its handshake. Blocks.

        Clients that do not complete the handshake do not delay others. Each is logged to the logger
        "tensorstream".

        Args:
            timeout: Seconds to wait.

        Raises:
            ConnectionTimeout: No client connected within ``timeout``.
        """
        return Connection(self._native.accept(timeout, _log_refusal))

    def close(self) -> None:
        """Stops listening. Connections stay open."""
        self._native.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _log_refusal(peer: str, reason: str) -> None:
    logging.getLogger("tensorstream").warning("refused a connection from %s: %s", peer, reason)


def _detached(tensor: Any) -> Any:
    """Detaches a tensor: DLPack does not carry gradients."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _tensor(tensor: Any, name: str | None, metadata: Mapping[str, str] | None = None) -> Tensor:
    return Tensor.from_dlpack(
        _detached(tensor), name=name, metadata=None if metadata is None else dict(metadata)
    )


def _by_storage(tensors: Mapping[str, Any]) -> Iterator[tuple[Tensor, int, bool]]:
    """Groups tensors by storage, and yields each with two values for the native module.

    They are the number of its storage, or 0 if no other tensor shares it, and whether more tensors
    of the storage follow.
    """
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        shared = hasattr(tensor, "untyped_storage") and tensor.device.type == "cpu"
        key = tensor.untyped_storage().data_ptr() if shared else 0
        groups.setdefault(key or name, []).append(name)
    for number, names in enumerate(groups.values(), 1):
        if len(names) == 1:
            yield _tensor(tensors[names[0]], names[0]), 0, False
            continue
        whole = _native.Tensor.from_dlpack(_bytes_of(tensors[names[0]]))
        for at, name in enumerate(names):
            view = _detached(tensors[name])
            offset = view.storage_offset() * view.element_size()
            part = whole._view(name, str(view.dtype), list(view.shape), list(view.stride()), offset)
            yield part, number, at + 1 < len(names)


def _bytes_of(tensor: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
