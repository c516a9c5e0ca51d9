# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fetches tensors from other machines for sessions. Imports PyTorch at the first fetch."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ._offers import NOT_YET

if TYPE_CHECKING:
    import torch

#: The timeout of connections to other machines, in seconds.
_TIMEOUT = 5.0
#: The most connections to one machine. Each serves one fetch at a time.
_MAX_CONNECTIONS = 8
#: The longest time that a fetch waits until the tensor is computed and offered, in seconds.
_OFFER_TIMEOUT = 300.0


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
        #: By address: the machines that no fetch uses now, and the number of all.
        self._idle: dict[str, list[Any]] = collections.defaultdict(list)
        self._count: dict[str, int] = collections.defaultdict(int)
        self._freed = threading.Condition()

    def fetch(
        self,
        address: str,
        ticket: str,
        metadata: dict[str, Any],
        limit: int | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> torch.Tensor:
        """Returns a copy, on the CPU, of a tensor that a machine offers or will offer. Blocks.

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
        from ..remote.server._exchange import layout

        dtype, sizes, nbytes = layout(metadata)
        if limit is not None and nbytes > limit:
            raise RuntimeError(
                f"the tensor is too large: it has {nbytes} bytes, and the limit is {limit}"
            )
        with self._borrowed(address) as machine:
            return _claim(machine, ticket, dtype, sizes, wanted)

    @contextmanager
    def _borrowed(self, address: str) -> Iterator[Any]:
        """Connects to a machine, or takes a connection that is free.

        Several are necessary, because a fetch may wait for its offer.
        """
        with self._freed:
            if not self._freed.wait_for(
                lambda: self._idle[address] or self._count[address] < _MAX_CONNECTIONS, _TIMEOUT
            ):
                raise RuntimeError(
                    f"{_MAX_CONNECTIONS} other copies from {address} wait for their tensors"
                )
            machine = self._idle[address].pop() if self._idle[address] else None
            self._count[address] += machine is None
        try:
            machine = machine or self._connect(address)
            yield machine
        except BaseException:
            # The connection may be lost.
            with self._freed:
                self._count[address] -= 1
                self._freed.notify()
            if machine is not None:
                machine.stop()
            raise
        with self._freed:
            self._idle[address].append(machine)
            self._freed.notify()

    def _connect(self, address: str) -> Any:
        from ..remote.client._machine import RemoteMachine

        tls = {} if address.startswith("unix:") else self._tls
        return RemoteMachine(
            "tcp", address, token=self._token, idle_timeout=_TIMEOUT, retry=_TIMEOUT, **tls
        )


def _claim(
    machine: Any, ticket: str, dtype: torch.dtype, sizes: list[int], wanted: Callable[[], bool]
) -> torch.Tensor:
    """Claims a tensor of a machine, again and again until it is offered."""
    import torch

    from ..remote.client import _server_operators as _operators

    end = time.monotonic() + _OFFER_TIMEOUT
    while True:
        into = torch.empty(sizes, dtype=dtype, device=machine.device())
        # Without a wait in between, the tensor comes with the answer to the claim.
        _operators.CLAIM(into, ticket)
        try:
            return into.cpu()
        except RuntimeError as error:
            if NOT_YET not in str(error) or time.monotonic() > end or not wanted():
                raise
