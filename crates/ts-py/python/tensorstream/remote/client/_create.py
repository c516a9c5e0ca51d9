# SPDX-License-Identifier: MIT OR Apache-2.0
"""Creates machines of one kind, by functions whose names are those of the older interface."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..providers import Request
from ..providers._ray import nodes
from ._machine import RemoteMachine


def create_mock_machine(
    device_type: str = "cpu", device_count: int = 1, **options: Any
) -> RemoteMachine:
    """Creates a machine in a thread of this process, like ``RemoteMachine("mock", ...)``.

    The arguments and errors are those of ``RemoteMachine``.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import create_mock_machine
        >>> with create_mock_machine(device_count=2) as machine:
        ...     torch.ones(2, device=machine.device(1)).tolist()
        [1.0, 1.0]
    """
    return RemoteMachine("mock", device_type=device_type, device_count=device_count, **options)


def create_local_machine(
    device_type: str = "cpu", device_count: int = 1, **options: Any
) -> RemoteMachine:
    """Creates a machine in a process on this computer, like ``RemoteMachine("local", ...)``.

    The arguments and errors are those of ``RemoteMachine``.

    Examples:
        >>> from tensorstream.remote import create_local_machine
        >>> machine = create_local_machine(device_count=2, start=False)
        >>> machine.kind, machine.device_count
        ('local', 2)
    """
    return RemoteMachine("local", device_type=device_type, device_count=device_count, **options)


def create_ssh_machine(
    host: str, device_type: str = "cpu", device_count: int = 1, **options: Any
) -> RemoteMachine:
    """Starts a server on a host that ssh reaches, like ``RemoteMachine("ssh", host, ...)``.

    The arguments and errors are those of ``RemoteMachine`` and its provider.

    Examples:
        >>> from tensorstream.remote import create_ssh_machine
        >>> machine = create_ssh_machine("user@gpu.example", "A100", start=False)
        >>> machine.kind, machine.device_type
        ('ssh', 'A100')
    """
    return RemoteMachine.ssh(host, device_type=device_type, device_count=device_count, **options)


def create_tcp_machine(
    address: str, device_type: str = "cpu", device_count: int = 1, **options: Any
) -> RemoteMachine:
    """Connects to ``tensorstream serve``, like ``RemoteMachine("tcp", address, ...)``.

    The arguments and errors are those of ``RemoteMachine``.

    Examples:
        >>> from tensorstream.remote import create_tcp_machine
        >>> machine = create_tcp_machine("gpu.example:7470", token="secret", start=False)
        >>> machine.kind, machine.address
        ('tcp', 'gpu.example:7470')
    """
    return RemoteMachine.tcp(address, device_type=device_type, device_count=device_count, **options)


def create_modal_machine(
    device_type: str = "cpu", device_count: int = 1, **options: Any
) -> RemoteMachine:
    """Starts a server in a container on Modal, like ``RemoteMachine("modal", ...)``.

    The arguments and errors are those of ``RemoteMachine`` and its provider.

    Examples:
        >>> from tensorstream.remote import create_modal_machine
        >>> machine = create_modal_machine("T4", start=False)  # doctest: +SKIP
    """
    return RemoteMachine("modal", device_type=device_type, device_count=device_count, **options)


def create_ray_machine(
    device_type: str = "cpu", device_count: int = 1, **options: Any
) -> RemoteMachine:
    """Starts a server on a node of a Ray cluster, like ``RemoteMachine("ray", ...)``.

    The arguments and errors are those of ``RemoteMachine`` and its provider.

    Examples:
        >>> from tensorstream.remote import create_ray_machine
        >>> machine = create_ray_machine("A100", start=False)  # doctest: +SKIP
    """
    return RemoteMachine("ray", device_type=device_type, device_count=device_count, **options)


def create_ray_machines(
    device_type: str = "cpu", device_count: int = 1, *, address: str | None = None, **options: Any
) -> list[RemoteMachine]:
    """Starts a server on each node of a Ray cluster that has the devices. Blocks.

    Args:
        device_type: The type of the devices, as for ``RemoteMachine``.
        device_count: The number of devices of each machine. Nodes with fewer GPUs are left out.
        address: The address of the cluster. See ``RayProvider``.
        options: The other arguments of ``RemoteMachine`` and its provider, for all machines.

    Returns:
        The machines, in the order of their nodes' IDs. Their names have the beginnings of these.

    Raises:
        ProviderCapacityError: No node has the devices.
        ProviderError: A node cannot start a server. Those that were started are stopped.
    """
    # Checks the arguments.
    asked = RemoteMachine(
        "ray", device_type=device_type, device_count=device_count, address=address, start=False,
        **options,
    )  # fmt: skip
    kind = asked.device_type
    request = Request("", kind, device_count)
    found = nodes(address, request, options.get("num_cpus", 1))
    machines = [
        RemoteMachine(
            "ray", device_type=device_type, device_count=device_count, address=address, node=node,
            name=f"ray-{node[:12]}", start=False, **options,
        )
        for node in found
    ]  # fmt: skip
    try:
        with ThreadPoolExecutor(len(machines)) as starting:
            list(starting.map(RemoteMachine.start, machines))
    except BaseException:
        for machine in machines:
            machine.stop()
        raise
    return machines
