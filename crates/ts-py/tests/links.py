# SPDX-License-Identifier: MIT OR Apache-2.0
"""Links network namespaces. The links lose packets, delay them, or are slow."""

from __future__ import annotations

import heapq
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import preloaded

__all__ = ["Link", "Namespace", "bad_link", "shaped_star", "skip_reason"]

# Not every kernel has netem, so the packets of `bad_link` pass through this process, which delays
# or drops them.
_OPEN_TUN = """
import fcntl, os, socket, struct, sys
tun = os.open("/dev/net/tun", os.O_RDWR)
# TUNSETIFF, IFF_TUN | IFF_NO_PI
fcntl.ioctl(tun, 0x400454ca, struct.pack("16sH14x", b"tun0", 0x1001))
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], [tun])
"""
# Puts the threads of a process that has only one into a namespace.
_ENTER = """
import ctypes
with open("/var/run/netns/{}") as space:
    assert ctypes.CDLL(None).setns(space.fileno(), 0) == 0
"""
_MTU = 9000


def skip_reason() -> str | None:
    """Returns why this computer cannot link network namespaces, or None if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs root, ip and tc"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    result = subprocess.run(
        ["ip", "netns", "add", f"ts-try-{os.getpid()}"], capture_output=True, check=False
    )
    if result.returncode:
        return "needs network namespaces"
    _run("ip", "netns", "del", f"ts-try-{os.getpid()}")
    return None


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Namespace:
    """A network namespace, which acts as a separate machine.

    Its processes are killed at the end of the ``with`` block.
    """

    def __init__(self, name: str) -> None:
        self.name = f"ts-{os.getpid()}-{name}"
        self.processes: list[subprocess.Popen[str] | preloaded.Program] = []

    def __enter__(self) -> Namespace:
        _run("ip", "netns", "add", self.name)
        self.ip("link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        _run("ip", "netns", "del", self.name)

    def ip(self, *arguments: str) -> None:
        _run("ip", "-n", self.name, *arguments)

    def start(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        self.processes.append(process)
        return process

    def start_code(
        self, programs: preloaded.Server, code: str, *arguments: object
    ) -> preloaded.Program:
        """Starts the text of a program."""
        program = programs.start_code(_ENTER.format(self.name) + code, *arguments)
        self.processes.append(program)
        return program


class Link:
    """Forwards packets between two namespaces. Its attributes can be changed at any time.

    ``loss`` is the probability that a packet is dropped, and ``cut`` drops all packets. At first,
    the link is fast and drops none.
    """

    def __init__(self, ends: tuple[int, int]) -> None:
        self.delay_s = 0.0
        self.loss = 0.0
        self.bytes_per_s = float("inf")
        self.cut = False
        self.dropped = 0
        self._ends = ends
        self._stop = threading.Event()
        self._random = random.Random(7)
        self._thread = threading.Thread(target=self._forward)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _forward(self) -> None:
        # The time of delivery, the order of arrival, the target and the content of each packet.
        pending: list[tuple[float, int, int, bytes]] = []
        free_at = dict.fromkeys(self._ends, 0.0)
        number = 0
        while not self._stop.is_set():
            now = time.monotonic()
            while pending and pending[0][0] <= now:
                _, _, target, packet = heapq.heappop(pending)
                os.write(target, packet)
            timeout = min(0.05, pending[0][0] - now) if pending else 0.05
            for end in select.select(self._ends, [], [], timeout)[0]:
                packet = os.read(end, 1 << 16)
                target = self._ends[1] if end == self._ends[0] else self._ends[0]
                now = time.monotonic()
                free_at[target] = max(free_at[target], now) + len(packet) / self.bytes_per_s
                # Like a router, queues at most 100 ms of packets for each end, and drops the rest.
                full = free_at[target] - now > 0.1
                if self.cut or full or self._random.random() < self.loss:
                    self.dropped += 1
                    continue
                number += 1
                heapq.heappush(pending, (free_at[target] + self.delay_s, number, target, packet))


@contextmanager
def bad_link() -> Iterator[tuple[Namespace, Namespace, Link]]:
    """Links two new namespaces, and yields them with their link.

    Their addresses are 10.77.0.1 and 10.77.0.2.
    """
    with ExitStack() as stack:
        spaces = [stack.enter_context(Namespace(name)) for name in ("a", "b")]
        ends = []
        for number, space in enumerate(spaces, 1):
            receiver, sender = socket.socketpair()
            process = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    space.name,
                    sys.executable,
                    "-c",
                    _OPEN_TUN,
                    str(sender.fileno()),
                ],
                pass_fds=[sender.fileno()],
            )
            ends.append(socket.recv_fds(receiver, 1, 1)[1][0])
            assert process.wait() == 0
            receiver.close()
            sender.close()
            space.ip("addr", "add", f"10.77.0.{number}/24", "dev", "tun0")
            space.ip("link", "set", "tun0", "mtu", str(_MTU), "up")
        link = stack.enter_context(Link((ends[0], ends[1])))
        yield spaces[0], spaces[1], link


@contextmanager
def shaped_star(count: int, rate: str) -> Iterator[list[tuple[Namespace, str]]]:
    """Creates namespaces that a switch connects. Yields a list of them and their addresses.

    Args:
        count: The number of namespaces.
        rate: The rate of each link, in both directions, such as "400mbit".
    """
    with ExitStack() as stack:
        hub = stack.enter_context(Namespace("hub"))
        hub.ip("link", "add", "br0", "type", "bridge")
        hub.ip("link", "set", "br0", "up")
        nodes = []
        for number in range(1, count + 1):
            space = stack.enter_context(Namespace(f"n{number}"))
            hub.ip(
                "link",
                "add",
                f"p{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space.name,
            )
            hub.ip("link", "set", f"p{number}", "master", "br0", "up")
            space.ip("addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            space.ip("link", "set", "eth0", "up")
            for name, device in ((hub.name, f"p{number}"), (space.name, "eth0")):
                shape = ["rate", rate, "burst", "256kb", "latency", "50ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *shape)
            nodes.append((space, f"10.78.0.{number}"))
        yield nodes
