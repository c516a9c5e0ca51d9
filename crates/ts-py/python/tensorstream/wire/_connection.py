# SPDX-License-Identifier: MIT OR Apache-2.0
"""Implements ``tensorstream.connect`` and ``tensorstream.listen``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NotRequired, TypedDict

from .. import _native
from .._deprecated import renamed
from .._native import PoolConfig, Tensor
from ..devices import Device, accelerator, device_of
from ..errors import ConfigurationError

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
        key: The private key of ``cert`` (PEM).
        idle_timeout: The longest silence of the peer, in seconds, while this side waits for it.
            After this time, the wait fails.
        stall_timeout: Seconds without progress after which this side stops waiting for a transfer,
            even if the peer is alive. The wait then fails.
        shared_memory: Whether to send large tensors through shared memory, if the address is a Unix
            socket.
        pool: The pool of memory blocks to receive tensors into. A block returns to the pool when
            its tensor is deleted. Receiving into reused memory is several times as fast as into new
            memory. By default, there is no pool.
        limit_bytes: The maximum size of a received tensor, in bytes. Larger tensors are refused.

    Raises:
        ConnectionLost: The listener cannot be reached, or refuses the connection.
        ConnectionTimeout: The listener does not answer.
        ProtocolError: The listener uses another protocol, or its certificate is not trusted.
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
        token: The secret that clients must send.
        ca: Accept only clients with a certificate of these authorities (a file, PEM).
        cert: A certificate (PEM) of this side. Connections then use TLS.
        key: The private key of ``cert`` (PEM).
        insecure: Whether to accept clients without a token or certificate on an address that other
            computers can reach. These are all addresses except loopback and Unix sockets.
        idle_timeout: See ``connect``.
        stall_timeout: See ``connect``.
        shared_memory: See ``connect``.
        pool: See ``connect``.
        limit_bytes: See ``connect``.

    Raises:
        ConnectionLost: The address is in use, or cannot be used.
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
    """Statistics of the pool of a connection.

    Examples:
        >>> import tensorstream as ts, threading
        >>> def client(address):
        ...     with ts.connect(address) as connection:
        ...         connection.send_message(b"hello")
        >>> with ts.listen("127.0.0.1:0", pool=ts.PoolConfig.low_memory()) as listener:
        ...     thread = threading.Thread(target=client, args=[listener.address])
        ...     thread.start()
        ...     with listener.accept() as connection:
        ...         message = connection.recv()
        ...         pool = connection.stats()["pool"]
        ...     thread.join()
        >>> pool["in_use_bytes"]
        0
    """

    #: The share of tensors that were received into reused memory, in per cent.
    hit_rate: float
    #: Memory of received tensors that still exist.
    in_use_bytes: int
    #: Memory of blocks that can be reused.
    available_bytes: int


class ConnectionStats(TypedDict):
    """Statistics of a connection.

    Examples:
        >>> import tensorstream as ts, threading
        >>> def client(address):
        ...     with ts.connect(address) as connection:
        ...         connection.send_message(b"hello")
        >>> with ts.listen("127.0.0.1:0") as listener:
        ...     thread = threading.Thread(target=client, args=[listener.address])
        ...     thread.start()
        ...     with listener.accept() as connection:
        ...         message = connection.recv()
        ...         stats = connection.stats()
        ...     thread.join()
        >>> stats["received_bytes"] > len(message)
        True
    """

    #: All bytes that were written to and read from the transport.
    sent_bytes: int
    received_bytes: int
    #: Payload bytes that were copied after they were read. The others were read to their final
    #: memory.
    copied_bytes: int
    #: Seconds since the connection began.
    seconds: float
    #: Statistics of the pool, if the connection has one.
    pool: NotRequired[BlockPoolStats]


class Connection:
    """One side of a connection. One thread can use it at a time.

    A tensor must not be written to until ``send`` returns. Delivery is only certain after
    ``close``, or after the end of a ``with`` block.

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
        """Sends a tensor. Blocks until the operating system has all of its bytes.

        Args:
            tensor: A ``Tensor``, or any object in host memory that supports DLPack. Strides
                are preserved. ``RemoteMachine.connect`` sends tensors of a remote machine.
            name: Its name at the receiver.
            metadata: Text by key, for the receiver.
            compression: A codec for the payload.
            checksums: Whether to send checksums, which the receiver verifies.
            progress: Called about ten times a second with two numbers: the bytes sent, and the
                bytes to send. Both include earlier tensors.

        Raises:
            TypeError: The object does not support DLPack.
            ConfigurationError: An argument is invalid, or the connection is closed or in use.
            ConnectionLost: The other side closed the connection, or cancelled the transfer.
            ConnectionTimeout: The other side is silent, or makes no progress.
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
        """Sends named tensors. Blocks like ``send``, and has the same arguments and errors.

        Tensors that share a storage, such as tied weights, also share a storage at the receiver.
        The bytes of the storage are sent once.
        """
        self._native._send(
            list(_by_storage(tensors)),
            compression=compression,
            checksums=checksums,
            apart=True,
            progress=progress,
        )

    def send_message(self, message: bytes) -> None:
        """Sends a message of at most 64 KiB. Blocks until the operating system has it.

        Raises:
            ConfigurationError: The message is too long, or the connection is closed or in use.
            ConnectionLost: The other side closed the connection.
            ConnectionTimeout: The other side is silent, or makes no progress.
        """
        self._native.send_message(message)

    def recv(
        self,
        *,
        into: Any = None,
        device: Device | None = None,
        timeout: float | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Tensor | bytes | None:
        """Returns the next tensor or message. Blocks.

        Args:
            into: Memory for the tensor: a contiguous and writable object that supports DLPack and
                has exactly the size of the tensor.
            device: The device of the tensor, such as "cuda", to which its bytes are copied in
                pieces as they arrive. The default is the CPU. The memory is freed in the order of
                PyTorch's current stream.
            timeout: Seconds to wait. None waits without a limit.
            progress: Called about ten times a second with the bytes received so far.

        Returns:
            A ``Tensor``, the bytes of a message, or None at the end of the connection.

        Raises:
            ConnectionTimeout: No complete tensor or message arrived within ``timeout``; the
                connection stays usable. Also raised if the other side is silent, or makes no
                progress.
            ConnectionLost: The connection was lost, the other side ended it without closing it, or
                it cancelled the transfer. What it sent before was received.
            ConfigurationError: ``into`` has another size than the tensor; the tensor can still be
                received. Also raised if the device cannot be used, if the connection is in use, and
                if it is closed, also by another thread during the call.
            OutOfMemoryError: There is not enough memory for the tensor, or it exceeds
                ``limit_bytes``. The connection stays usable.
            ChecksumError: The tensor differs from its checksums.
            ProtocolError: The other side sent invalid data.
        """
        if into is not None and device is not None:
            raise ConfigurationError("recv takes either `into` or `device`, not both")
        target = None if into is None else Tensor.from_dlpack(_detached(into))
        received: Tensor | bytes | None = self._native._recv(
            into=target, device=_accelerator(device), timeout=timeout, progress=progress
        )
        return received

    def recv_state_dict(
        self,
        *,
        device: Device | None = None,
        timeout: float | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> dict[str, Tensor] | None:
        """Returns the tensors of one ``send_state_dict`` by name, or None at the end. Blocks.

        The arguments and errors are those of ``recv``, without ``into``. The next call after a
        timeout continues.

        Raises:
            ConfigurationError: A message arrived instead of a tensor.
            ConnectionLost: The other side ended the connection before the set was complete. The
                tensors that had arrived are returned by ``recv``.
        """
        tensors = self._native._recv_all(
            device=_accelerator(device), timeout=timeout, progress=progress
        )
        return None if tensors is None else {tensor.name: tensor for tensor in tensors}

    def stats(self) -> ConnectionStats:
        """Returns the statistics of the connection."""
        return self._native.stats()

    def close(self, reason: str = "the peer called close()") -> None:
        """Sends everything that is queued, and closes the connection.

        Blocks until the operating system of the other side has received everything. The program
        there may read it later. On systems other than Linux, blocks until the other side has closed
        the connection. Does nothing if the connection is already closed. A call that waits on
        another thread ends with ConfigurationError.

        Args:
            reason: A reason, which is sent to the other side and appears in its errors.

        Raises:
            ConnectionLost: The connection was lost before everything was received.
            ConnectionTimeout: The other side is silent, or makes no progress.
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

        Clients that do not complete the handshake do not delay others. Each of these clients is
        logged to the logger "tensorstream".

        Args:
            timeout: Seconds to wait. None waits without a limit.

        Raises:
            ConnectionTimeout: No client completed a handshake within ``timeout``.
            ConfigurationError: The listener is in use, or is closed, also by another thread during
                the call.
        """
        return Connection(self._native.accept(timeout, _log_refusal))

    def close(self) -> None:
        """Stops listening. Connections stay open. Ends an ``accept`` that waits on another thread.

        Raises:
            ConfigurationError: The call that runs this callback uses the listener.
        """
        self._native.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _log_refusal(peer: str, reason: str) -> None:
    logging.getLogger("tensorstream").warning("refused a connection from %s: %s", peer, reason)


def _accelerator(device: Device | None) -> _native.Accelerator | None:
    """Opens the device for received tensors. Returns ``None`` for the CPU."""
    return None if device is None else accelerator(device_of(device))


def _detached(tensor: Any) -> Any:
    """Detaches a tensor from autograd, because DLPack refuses tensors that require gradients."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _is_lazy(tensor: Any) -> bool:
    """Returns whether the elements of a PyTorch tensor differ from those of its memory."""
    return hasattr(tensor, "resolve_neg") and (tensor.is_conj() or tensor.is_neg())


