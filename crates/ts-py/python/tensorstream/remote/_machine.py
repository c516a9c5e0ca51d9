# SPDX-License-Identifier: MIT OR Apache-2.0
"""Machines: where they are found, how they are started, and their devices."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import Any, Literal

import torch

from .. import _native
from .._wire import _settings
from ..errors import ConfigurationError, ConnectionLost
from . import _composites, _device

Kind = Literal["mock", "local", "tcp"]

_LIMIT_BYTES = 64 << 30


class RemoteMachine:
    """A machine that has tensors, and runs operators on them.

    kind: "mock" is a thread of this process, "local" a process of this computer's, both by a Unix socket; "tcp" is
    whoever listens at ``address``: ``tensorstream serve``. gpu_type: "cpu" or "cuda", what a machine that is started
    here runs operators on. gpu_count: how many devices it has. token, ca, cert, key: as of
    :func:`tensorstream.connect`. retry: seconds for which a link that was lost is made again, while nothing is lost.
    threads: of PyTorch's for one operator, on a machine that is started here.

    It is started at once, or by :meth:`start` if ``start=False``. At the end of a ``with`` it is stopped: its tensors
    are gone.
    """

    def __init__(
        self,
        kind: Kind = "local",
        address: str | None = None,
        *,
        gpu_type: str = "cpu",
        gpu_count: int = 1,
        name: str | None = None,
        token: str | None = None,
        ca: Any = None,
        cert: Any = None,
        key: Any = None,
        timeout: float = 30.0,
        patience: float = 300.0,
        retry: float = 30.0,
        threads: int | None = None,
        start: bool = True,
    ) -> None:
        if kind not in ("mock", "local", "tcp"):
            raise ConfigurationError(f"a machine of kind {kind!r}: there are mock, local and tcp")
        if (kind == "tcp") != (address is not None):
            raise ConfigurationError("address says where a machine of kind tcp listens, and no other")
        if gpu_count < 1 or gpu_type.lower() not in ("cpu", "cuda"):
            raise ConfigurationError(f"gpu_type={gpu_type!r}, gpu_count={gpu_count}: cpu or cuda, and at least one")
        self.kind, self.address, self.gpu_type, self.gpu_count = kind, address, gpu_type.lower(), gpu_count
        self._threads, self._retry = threads, retry
        self._settings = _settings(token, timeout, patience, True, None, _LIMIT_BYTES)
        self._tls = {"ca": ca, "cert": cert, "key": key}
        self._session: _native.RemoteSession | None = None
        self._server: Any = None
        self._directory: str | None = None
        self.name = name or (address or f"{kind}-{id(self):x}")
        if start:
            self.start()

    def start(self) -> RemoteMachine:
        """Starts the machine, or connects to it. Blocks until it is there. Nothing happens if it is."""
        if self._session is not None:
            return self
        address = self.address or ""
        if self.kind != "tcp":
            self._directory = tempfile.mkdtemp(prefix="tensorstream-")
            address = f"unix:{self._directory}/socket"
            (self._start_thread if self.kind == "mock" else self._start_process)(address)
        try:
            self._session = _native.RemoteSession(
                address, self.name, self.gpu_count, self._settings, self._retry, **self._tls
            )
        except BaseException:
            self._end_server()
            raise
        first = self._session.first
        _device.SESSIONS[first] = self._session
        _device.COUNT = max(_device.COUNT, first + self.gpu_count)
        kind = _device.kind_of(first)
        _composites.KINDS.update({first + index: kind for index in range(self.gpu_count)})
        _device.seed_of(first, torch.initial_seed())
        # A machine that hears nothing of the end keeps the tensors for a while.
        atexit.register(self.stop)
        return self

    def _start_thread(self, address: str) -> None:
        from ._server import devices_of, server

        self._server = server(address, devices=devices_of(self.gpu_type))
        self._thread = threading.Thread(target=self._server.run, name="tensorstream-mock", daemon=True)
        self._thread.start()

    def _start_process(self, address: str) -> None:
        command = [
            sys.executable,
            "-m",
            "tensorstream.remote._server",
            "--listen",
            address,
            "--device",
            self.gpu_type,
        ]
        threads = self._threads or torch.get_num_threads()
        self._server = subprocess.Popen(
            [*command, "--threads", str(threads), "--with-parent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line.startswith(b"listening"):
            self._end_server()
            raise ConnectionLost(f"machine {self.name}: the process for it did not start; what it said is above")

    def _end_server(self) -> None:
        if isinstance(self._server, subprocess.Popen):
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.close()
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server.stdout.close()
        elif self._server is not None:
            self._server.stop()
            self._thread.join(10)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._server = self._directory = None

    def device(self, index: int = 0) -> torch.device:
        """One of its devices: ``torch.device("ts", ...)``, whose index is this process's."""
        if self._session is None:
            raise ConfigurationError(f"machine {self.name} was not started, or was stopped")
        if not 0 <= index < self.gpu_count:
            raise ConfigurationError(f"machine {self.name} has devices 0 to {self.gpu_count - 1}, and no {index}")
        return torch.device("ts", self._session.first + index)

    def synchronize(self) -> None:
        """Waits until all that was asked is done; what has failed meanwhile is raised."""
        if self._session is not None:
            self._session.synchronize()

    def stats(self) -> dict[str, int]:
        """What the session has done: requests, batches, waits, reconnects, uploaded_bytes, downloaded_bytes."""
        if self._session is None:
            raise ConfigurationError(f"machine {self.name} was not started, or was stopped")
        return self._session.stats()

    def waits(self) -> list[tuple[str, int, float]]:
        """Where the program has waited: place, how often, and for how many seconds; longest first."""
        if self._session is None:
            raise ConfigurationError(f"machine {self.name} was not started, or was stopped")
        return self._session.waits()

    def stop(self) -> None:
        """Ends the session, and the machine if it was started here. Its tensors are gone. May be called again."""
        session, self._session = self._session, None
        if session is None:
            return
        atexit.unregister(self.stop)
        _device.SESSIONS.pop(session.first, None)
        try:
            session.close()
        except RuntimeError:
            # It was lost before, which whoever waited for it was told.
            pass
        finally:
            session.forget()
            self._end_server()

    def __enter__(self) -> RemoteMachine:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._session is None else f"ts:{self._session.first}"
        devices = f"gpu_type={self.gpu_type!r}, gpu_count={self.gpu_count}"
        return f"RemoteMachine({self.kind!r}, name={self.name!r}, {devices}, {state})"
