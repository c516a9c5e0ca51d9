# SPDX-License-Identifier: MIT OR Apache-2.0
"""What sessions exchange with others: tensors, and open files that they get.

A session offers a tensor under a ticket, a random secret of the client. Any session of the same
machine can claim the tensor with the ticket, once. Another machine fetches the tensor: it connects
to this machine and claims the tensor. If each session has its own process, tensors are passed as
descriptors of memory via the broker (``tensorstream.serve._broker``), and only the broker connects
to other machines, and to programs to which sessions send tensors. The broker also opens the files
of checkpoints, and passes their descriptors.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import threading
from collections.abc import Hashable
from typing import Any, Protocol

import torch

from ... import errors
from ..._dtypes import SCALAR_TYPES
from ..._native import PassedSource, RelayClient, Tensor
from ...errors import ConfigurationError
from ...serve._messages import MAX_MESSAGE, SEALS, layout, receive_all, send
from ...serve._offers import Offers
from ...serve._outgoing import Outgoing
from ...serve._peers import Peers
from ...serve._weights import OpenFile, Weights

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SCALAR_TYPES}


class Exchange(Protocol):
    """The operations that a session needs for direct copies, connections and checkpoints."""

    def offer(self, session: Hashable, tensor: torch.Tensor, ticket: str, to: str = "") -> str:
        """Offers a tensor until it is claimed or withdrawn.

        Args:
            session: The session.
            tensor: The tensor.
            ticket: The ticket with which it can be claimed.
            to: The address of the machine that will fetch it. It is sent there, if this machine can
                reach that one. Empty if a session of this machine will claim it.

        Returns:
            An empty string, or the reason why it cannot be offered.
        """

    def refuse(self, session: Hashable, ticket: str, reason: str) -> None:
        """Gives the claimant of a ticket a reason instead of a tensor."""

    def withdraw(self, session: Hashable, ticket: str) -> None:
        """Ends an offer of this session, if it was not claimed."""

    def drop(self, session: Hashable) -> None:
        """Ends all offers of this session, which has ended."""

    def claim(self, ticket: str) -> torch.Tensor:
        """Returns a copy of a tensor that a session of this machine offers. Blocks for seconds.

        Raises:
            LookupError: No session offers a tensor under this ticket.
        """

    def fetch(
        self,
        into: torch.Tensor,
        address: str,
        ticket: str,
        dtype: torch.dtype,
        is_sent: bool = False,
    ) -> tuple[str, bool]:
        """Gets a tensor that another machine offers or sends, and copies it to ``into``. Blocks.

        Args:
            into: A tensor of the same shape.
            address: The address of the other machine.
            ticket: The ticket of the tensor.
            dtype: The dtype of the tensor.
            is_sent: Whether the other machine probably sends it.

        Returns:
            An empty string, or the reason why the tensor could not be copied; and whether it was
            sent.
        """

    def connect(self, session: Hashable, address: str, options: dict[str, Any]) -> tuple[int, str]:
        """Connects to a program, to send it tensors. See ``Outgoing.connect``. Blocks."""

    def send(
        self, session: Hashable, number: int, tensor: torch.Tensor, options: dict[str, Any]
    ) -> None:
        """Sends a tensor over a connection. Blocks.

        Args:
            session: The session.
            number: The number of the connection.
            tensor: The tensor, or the bytes of a message.
            options: See ``Outgoing.send``.

        Raises:
            TensorStreamError: As ``Connection.send``.
        """

    def close(self, session: Hashable, number: int, reason: str | None) -> None:
        """Closes a connection. See ``Outgoing.close``. Blocks."""

    def open(self, source: str, beside: str = "") -> PassedSource:
        """Opens a file of a checkpoint. See ``Weights.open``. Blocks.

        Raises:
            TensorStreamError: The file cannot be opened, or the session may not read it.
        """

    def directories(self, source: str) -> list[str]:
        """Returns the directories of a source that have weights. See ``Weights.directories``.

        Raises:
            TensorStreamError: The session may not read the source.
        """


class LocalExchange:
    """The exchange of sessions that share one process.

    Args:
        peers: The other machines from which tensors can be fetched. None are sent.
        weights: The checkpoints that the sessions can read.
        outgoing: Connects sessions to programs. By default to none.
    """

    def __init__(
        self,
        peers: Peers | None = None,
        weights: Weights | None = None,
        outgoing: Outgoing | None = None,
    ) -> None:
        self._peers, self._weights = peers, weights or Weights()
        self._offers: Offers[torch.Tensor] = Offers()
        self._outgoing = outgoing or Outgoing()

    def offer(self, session: Hashable, tensor: torch.Tensor, ticket: str, to: str = "") -> str:
        # A copy, because the session may free, resize or write to the tensor.
        return self._offers.add(session, ticket, tensor.clone())

    def refuse(self, session: Hashable, ticket: str, reason: str) -> None:
        self._offers.refuse(session, ticket, reason)

    def withdraw(self, session: Hashable, ticket: str) -> None:
        self._offers.withdraw(session, ticket)

    def drop(self, session: Hashable) -> None:
        self._offers.drop(session)
        self._outgoing.drop(session)

    def claim(self, ticket: str) -> torch.Tensor:
        return self._offers.take(ticket)

    def fetch(
        self,
        into: torch.Tensor,
        address: str,
        ticket: str,
        dtype: torch.dtype,
        is_sent: bool = False,
    ) -> tuple[str, bool]:
        if self._peers is None:
            refusal = (
                f'this machine cannot fetch tensors from {address}; use a machine of kind "local", '
                f"or a server started with `tensorstream serve --peer {address}`"
            )
            return refusal, False
        metadata, sent = _metadata(dtype, into.shape), self._offers.receive
        try:
            got = self._peers.fetch(address, ticket, metadata, sent=sent, is_sent=is_sent)
            if isinstance(got, bytes):
                into.copy_(torch.frombuffer(bytearray(got), dtype=dtype).view(into.shape))
            else:
                _copy_sent(got, into, dtype)
        except RuntimeError as error:
            return str(error), False
        return "", not isinstance(got, bytes)

    def connect(self, session: Hashable, address: str, options: dict[str, Any]) -> tuple[int, str]:
        return self._outgoing.connect(session, address, options)

    def send(
        self, session: Hashable, number: int, tensor: torch.Tensor, options: dict[str, Any]
    ) -> None:
        host = _on_host(tensor)
        # DLPack of some versions of PyTorch lacks dtypes.
        elements = Tensor.from_dlpack(host.view(-1).view(torch.uint8))
        try:
            dtype, sizes, _ = layout(_metadata(host.dtype, host.shape))
            given = elements._view("", dtype, sizes, list(host.stride()), 0)
        except (RuntimeError, TypeError) as error:
            raise ConfigurationError(str(error)) from error
        self._outgoing.send(session, number, given, options)

    def close(self, session: Hashable, number: int, reason: str | None) -> None:
        self._outgoing.close(session, number, reason)

    def open(self, source: str, beside: str = "") -> PassedSource:
        opened = self._weights.open(source, beside)
        return opened.source() if isinstance(opened, OpenFile) else opened

    def directories(self, source: str) -> list[str]:
        return self._weights.directories(source)


class BrokerExchange:
    """The exchange of a session that has its own process. Sends requests to the broker."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._relay: RelayClient | None = None
        # Reentrant, because the garbage collector may withdraw a session's offers at any time.
        self._sending, self._requesting = threading.RLock(), threading.RLock()

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a message that the broker does not answer."""
        with self._sending:
            send(self._requests, message)

    def _request(
        self, message: dict[str, Any], descriptor: int | None = None
    ) -> tuple[dict[str, Any], list[int]]:
        if len(json.dumps(message)) > MAX_MESSAGE:
            raise ConfigurationError(
                f"the arguments are too long: the limit is {MAX_MESSAGE} bytes as JSON"
            )
        with self._requesting:
            with self._sending:
                send(self._requests, message, descriptor)
            answer = receive_all(self._requests)
        if answer is None:
            raise RuntimeError("the server is stopping, or has ended this session")
        return answer

    def offer(self, session: Hashable, tensor: torch.Tensor, ticket: str, to: str = "") -> str:
        packed, descriptor = pack(tensor)
        try:
            answer, _ = self._request({"offer": ticket, "tensor": packed, "to": to}, descriptor)
        finally:
            os.close(descriptor)
        return str(answer.get("refused", ""))

    def refuse(self, session: Hashable, ticket: str, reason: str) -> None:
        self.tell({"refuse": ticket, "reason": reason[:1000]})

    def withdraw(self, session: Hashable, ticket: str) -> None:
        self.tell({"withdraw": ticket})

    def drop(self, session: Hashable) -> None:
        """Does nothing, because the broker does so when this process ends."""

    def claim(self, ticket: str) -> torch.Tensor:
        return self._tensor({"claim": ticket}, LookupError)[0]

    def fetch(
        self,
        into: torch.Tensor,
        address: str,
        ticket: str,
        dtype: torch.dtype,
        is_sent: bool = False,
    ) -> tuple[str, bool]:
        metadata = _metadata(dtype, into.shape)
        request = {"fetch": ticket, "from": address, "tensor": metadata, "is_sent": is_sent}
        try:
            tensor, was_sent = self._tensor(request, RuntimeError)
            _copy_sent(tensor, into, dtype)
        except RuntimeError as error:
            return str(error), False
        return "", was_sent

    def _tensor(
        self, message: dict[str, Any], refusal: type[Exception]
    ) -> tuple[torch.Tensor, bool]:
        answer, descriptors = self._request(message)
        if not descriptors:
            raise refusal(answer.get("refused", "the server sent no tensor"))
        return unpack(answer, descriptors[0]), bool(answer.get("was_sent"))

    def connect(self, session: Hashable, address: str, options: dict[str, Any]) -> tuple[int, str]:
        answer = self._done({"connect": address, "options": options})
        return answer["number"], answer["peer"]

    def send(
        self, session: Hashable, number: int, tensor: torch.Tensor, options: dict[str, Any]
    ) -> None:
        packed, descriptor = pack(tensor)
        try:
            self._done({"send": number, "tensor": packed, "options": options}, descriptor)
        finally:
            os.close(descriptor)

    def close(self, session: Hashable, number: int, reason: str | None) -> None:
        self._done({"close": number, "reason": reason})

    def _done(self, message: dict[str, Any], descriptor: int | None = None) -> dict[str, Any]:
        """Returns the answer to a request that the broker must not refuse."""
        answer, _ = self._request(message, descriptor)
        if "refused" in answer:
            raise _refusal(answer)
        return answer

    def open(self, source: str, beside: str = "") -> PassedSource:
        answer, descriptors = self._request({"open": source, "beside": beside})
        match answer:
            case {"number": number, "name": name, "length": length}:
                # The first answer of this kind has the channels.
                self._relay = self._relay or RelayClient(descriptors)
                return self._relay.source(number, name, length)
            case {"name": name, "alignment": alignment}:
                direct = (descriptors[1], alignment) if len(descriptors) > 1 else None
                return PassedSource.of_file(name, descriptors[0], direct)
            case _:
                raise _refusal(answer)

    def directories(self, source: str) -> list[str]:
        found: list[str] = self._done({"directories": source})["directories"]
        return found


def _copy_sent(tensor: torch.Tensor, into: torch.Tensor, dtype: torch.dtype) -> None:
    """Copies a tensor of another machine.

    Raises:
        RuntimeError: It has another dtype or shape.
    """
    if (tensor.dtype, tensor.shape) != (dtype, into.shape):
        raise RuntimeError(
            f"the tensor that was sent has shape {list(tensor.shape)} and {tensor.dtype}, but "
            f"{list(into.shape)} and {dtype} are expected"
        )
    into.copy_(tensor)


def _refusal(answer: dict[str, Any]) -> Exception:
    """Returns the error with which the broker refused a request."""
    error: Exception = getattr(errors, answer["error"])(answer["refused"])
    return error


def pack(tensor: torch.Tensor) -> tuple[dict[str, Any], int]:
    """Copies a tensor to sealed memory.

    Returns:
        The metadata of the tensor, for ``unpack``, and a descriptor of the memory, which the caller
        owns.
    """
    tensor = _on_host(tensor)
    descriptor = os.memfd_create("tensorstream-offer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        nbytes = tensor.numel() * tensor.element_size()
        os.ftruncate(descriptor, nbytes)
        if nbytes:
            with mmap.mmap(descriptor, nbytes) as memory:
                copy = torch.frombuffer(memory, dtype=torch.uint8)
                copy.copy_(tensor.view(-1).view(torch.uint8))
                # Memory that is mapped for writing cannot be sealed.
                del copy
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return _metadata(tensor.dtype, tensor.shape), descriptor


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor, or a copy, that is contiguous on the host."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _metadata(dtype: torch.dtype, sizes: torch.Size) -> dict[str, Any]:
    """Returns the dtype and the sizes of a tensor, for ``layout``."""
    return {"dtype": str(dtype).removeprefix("torch."), "sizes": list(sizes)}


def unpack(packed: dict[str, Any], descriptor: int) -> torch.Tensor:
    """Returns a copy, on the CPU, of a tensor in sealed memory. Closes the descriptor.

    Raises:
        RuntimeError: The metadata, which another session has sent, is invalid or does not match the
            memory.
    """
    try:
        name, sizes, nbytes = layout(packed)
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise RuntimeError(f"invalid offer: the PyTorch of this machine has no dtype {name}")
        if (length := os.lseek(descriptor, 0, os.SEEK_END)) != nbytes:
            raise RuntimeError(f"invalid offer: expected memory of {nbytes} bytes, got {length}")
        if not nbytes:
            return torch.empty(sizes, dtype=dtype)
        with mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY) as memory:
            shared = torch.frombuffer(memory, dtype=dtype).view(sizes)
            copy = shared.clone()
            del shared
            return copy
    finally:
        os.close(descriptor)