def _resolved(tensor: Any) -> Any:
    """Copies tensors that are lazily conjugated or negated. Returns others as they are."""
    return tensor.resolve_conj().resolve_neg() if _is_lazy(tensor) else tensor


def _tensor(tensor: Any, name: str | None, metadata: Mapping[str, str] | None = None) -> Tensor:
    """Describes a tensor to send.

    Raises:
        ConfigurationError: It is on a remote machine.
    """
    device = getattr(tensor, "device", None)
    if getattr(device, "type", None) == "ts":
        raise ConfigurationError(
            f"cannot send a tensor on {device} from this process: send it from its machine, with "
            "machine.connect(ADDRESS).send(tensor), or copy it to the host first, with tensor.cpu()"
        )
    return Tensor.from_dlpack(
        _resolved(_detached(tensor)),
        name=name,
        metadata=None if metadata is None else dict(metadata),
    )


def _by_storage(tensors: Mapping[str, Any]) -> Iterator[tuple[Tensor, int, bool]]:
    """Groups tensors by storage. Yields three values for each tensor:

    - The tensor.
    - The number of its storage, or 0 if no other tensor shares the storage.
    - Whether more tensors of the same storage follow.
    """
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        shared = (
            hasattr(tensor, "untyped_storage")
            and tensor.device.type == "cpu"
            and not _is_lazy(tensor)
        )
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
