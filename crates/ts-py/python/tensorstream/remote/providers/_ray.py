# SPDX-License-Identifier: MIT OR Apache-2.0
"""The provider "ray": an actor on a node of a Ray cluster hosts the server.

Ray places the actor, and reports its death. Tensors do not pass through Ray: the client connects to
the server, and servers connect to each other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import secrets
import socket
import types
from collections.abc import Mapping
from typing import Any

from ...budget import parse_size
from ...errors import (
    ConfigurationError,
    ProviderAuthenticationError,
    ProviderCapacityError,
    ProviderConnectionError,
    ProviderError,
)
from ...serve._ray_host import STOP, Host
from ._base import KINDS, Provider, Request, Server
from ._messages import brief_error

_log = logging.getLogger("tensorstream.remote")

#: The time that connecting to a cluster may take, in seconds.
_CONNECT = 10.0

#: The secret of all servers that this process starts, so that they can share tensors. It reaches
#: the actors as an argument, which Ray keeps in its object store.
_TOKEN = secrets.token_hex(32)


class RayProvider(Provider):
    """Starts an actor on a node of a Ray cluster, which hosts a server.

    The server listens on the node's address, and requires a secret that only this process and its
    servers have. The connections are not encrypted, and Ray's are not either unless it is
    configured: use a network that only you use. The actor ends with the machine, or with this
    process.

    The node needs Python, PyTorch and TensorStream as here. ``runtime_env`` can install them.

    Args:
        address: The address of the cluster, as ``ray.init`` takes it. The default is the cluster to
            which this process is connected, or else that of the environment or of this computer.
        num_cpus: The number of CPUs that Ray reserves, at least 1. It is also the number of PyTorch
            threads.
        resources: The custom resources that Ray reserves, by name.
        runtime_env: The environment of the actor, as Ray takes it.
        node: The ID of the node. The default is any node with enough resources. A request for GPUs
            reserves as many as the machine has devices.
        memory: The most memory of one session, in bytes or such as "4GiB". Unlimited by default.
        budget: The most memory for weights that the machine loads, in bytes or such as "4GiB".
            Those that do not fit are streamed. The default is unlimited.
        start_timeout: The longest time to wait for a node and its server, in seconds.

    Raises:
        ConfigurationError: An option is invalid.
    """

    name = "ray"

    def __init__(
        self,
        *,
        address: str | None = None,
        num_cpus: int = 1,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        node: str | None = None,
        memory: int | str | None = None,
        budget: int | str | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        if not isinstance(num_cpus, int) or num_cpus < 1:
            raise ConfigurationError(f"invalid num_cpus {num_cpus!r}: expected at least 1")
        if not (math.isfinite(start_timeout) and start_timeout > 0):
            raise ConfigurationError(
                f"invalid start_timeout {start_timeout!r}: expected seconds above 0"
            )
        self._cluster, self._num_cpus, self._node = address, num_cpus, node
        self._resources, self._runtime_env = dict(resources or {}), dict(runtime_env or {})
        self._memory = None if memory is None else parse_size(memory, "memory")
        self._budget = None if budget is None else parse_size(budget, "budget")
        self._start_timeout = start_timeout

    @classmethod
    def probe(cls) -> str | None:
        """Returns ``None`` if Ray is installed, else what to do."""
        found = importlib.util.find_spec("ray")
        return None if found else "Ray is not installed: `pip install ray`"

    def start(self, request: Request) -> Server:
        """Starts an actor and its server. Blocks until the server listens."""
        ray = connected(self._cluster)
        actor = ray.remote(Host).options(**self._actor_options(request)).remote()
        try:
            return RayServer(actor, self._await_address(ray, actor, request))
        except BaseException:
            ray.kill(actor)
            raise

    def _actor_options(self, request: Request) -> dict[str, Any]:
        # `wait` blocks one thread of the actor, and `stop` needs another one.
        options: dict[str, Any] = {"num_cpus": self._num_cpus, "max_concurrency": 4}
        if request.kind != "cpu":
            options["num_gpus"] = request.device_count
            if request.device_type not in KINDS:
                options["accelerator_type"] = _base(request.device_type)
        if self._resources:
            options["resources"] = self._resources
        if self._runtime_env:
            options["runtime_env"] = self._runtime_env
        if self._node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._node, soft=False)
        return options

    def _needs(self, request: Request) -> str:
        """Returns the resources that a machine needs, for an error."""
        gpus = [] if request.kind == "cpu" else [(request.device_count, request.device_type)]
        own = [(count, name) for name, count in self._resources.items()]
        needs = [(self._num_cpus, "CPU"), *gpus, *own]
        return " and ".join(f"{count:g} {name}" for count, name in needs)

    def _await_address(self, ray: Any, actor: Any, request: Request) -> str:
        """Starts the server of an actor. Returns its address."""
        _log.info("%s: starting a server on a node of the Ray cluster", request.name)
        started = actor.start.remote(
            {
                "token": _TOKEN,
                "device": request.kind,
                "devices": request.device_count,
                "threads": self._num_cpus,
                "session_memory": self._memory,
                "budget": self._budget,
            }
        )
        try:
            address: str = ray.get(started, timeout=self._start_timeout)
        except ray.exceptions.GetTimeoutError:
            raise ProviderCapacityError(
                f"cannot start a machine: no server was ready after {self._start_timeout:g} "
                f"seconds; it needs {self._needs(request)}; of {_text(ray.cluster_resources())}, "
                f"Ray has {_text(ray.available_resources())} left"
            ) from None
        except ray.exceptions.RayError as error:
            raise _error(ray, error) from error
        return address


class RayServer(Server):
    """The server of an actor.

    Args:
        actor: The actor, whose server listens.
        address: The address of the server.
    """

    def __init__(self, actor: Any, address: str) -> None:
        self.actor, self.address, self.token = actor, address, _TOKEN
        # Ray fails the call when the actor dies.
        self._over = actor.wait.remote().future()

    def failure(self) -> str | None:
        """Returns how the actor, or its server, has ended."""
        if not self._over.done():
            return None
        error = self._over.exception()
        if error is not None:
            return f"its Ray actor died: {brief_error(error)}"
        return str(self._over.result())

    def stop(self) -> None:
        """Ends the server and the actor. Blocks, for at most 10 seconds."""
        import ray

        if not ray.is_initialized():
            return  # the actor has ended with the connection to Ray
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.actor.stop.remote(), timeout=STOP)
        ray.kill(self.actor)


def connected(address: str | None) -> types.ModuleType:
    """Returns the module ``ray``, connected to a cluster. Blocks.

    Raises:
        ProviderAuthenticationError: The cluster does not accept this process.
        ProviderConnectionError: There is no cluster at the address.
    """
    import ray

    if ray.is_initialized():
        return ray
    _check_reachable(address or os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(address or "auto", log_to_driver=False)
    except Exception as error:
        if isinstance(error, ray.exceptions.RayError):
            raise _error(ray, error) from error
        where = "of the environment, or on this computer" if address is None else f"at {address}"
        raise ProviderConnectionError(
            f"cannot connect to a Ray cluster {where}: {brief_error(error)}; start one with "
            "`ray start --head`, or pass its `address`"
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Connects to the address of a cluster, because Ray ends the process if it cannot."""
    host, _, port = address.rpartition(":")
    if "://" in address or not (host and port.isdecimal()):
        return  # Ray finds the cluster, or refuses the address
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
    except OSError as error:
        raise ProviderConnectionError(
            f"cannot connect to a Ray cluster at {address}: {error}; start one with "
            "`ray start --head`, or pass its `address`"
        ) from error


