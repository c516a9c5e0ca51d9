# SPDX-License-Identifier: MIT OR Apache-2.0
"""The main process of ``tensorstream serve``: authenticates clients, and runs no operators.

It holds the token and the TLS keys. Each session runs in its own process
(:mod:`.remote._zygote`), which cannot open files or sockets: the broker passes it the client's
connections, and the tensors of other sessions and machines that it may read.
"""

from __future__ import annotations

import itertools
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
from typing import Any

from .. import _native
from ._messages import is_sealed, pair, receive, send
from ._peers import Peers

_log = logging.getLogger("tensorstream.remote")

#: The services of a session with a name, which its client can reconnect to, and of a new session
#: without one.
_SERVICE = re.compile(r"exec(/[0-9a-f]{32})?")
#: The most tensors that one session, and all of them, can offer to others at a time.
_MAX_OFFERED = 16
_MAX_OFFERED_IN_ALL = 1024
#: The most connections of one session at a time. Its client uses one, and may not know yet that
#: others are lost.
_MAX_CONNECTIONS = 8
#: How long sessions may take to end when the server stops, in seconds.
_GRACE = 5.0
#: The environment variables that sessions get. None of them is a secret.
_ENVIRONMENT = re.compile(
    r"PATH|HOME|LANG|LC_.*|TZ|TMPDIR|VIRTUAL_ENV|PYTHON.*|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|CUDA_.*|NVIDIA_.*"
    r"|(OMP|KMP|MKL|DNNL|ONEDNN|TORCH|PYTORCH|ATEN|MALLOC|GOMP)_.*"
)
#: The names of the signals, by the exit status that they cause.
_SIGNALS = {-number: number.name for number in signal.Signals}


class _InvalidRequest(Exception):
    """The process of a session has sent something that no honest one sends."""


class _Session:
    """A session and its process.

    handoffs: the socket that passes connections to the process. requests: the socket for its
    requests to the broker.
    """

    def __init__(
        self, number: int, service: str, handoffs: socket.socket, requests: socket.socket
    ) -> None:
        self.number, self.service, self.handoffs, self.requests = (
            number,
            service,
            handoffs,
            requests,
        )
        #: The number of open connections, and the time when the last one closed.
        self.connections = 0
        self.idle_since = 0.0
        #: The tickets of the tensors that it offers.
        self.offered: set[str] = set()
        self.ended = threading.Event()


