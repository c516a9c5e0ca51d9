# SPDX-License-Identifier: MIT OR Apache-2.0
"""Machines: where they are found, how they are started, and their devices."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Concatenate, Literal, ParamSpec, TypeVar

import torch

from ... import _native
from ..._deprecated import renamed
from ...errors import ConfigurationError, ConnectionLost, ProtocolError
from ...wire._connection import LIMIT_BYTES, _settings
from .. import _registry
from . import _device
from ._trace import LOG

Kind = Literal["mock", "local", "tcp"]
P = ParamSpec("P")
R = TypeVar("R")

#: As many devices PyTorch can tell from each other.
_MAX_DEVICES = 127
#: Seconds after which a process that is starting says so.
_SLOW_START = 2.0
#: Storages are saved and restored in pieces.
_PIECE_BYTES = 16 << 20


class _Said:
    """What a process writes to its standard error, which goes to this one's."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._lines: deque[str] = deque(maxlen=20)
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, name="tensorstream-said", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe, contextlib.suppress(ValueError, OSError):
            for line in self._pipe:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                print(text, file=sys.stderr, flush=True)

    def last(self) -> str:
        """What it said last, of a process that has ended."""
        self._thread.join(2.0)
        return "\n".join(self._lines) or "it said nothing"


class _Saved:
    """Storages of a machine that is paused, in files of a directory: one each, of its bytes."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tensorstream-paused-", dir=directory))
        self.nbytes = 0
        self._storages: list[tuple[int, int, int, bool]] = []
        self._memory = bytearray(_PIECE_BYTES)

    def _pieces(self, nbytes: int) -> Iterator[tuple[int, memoryview, Any]]:
        """Where a piece is, memory for it, and a capsule of that."""
        for offset in range(0, nbytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, nbytes - offset)
            tensor = torch.frombuffer(self._memory, dtype=torch.uint8, count=count)
            yield offset, memoryview(self._memory)[:count], torch._C._to_dlpack(tensor)

    def save(
        self, session: _native.RemoteSession, storage: int, nbytes: int, ordinal: int, state: int
    ) -> None:
        # What was never computed (2) is not there when it goes on, which who looks at it is told.
        if state == 1 and nbytes:
            with (self.directory / str(storage)).open("wb") as file:
                for offset, piece, capsule in self._pieces(nbytes):
                    session.read(storage, offset, capsule)
                    file.write(piece)
        if state != 2:
            self._storages.append((storage, nbytes, ordinal, state == 1))
            self.nbytes += nbytes

    def restore(self, session: _native.RemoteSession) -> None:
        for storage, nbytes, ordinal, written in self._storages:
            if session.was_freed(storage):
                continue
            session.create(storage, nbytes, ordinal)
            if written and nbytes:
                with (self.directory / str(storage)).open("rb") as file:
                    for offset, piece, capsule in self._pieces(nbytes):
                        if file.readinto(piece) != len(piece):
                            raise ProtocolError(
                                f"{file.name} was cut off: the tensor in it cannot be restored"
                            )
                        session.write(storage, offset, capsule)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def _alone(
    method: Callable[Concatenate[RemoteMachine, P], R],
) -> Callable[Concatenate[RemoteMachine, P], R]:
    """Of methods so marked a machine does one at a time, whichever threads call them; and none in a
    child process, whose parent's the session is."""

    @functools.wraps(method)
    def call(self: RemoteMachine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if _registry.is_forked():
            raise ConfigurationError(
                f"machine {self.name} is the parent's of this forked process: start processes by "
                "spawn or forkserver"
            )
        with self._turn:
            return method(self, *args, **kwargs)

    return call


@dataclasses.dataclass(frozen=True)
class Wait:
    """How often and how long a program has waited for a machine at one place."""

    #: "FILE:LINE" of the program.
    place: str
    count: int
    seconds: float


class RemoteMachine:
    """A machine that holds tensors and runs operators on them.

    :meth:`local`, :meth:`mock` and :meth:`tcp` create machines of each kind with the options that
    it has. The machine starts when it is created, unless ``start=False``, and stops at the end of a
    ``with`` block or with :meth:`stop`. Its tensors are then gone.

    Args:
        kind: "local" for a process on this computer, "mock" for a thread of this process, or "tcp"
            for a machine that runs ``tensorstream serve``.
        address: Where a "tcp" machine listens: "HOST:PORT" or "unix:PATH".
        device_type: "cpu" or "cuda": what the machine runs operators on.
        device_count: The number of its devices, 1 to 127.
        name: Its name in messages.
        token: The secret of a "tcp" machine.
        ca: A file of certificates (PEM) to trust. The connection then uses TLS.
        cert: A certificate (PEM) of this client, if the machine requires one.
        key: Its key (PEM).
        idle_timeout: Seconds without a byte from the machine after which a connection is lost.
        stall_timeout: Seconds without progress after which a transfer fails.
        retry: Seconds for which a lost connection is retried. Nothing is lost meanwhile.
        threads: PyTorch threads of a "local" machine; as many as this process has by default.
        start: Whether to start now.
        gpu_type: Another name for ``device_type``.
        gpu_count: Another name for ``device_count``.

    Raises:
        ConfigurationError: An argument is invalid.
        ConnectionLost: The machine cannot be reached or started.
    """

    @renamed(timeout="idle_timeout", patience="stall_timeout")
    def __init__(
        self,
        kind: Kind = "local",
        address: str | None = None,
        *,
        device_type: str = "cpu",
        device_count: int = 1,
        name: str | None = None,
        token: str | None = None,
        ca: Any = None,
        cert: Any = None,
        key: Any = None,
        idle_timeout: float = 30.0,
        stall_timeout: float = 300.0,
        retry: float = 30.0,
        threads: int | None = None,
        start: bool = True,
        gpu_type: str | None = None,
        gpu_count: int | None = None,
    ) -> None:
        if kind not in ("mock", "local", "tcp"):
            raise ConfigurationError(f'invalid kind {kind!r}: expected "local", "mock" or "tcp"')
        if kind != "tcp" and address is not None:
            raise ConfigurationError(
                f'unexpected address {address!r} for a machine of kind "{kind}", which starts on '
                'this computer: expected device_type="cpu" or "cuda", or kind "tcp"'
            )
        if kind == "tcp" and address is None:
            raise ConfigurationError('missing address: a machine of kind "tcp" needs HOST:PORT')
        device_type, device_count = gpu_type or device_type, gpu_count or device_count
        if gpu_count == 0 or not 1 <= device_count <= _MAX_DEVICES:
            count = 0 if gpu_count == 0 else device_count
            raise ConfigurationError(f"device_count must be 1 to {_MAX_DEVICES}, got {count}")
        if device_type.lower() not in ("cpu", "cuda"):
            raise ConfigurationError(f'device_type must be "cpu" or "cuda", got {device_type!r}')
        self.kind, self.address = kind, address
        self.device_type, self.device_count = device_type.lower(), device_count
        self._threads, self._retry = threads, retry
        self._settings = _settings(token, idle_timeout, stall_timeout, True, None, LIMIT_BYTES)
        self._tls = {"ca": ca, "cert": cert, "key": key}
        self._session: _native.RemoteSession | None = None
        #: The index of its first device, which it has again when it is started again.
        self._first: int | None = None
        self._paused: tuple[_Saved, list[torch.Tensor]] | None = None
        self._server: Any = None
        self._directory: str | None = None
        self._turn = threading.RLock()
        self.name = name or (address or f"{kind}-{id(self):x}")
        if start:
            self.start()

    @classmethod
    def local(
        cls, *, device_type: str = "cpu", device_count: int = 1, threads: int | None = None,
        name: str | None = None, start: bool = True,
    ) -> RemoteMachine:  # fmt: skip
        """Starts a machine in a process on this computer. Blocks. Arguments as of the class."""
        return cls(
            "local", device_type=device_type, device_count=device_count, threads=threads, name=name,
            start=start,
        )  # fmt: skip

    @classmethod
    def mock(
        cls, *, device_count: int = 1, name: str | None = None, start: bool = True
    ) -> RemoteMachine:
        """Starts a machine in a thread of this process, for tests. It uses the same protocol.

        It also uses the default dtype of this process: call ``torch.set_default_dtype`` after
        :meth:`synchronize`. Arguments as of the class.
        """
        return cls("mock", device_count=device_count, name=name, start=start)

    @classmethod
    @renamed(timeout="idle_timeout", patience="stall_timeout")
    def tcp(
        cls, address: str, *, token: str | None = None, ca: Any = None, cert: Any = None,
        key: Any = None, device_type: str = "cpu", device_count: int = 1, name: str | None = None,
        idle_timeout: float = 30.0, stall_timeout: float = 300.0, retry: float = 30.0,
        start: bool = True,
    ) -> RemoteMachine:  # fmt: skip
        """Connects to a machine that runs ``tensorstream serve``. Blocks. Arguments as of the
        class."""
        return cls(
            "tcp", address, token=token, ca=ca, cert=cert, key=key, device_type=device_type,
            device_count=device_count, name=name, idle_timeout=idle_timeout,
            stall_timeout=stall_timeout, retry=retry, start=start,
        )  # fmt: skip

    @property
    def gpu_type(self) -> str:
        """Another name for ``device_type``."""
        return self.device_type

    @property
    def gpu_count(self) -> int:
        """Another name for ``device_count``."""
        return self.device_count

    @_alone
    def start(self) -> RemoteMachine:
        """Starts the machine, or connects to it; goes on where :meth:`pause` has left off. Blocks
        until it is there. Nothing happens if it is. One whose link was lost for good begins again,
        without its tensors and with the same devices."""
        if self._paused is not None:
            self.resume()
        if self._session is not None and self._session.is_over():
            self.stop()
        if self._session is not None:
            return self
        _device.set_up()
        address = self._listen()
        try:
            self._session = _native.RemoteSession(
                address, self.name, self.device_count, self._settings, self._retry,
                first=self._first, returns=self.kind == "tcp", **self._tls,
            )  # fmt: skip
        except BaseException:
            self._end_server()
            raise
        self._first = first = self._session.first
        try:
            _registry.add(self._session, self.device_count)
            self._is_at(address)
            kind, count = _device.kind_of(first)
            if self.kind == "tcp" and self.device_type == "cuda" != kind:
                raise ConfigurationError(
                    f"device_type='cuda': machine {self.name} runs operators on its {kind}"
                )
            if self.device_count > count:
                raise ConfigurationError(
                    f"device_count={self.device_count}: machine {self.name} has {count} devices"
                )
            _registry.KINDS.update({first + index: kind for index in range(self.device_count)})
            for index in range(self.device_count):
                _device.seed_of(first + index, torch.initial_seed())
        except BaseException:
            self.stop()
            raise
        # A machine that hears nothing of the end keeps the tensors for a while.
        atexit.register(self.stop)
        LOG.info("%s: %s at %s, ts:%d", self.name, self.kind, address, first)
        return self

    def _is_at(self, address: str | None) -> None:
        """Where others find it from now on; None when it is not there any more."""
        first = self._there().first
        for index in range(first, first + self.device_count):
            if address is None:
                _registry.ADDRESSES.pop(index, None)
            else:
                _registry.ADDRESSES[index] = first, address

    def _listen(self) -> str:
        """Starts what is started here. Where it listens."""
        if self.kind == "tcp":
            return self.address or ""
        self._directory = tempfile.mkdtemp(prefix="tensorstream-")
        address = f"unix:{self._directory}/socket"
        (self._start_thread if self.kind == "mock" else self._start_process)(address)
        return address

    def _start_thread(self, address: str) -> None:
        from ..server._server import devices_of, server

        self._server = server(
            address, devices=devices_of(self.device_type, self.device_count), shared=True
        )
        self._thread = threading.Thread(
            target=self._server.run, name="tensorstream-mock", daemon=True
        )
        self._thread.start()

    def _start_process(self, address: str) -> None:
        threads = self._threads or torch.get_num_threads()
        self._server = subprocess.Popen(
            [
                sys.executable, "-m", "tensorstream.remote.server._local",
                address, self.device_type, str(self.device_count), str(threads),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert self._server.stdout is not None and self._server.stderr is not None
        said = _Said(self._server.stderr)
        tell = threading.Timer(
            _SLOW_START, LOG.warning, ("%s: it starts, and imports PyTorch", self.name)
        )
        tell.daemon = True
        tell.start()
        try:
            line = self._server.stdout.readline()
        finally:
            tell.cancel()
        if not line.startswith(b"listening"):
            self._end_server()
            raise ConnectionLost(
                f"machine {self.name}: the process for it did not start: {said.last()}"
            )

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

    def device(self, index: int | str = 0, of_kind: int | None = None) -> torch.device:
        """One of its devices: ``torch.device("ts", ...)``, whose index is this process's.
        ``device("cuda", 1)`` is ``device(1)`` of a machine with GPUs."""
        session = self._there()
        kind = None
        if isinstance(index, str):
            kind, _, number = index.partition(":")
            index = of_kind if of_kind is not None else int(number) if number.isdecimal() else 0
        elif of_kind is not None:
            raise ConfigurationError(
                f"device({index!r}, {of_kind!r}): an index, or a kind and an index"
            )
        if kind not in (None, "ts", runs_on := _registry.KINDS[session.first]):
            raise ConfigurationError(
                f"machine {self.name} runs operators on its {runs_on}, and has no {kind}"
            )
        if not 0 <= index < self.device_count:
            raise ConfigurationError(
                f"machine {self.name} has devices 0 to {self.device_count - 1}, and no {index}"
            )
        return torch.device("ts", session.first + index)

    def synchronize(self) -> None:
        """Waits until all that was asked is done; what has failed meanwhile is raised."""
        if self._session is not None:
            self._session.synchronize()

    def stats(self) -> dict[str, int]:
        """What was done, in numbers: operators, requests (those, and all else that was asked),
        batches that they went in, waits, reconnects, uploaded_bytes, downloaded_bytes;
        cached_scalars and early_scalars: numbers that were looked at without a wait, and such as
        were asked for before; and, of all machines together, signature_hits, signature_misses and
        signatures of the cache that knows what operators give."""
        names = ("signature_hits", "signature_misses", "signatures")
        return self._there().stats() | dict(zip(names, _native.remote_cache_stats(), strict=True))

    def waits(self) -> list[Wait]:
        """Returns where the program has waited, the longest time first."""
        return [Wait(*wait) for wait in self._there().waits()]

    def _there(self) -> _native.RemoteSession:
        if self._session is None:
            raise ConfigurationError(f"machine {self.name} was not started, or was stopped")
        return self._session

    @_alone
    def pause(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Gives up the machine and its memory until :meth:`resume`: its tensors go to files in
        ``directory``, or a temporary one, and a machine that was started here ends. Blocks; what
        has failed before is raised first.

        Tensors, their devices and the generators' states are as before when it goes on; an operator
        in between is a ConfigurationError. Memory here is taken for 16 MiB, whatever the tensors'.
        """
        session = self._there()
        if self._paused is not None:
            return
        saved = _Saved(directory)
        session.pausing(True)
        try:
            session.synchronize()
            states = [
                _device.get_rng_state(session.first + index) for index in range(self.device_count)
            ]
            for storage in session.storages():
                saved.save(session, *storage)
        except BaseException:
            session.pausing(False, True)
            saved.remove()
            raise
        _registry.PAUSED[session.first] = None
        self._paused = saved, states
        self._is_at(None)
        try:
            session.close()
        except RuntimeError as error:
            LOG.warning("%s was paused, and did not hear of it: %s", self.name, error)
        finally:
            session.pausing(False)
            self._end_server()
        LOG.info("%s: paused, %d bytes in %s", self.name, saved.nbytes, saved.directory)

    @_alone
    def resume(self) -> None:
        """Goes on after :meth:`pause`: starts the machine, or connects to it, and gives it the
        tensors. Blocks. Nothing happens without a pause. If it fails it can be tried again."""
        if self._paused is None:
            return
        session, (saved, states) = self._there(), self._paused
        session.pausing(True)
        try:
            address = self._listen()
            session.resume(address)
            saved.restore(session)
            self._is_at(address)
            for index, state in enumerate(states):
                _device.set_rng_state(state, session.first + index)
            session.synchronize()
        except BaseException:
            self._is_at(None)
            with contextlib.suppress(RuntimeError):
                session.close()
            session.pausing(False)
            self._end_server()
            raise
        self._paused = None
        session.pausing(False, True)
        saved.remove()
        seed = _registry.PAUSED.pop(session.first)
        if seed is not None:
            for index in range(self.device_count):
                _device.seed_of(session.first + index, seed)
        LOG.info("%s: resumed at %s", self.name, address)

    def stop(self) -> None:
        """Ends the session, and the machine if it was started here. Its tensors are gone. May be
        called again.

        In a child process that was forked it does nothing: the machine is the parent's."""
        if not _registry.is_forked():
            self._stop()

    @_alone
    def _stop(self) -> None:
        session = self._session
        if session is None:
            return
        self._is_at(None)
        self._session = None
        if self._paused is not None:
            self._paused[0].remove()
            self._paused = None
            _registry.PAUSED.pop(session.first, None)
        atexit.unregister(self.stop)
        _registry.SESSIONS.pop(session.first, None)
        try:
            failed = session.close()
            if failed is not None:
                LOG.warning(
                    "%s was stopped, and nobody had looked at what failed: %s", self.name, failed
                )
        except RuntimeError:
            # It was lost before, which whoever waited for it was told.
            pass
        finally:
            session.forget()
            self._end_server()

    def __enter__(self) -> RemoteMachine:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._session is None else f"ts:{self._session.first}"
        state += ", paused" if self._paused is not None else ""
        devices = f"device_type={self.device_type!r}, device_count={self.device_count}"
        return f"RemoteMachine({self.kind!r}, name={self.name!r}, {devices}, {state})"


def create_mock_machine(
    device_type: str = "cpu", device_count: int = 1, **options: Any
) -> RemoteMachine:
    """``RemoteMachine("mock", ...)``."""
    return RemoteMachine("mock", device_type=device_type, device_count=device_count, **options)


def create_local_machine(
    device_type: str = "cpu", device_count: int = 1, **options: Any
) -> RemoteMachine:
    """``RemoteMachine("local", ...)``."""
    return RemoteMachine("local", device_type=device_type, device_count=device_count, **options)


def create_tcp_machine(
    address: str, device_type: str = "cpu", device_count: int = 1, **options: Any
) -> RemoteMachine:
    """``RemoteMachine("tcp", address, ...)``."""
    return RemoteMachine(
        "tcp", address, device_type=device_type, device_count=device_count, **options
    )
