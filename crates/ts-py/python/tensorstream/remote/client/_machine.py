# SPDX-License-Identifier: MIT OR Apache-2.0
"""Starts, pauses and stops remote machines, and returns their devices."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ... import _native
from ..._deprecated import renamed
from ...errors import ConfigurationError
from ...wire._connection import LIMIT_BYTES, _settings
from .. import _registry, providers
from ..providers._base import KINDS
from ..providers._gpus import GPUS
from . import _device, _direct
from ._connection import MachineConnection
from ._pause import SavedStorages
from ._status import Watcher
from ._trace import LOG

P = ParamSpec("P")
R = TypeVar("R")

#: The most devices of all machines of a process. PyTorch has this limit.
_MAX_DEVICES = 127


def _exclusive(
    method: Callable[Concatenate[RemoteMachine, P], R],
) -> Callable[Concatenate[RemoteMachine, P], R]:
    """Makes threads run the decorated methods of a machine one at a time.

    In a forked child the methods raise ``ConfigurationError``, because the session belongs to
    the parent.
    """

    @functools.wraps(method)
    def call(self: RemoteMachine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if _registry.is_forked():
            raise ConfigurationError(
                f"machine {self.name} belongs to the parent of this forked process; start "
                'processes with the method "spawn" or "forkserver"'
            )
        with self._lock:
            return method(self, *args, **kwargs)

    return call


@dataclasses.dataclass(frozen=True)
class Wait:
    """The waits for a machine at one line of a program.

    Attributes:
        place: The line, as "FILE:LINE in FUNCTION".
        count: The number of waits.
        seconds: The total time of the waits.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine
        >>> with RemoteMachine.mock() as machine:
        ...     value = torch.ones(3, device=machine.device()).sum().item()
        ...     waits = machine.waits()
        >>> waits[0].count >= 1
        True
    """

    place: str
    count: int
    seconds: float


class RemoteMachine:
    """A machine that stores tensors and runs operators on them.

    The methods ``local``, ``mock``, ``ssh`` and ``tcp`` create a machine of one kind, with the
    options of that kind. Unless ``start=False``, the machine starts when it is created. It stops at
    the end of a ``with`` block, or when ``stop`` is called. Its tensors are then lost.

    Args:
        kind: The provider of the machine, or its name: "local" for a process on this computer,
            "mock" for a thread of this process, "tcp" for a machine that runs ``tensorstream
            serve``, "ssh" for one on which that is started, or another one of
            ``tensorstream.remote.providers.available()``.
        place: A type of devices, as ``device_type``, or the first option of the provider: the
            address of a "tcp" machine ("HOST:PORT" or "unix:PATH"), or the host of an "ssh" one.
        device_type: The type of device that runs the operators: "cpu", "cuda", a type of GPU such
            as "A100", or "accelerator" for any accelerator that PyTorch supports.
        device_count: The number of its devices, 1 to 127.
        name: The name of the machine in messages.
        idle_timeout: The longest silence of the machine, in seconds, while the client waits for it.
            After this time, the connection is lost.
        stall_timeout: Seconds without progress after which a transfer fails.
        retry: Seconds for which a lost connection is retried. If a retry succeeds, nothing is lost.
        start: Whether to start the machine now.
        gpu_type: Another name for ``device_type``.
        gpu_count: Another name for ``device_count``.
        options: The options of the provider, such as ``token`` of a "tcp" machine. See the classes
            of ``tensorstream.remote.providers``.

    Raises:
        ConfigurationError: An argument is invalid.
        ConnectionLost: The machine cannot be reached or started.
        ConnectionTimeout: The machine does not answer.
        ProtocolError: The machine uses another protocol, or its certificate is not trusted.
        ProviderError: The provider cannot start a machine.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine
        >>> with RemoteMachine.mock() as machine:
        ...     x = torch.arange(4.0, device=machine.device())
        ...     (x * x).sum().item()
        14.0
    """

    @renamed(timeout="idle_timeout", patience="stall_timeout")
    def __init__(
        self,
        kind: str | providers.Provider = "local",
        place: str | None = None,
        *,
        device_type: str | None = None,
        device_count: int = 1,
        name: str | None = None,
        idle_timeout: float = 30.0,
        stall_timeout: float = 300.0,
        retry: float = 30.0,
        start: bool = True,
        gpu_type: str | None = None,
        gpu_count: int | None = None,
        **options: Any,
    ) -> None:
        of_type = gpu_type or device_type
        if place is not None and _canonical(place) is not None:
            if of_type is not None and _canonical(of_type) != _canonical(place):
                raise ConfigurationError(
                    f"the type of devices is given twice: {place!r} and {of_type!r}"
                )
            of_type, place = place, None
        device_count = gpu_count or device_count
        if gpu_count == 0 or not 1 <= device_count <= _MAX_DEVICES:
            count = 0 if gpu_count == 0 else device_count
            raise ConfigurationError(f"device_count must be 1 to {_MAX_DEVICES}, got {count}")
        self.kind, self._provider = _provider(kind, place, options)
        self.device_type, self.device_count = self._offered(of_type or "cpu"), device_count
        self._refuse_unless_offered()
        self.address: str | None = getattr(self._provider, "address", None)
        self._retry = retry
        self._timeouts = idle_timeout, stall_timeout
        self._session: _native.RemoteSession | None = None
        #: The index of the first device, which is used again after a restart if it is free.
        self._first: int | None = None
        #: While paused: the storages, and the states of the devices' generators.
        self._paused: tuple[SavedStorages, list[torch.Tensor]] | None = None
        self._server: providers.Server | None = None
        self._lock = threading.RLock()
        self.name = name or self.address or f"{self.kind}-{id(self):x}"
        self._watcher = Watcher(self.name, lambda: self.status, self._notice_end)
        if start:
            self.start()

    def _offered(self, device_type: Any) -> str:
        """Returns a type of devices as the provider, or ``Request``, spells it."""
        if device_type in (self._provider.device_types() or ()):
            return str(device_type)
        known = _canonical(device_type)
        if known is None:
            raise ConfigurationError(f"device_type must be {_TYPES}, got {device_type!r}")
        return known

    def _refuse_unless_offered(self) -> None:
        """Refuses a type or number of devices that the provider does not have."""
        offered = self._provider.device_types()
        if offered is None:
            return
        if self.device_type not in offered:
            raise ConfigurationError(
                f"the provider {self.kind!r} has no devices of type {self.device_type!r}: expected "
                f"one of {', '.join(offered)}"
            )
        if self.device_count > offered[self.device_type]:
            raise ConfigurationError(
                f"device_count is {self.device_count}, but the provider {self.kind!r} has "
                f"{offered[self.device_type]} devices of type {self.device_type!r} on a machine"
            )

    @classmethod
    def local(
        cls, *, device_type: str = "cpu", device_count: int = 1, threads: int | None = None,
        budget: int | str | None = None, name: str | None = None, start: bool = True,
    ) -> RemoteMachine:  # fmt: skip
        """Creates a machine in a process on this computer.

        Blocks until the machine has started, unless ``start`` is false.

        The arguments and errors are those of the class, and of
        ``tensorstream.remote.providers.LocalProvider``.
        """
        return cls(
            "local", device_type=device_type, device_count=device_count, threads=threads,
            budget=budget, name=name, start=start,
        )  # fmt: skip

    @classmethod
    def mock(
        cls, *, device_count: int = 1, name: str | None = None, start: bool = True
    ) -> RemoteMachine:
        """Creates a machine in a thread of this process, for tests.

        It uses the same protocol as other machines. Its operators use the default dtype of this
        process, so call ``synchronize`` before ``torch.set_default_dtype``. The arguments and
        errors are those of the class.
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
        """Connects to a machine that runs ``tensorstream serve``. Blocks.

        The arguments and errors are those of the class.
        """
        return cls(
            "tcp", address=address, token=token, ca=ca, cert=cert, key=key, device_type=device_type,
            device_count=device_count, name=name, idle_timeout=idle_timeout,
            stall_timeout=stall_timeout, retry=retry, start=start,
        )  # fmt: skip

    @classmethod
    def ssh(
        cls, host: str, *, device_type: str = "cpu", device_count: int = 1, name: str | None = None,
        idle_timeout: float = 30.0, stall_timeout: float = 300.0, retry: float = 30.0,
        start: bool = True, **options: Any,
    ) -> RemoteMachine:  # fmt: skip
        """Starts ``tensorstream serve`` on a host that the user's ssh reaches. Blocks.

        The arguments and errors are those of the class, and of
        ``tensorstream.remote.providers.SshProvider``.
        """
        return cls(
            "ssh", host=host, device_type=device_type, device_count=device_count, name=name or host,
            idle_timeout=idle_timeout, stall_timeout=stall_timeout, retry=retry, start=start,
            **options,
        )  # fmt: skip

    @property
    def gpu_type(self) -> str:
        """Another name for ``device_type``."""
        return self.device_type

    @property
    def gpu_count(self) -> int:
        """Another name for ``device_count``."""
        return self.device_count

    @_exclusive
    def start(self) -> RemoteMachine:
        """Starts the machine, or connects to it. Blocks.

        Does nothing if the machine is running, and calls ``resume`` if it is paused. If the session
        of the machine has ended, starts a new session with the same devices and no tensors.

        Returns:
            The machine itself.

        Raises:
            ConfigurationError: The machine does not have the requested devices.
            ConnectionLost: The machine cannot be reached or started.
            ConnectionTimeout: The machine does not answer.
            ProtocolError: The machine uses another protocol, or its certificate is not trusted.
            ProviderError: The provider cannot start a machine.
        """
        if self._paused is not None:
            self.resume()
        if self._session is not None and self._session.is_over():
            self.stop()
        if self._session is not None:
            return self
        _device.set_up()
        server = self._start_server()
        try:
            address = server.address
            settings = _settings(server.token, *self._timeouts, True, None, LIMIT_BYTES)
            self._session = _native.RemoteSession(
                address, self.name, self.device_count, settings, self._retry,
                first=self._first, returns=self._provider.keeps_sessions,
                ca=server.ca, cert=server.cert, key=server.key,
            )  # fmt: skip
        except BaseException:
            self._stop_server()
            raise
        self._first = first = self._session.first
        try:
            _registry.add(self._session, self.device_count)
            self._set_address(address)
            kind, count = _device.kind_of(first)
            if self.device_count > count:
                raise ConfigurationError(
                    f"device_count is {self.device_count}, but machine {self.name} has {count} "
                    "devices"
                )
            if self.device_type != "cpu" and not self._provider.simulates:
                self._check_gpus(kind, first)
            if self._provider.shares_files:
                _registry.SHARING_FILES.add(first)
            else:
                _registry.SHARING_FILES.discard(first)
            _registry.KINDS.update({first + index: kind for index in range(self.device_count)})
            for index in range(self.device_count):
                _device.seed_of(first + index, torch.initial_seed())
        except BaseException:
            self.stop()
            raise
        # If the session is not closed, the server keeps its tensors for a while.
        atexit.register(self.stop)
        self._watcher.start()
        LOG.info("%s: started (%s at %s, ts:%d)", self.name, self.kind, address, first)
        return self

    def _set_address(self, address: str | None) -> None:
        """Sets the address from which other machines can copy tensors. None removes it."""
        first = self._get_session().first
        for index in range(first, first + self.device_count):
            if address is None:
                _registry.ADDRESSES.pop(index, None)
            else:
                _registry.ADDRESSES[index] = first, address

    def _check_gpus(self, kind: str, first: int) -> None:
        """Refuses devices of another type than the requested one."""
        if kind == "cpu" or (kind != "cuda" and self.device_type != "accelerator"):
            raise ConfigurationError(
                f"device_type is {self.device_type!r}, but machine {self.name} runs operators on "
                f"{kind}"
            )
        if self.device_type not in GPUS:
            return  # any GPU, or a type that only the provider knows
        for index in range(first, first + self.device_count):
            name, memory = _device.gpu_of(index)
            if not GPUS[self.device_type].matches(name, memory):
                raise ConfigurationError(
                    f"device_type is {self.device_type!r}, but device {index - first} of machine "
                    f"{self.name} is {name} with {memory >> 30} GiB"
                )

    def _start_server(self) -> providers.Server:
        request = providers.Request(self.name, self.device_type, self.device_count)
        self._server = self._provider.start(request)
        return self._server

    def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def device(self, index: int | str = 0, of_kind: int | None = None) -> torch.device:
        """Returns a device of this machine, as ``torch.device("ts", ...)``.

        The devices of all machines of this process are numbered together, so the index of the
        result can differ from ``index``.

        Args:
            index: The index of the device on this machine, or its type, optionally with an index,
                as in "cuda:1". "ts" is any type, and "cuda" any accelerator.
            of_kind: The index, if ``index`` is a type: ``device("cuda", 1)`` is ``device(1)``.

        Raises:
            ConfigurationError: The machine does not have this device, or was not started.
        """
        session = self._get_session()
        kind = None
        if isinstance(index, str):
            kind, _, number = index.partition(":")
            index = of_kind if of_kind is not None else int(number) if number.isdecimal() else 0
        elif of_kind is not None:
            raise ConfigurationError(
                f"invalid arguments device({index!r}, {of_kind!r}): expected an index, or a type "
                "and an index"
            )
        runs_on = _registry.KINDS[session.first]
        simulates = self._provider.simulates and self.device_type != "cpu"
        accelerator = ("cuda", "accelerator") if simulates or runs_on != "cpu" else ()
        if kind not in (None, "ts", runs_on, *accelerator):
            raise ConfigurationError(
                f"machine {self.name} has no {kind} devices: it runs operators on {runs_on}"
            )
        if not 0 <= index < self.device_count:
            raise ConfigurationError(
                f"machine {self.name} has no device {index}: expected 0 to {self.device_count - 1}"
            )
        return torch.device("ts", session.first + index)

    @property
    def status(self) -> str:
        """What the machine does. Does not block.

        - "stopped": It was not started, or was stopped.
        - "running": It takes operators.
        - "reconnecting": The connection is lost, and is being replaced. Calls wait meanwhile.
        - "paused": It was paused.
        - "lost": Its session has ended, and so have its tensors. ``start`` begins a new one.
        """
        session = self._session
        if self._paused is not None:
            return "paused"
        if session is None:
            return "stopped"
        if session.is_over():
            return "lost"
        return "reconnecting" if session.is_reconnecting() else "running"

    def on_status(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Calls a function with the new ``status`` when it has changed.

        The calls come from another thread, within about 0.2 seconds. A machine that
        reconnects in less time is not reported. Exceptions of the function are logged.

        Returns:
            A function that ends this.

        Examples:
            >>> from tensorstream.remote import RemoteMachine
            >>> machine = RemoteMachine.mock(start=False)
            >>> forget = machine.on_status(lambda status: print("the machine is", status))
            >>> forget()
        """
        return self._watcher.add(callback)

    def _notice_end(self) -> None:
        """Ends the session if its server has ended by itself."""
        # A call that starts or stops the server has the lock.
        if not self._lock.acquire(blocking=False):
            return
        try:
            session, server = self._session, self._server
            if session is None or server is None or session.is_over():
                return
            reason = server.failure()
            if reason is not None:
                LOG.warning("%s: %s", self.name, reason)
                session.abandon(reason)
        finally:
            self._lock.release()

    def synchronize(self) -> None:
        """Blocks until the machine has run all operators called so far.

        Does nothing if the machine was not started, or was stopped.

        Raises:
            RemoteTensorError: An operator failed, and its error was not raised yet.
            ConnectionLost: The machine cannot be reached.
        """
        if self._session is not None:
            self._session.synchronize()

    def stats(self) -> dict[str, int]:
        """Returns counters of the session.

        Returns:
            These counters by name:

            - ``operators``: The operators that were sent.
            - ``requests``: All requests that were sent, including operators.
            - ``batches``: The batches in which the requests were sent.
            - ``waits``: The waits of the program.
            - ``reconnects``: The times that a lost connection was restored.
            - ``uploaded_bytes`` and ``downloaded_bytes``: The bytes of tensors that were copied to
              the machine and from it.
            - ``cached_scalars``: The reads of one element that needed no wait.
            - ``early_scalars``: The reads of one element whose value was prefetched.
            - ``signatures``, ``signature_hits`` and ``signature_misses``: The entries, hits and
              misses of the cache of operator results, which all machines of the process share.

        Raises:
            ConfigurationError: The machine was not started, or was stopped.
        """
        names = ("signature_hits", "signature_misses", "signatures")
        return self._get_session().stats() | dict(
            zip(names, _native.remote_cache_stats(), strict=True)
        )

    def waits(self) -> list[Wait]:
        """Returns the waits at each line of the program, sorted by total time, longest first.

        Raises:
            ConfigurationError: The machine was not started, or was stopped.
        """
        return [Wait(*wait) for wait in self._get_session().waits()]

    def connect(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: bool = False,
        idle_timeout: float = 30.0,
        stall_timeout: float = 300.0,
        shared_memory: bool = True,
    ) -> MachineConnection:
        """Connects from the machine to a ``ts.Listener``. Blocks.

        Tensors of the machine can then be sent there. They do not pass through this process. A
        machine of ``tensorstream serve`` must allow the address, with ``--send-to ADDRESS``.

        Args:
            address: The address of the listener, as the machine reaches it: "HOST:PORT" or
                "unix:PATH".
            token: The secret that the listener requires. The machine gets it.
            tls: Whether to use TLS. The machine trusts the certificates of ``--peer-ca``.
            idle_timeout: As ``ts.connect``, at most 60 seconds.
            stall_timeout: As ``ts.connect``, at most 600 seconds.
            shared_memory: As ``ts.connect``.

        Raises:
            ConfigurationError: An argument is invalid, the machine is not allowed to connect to the
                address, it has 8 connections already, or it was not started.
            ConnectionLost: The listener cannot be reached, or refuses the connection; or the
                machine cannot be reached.
            ConnectionTimeout: The listener does not answer.
            ProtocolError: The listener uses another protocol, or its certificate is not trusted.

        Examples:
            >>> import tensorstream as ts, threading, torch
            >>> from tensorstream.remote import RemoteMachine
            >>> def receive(listener):
            ...     with listener.accept() as connection:
            ...         for tensor in connection:
            ...             print(tensor.name, tensor.to_torch())
            >>> with ts.listen("127.0.0.1:0") as listener, RemoteMachine.mock() as machine:
            ...     thread = threading.Thread(target=receive, args=[listener])
            ...     thread.start()
            ...     with machine.connect(listener.address) as connection:
            ...         connection.send(torch.arange(3, device=machine.device()), "a")
            ...     thread.join()
            a tensor([0, 1, 2])
        """
        self._get_session()
        return MachineConnection(
            self.name,
            self.device(),
            address,
            {
                "token": token,
                "tls": tls,
                "idle_timeout": idle_timeout,
                "stall_timeout": stall_timeout,
                "shared_memory": shared_memory,
            },
        )

    def _get_session(self) -> _native.RemoteSession:
        if self._session is None:
            raise ConfigurationError(
                f"machine {self.name} was not started or was stopped; call start()"
            )
        return self._session

    @_exclusive
    def pause(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Saves the tensors to files and releases the machine until ``resume``. Blocks.

        A server that the provider has started stops. Until ``resume``, operators on the tensors
        raise ``ConfigurationError``. Saving uses 16 MiB of memory. If ``pause`` fails, the machine
        continues. Does nothing if the machine is already paused.

        Args:
            directory: The directory in which to create a new directory for the files. None means
                the system's temporary directory.

        Raises:
            RemoteTensorError: An operator failed before, and its error was not raised yet.
            ConfigurationError: The machine was not started, or was stopped.
            ConnectionLost: The machine cannot be reached.
            OSError: The files cannot be written.
        """
        session = self._get_session()
        if self._paused is not None:
            return
        saved = SavedStorages(directory)
        _direct.leave(session.first)
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
        self._set_address(None)
        try:
            session.close()
        except RuntimeError as error:
            LOG.warning("%s: paused, but its session could not be closed: %s", self.name, error)
        finally:
            session.pausing(False)
            self._stop_server()
        LOG.info("%s: paused, with %d bytes saved in %s", self.name, saved.nbytes, saved.directory)

    @_exclusive
    def resume(self) -> None:
        """Starts a paused machine, or reconnects to it, and restores its tensors. Blocks.

        Also restores the random number generators. Does nothing if the machine is not paused. If
        ``resume`` fails, the machine stays paused, and the call can be repeated.

        Raises:
            ConnectionLost: The machine cannot be reached or started.
            ProtocolError: A saved file is truncated.
            ProviderError: The provider cannot start a machine.
        """
        if self._paused is None:
            return
        session, (saved, states) = self._get_session(), self._paused
        session.pausing(True)
        try:
            address = self._start_server().address
            session.resume(address)
            saved.restore(session)
            self._set_address(address)
            for index, state in enumerate(states):
                _device.set_rng_state(state, session.first + index)
            session.synchronize()
        except BaseException:
            self._set_address(None)
            with contextlib.suppress(RuntimeError):
                session.close()
            session.pausing(False)
            self._stop_server()
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
        """Ends the session, and the server if the provider has started it. Blocks.

        The tensors of the machine are lost. Does nothing if the machine is stopped. Also does
        nothing in a forked child process, because the machine belongs to the parent.
        """
        if not _registry.is_forked():
            self._stop()

    @_exclusive
    def _stop(self) -> None:
        session = self._session
        if session is None:
            return
        _direct.leave(session.first)
        self._set_address(None)
        self._watcher.note()
        self._session = None
        if self._paused is not None:
            self._paused[0].remove()
            self._paused = None
            _registry.PAUSED.pop(session.first, None)
        atexit.unregister(self.stop)
        self._watcher.stop()
        _registry.SESSIONS.pop(session.first, None)
        try:
            failed = session.close()
            if failed is not None:
                LOG.warning(
                    "%s: stopped with an error that was never raised: %s", self.name, failed
                )
        except RuntimeError:
            # The connection was already lost, and calls that waited raised the error.
            pass
        finally:
            session.forget()
            self._stop_server()

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


_TYPES = f'"cpu", "cuda", "accelerator" or one of {", ".join(GPUS)}'


def _canonical(device_type: Any) -> str | None:
    """Returns a type of devices as it is spelled in ``Request``, or ``None``."""
    spelled = {name.lower(): name for name in (*KINDS, *GPUS)}
    return spelled.get(device_type.lower()) if isinstance(device_type, str) else None


def _provider(
    kind: str | providers.Provider, place: str | None, options: dict[str, Any]
) -> tuple[str, providers.Provider]:
    """Returns a provider and its name."""
    if isinstance(kind, str):
        given = () if place is None else (place,)
        try:
            return kind, providers.provider(kind, *given, **options)
        except ConfigurationError as error:
            if place is None or "positional" not in str(error):
                raise
            raise ConfigurationError(
                f"unexpected {place!r}: a machine of kind {kind!r} has no address; expected a type "
                f"of devices: {_TYPES}"
            ) from None
    if place is not None:
        raise ConfigurationError(f"unexpected {place!r}: expected a type of devices: {_TYPES}")
    if not isinstance(kind, providers.Provider):
        raise ConfigurationError(
            f"invalid kind {kind!r}: expected the name of a provider, or a provider"
        )
    if options:
        raise ConfigurationError(
            f"unexpected options {', '.join(options)}: pass them to {type(kind).__name__}"
        )
    return kind.name, kind