def nodes(address: str | None, request: Request, num_cpus: int) -> list[str]:
    """Returns the IDs of the nodes that run and have what a machine needs, sorted. Blocks.

    Raises:
        ProviderCapacityError: There is no such node.
        ProviderError: The cluster cannot be used.
    """
    ray = connected(address)
    running = [node for node in ray.nodes() if node["Alive"]]
    needs: dict[str, float] = {"CPU": num_cpus}
    if request.kind != "cpu":
        needs["GPU"] = request.device_count
        if request.device_type not in KINDS:
            needs[f"accelerator_type:{_base(request.device_type)}"] = 0.001
    found = sorted(
        node["NodeID"]
        for node in running
        if all(node["Resources"].get(name, 0) >= count for name, count in needs.items())
    )
    if not found:
        named = " and ".join(f"{count:g} {name}" for name, count in needs.items())
        raise ProviderCapacityError(
            f"cannot start machines: none of the {len(running)} nodes has {named}"
        )
    return found


def _base(device_type: str) -> str:
    """Returns Ray's type of a GPU. It is without the size of the memory, which is checked later."""
    return device_type.partition("-")[0]


def _error(ray: types.ModuleType, error: Exception) -> ProviderError:
    """Returns the error for an exception of Ray."""
    cause: BaseException = getattr(error, "cause", None) or error
    kinds = ray.exceptions
    kind: type[ProviderError] = ProviderError
    if isinstance(error, getattr(kinds, "AuthenticationError", ())):
        kind = ProviderAuthenticationError
    elif isinstance(error, kinds.ActorUnschedulableError | kinds.OutOfMemoryError) or isinstance(
        cause, MemoryError
    ):
        kind = ProviderCapacityError
    elif isinstance(error, kinds.ActorUnavailableError | kinds.NodeDiedError):
        kind = ProviderConnectionError
    return kind(f"cannot start a machine with Ray: {brief_error(cause)}")


def _text(resources: Mapping[str, float]) -> str:
    """Returns the resources of a cluster that users ask for."""
    named = [
        f"{count:g} {name}" for name, count in sorted(resources.items()) if name in ("CPU", "GPU")
    ]
    return " and ".join(named) or "no CPU"
