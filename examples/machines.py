# SPDX-License-Identifier: MIT OR Apache-2.0
"""The machines of the examples: nodes of a Ray cluster, other computers, or processes here."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from tensorstream.remote import RemoteMachine, create_modal_machine, create_ray_machines


def start(stack: ExitStack, names: list[str] | None = None) -> list[RemoteMachine]:
    """Starts the machines that the command line or ``names`` asks for, until ``stack`` is closed.

    - `ray`, or `ray ADDRESS`: one on each node of a Ray cluster.
    - `ssh HOST...`: one on each host, with ssh.
    - `modal GPU`: one at Modal, with a GPU such as "T4".
    - nothing: two processes on this computer.
    """
    match sys.argv[1:] if names is None else names:
        case ["ray", *address]:
            machines = create_ray_machines(address=address[0] if address else None)
        case ["ssh", *hosts] if hosts:
            machines = [RemoteMachine.ssh(host) for host in hosts]
        case ["modal", gpu]:
            machines = [create_modal_machine(gpu)]
        case []:
            machines = [RemoteMachine.local(name=name) for name in ("one", "other")]
        case _:
            sys.exit(f"usage: {sys.argv[0]} [ray [ADDRESS] | ssh HOST... | modal GPU]")
    for machine in machines:
        stack.callback(machine.stop)
    return machines
