# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sends messages between the processes of ``tensorstream serve``.

A message is JSON, optionally with descriptors, over a ``SOCK_SEQPACKET`` socket. The process of a
session may be under its client's control, so its messages are data only: strings, numbers, and
descriptors of sealed memory.
"""

from __future__ import annotations

import array
import fcntl
import json
import math
import os
import socket
from typing import Any

from .. import _native

#: The longest message, in bytes.
MAX_MESSAGE = 32 << 10
#: The most dimensions of a tensor.
MAX_DIMS = 64
#: The sizes of elements in bytes, by the names of dtypes.
_ITEMSIZES = {name: size for name, _, _, size in _native.DTYPES}
#: The seals of memory that can no longer change. Only Linux has them.
SEALS = sum(getattr(fcntl, f"F_SEAL_{name}", 0) for name in ("WRITE", "SHRINK", "GROW", "SEAL"))


def pair() -> tuple[socket.socket, socket.socket]:
    """Creates two connected sockets for messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(
    channel: socket.socket, message: dict[str, Any], *descriptors: int | None, wait: bool = True
) -> None:
    """Sends a message with descriptors, which stay open in this process.

    Args:
        channel: The socket.
        message: The message.
        descriptors: The descriptors. None values are skipped.
        wait: Whether to block while the channel is full.

    Raises:
        OSError: The other end has closed, or the channel is full and ``wait`` is False.
    """
    given = array.array("i", [each for each in descriptors if each is not None])
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)] if given else []
    # `socket.send_fds` ignores its flags.
    channel.sendmsg([json.dumps(message).encode()], attached, 0 if wait else socket.MSG_DONTWAIT)


def receive(channel: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """Receives a message. Blocks.

    Returns:
        The message and its first descriptor, which the caller owns. None if the other end has
        closed, or has sent invalid data.
    """
    received = receive_all(channel)
    if received is None:
        return None
    message, descriptors = received
    for surplus in descriptors[1:]:
        os.close(surplus)
    return message, descriptors[0] if descriptors else None


def receive_all(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receives a message. Blocks.

    Returns:
        The message and its descriptors, at most 4, which the caller owns. None if the other end has
        closed, or has sent invalid data.
    """
    try:
        text, descriptors, flags, _ = socket.recv_fds(channel, MAX_MESSAGE, 4)
    except OSError:
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return message, descriptors


def is_sealed(descriptor: int) -> bool:
    """Returns whether a descriptor refers to memory that can no longer change."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False


def sealed(data: bytes) -> int:
    """Returns a descriptor, which the caller owns, of sealed memory with this content."""
    descriptor = os.memfd_create("tensorstream-offer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def layout(metadata: dict[str, Any]) -> tuple[str, list[int], int]:
    """Returns the name of the dtype, the sizes, and the size in bytes of a tensor.

    Raises:
        RuntimeError: The metadata, which another process has sent, is invalid.
    """
    dtype, sizes = metadata.get("dtype"), metadata.get("sizes")
    itemsize = _ITEMSIZES.get(dtype) if isinstance(dtype, str) else None
    if (
        itemsize is None
        or not isinstance(sizes, list)
        or len(sizes) > MAX_DIMS
        or not all(type(size) is int and 0 <= size < 2**63 for size in sizes)
    ):
        raise RuntimeError(
            f"invalid offer: expected a dtype and a list of sizes, got {dtype!r} and {sizes!r}"
        )
    return str(dtype), sizes, math.prod(sizes) * itemsize
