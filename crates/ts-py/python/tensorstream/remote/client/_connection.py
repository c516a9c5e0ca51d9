# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sends tensors of a machine to other programs, without passing them through this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from ...errors import ConfigurationError, TensorStreamError
from ...wire._connection import Compression
from .. import _registry
from .._answers import answered
from . import _server_operators as operators

#: The most characters of a tensor's name and metadata, as JSON.
_MAX_OPTIONS = 24 << 10
#: The reason of ``close``, as that of ``Connection``.
_CLOSED = "the peer called close()"


class MachineConnection:
    """A connection from a machine to a ``ts.Listener``. ``RemoteMachine.connect`` creates it.

    It only sends; what the program sends is dropped. The connection ends with the session of the
    machine, and if sending fails. A tensor that the program refuses, for example because of its
    ``limit_bytes``, is reported by a later call. Delivery is only certain after ``close``, or after
    the end of a ``with`` block. Without these, the program gets ``ConnectionLost`` at the end.

    Attributes:
        peer: The address of the other side.

    Examples:
        >>> import tensorstream as ts, threading, torch
        >>> from tensorstream.remote import RemoteMachine
        >>> listener = ts.listen("unix:a.socket")
        >>> def receive():
        ...     with listener.accept() as connection:
        ...         print(connection.recv().name, connection.recv())
        >>> thread = threading.Thread(target=receive)
        >>> thread.start()
        >>> with RemoteMachine.mock() as machine:
        ...     with machine.connect("unix:a.socket") as connection:
        ...         connection.send(torch.ones(2, device=machine.device()), "ones")
        ...         connection.send_message(b"done")
        >>> thread.join()
        ones b'done'
        >>> listener.close()
    """

    def __init__(
        self, machine: str, device: torch.device, address: str, options: dict[str, Any]
    ) -> None:
        self._machine, self._device = machine, device
        text = operators.CONNECT(operators.anchor(device.index), address, json.dumps(options))
        answer = answered(text, machine)
        self.peer: str = answer["peer"]
        self._number: int | None = answer["number"]

    def send(
        self,
        tensor: torch.Tensor,
        name: str | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        compression: Compression | None = None,
        checksums: bool = False,
    ) -> None:
        """Sends a tensor. Blocks until the operating system of the machine has all of its bytes.

        The elements are sent in row-major order. The tensor may be written to afterwards.

        Args:
            tensor: A tensor of the machine.
            name: Its name at the receiver.
            metadata: Text by key, for the receiver.
            compression: As ``Connection.send``.
            checksums: As ``Connection.send``.

        Raises:
            ConfigurationError: The tensor is not on the machine, an argument is invalid, or the
                connection is closed.
            ConnectionLost: The other side closed the connection; or the machine cannot be reached.
            ConnectionTimeout: The other side is silent, or makes no progress.
            RemoteTensorError: An operator that computes the tensor has failed.
            RemoteOutOfMemoryError: The machine has too little memory for the copy.
        """
        if not self._is_here(tensor.device):
            raise ConfigurationError(
                f"cannot send a tensor on {tensor.device} from machine {self._machine}: move it "
                f'there with tensor.to("{self._device}")'
            )
        options = json.dumps(
            {
                "name": name or "",
                "metadata": dict(metadata or {}),
                "compression": compression,
                "checksums": checksums,
            }
        )
        if len(options) > _MAX_OPTIONS:
            raise ConfigurationError(
                f"the name and the metadata are too long: {len(options)} characters as JSON, and "
                f"the limit is {_MAX_OPTIONS}"
            )
        self._send(tensor.detach().resolve_conj().resolve_neg(), options)

    def send_message(self, message: bytes) -> None:
        """Sends a message of at most 64 KiB. Blocks until the operating system of the machine has
        it.

        Raises:
            ConfigurationError: The message is too long, or the connection is closed.
            ConnectionLost: The other side closed the connection; or the machine cannot be reached.
            ConnectionTimeout: The other side is silent, or makes no progress.
        """
        elements = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else None
        on_machine = (torch.empty(0, dtype=torch.uint8) if elements is None else elements).to(
            self._device
        )
        self._send(on_machine, json.dumps({"message": True}))

    def close(self, reason: str = _CLOSED) -> None:
        """Sends everything that is queued, and closes the connection. See ``Connection.close``.

        Args:
            reason: A reason, which is sent to the other side and appears in its errors. At most
                1000 characters of it are.

        Raises:
            ConnectionLost: A tensor was refused, or the connection was lost before everything was
                received; or the machine cannot be reached.
            ConnectionTimeout: The other side is silent, or makes no progress.
        """
        self._end(reason[:1000])

    def _end(self, reason: str | None) -> None:
        """Closes the connection. Without a reason, drops what is not sent yet."""
        number, self._number = self._number, None
        if number is not None:
            anchor = operators.anchor(self._device.index)
            answered(operators.DISCONNECT(anchor, number, reason), self._machine)

    def _send(self, tensor: torch.Tensor, options: str) -> None:
        if self._number is None:
            raise ConfigurationError(f"the connection from machine {self._machine} is closed")
        answered(operators.SEND(tensor, self._number, options), self._machine)

    def _is_here(self, device: torch.device) -> bool:
        addresses = _registry.ADDRESSES
        if self._device.index not in addresses:
            raise ConfigurationError(
                f"the connection is closed: machine {self._machine} is paused or stopped"
            )
        own, _ = addresses[self._device.index]
        return device.type == "ts" and addresses.get(device.index, (-1, ""))[0] == own

    def __enter__(self) -> MachineConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            return self.close()
        with contextlib.suppress(TensorStreamError, RuntimeError):  # such as a lost machine
            self._end(None)

    def __repr__(self) -> str:
        state = "closed" if self._number is None else "open"
        return f"<connection from machine {self._machine} to {self.peer}, {state}>"
