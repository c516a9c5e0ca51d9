# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a provider of machines is."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

#: The types of devices that are not types of NVIDIA GPUs.
KINDS = ("cpu", "cuda", "accelerator")


@dataclass(frozen=True)
class Request:
    """A machine to start.

    Attributes:
        name: The name of the machine in messages.
        device_type: "cpu", "cuda" for any NVIDIA GPU, "accelerator" for any accelerator of PyTorch,
            or a type of NVIDIA GPU, such as "A100".
        device_count: The number of devices, at least 1.
    """

    name: str
    device_type: str
    device_count: int

    @property
    def kind(self) -> str:
        """What runs the operators: "cpu", "cuda" or "accelerator"."""
        return self.device_type if self.device_type in KINDS else "cuda"


class Server(ABC):
    """A server that a provider has started, or one that runs already.

    All servers of a provider must have the same token and certificates, because a machine that is
    paused goes on with another server.

    Attributes:
        address: Its address: "HOST:PORT" or "unix:PATH".
        token: The secret that it requires, or ``None``.
        ca: A file of certificates (PEM) to trust, or ``None``. With it, connections use TLS.
        cert: A certificate (PEM) of this client, if the server requires one.
        key: The private key of ``cert`` (PEM).
    """

    address: str
    token: str | None = None
    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None

    def failure(self) -> str | None:
        """Returns why the server has ended by itself, or ``None``. Does not block.

        A machine asks several times a second. When the server has ended, the calls that wait for it
        fail at once, with this reason. The default is ``None``: nothing is known.
        """
        return None

    @abstractmethod
    def stop(self) -> None:
        """Ends the server, if the provider has started it. Blocks. Its session is closed before."""


class Provider(ABC):
    """Starts the servers of machines. The arguments of its constructor are options.

    ``RemoteMachine("NAME", option=value)`` creates the provider with this name and its options,
    which cannot have the names of ``RemoteMachine``'s own arguments, nor "timeout" or "patience". A
    package adds a provider with an entry point in the group ``tensorstream.providers``, whose name
    is that of the provider.

    Attributes:
        name: The name of the provider.
        keeps_sessions: Whether the server keeps the session of a client whose connection is lost,
            so that the client tries again when it is refused. ``tensorstream serve`` does.
        shares_files: Whether machines see the files of this computer under the same paths, so that
            a relative path means the same there.
        simulates: Whether the provider accepts types of GPUs that it does not have, for tests.

    Examples:
        >>> from tensorstream.remote.providers import Provider, Request, Server
        >>> class Running(Server):
        ...     def __init__(self, address):
        ...         self.address = address
        ...
        ...     def stop(self):
        ...         pass
        >>> class Rack(Provider):
        ...     name = "rack"
        ...
        ...     def __init__(self, shelf):
        ...         self.shelf = shelf
        ...
        ...     def start(self, request):
        ...         return Running(f"shelf-{self.shelf}.example:7470")
        >>> Rack(3).start(Request("a", "cpu", 1)).address
        'shelf-3.example:7470'
    """

    name: ClassVar[str]
    keeps_sessions: ClassVar[bool] = True
    shares_files: ClassVar[bool] = False
    simulates: ClassVar[bool] = False

    @classmethod
    def probe(cls) -> str | None:
        """Returns ``None`` if this computer can use the provider, else the reason and what to do.

        Does not connect to anything.
        """
        return None

    def device_types(self) -> Mapping[str, int] | None:
        """Returns the most devices of one machine by type. ``None`` if only the machine knows."""
        return None

    @abstractmethod
    def start(self, request: Request) -> Server:
        """Starts a server. Blocks until it accepts connections.

        Raises:
            ConfigurationError: An option is invalid.
            ProviderConnectionError: The machine, or the service that provides it, cannot be
                reached.
            ProviderAuthenticationError: It does not accept the user.
            ProviderCapacityError: It has no free machine, devices or memory.
        """
