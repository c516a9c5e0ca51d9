# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs ``tensorstream serve`` and ``tensorstream serve-weights`` in child processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "PROGRAM", "SERVE", "Serving", "children", "free_port", "get", "is_running", "served",
    "serving",
]  # fmt: skip

SERVE = [sys.executable, "-m", "tensorstream.serve"]
PROGRAM = Path(sys.executable).parent / "tensorstream"


class Serving:
    """A running ``tensorstream serve``, which ends with the ``with`` block.

    Args:
        options: Options with values.
        flags: Options without values.
        log: A file for its standard error.
    """

    def __init__(
        self, options: dict[str, Any] | None = None, *flags: str, log: Path | None = None
    ) -> None:
        options = {"--listen": "127.0.0.1:0", "--threads": 1, **(options or {})}
        self._log = log.open("w", encoding="utf-8") if log else None
        self.process = subprocess.Popen(
            [*SERVE, *(str(part) for option in options.items() for part in option), *flags],
            stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().removeprefix("listening at ").strip()

    def zygote(self) -> int:
        """Returns the ID of the process from which sessions are forked."""
        (child,) = children(self.process.pid)
        return child

    def sessions(self) -> list[int]:
        """Returns the IDs of the processes of sessions, in ascending order."""
        return children(self.zygote())

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.terminate()
            self.process.wait(30)
        if self._log:
            self._log.close()
        assert self.process.returncode in (0, -signal.SIGKILL)


@contextmanager
def served(directory: Path, *arguments: str) -> Iterator[str]:
    """Serves the files of a directory, and yields its URL. Ends the server with
    SIGINT, as Ctrl-C would."""
    with serving(directory, *arguments) as (url, _):
        yield url


@contextmanager
def serving(directory: Path, *arguments: str) -> Iterator[tuple[str, int]]:
    """Serves the files of a directory, and yields its URL and its process ID."""
    command = [PROGRAM, "--json", "serve-weights", directory]
    server = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        yield json.loads(server.stdout.readline())["url"], server.pid
    finally:
        server.send_signal(signal.SIGINT)
        rest, _ = server.communicate(timeout=20)
    assert server.returncode == 0
    assert json.loads(rest)["sent_bytes"] > 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def get(port: int, path: str) -> tuple[int, str]:
    """Returns the status and the content of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def children(process: int) -> list[int]:
    """Returns the IDs of the running child processes of a process, in ascending order."""
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += [int(child) for child in thread.read_text(encoding="ascii").split()]
        except OSError:
            continue
    return sorted(child for child in found if is_running(child))


def is_running(process: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def cut(address: str) -> None:
    """Shuts down the sockets of this process that are connected to an address."""
    host, _, port = address.rpartition(":")
    name = port if host == "unix" else (host, int(port))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getpeername() == name:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was closed meanwhile, or is not connected
            continue
