# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fetches tensors from other machines for sessions. Imports PyTorch at the first fetch."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: The timeout of connections to other machines, in seconds.
_TIMEOUT = 5.0


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
        self._machines: dict[str, Any] = {}
        self._locks: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)

    def fetch(self, address: str, ticket: str, limit: int | None = None) -> torch.Tensor:
        """Returns a copy, on the CPU, of a tensor that a machine offers. Blocks.

        Args:
            address: The address of the machine.
            ticket: The ticket of the tensor.
            limit: The most bytes to copy. None for no limit.

        Raises:
            RuntimeError: The address is not allowed, the machine cannot be reached, it offers no
                tensor under this ticket, or the tensor has more than ``limit`` bytes.
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
        from ..remote.client import _kernels

        with self._locks[address]:
            try:
                machine = self._machine(address)
                tensor: torch.Tensor = _kernels.CLAIM(
                    _kernels.anchor(machine.device().index), ticket
                )
                if limit is None or tensor.nbytes <= limit:
                    return tensor.cpu()
            except RuntimeError:
                if address in self._machines:
                    self._machines.pop(address).stop()
                raise
            raise RuntimeError(
                f"the tensor is too large: it has {tensor.nbytes} bytes, and the limit is {limit}"
            )

    def _machine(self, address: str) -> Any:
        from ..remote.client._machine import RemoteMachine

        if address not in self._machines:
            tls = {} if address.startswith("unix:") else self._tls
            self._machines[address] = RemoteMachine(
                "tcp", address, token=self._token, idle_timeout=_TIMEOUT, retry=0.0, **tls
            )
        return self._machines[address]
