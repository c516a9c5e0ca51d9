# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors between processes: what :func:`tensorstream.connect` and :func:`tensorstream.listen`
give.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Literal

from . import _native
from ._native import PoolConfig, Tensor

__all__ = ["Connection", "Listener", "connect", "listen"]

Compression = Literal["lz4", "zstd", "split", "auto"]
Path = str | PathLike[str]

#: The longest tensor that a connection takes if nothing else is said, in bytes.
LIMIT_BYTES = 64 << 30


def connect(
    address: str,
    *,
    token: str | None = None,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    timeout: float = 30.0,
    patience: float = 300.0,
    shared_memory: bool = True,
    pool: PoolConfig | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Connection:
    """Connects to a :class:`Listener` at "HOST:PORT" or "unix:PATH". Blocks until both ends know
    each other.

    token: the secret that the listener wants. ca: whom to trust, a file of certificates (PEM): then
    the connection is under TLS; cert and key: who this is, if the listener wants to know. timeout:
    seconds of silence after which the other end is given up; patience: seconds for which it may be
    there and yet give or take nothing that is under way. shared_memory: large tensors to the same
    host go by memory that both have (Unix sockets). pool: tensors are received to blocks of such a
    pool, which come back to it when they are deleted: memory that was used before is several times
    as fast to receive to. limit_bytes: longer tensors are refused.

    ``ConnectionLost``, ``ConnectionTimeout``, ``ProtocolError``, ``ConfigurationError``.
    """
    settings = _settings(token, timeout, patience, shared_memory, pool, limit_bytes)
    return Connection(_native.connect(address, settings, ca, cert, key))


def listen(
    address: str,
    *,
    token: str | None = None,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    insecure: bool = False,
    timeout: float = 30.0,
    patience: float = 300.0,
    shared_memory: bool = True,
    pool: PoolConfig | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Listener:
    """Listens at "HOST:PORT" (port 0: one that is free) or "unix:PATH". Does not block.

    As :func:`connect`. cert and key: connections are under TLS; ca: only clients with a certificate
    of these. An address that other machines reach needs a token or certificates, or insecure=True.
    """
    settings = _settings(token, timeout, patience, shared_memory, pool, limit_bytes)
    return Listener(_native.listen(address, settings, ca, cert, key, insecure))


def _settings(
    token: str | None,
    timeout: float,
    patience: float,
    shared_memory: bool,
    pool: PoolConfig | None,
    limit_bytes: int,
) -> dict[str, Any]:
    names = ("token", "timeout", "patience", "shared_memory", "pool", "limit_bytes")
    return dict(
        zip(names, (token, timeout, patience, shared_memory, pool, limit_bytes), strict=True)
    )


class Connection:
    """One end of a connection, by which tensors and messages come and go. For one thread at a time.

    A tensor that is sent stays where it is until it is on its way, and must not be written to
    before :meth:`send` returns. Only who closes a connection - by :meth:`close`, or at the end of a
    ``with`` - is sure that what was sent is delivered.
    """

    def __init__(self, native: _native.Connection) -> None:
        self._native = native

    @property
    def peer(self) -> str:
        """Who is at the other end."""
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
        """Sends a tensor: a :class:`Tensor`, or one of PyTorch, numpy, jax - whatever speaks DLPack
        and is on the host.

        Blocks until the system has it all, which takes as long as the other end gives no memory for
        it. Strides stay as they are. progress is called some ten times a second with the bytes sent
        and those to be sent, since the connection began.
        """
        given = _tensor(tensor, name, metadata)
        self._native._send(
            [(given, 0, False)], compression=compression, checksums=checksums, progress=progress
        )

    def send_state_dict(
        self,
        tensors: Mapping[str, Any],
        *,
        compression: Compression | None = None,
        checksums: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Sends named tensors of PyTorch, or others; those that share a storage, as tied weights
        do, share one at the other end, and its bytes go once. Blocks as :meth:`send`.
        """
        self._native._send(
            list(_by_storage(tensors)),
            compression=compression,
            checksums=checksums,
            apart=True,
            progress=progress,
        )

    def send_message(self, message: bytes) -> None:
        """Sends a message of at most 64 KiB, which goes before tensors of other streams: tokens, or
        what to do next.
        """
        self._native.send_message(message)

    def recv(
        self,
        *,
        into: Any = None,
        timeout: float | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Tensor | bytes | None:
        """The next :class:`Tensor` or message. None at the end, or when nothing came within timeout
        seconds.

        into: memory that the tensor is to go to, of exactly its length - anything that speaks
        DLPack, contiguous and writable; the system writes there itself. progress is called some ten
        times a second with the bytes received since the connection began.
        """
        target = None if into is None else Tensor.from_dlpack(_plain(into))
        received: Tensor | bytes | None = self._native._recv(
            into=target, timeout=timeout, progress=progress
        )
        return received

    def recv_state_dict(
        self, *, timeout: float | None = None, progress: Callable[[int], object] | None = None
    ) -> dict[str, Tensor] | None:
        """What :meth:`send_state_dict` sends; None at the end."""
        tensors = self._native._recv_all(timeout=timeout, progress=progress)
        return None if tensors is None else {tensor.name: tensor for tensor in tensors}

    def stats(self) -> dict[str, Any]:
        """Bytes sent, received, and copied on their way to where they belong; seconds since the
        connection began; of its pool the share of tensors that got a block that was there, and
        bytes in use and available.
        """
        return self._native.stats()

    def close(self, reason: str = "it was closed") -> None:
        """Tells the other end that this is all, behind what was sent, and waits until its system
        has that, which may be before it is read. Does nothing the second time."""
        self._native.close(reason)

    def __iter__(self) -> Iterator[Tensor | bytes]:
        """What comes, until the end."""
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
    """Where others connect to."""

    def __init__(self, native: _native.Listener) -> None:
        self._native = native

    @property
    def address(self) -> str:
        """Where it listens, as :func:`connect` wants it."""
        return self._native.address

    def accept(self, *, timeout: float | None = None) -> Connection | None:
        """The next that connects and says who it is. None if nobody does so within timeout seconds.
        Who says nothing, does not know the token or speaks something else keeps nobody waiting, and
        is told to the logger "tensorstream".
        """
        native = self._native.accept(timeout, _sent_away)
        return None if native is None else Connection(native)

    def close(self) -> None:
        """Listens no more. Connections go on."""
        self._native.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sent_away(peer: str, reason: str) -> None:
    logging.getLogger("tensorstream").warning("%s was sent away: %s", peer, reason)


def _plain(tensor: Any) -> Any:
    """Without what DLPack does not carry: gradients are not sent."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _tensor(tensor: Any, name: str | None, metadata: Mapping[str, str] | None = None) -> Tensor:
    return Tensor.from_dlpack(
        _plain(tensor), name=name, metadata=None if metadata is None else dict(metadata)
    )


def _by_storage(tensors: Mapping[str, Any]) -> Iterator[tuple[Tensor, int, bool]]:
    """Tensors, those of one storage together: with the storage's number, if there are several, and
    whether more come.
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
            view = _plain(tensors[name])
            offset = view.storage_offset() * view.element_size()
            part = whole._view(name, str(view.dtype), list(view.shape), list(view.stride()), offset)
            yield part, number, at + 1 < len(names)


def _bytes_of(tensor: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
