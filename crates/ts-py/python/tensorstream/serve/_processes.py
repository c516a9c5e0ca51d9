# SPDX-License-Identifier: MIT OR Apache-2.0
"""Creates, schedules and ends the processes of sessions, for the broker."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .. import _native
from ._messages import pair, receive, send

_log = logging.getLogger("tensorstream.remote")

#: The time limit for the processes of sessions to end when the server stops, in seconds.
GRACE = 5.0
#: The time slices of sessions, in seconds: of the only one of a client, which then interrupts
#: others when it gets work, and of several.
_SHORT_SLICE, _LONG_SLICE = 0.0001, 0.02
#: The environment variables that sessions get. They contain no secrets.
_ENVIRONMENT = re.compile(
    r"PATH|HOME|LANG|LC_.*|TZ|TMPDIR|VIRTUAL_ENV|PYTHON.*|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|CUDA_.*|NVIDIA_.*"
    r"|(OMP|KMP|MKL|DNNL|ONEDNN|TORCH|PYTORCH|ATEN|MALLOC|GOMP)_.*"
)
#: The names of signals, by the exit status of a process that they end.
_SIGNALS = {-number: number.name for number in signal.Signals}


class Processes:
    """Creates the processes of sessions.

    On a CPU, the processes are forked from a zygote process. If it ends, its successor, which it
    has forked, replaces it at once. GPU drivers do not support fork, so on GPUs each process is
    started separately, and the next one is started in advance.

    The constructor blocks until a session can start.

    Args:
        options: The options of the sessions. See ``Broker``.
        on_failure: Called when the process of a session has failed.
        on_end: Called with the CPU time, in seconds, of a session's process that has ended.

    Raises:
        OSError: The system cannot create a process.
        RuntimeError: The zygote has ended, or this computer does not have the devices.
    """

    def __init__(
        self,
        options: dict[str, Any],
        on_failure: Callable[[], None],
        on_end: Callable[[float], None],
    ) -> None:
        self._options, self._on_failure, self._on_end = json.dumps(options), on_failure, on_end
        self._once = options["device"] != "cpu"
        self._lock = threading.Lock()
        self._closing = False
        self._all: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        #: The successor of the zygote, and whether it is ready.
        self._successor: socket.socket | None = None
        self._has_successor = False
        #: Descriptors of the processes that were or are successors, by the socket for requests.
        self._successors: dict[socket.socket, int] = {}
        #: Descriptors of the processes of sessions, by session number. None if the process is to be
        #: killed as soon as its descriptor arrives.
        self._pidfds: dict[int, int | None] = {}
        #: The processes of sessions, by session number, and how they are to be scheduled.
        self._processes: dict[int, int] = {}
        self._niceness: dict[int, int] = {}
        #: What the sandbox of a session blocks access to, one text for each mechanism.
        self.restrictions: list[str] = []
        #: Whether a session can start now.
        self.is_ready = False
        self._next: socket.socket
        self._await_ready(self._start())

    def _start(self) -> socket.socket:
        """Starts a zygote. Returns the socket for requests to it."""
        with self._lock:
            self._all = [
                (process, orders) for process, orders in self._all if process.poll() is None
            ]
        orders, child_orders = pair()
        command = [
            sys.executable,
            "-m",
            "tensorstream.remote.server._zygote",
            str(child_orders.fileno()),
            self._options,
        ]
        environment = {
            name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)
        }
        process = subprocess.Popen(
            [*command, "once"] if self._once else command, pass_fds=[child_orders.fileno()],
            stdin=subprocess.DEVNULL,
            # OpenBLAS would start threads on import, and a process with threads cannot be forked
            # safely.
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        child_orders.close()
        with self._lock:
            self._all.append((process, orders))
        return orders

    def _await_ready(self, orders: socket.socket) -> None:
        """Waits until a zygote is ready, makes it the current one, and starts a thread for it.

        Raises:
            RuntimeError: The zygote has ended, or this computer does not have the devices.
        """
        received = receive(orders)
        if received is None:
            raise RuntimeError(
                "the process that starts sessions ended before it was ready; see standard error "
                "for the reason"
            )
        if "refused" in received[0]:
            raise RuntimeError(received[0]["refused"])
        self.restrictions = received[0]["restrictions"]
        # The thread replaces it if it is the current one.
        self._next, self.is_ready = orders, True
        self._start_watching(orders)
        if not self._once:
            self._order_successor(orders)

    def _start_watching(self, orders: socket.socket) -> None:
        threading.Thread(
            target=self._watch, args=(orders,), name="tensorstream-zygote", daemon=True
        ).start()

    def _order_successor(self, zygote: socket.socket) -> None:
        """Makes a zygote fork its successor."""
        orders, child_orders = pair()
        with self._lock:
            former, self._successor, self._has_successor = self._successor, orders, False
        if former:
            former.shutdown(socket.SHUT_RDWR)
        with child_orders, contextlib.suppress(OSError):  # the zygote may have ended
            send(zygote, {"succeed": True}, child_orders.fileno())
        self._start_watching(orders)

    def _succeed(self, zygote: socket.socket) -> bool:
        """Replaces a zygote that has ended by its successor.

        Returns:
            Whether it has been replaced, now or before.
        """
        with self._lock:
            if self._next is not zygote:
                return True
            if self._successor is None or not self._has_successor:
                return False
            self._next, self._successor = self._successor, None
            self._forget_unstarted()
            successor = self._next
        _log.warning("the process that starts sessions has ended; its successor replaces it")
        self._order_successor(successor)
        return True

    def _forget_unstarted(self) -> None:
        """Forgets the processes whose descriptors the ended zygote did not send."""
        self._pidfds = {
            number: pidfd for number, pidfd in self._pidfds.items() if pidfd is not None
        }

    def _watch(self, orders: socket.socket) -> None:
        """Handles the reports of a zygote or a successor. Logs failures of sessions' processes.

        When it ends, replaces it if it is the current zygote or its successor.
        """
        while (received := receive(orders)) is not None:
            report, pidfd = received
            if "began" in report and pidfd is not None:
                self._began(report["began"], pidfd, report["process"])
            elif "successor" in report and pidfd is not None:
                with self._lock:
                    self._successors[orders] = pidfd
                    self._has_successor |= self._successor is orders
            elif "over" in report:
                self._over(report)
        with self._lock:
            if (descriptor := self._successors.pop(orders, None)) is not None:
                os.close(descriptor)
            was_successor = self._successor is orders
            self._has_successor &= not was_successor
        if was_successor:
            # The system may have too few processes or too little memory for another one now.
            time.sleep(1.0)
            if self._successor is orders and not self._closing:
                return self._order_successor(self._next)
        if not self._closing and not self._succeed(orders):
            self.is_ready = False
            with self._lock:
                self._forget_unstarted()
            self._replace()

    def _replace(self) -> None:
        """Starts the next zygote. Retries until it is ready. Clients try to reconnect meanwhile."""
        while not self._closing:
            _log.info("starting a process for sessions")
            try:
                return self._await_ready(self._start())
            except (OSError, RuntimeError) as error:
                _log.error("cannot start a process for sessions: %s; trying again", error)
                time.sleep(1.0)

    def _began(self, number: int, pidfd: int, process: int) -> None:
        """Stores the descriptor of a session's process, or kills it if ``kill`` was called."""
        with self._lock:
            is_to_end = number in self._pidfds
            self._pidfds[number] = pidfd
            self._processes[number] = process
        if is_to_end:
            self.kill(number)
        else:
            self.schedule(number)

    def _over(self, report: dict[str, Any]) -> None:
        """Handles the end of a session's process."""
        number = report["over"]
        with self._lock:
            self._processes.pop(number, None)
            self._niceness.pop(number, None)
        self._on_end(report["cpu"])
        _log.info(
            "session %d: used %.1f s of CPU time and up to %d MiB",
            number, report["cpu"], report["peak"] >> 20,
        )  # fmt: skip
        if report["status"]:
            status = _SIGNALS.get(report["status"], f"exit status {report['status']}")
            _log.warning("session %d: its process ended: %s", number, status)
            self._on_failure()

    def schedule(self, number: int, niceness: int | None = None) -> None:
        """Sets the niceness of a session's process, by default to that which was set before.

        A process that has not begun gets it when it begins.
        """
        with self._lock:
            if niceness is not None and niceness == self._niceness.get(number):
                return
            if niceness is not None:
                self._niceness[number] = niceness
            process, pidfd = self._processes.get(number), self._pidfds.get(number)
            if process is not None and pidfd is not None and number in self._niceness:
                is_alone = self._niceness[number] == 0
                slice = _SHORT_SLICE if is_alone else _LONG_SLICE
                _native.set_share(process, self._niceness[number], slice)

    def begin(self, number: int, handoffs: socket.socket, requests: socket.socket) -> None:
        """Starts the process of a session.

        Args:
            number: The number of the session.
            handoffs: The process's end of the socket for connections.
            requests: The process's end of the socket for requests.

        Raises:
            OSError: The zygote has ended, and the next one is not ready yet.
        """
        zygote, descriptors = self._next, (handoffs.fileno(), requests.fileno())
        try:
            send(zygote, {"begin": number}, *descriptors)
        except OSError:
            if not self._succeed(zygote):
                raise
            send(self._next, {"begin": number}, *descriptors)
        if self._once:
            self.is_ready = False
            self._next.shutdown(socket.SHUT_WR)
            threading.Thread(target=self._replace, daemon=True).start()

    def kill(self, number: int) -> None:
        """Kills the process of a session if it has not ended. Must be called once per session."""
        with self._lock:
            pidfd = self._pidfds.pop(number, None)
            if pidfd is None:
                self._pidfds[number] = None
                return
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)

    def close(self) -> None:
        """Ends the zygote, or the processes of GPU sessions. Blocks."""
        self._closing = True
        self._end_successors()
        for process, orders in self._all:
            # `orders.close()` would not end the connection while `_watch` receives on the socket.
            orders.shutdown(socket.SHUT_RDWR)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _end_successors(self) -> None:
        """Ends the processes that were or are successors. Blocks."""
        with self._lock:
            successors = list(self._successors.items())
            waiting = [] if self._successor is None else [self._successor]
        for orders in {*waiting, *(orders for orders, _ in successors)}:
            with contextlib.suppress(OSError):
                orders.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + GRACE
        for orders, _ in successors:
            while orders in self._successors and time.monotonic() < end:
                time.sleep(0.01)
        with self._lock:
            for pidfd in self._successors.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
