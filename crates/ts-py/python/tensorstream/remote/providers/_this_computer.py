# SPDX-License-Identifier: MIT OR Apache-2.0
"""The providers "local" and "mock": servers on this computer, in a process or in a thread."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from typing import IO

from ..._scratch import for_socket
from ..._systems import require_unix
from ...budget import parse_size
from ...errors import ConnectionLost
from .._answers import answered
from ._base import KINDS, Provider, Request, Server

_log = logging.getLogger("tensorstream.remote")

#: What to do on Windows.
ELSEWHERE = "run `tensorstream serve device` on a Linux machine, and connect with RemoteMachine.tcp"
#: The time after which a slow start is logged, in seconds.
_SLOW_START = 2.0
#: The time that a server may take to stop, in seconds.
_STOP_TIMEOUT = 10


class LocalProvider(Provider):
    """Starts a process on this computer.

    Args:
        threads: The number of its PyTorch threads. The default is that of this process.
        budget: The most memory for weights that the machine loads, in bytes or such as "4GiB".
            Those that do not fit are streamed. The default is unlimited.

    Raises:
        ConfigurationError: The budget is invalid.
    """

    name = "local"
    keeps_sessions = False
    shares_files = True

    def __init__(self, *, threads: int | None = None, budget: int | str | None = None) -> None:
        self._threads = threads
        self._budget = None if budget is None else parse_size(budget, "budget")

    def start(self, request: Request) -> Server:
        """Starts the process. Blocks until it listens.

        Raises:
            ConfigurationError: This is Windows.
            DeviceUnavailableError: This computer does not have the devices.
            ConnectionLost: The process ended before it listened.
        """
        require_unix("a machine on this computer", ELSEWHERE)
        import torch

        from ..server._server import devices_of

        # Only the process knows accelerators of packages: this one has `ts` in their place.
        if request.kind != "accelerator":
            devices_of(request.kind, request.device_count)
        threads = self._threads or torch.get_num_threads()
        return ProcessServer(
            request.name, request.kind, request.device_count, threads, self._budget
        )


class MockProvider(Provider):
    """Starts a thread of this process, for tests. It runs operators on the CPU.

    It uses the same protocol as other machines. Its operators use the default dtype of this
    process, so call ``synchronize`` before ``torch.set_default_dtype``.
    """

    name = "mock"
    keeps_sessions = False
    shares_files = True
    simulates = True

    def start(self, request: Request) -> Server:
        """Starts the thread.

        Raises:
            ConfigurationError: This is Windows.
            DeviceUnavailableError: The device type is "cuda" or "accelerator", and this process
                does not have the devices.
        """
        require_unix("a machine on this computer", ELSEWHERE)
        return ThreadServer(
            request.device_type if request.device_type in KINDS else "cpu", request.device_count
        )


class _StderrReader:
    """Copies a child's standard error to that of this process, and keeps the last lines."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._lines: deque[str] = deque(maxlen=20)
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, name="tensorstream-stderr", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe, contextlib.suppress(ValueError, OSError):
            for line in self._pipe:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                print(text, file=sys.stderr, flush=True)

    def last_lines(self) -> str:
        """Returns the last lines, at most 20. Waits up to 2 seconds for the child to end."""
        self._thread.join(2.0)
        return "\n".join(self._lines) or "no error message"


class ProcessServer(Server):
    """The server of a "local" machine, in a child process.

    It listens on a Unix socket in a temporary directory. It ends when its standard input is closed,
    so it does not outlive this process. The constructor blocks until the server listens.

    Args:
        name: The name of the machine, for messages.
        device_type: "cpu", "cuda" or "accelerator".
        device_count: The number of devices.
        threads: The number of PyTorch threads.
        budget: The most memory for weights that it loads, in bytes.

    Raises:
        DeviceUnavailableError: This computer does not have the devices.
        ConnectionLost: The process ended before it listened.
    """

    def __init__(
        self, name: str, device_type: str, device_count: int, threads: int,
        budget: int | None = None,
    ) -> None:  # fmt: skip
        self._directory = for_socket("tensorstream-machine-")
        self.address = f"unix:{self._directory.path}/socket"
        # This process may have set the variable, because it cannot have two devices of packages.
        extra = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"} if device_type == "accelerator" else {}
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "tensorstream.remote.server._local",
                self.address, device_type, str(device_count), str(threads),
                *([] if budget is None else [str(budget)]),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **extra},
        )  # fmt: skip
        assert self.process.stdout is not None and self.process.stderr is not None
        self._stderr = _StderrReader(self.process.stderr)
        slow = threading.Timer(
            _SLOW_START, _log.warning, ("%s: still starting; importing PyTorch may be slow", name)
        )
        slow.daemon = True
        slow.start()
        try:
            line = self.process.stdout.readline()
        finally:
            slow.cancel()
        if not line.startswith(b"listening"):
            self.stop()
            refused = f"cannot start machine {name}"
            if line.startswith(b"{"):
                answered(line.decode(), refused)
            raise ConnectionLost(f"{refused}: its process ended: {self._stderr.last_lines()}")

    def failure(self) -> str | None:
        """Returns how the process has ended, with its last messages."""
        status = self.process.poll()
        if status is None:
            return None
        how = f"exit status {status}" if status >= 0 else f"by signal {-status}"
        return f"its process has ended ({how}): {self._stderr.last_lines()}"

    def stop(self) -> None:
        """Ends the process. Blocks until it has ended, and kills it after 10 seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._directory.remove()


class ThreadServer(Server):
    """The server of a "mock" machine, in a thread of this process.

    It listens on a Unix socket in a temporary directory.

    Args:
        device_type: "cpu", "cuda" or "accelerator".
        device_count: The number of devices.

    Raises:
        DeviceUnavailableError: This computer does not have the devices.
    """

    def __init__(self, device_type: str, device_count: int) -> None:
        from ...serve._outgoing import Outgoing
        from ...serve._weights import EVERYTHING, Weights
        from ..server._exchange import LocalExchange
        from ..server._functions import ANY, Functions
        from ..server._server import devices_of, server

        devices = devices_of(device_type, device_count)
        exchange = LocalExchange(weights=Weights(EVERYTHING), outgoing=Outgoing(("any",)))
        self._directory = for_socket("tensorstream-machine-")
        self.address = f"unix:{self._directory.path}/socket"
        functions = Functions((ANY,))
        self._server = server(
            self.address, devices=devices, exchange=exchange, shared=True, functions=functions
        )
        self._thread = threading.Thread(
            target=self._server.run, name="tensorstream-mock", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stops the server. Blocks until its thread has ended, for at most 10 seconds."""
        self._server.stop()
        self._thread.join(_STOP_TIMEOUT)
        self._directory.remove()