class _Processes:
    """Creates the processes of sessions.

    On a CPU they are forked from a zygote process. GPU drivers do not support fork, so on GPUs each
    is started separately, and the next one is started in advance.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = json.dumps(options)
        self._once = options["device"] == "cuda"
        self._lock = threading.Lock()
        self._closing = False
        self._all: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        #: Descriptors of the processes of sessions, by session; None for one that is to be killed
        #: once it is known.
        self._pidfds: dict[int, int | None] = {}
        #: What the sandbox of a session prevents, one description for each mechanism.
        self.restrictions: list[str] = []
        self._next = self._start()
        self._await_ready(self._next)

    def _start(self) -> socket.socket:
        with self._lock:
            self._all = [
                (process, orders) for process, orders in self._all if process.poll() is None
            ]
        own, its = pair()
        command = [
            sys.executable,
            "-m",
            "tensorstream.remote.server._zygote",
            str(its.fileno()),
            self._options,
        ]
        environment = {
            name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)
        }
        process = subprocess.Popen(
            [*command, "once"] if self._once else command, pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            # OpenBLAS would start threads on import, and a process is only safe to fork without
            # threads.
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        its.close()
        with self._lock:
            self._all.append((process, own))
        return own

    def _await_ready(self, orders: socket.socket) -> None:
        received = receive(orders)
        if received is None:
            raise RuntimeError(
                "the process for sessions did not start; its errors are on standard error"
            )
        if "refused" in received[0]:
            raise RuntimeError(received[0]["refused"])
        self.restrictions = received[0]["restrictions"]
        threading.Thread(
            target=self._watch, args=(orders,), name="tensorstream-zygote", daemon=True
        ).start()

    def _watch(self, orders: socket.socket) -> None:
        """Logs how sessions end. Replaces the zygote if it ends."""
        while (received := receive(orders)) is not None:
            report, pidfd = received
            if "began" in report and pidfd is not None:
                self._began(report["began"], pidfd)
            elif report.get("status"):
                status = _SIGNALS.get(report["status"], f"exit status {report['status']}")
                _log.warning("session %d: its process ended: %s", report["over"], status)
        if self._next is orders:
            with self._lock:
                # It will not report these any more.
                self._pidfds = {
                    number: pidfd for number, pidfd in self._pidfds.items() if pidfd is not None
                }
            self._replace()

    def _replace(self) -> None:
        """Starts the next zygote, and tries again until it is ready.

        Clients reconnect meanwhile.
        """
        while not self._closing:
            _log.info("starting a process for sessions")
            try:
                orders = self._start()
                self._await_ready(orders)
            except (OSError, RuntimeError) as error:
                _log.error("cannot start a process for sessions: %s; trying again", error)
                time.sleep(1.0)
            else:
                self._next = orders
                return

    def _began(self, number: int, pidfd: int) -> None:
        with self._lock:
            killed = number in self._pidfds
            self._pidfds[number] = pidfd
        if killed:
            self.kill(number)

    def begin(self, number: int, handoffs: socket.socket, requests: socket.socket) -> None:
        """Starts the process of a session, with its ends of two sockets.

        Raises:
            OSError: The zygote has ended, and the next one is not ready yet.
        """
        send(self._next, {"begin": number}, handoffs.fileno(), requests.fileno())
        if self._once:
            self._next.shutdown(socket.SHUT_WR)
            threading.Thread(target=self._replace, daemon=True).start()

    def kill(self, number: int) -> None:
        """Kills the process of a session, if it has not ended. Called once for each session."""
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
        """Ends the zygote, or the processes of sessions on GPUs. Blocks."""
        self._closing = True
        for process, orders in self._all:
            # `_watch` keeps the socket open.
            orders.shutdown(socket.SHUT_RDWR)
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Broker:
    """A server with one process for each session. The constructor blocks until sessions can start.

    peers: the machines that sessions can fetch tensors from. options: of the sessions, for
    :mod:`.remote._zygote`.
    """

    def __init__(
        self,
        dispatcher: _native.Dispatcher,
        peers: Peers,
        options: dict[str, Any],
        max_sessions: int,
    ) -> None:
        self._dispatcher, self._peers, self._max_sessions = dispatcher, peers, max_sessions
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        #: Offered tensors by ticket: their metadata and memory.
        self._offers: dict[str, tuple[dict[str, Any], int]] = {}
        self._memory: int | None = options["memory"]
        self._stopped = False
        self._processes = _Processes(options)
        self.restrictions = self._processes.restrictions

    def stop(self) -> None:
        """Ends :meth:`run`. Does not block."""
        self._stopped = True

    def run(self) -> None:
        """Serves until :meth:`stop` is called, then ends all sessions and tells their clients.

        Blocks.
        """
        try:
            while not self._stopped:
                handoff = self._dispatcher.next(
                    0.1, lambda peer, reason: _log.info("%s: %s", peer, reason)
                )
                if handoff is not None:
                    self._dispatch(handoff)
        finally:
            with self._lock:
                sessions = list(self._sessions.values())
            for session in sessions:
                # Its process then tells the client, and exits.
                session.handoffs.close()
            end = time.monotonic() + _GRACE
            for session in sessions:
                if not session.ended.wait(max(0.0, end - time.monotonic())):
                    session.requests.shutdown(socket.SHUT_RDWR)
                    session.ended.wait()
            self._processes.close()

    def _dispatch(self, handoff: _native.Handoff) -> None:
        service, refusal = handoff.service, ""
        if not _SERVICE.fullmatch(service):
            return handoff.refuse("invalid session name: expected exec/ and 32 hexadecimal digits")
        with self._lock:
            session = self._sessions.get(service)
            if session is None and not self._has_capacity():
                refusal = (
                    f"the server has {self._max_sessions} sessions, its maximum; try again later"
                )
            elif session is not None and session.connections >= _MAX_CONNECTIONS:
                # Dropped without a reason: the client reconnects.
                _log.warning(
                    "%s: session %d has too many connections", handoff.peer, session.number
                )
            else:
                try:
                    session = session or self._begin(service, handoff.peer)
                    handoff.send_to(os.dup(session.handoffs.fileno()))
                    session.connections += 1
                except (OSError, RuntimeError) as error:
                    _log.warning(
                        "%s: cannot pass the connection to a session: %s", handoff.peer, error
                    )
                    if session is None:
                        refusal = "the server cannot start a session now; try again later"
        if refusal:
            handoff.refuse(refusal)

    def _has_capacity(self) -> bool:
        """Makes room by ending the session that has been disconnected longest, if the server is
        full.
        """
        if len(self._sessions) < self._max_sessions:
            return True
        idle = [session for session in self._sessions.values() if not session.connections]
        if not idle:
            return False
        oldest = min(idle, key=lambda session: session.idle_since)
        _log.info(
            "session %d: ended, because it has been disconnected longest and the server is full",
            oldest.number,
        )
        self._remove(oldest)
        # `_serve` then kills its process.
        oldest.requests.shutdown(socket.SHUT_RDWR)
        return True

    def _begin(self, service: str, peer: str) -> _Session:
        number = next(self._numbers)
        handoffs, its_handoffs = pair()
        requests, its_requests = pair()
        # The process sends nothing back this way.
        handoffs.shutdown(socket.SHUT_RD)
        with its_handoffs, its_requests:
            self._processes.begin(number, its_handoffs, its_requests)
        # A session without a name cannot be reconnected to.
        session = _Session(
            number, service if "/" in service else f"{service}#{number}", handoffs, requests
        )
        self._sessions[session.service] = session
        name = f"tensorstream-session-{number}"
        threading.Thread(target=self._serve, args=(session,), name=name, daemon=True).start()
        _log.info("session %d: started for %s", number, peer)
        return session

    def _remove(self, session: _Session) -> None:
        """Accepts no more connections for a session, and makes its process exit."""
        if self._sessions.get(session.service) is session:
            del self._sessions[session.service]
        session.handoffs.close()

    def _serve(self, session: _Session) -> None:
        """Answers the requests of a session's process until it ends.

        Ends it if a request is invalid.
        """
        try:
            while (received := receive(session.requests)) is not None:
                message, descriptor = received
                try:
                    self._answer(session, message, descriptor)
                finally:
                    if descriptor is not None:
                        os.close(descriptor)
        except _InvalidRequest as error:
            _log.warning("session %d: %s", session.number, error)
        except (OSError, MemoryError) as error:
            # It has ended, or does not receive its answers.
            _log.info("session %d: %s", session.number, error)
        finally:
            with self._lock:
                self._remove(session)
                for ticket in session.offered:
                    self._forget(ticket)
            self._processes.kill(session.number)
            session.requests.close()
            session.ended.set()
            _log.info("session %d: ended", session.number)

    def _forget(self, ticket: str) -> None:
        offer = self._offers.pop(ticket, None)
        if offer is not None:
            os.close(offer[1])

    def _answer(self, session: _Session, message: dict[str, Any], descriptor: int | None) -> None:
        """Handles a request. The process may be under its client's control, so nothing in the
        request is trusted.

        Raises:
            _InvalidRequest: The session is to end.
            OSError: The process does not receive the answer.
        """
        match message:
            case {"offer": str(ticket), "tensor": dict(tensor)}:
                send(
                    session.requests,
                    {"refused": self._offer(session, ticket, tensor, descriptor)},
                    wait=False,
                )
            case {"claim": str(ticket)}:
                with self._lock:
                    offer = self._offers.get(ticket)
                    # The session that offers it may withdraw it, and close its descriptor, at any
                    # time.
                    own = None if offer is None else os.dup(offer[1])
                try:
                    answer = (
                        {"refused": "no session offers this tensor"} if offer is None else offer[0]
                    )
                    send(session.requests, answer, own, wait=False)
                finally:
                    if own is not None:
                        os.close(own)
            case {"fetch": str(ticket), "from": str(address)}:
                self._fetch(session, address, ticket)
            case {"withdraw": str(ticket)}:
                with self._lock:
                    if ticket in session.offered:
                        session.offered.discard(ticket)
                        self._forget(ticket)
            case {"disconnected": [str(peer), str(reason)]}:
                with self._lock:
                    if not session.connections:
                        raise _InvalidRequest(
                            "it reports the end of a connection that it does not have"
                        )
                    session.connections -= 1
                    session.idle_since = time.monotonic()
                _log.info("session %d: %.100r: %.1000r", session.number, peer, reason)
            case {"failed": str(trace)}:
                raise _InvalidRequest(f"its process failed: {trace[:4000]!r}")
            case _:
                raise _InvalidRequest(f"invalid request: {str(message)[:100]!r}")

    def _offer(
        self, session: _Session, ticket: str, tensor: dict[str, Any], descriptor: int | None
    ) -> str:
        """Stores an offered tensor. Returns why not, or an empty string."""
        if (
            descriptor is None
            or not re.fullmatch("[0-9a-f]{32}", ticket)
            or not is_sealed(descriptor)
        ):
            return "invalid offer: expected a ticket of 32 hexadecimal digits and sealed memory"
        with self._lock:
            if len(session.offered) >= _MAX_OFFERED or ticket in self._offers:
                return f"a session can offer {_MAX_OFFERED} tensors at a time; withdraw one first"
            if len(self._offers) >= _MAX_OFFERED_IN_ALL:
                return (
                    f"sessions can offer {_MAX_OFFERED_IN_ALL} tensors at a time; try again later"
                )
            sizes = [os.fstat(self._offers[offered][1]).st_size for offered in session.offered]
            if (
                self._memory is not None
                and sum(sizes) + os.fstat(descriptor).st_size > self._memory
            ):
                return (
                    f"a session can offer {self._memory} bytes at a time; withdraw a tensor first"
                )
            self._offers[ticket] = tensor, os.dup(descriptor)
            session.offered.add(ticket)
        return ""

    def _fetch(self, session: _Session, address: str, ticket: str) -> None:
        try:
            fetched = self._peers.claimed(address, ticket, self._memory)
            # PyTorch is imported by now, which the broker needs only for this.
            from ..remote.server._exchange import pack

            tensor, descriptor = pack(fetched)
        except (RuntimeError, OSError, MemoryError) as error:
            return send(session.requests, {"refused": str(error)[:1000]}, wait=False)
        try:
            send(session.requests, tensor, descriptor, wait=False)
        finally:
            os.close(descriptor)
