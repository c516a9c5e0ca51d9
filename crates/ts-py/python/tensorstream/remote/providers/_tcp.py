# SPDX-License-Identifier: MIT OR Apache-2.0
"""The provider "tcp": a server that runs already."""

from __future__ import annotations

import os

from ...errors import ConfigurationError
from ._base import Provider, Request, Server

_Path = str | os.PathLike[str]


class TcpProvider(Provider):
    """Connects to a running ``tensorstream serve``.

    Args:
        address: Its address: "HOST:PORT" or "unix:PATH".
        token: The secret that it requires.
        ca: A file of certificates (PEM) to trust. The connection then uses TLS.
        cert: A certificate (PEM) of this client, if the server requires one.
        key: The private key of ``cert`` (PEM).

    Raises:
        ConfigurationError: There is no address.
    """

    name = "tcp"

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        ca: _Path | None = None,
        cert: _Path | None = None,
        key: _Path | None = None,
    ) -> None:
        if address is None:
            raise ConfigurationError(
                'missing address: a machine of kind "tcp" needs HOST:PORT or unix:PATH'
            )
        self.address = address
        self._server = _Running(address, token, ca, cert, key)

    def start(self, request: Request) -> Server:
        """Returns the server. Does not connect."""
        return self._server


class _Running(Server):
    """A server that other programs start and end."""

    def __init__(
        self,
        address: str,
        token: str | None,
        ca: _Path | None,
        cert: _Path | None,
        key: _Path | None,
    ) -> None:
        self.address, self.token = address, token
        self.ca, self.cert, self.key = ca, cert, key

    def stop(self) -> None:
        """Does nothing."""
