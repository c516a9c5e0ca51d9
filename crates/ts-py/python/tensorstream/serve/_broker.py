# SPDX-License-Identifier: MIT OR Apache-2.0
"""The main process of ``tensorstream serve``: authenticates clients, and runs no operators.

Only the broker has the token and the TLS keys. Each session runs in its own process
(``tensorstream.remote.server._zygote``). Unless the sandbox is disabled or not supported, the
process cannot connect sockets, and on a CPU it cannot open files. The broker passes the client's
connections to the process. The broker also passes tensors that other sessions and machines offer,
if the process sends the right tickets, and files of checkpoints that ``--weights`` allows.
"""

from __future__ import annotations

import collections
import itertools
import json
import logging
import math
import mmap
import os
import re
import resource
import select
import socket
import threading
import time
from collections.abc import Hashable
from typing import Any

from .. import _native
from ..errors import ConfigurationError, StorageError, TensorStreamError
from ..wire._connection import LIMIT_BYTES, _settings
from ._messages import MAX_MESSAGE, is_sealed, layout, pair, receive, sealed, send
from ._offers import Offers
from ._outgoing import Outgoing
from ._peers import Peers, Sender
from ._processes import GRACE, Processes
from ._weights import OpenFile, Weights

_log = logging.getLogger("tensorstream.remote")

#: The service that a client requests: a session with a name, to which it can reconnect, or a new
#: session without a name.
_SERVICE = re.compile(r"exec(/[0-9a-f]{32})?")
#: The most connections of one session at a time. A client uses one. The others are lost connections
#: whose end the session has not noticed yet.
_MAX_CONNECTIONS = 8
#: The sockets over which a session reads URLs. Each is for one read at a time, with up to 8 MiB of
#: the broker's memory.
_CHANNELS = 4
#: The time limit for the only session to start, in seconds.
_FIRST = 60.0
#: The counters of ``Broker.metrics``, and the gauges.
_COUNTERS = {
    "sessions_total": "Sessions that have started.",
    "refused_sessions_total": "Sessions that were refused.",
    "failed_sessions_total": "Sessions whose process has failed.",
    "connections_total": "Connections of clients that were authenticated.",
    "failed_handshakes_total": "Connections that were not.",
    "opened_files_total": "Files of checkpoints that sessions have got.",
    "session_cpu_seconds_total": "CPU time of sessions that have ended.",
}
_GAUGES = {
    "sessions": "Sessions, including those whose client is not connected.",
    "connections": "Connections of sessions.",
    "max_sessions": "The most sessions at a time.",
    "stopping": "Whether new sessions are refused because the server stops.",
}


class _InvalidRequest(Exception):
    """The process of a session has sent an invalid request, or has failed."""


class _Session:
    """A session and its process.

    Args:
        number: The number of the session in logs.
        service: The service name that further connections of the client request.
        handoffs: The socket that passes connections to the process.
        requests: The socket for requests from the process to the broker.
        client: What distinguishes the client from others.
        sender: Sends its tensors to other machines.
    """

    def __init__(
        self,
        number: int,
        service: str,
        handoffs: socket.socket,
        requests: socket.socket,
        client: str,
        sender: Sender,
    ) -> None:
        self.number, self.service, self.client, self.sender = number, service, client, sender
        self.handoffs, self.requests = handoffs, requests
        self.began = time.monotonic()
        #: The number of open connections, and the time when a connection most recently closed.
        self.connections = 0
        self.idle_since = 0.0
        self.ended = threading.Event()
        self.is_killed = False
        #: Reads URLs for the process, once it has channels to it.
        self._relay: _native.Relay | None = None

    def relayed(self, source: _native.PassedSource) -> tuple[dict[str, Any], list[int]]:
        """Returns the message, and the descriptors to close, that pass a source to the process.

        Raises:
            StorageError: The process has too many sources open.
            OSError: This process has too many open files or threads.
        """
        relay = self._relay or _native.Relay()
        answer = {"name": source.name, "number": relay.add(source), "length": source.length}
        if self._relay:
            return answer, []
        channels: list[int] = []
        try:
            for _ in range(_CHANNELS):
                channels.append(relay.channel())
        except BaseException:
            for channel in channels:
                os.close(channel)
            raise
        self._relay = relay
        return answer, channels


class Broker:
    """A server with one process for each session.

    The constructor blocks until sessions can start.

    Args:
        dispatcher: Accepts and authenticates connections.
        peers: The machines from which sessions can fetch tensors.
        outgoing: Connects sessions to programs to which they can send tensors.
        weights: The checkpoints that sessions can read.
        options: The options of the sessions: "device", "devices", "threads", "memory", "budget",
            "functions", "idle_timeout" and "sandbox".
        max_sessions: The most sessions at a time.
        client_sessions: The most sessions of one client at a time.
        drain: How long sessions may go on after ``stop``, while new ones are refused, in seconds.
        once: Whether ``run`` returns when the first session has ended, or when none has started in
            60 seconds.

    Raises:
        OSError: The system cannot create the process that starts sessions.
        RuntimeError: That process has ended, or this computer does not have the devices.
    """

    def __init__(
        self,
        dispatcher: _native.Dispatcher,
        peers: Peers,
        outgoing: Outgoing,
        weights: Weights,
        options: dict[str, Any],
        max_sessions: int,
        *,
        client_sessions: int = 64,
        drain: float = 0.0,
        once: bool = False,
    ) -> None:
        self._dispatcher, self._peers, self._weights = dispatcher, peers, weights
        self._max_sessions, self._client_sessions = max_sessions, client_sessions
        self._drain, self._once = drain, once
        self._counts = collections.Counter[str]()
        self._cpu_seconds = 0.0
        #: The session after which a server for one session ends.
        self._first: _Session | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._memory: int | None = options["memory"]
        #: The metadata and the memory of tensors.
        self._offers: Offers[tuple[dict[str, Any], int]] = offers(self._memory)
        self._outgoing = outgoing
        #: The time until which sessions may go on, once ``stop`` was called.
        self._until: float | None = None
        self._processes = Processes(options, self._process_failed, self._process_ended)
        self.restrictions = self._processes.restrictions

    def stop(self) -> None:
        """Makes ``run`` return when all sessions have ended or drained. Does not block.

        If it is called again, ``run`` does not wait for them, and returns within seconds.
        """
        now = time.monotonic()
        self._until = now if self._until is not None else now + self._drain

    def refuses(self) -> str:
        """Returns why new clients are refused, or an empty string."""
        if self._until is not None:
            return "the server is stopping"
        return "" if self._processes.is_ready else "the process that starts sessions is starting"

    def metrics(self) -> str:
        """Returns counters in the text format of Prometheus."""
        with self._lock:
            connections = sum(session.connections for session in self._sessions.values())
            values = {
                **{name: self._counts[name] for name in _COUNTERS},
                "session_cpu_seconds_total": round(self._cpu_seconds, 3),
                "sessions": len(self._sessions),
                "connections": connections,
                "max_sessions": self._max_sessions,
                "stopping": int(self._until is not None),
            }
        lines = []
        for name, text in (*_COUNTERS.items(), *_GAUGES.items()):
            full = f"tensorstream_serve_{name}"
            kind = "counter" if name in _COUNTERS else "gauge"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {values[name]}"]
        return "\n".join([*lines, ""])

    def _is_stopped(self) -> bool:
        if self._until is None:
            return False
        return not self._sessions or time.monotonic() >= self._until

    def run(self) -> None:
        """Serves until ``stop`` is called, or ``once`` ends it. Blocks.

        Before it returns, notifies the clients that the server stops, and ends all sessions.
        """
        end = time.monotonic() + _FIRST
        try:
            while not self._is_stopped() and not (self._once and self._is_over(end)):
                handoff = self._dispatcher.next(0.1, self._failed)
                if handoff is not None:
                    self._dispatch(handoff)
        finally:
            with self._lock:
                sessions = list(self._sessions.values())
            for session in sessions:
                # The process then notifies its client that the server stops, and exits.
                session.handoffs.close()
            end = time.monotonic() + GRACE
            for session in sessions:
                if not session.ended.wait(max(0.0, end - time.monotonic())):
                    with self._lock:
                        self._kill(session)
                    # Its thread may still download a model, and does not keep this process.
                    session.ended.wait(0.1)
            self._processes.close()

    def _process_failed(self) -> None:
        self._counts["failed_sessions_total"] += 1

    def _process_ended(self, seconds: float) -> None:
        self._cpu_seconds += seconds

    def _failed(self, peer: str, reason: str) -> None:
        """Notes a connection whose handshake failed."""
        self._counts["failed_handshakes_total"] += 1
        _log.info("%s: %s", peer, reason)

    def _is_over(self, end: float) -> bool:
        """Returns whether the first session has ended, or has not started until ``end``."""
        return time.monotonic() > end if self._first is None else self._first.ended.is_set()

    def _dispatch(self, handoff: _native.Handoff) -> None:
        """Passes a connection to its session, and starts the session if it is new."""
        service, refusal = handoff.service, ""
        if not _SERVICE.fullmatch(service):
            return handoff.refuse(
                f"unknown service {service[:100]!r}: this is `tensorstream serve`, which expects "
                '"exec", or "exec/" and 32 hexadecimal digits'
            )
        self._counts["connections_total"] += 1
        client = _client_at(handoff.peer)
        with self._lock:
            session = self._sessions.get(service)
            if session is None and self.refuses():
                refusal = f"{self.refuses()}; connect to another one, or try again later"
            elif session is None and not self._has_capacity_for(client):
                refusal = (
                    f"this client has reached its limit of {self._client_sessions} sessions; stop "
                    "other machines, or try again later"
                )
            elif session is None and not self._has_capacity():
                refusal = (
                    f"the server has reached its limit of {self._max_sessions} sessions; try again "
                    "later"
                )
            elif session is not None and session.connections >= _MAX_CONNECTIONS:
                # Drops the connection without a refusal, so that the client reconnects.
                _log.warning(
                    "%s: dropped: session %d already has %d connections",
                    handoff.peer,
                    session.number,
                    session.connections,
                )
            else:
                try:
                    session = session or self._begin(service, handoff.peer, client)
                    handoff.send_to(os.dup(session.handoffs.fileno()))
                    session.connections += 1
                except (OSError, RuntimeError) as error:
                    failed = (
                        "start a session"
                        if session is None
                        else f"pass the connection to session {session.number}"
                    )
                    _log.warning("%s: cannot %s: %s", handoff.peer, failed, error)
                    if session is None:
                        refusal = "the server cannot start a session now; try again later"
        if refusal:
            self._counts["refused_sessions_total"] += 1
            _log.info("%s: refused: %s", handoff.peer, refusal)
            handoff.refuse(refusal)

    def _has_capacity_for(self, client: str) -> bool:
        """Returns whether a client may have another session. May end one, as ``_make_room``."""
        own = [session for session in self._sessions.values() if session.client == client]
        return len(own) < self._client_sessions or self._make_room(own, "the client has too many")

    def _share(self) -> None:
        """Divides the CPU time among clients, and that of each among its sessions."""
        counts = collections.Counter(session.client for session in self._sessions.values())
        for session in self._sessions.values():
            count = counts[session.client] if len(counts) > 1 else 1
            self._processes.schedule(session.number, _niceness_of(count))

    def _has_capacity(self) -> bool:
        """Returns whether a session can start. May end one, as ``_make_room``."""
        return len(self._sessions) < self._max_sessions or self._make_room(
            list(self._sessions.values()), "the server is full"
        )

    def _make_room(self, sessions: list[_Session], why: str) -> bool:
        """Ends the session that has been disconnected longest, if there is one."""
        idle = [session for session in sessions if not session.connections]
        if not idle:
            return False
        oldest = min(idle, key=lambda session: session.idle_since)
        _log.info(
            "session %d: ended: %s, and this session was disconnected longest", oldest.number, why
        )
        self._remove(oldest)
        self._kill(oldest)
        return True

    def _kill(self, session: _Session) -> None:
        """Kills the process of a session, unless it was killed already."""
        if not session.is_killed:
            session.is_killed = True
            self._processes.kill(session.number)
            self._outgoing.abort(session)

    def _begin(self, service: str, peer: str, client: str) -> _Session:
        number = next(self._numbers)
        handoffs, child_handoffs = pair()
        requests, child_requests = pair()
        # The process only receives on this socket.
        handoffs.shutdown(socket.SHUT_RD)
        with child_handoffs, child_requests:
            self._processes.begin(number, child_handoffs, child_requests)
        # A client cannot reconnect to a session without a name. Its key only has to be unique.
        session = _Session(
            number,
            service if "/" in service else f"{service}#{number}",
            handoffs,
            requests,
            client,
            Sender(self._peers, self._offers),
        )
        self._sessions[session.service] = session
        self._share()
        self._first = self._first or session
        name = f"tensorstream-session-{number}"
        threading.Thread(target=self._serve, args=(session,), name=name, daemon=True).start()
        self._counts["sessions_total"] += 1
        _log.info("session %d: started for %s", number, peer)
        return session

    def _remove(self, session: _Session) -> None:
        """Makes the process of a session exit. Later connections start a new session."""
        if self._sessions.get(session.service) is session:
            del self._sessions[session.service]
            self._share()
        session.handoffs.close()

    def _serve(self, session: _Session) -> None:
        """Answers the requests of a session's process until the process ends or must be ended.

        Then removes the session, and kills the process if it has not ended. A process must be ended
        if it sends an invalid request or cannot be answered.
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
            # The process has ended or does not receive its answers, or there is too little memory.
            _log.info("session %d: cannot answer a request: %s", session.number, error)
        finally:
            with self._lock:
                self._remove(session)
                self._kill(session)
            self._offers.drop(session)
            self._outgoing.drop(session)
            session.sender.close()
            session.requests.close()
            session.ended.set()
            seconds = time.monotonic() - session.began
            _log.info("session %d: ended after %.1f s", session.number, seconds)

    def _answer(self, session: _Session, message: dict[str, Any], descriptor: int | None) -> None:
        """Handles a request.

        The process may be under its client's control, so nothing in the request is trusted.

        Raises:
            _InvalidRequest: The request is invalid, or the process failed. The session must end.
            OSError: The process does not receive the answer.
        """
        match message:
            case {"offer": str(ticket), "tensor": dict(tensor), "to": str(to)}:
                refusal = self._offer(session, ticket, tensor, descriptor, to)
                send(session.requests, {"refused": refusal}, wait=False)
            case {"claim": str(ticket)}:
                self._claim(session, ticket)
            case {"refuse": str(ticket), "reason": str(reason)}:
                self._offers.refuse(session, ticket, reason[:1000])
            case {
                "fetch": str(ticket), "from": str(address), "tensor": dict(tensor),
                "is_sent": bool(is_sent),
            }:  # fmt: skip
                self._fetch(session, address, ticket, tensor, is_sent)
            case {"open": str(source), "beside": str(beside)}:
                self._open(session, source, beside)
            case {"directories": str(source)}:
                self._list(session, source)
            case {"connect": _} | {"send": _} | {"close": _}:
                self._connection(session, message, descriptor)
            case {"withdraw": str(ticket)}:
                self._offers.withdraw(session, ticket)
                session.sender.withdraw(ticket)
            case {"disconnected": [str(peer), str(reason)]}:
                with self._lock:
                    if not session.connections:
                        raise _InvalidRequest(
                            "invalid request: it reports the end of an unknown connection"
                        )
                    session.connections -= 1
                    session.idle_since = time.monotonic()
                _log.info("session %d: %.100r disconnected: %.1000r", session.number, peer, reason)
            case {"failed": str(trace)}:
                raise _InvalidRequest(f"its process failed: {trace[:4000]!r}")
            case _:
                raise _InvalidRequest(f"invalid request: {str(message)[:100]!r}")

    def _offer(
        self,
        session: _Session,
        ticket: str,
        tensor: dict[str, Any],
        descriptor: int | None,
        to: str,
    ) -> str:
        """Stores an offered tensor, or sends it. Returns "", or the reason for a refusal."""
        if (
            descriptor is None
            or not re.fullmatch("[0-9a-f]{32}", ticket)
            or not is_sealed(descriptor)
        ):
            return "invalid offer: expected a ticket of 32 hexadecimal digits and sealed memory"
        copy, is_sent = os.dup(descriptor), bool(to) and self._peers.reaches(to)
        refusal = self._offers.add(session, ticket, (tensor, copy), is_sent)
        if refusal:
            os.close(copy)
        elif is_sent:
            session.sender.send(to, ticket, tensor, os.dup(descriptor))
        return refusal

    def _claim(self, session: _Session, ticket: str) -> None:
        """Sends a session the tensor that is offered under a ticket, or a refusal."""
        try:
            tensor, descriptor = self._offers.take(ticket)
        except LookupError as error:
            return send(session.requests, {"refused": str(error)}, wait=False)
        try:
            send(session.requests, tensor, descriptor, wait=False)
        finally:
            os.close(descriptor)

    def _fetch(
        self, session: _Session, address: str, ticket: str, tensor: dict[str, Any], is_sent: bool
    ) -> None:
        """Sends a session a copy of another machine's tensor, or the reason for a failure."""
        try:
            got = self._peers.fetch(
                address,
                ticket,
                tensor,
                self._memory,
                wanted=lambda: not _has_ended(session),
                sent=self._offers.receive,
                is_sent=is_sent,
            )
            tensor, descriptor = (tensor, sealed(got)) if isinstance(got, bytes) else got
        except Exception as error:
            return send(session.requests, {"refused": str(error)[:1000]}, wait=False)
        try:
            answer = {**tensor, "was_sent": not isinstance(got, bytes)}
            send(session.requests, answer, descriptor, wait=False)
        finally:
            os.close(descriptor)

    def _connection(
        self, session: _Session, message: dict[str, Any], descriptor: int | None
    ) -> None:
        """Opens, uses or closes a connection to a program, and answers when that is done."""

        def check() -> None:
            if _has_ended(session):
                raise StorageError("the session has ended")

        answer: dict[str, Any] = {}
        try:
            match message:
                case {"connect": str(address), "options": dict(options)}:
                    _log.info("session %d: connects to %.100r", session.number, address)
                    number, peer = self._outgoing.connect(session, address, options)
                    answer = {"number": number, "peer": peer}
                case {"send": int(number), "tensor": dict(metadata), "options": dict(options)}:
                    tensor = _mapped(metadata, descriptor, self._memory)
                    self._outgoing.send(session, number, tensor, options, check)
                case {"close": int(number), "reason": None | str() as reason}:
                    self._outgoing.close(session, number, reason)
                case _:
                    raise ConfigurationError("invalid request about a connection")
        except Exception as error:
            _log.info("session %d: its connection failed: %.200r", session.number, str(error))
            answer = _failure(error)
        send(session.requests, answer, wait=False)

    def _list(self, session: _Session, source: str) -> None:
        """Sends a session the directories of a source that have weights, or a refusal."""
        try:
            answer = {"directories": self._weights.directories(source)}
            if len(json.dumps(answer)) > MAX_MESSAGE:
                raise StorageError(f"{source} has too many directories; name one of them")
        except Exception as error:
            answer = _refusal(session, source, error)
        send(session.requests, answer, wait=False)

    def _open(self, session: _Session, source: str, beside: str) -> None:
        """Sends a session a file of a checkpoint, or the reason why it cannot be opened."""
        try:
            opened = self._weights.open(source, beside)
            if isinstance(opened, OpenFile):
                answer, descriptors = opened.passed()
            else:
                answer, descriptors = session.relayed(opened)
        except Exception as error:
            return send(session.requests, _refusal(session, source, error), wait=False)
        self._counts["opened_files_total"] += 1
        _log.info("session %d: reads %s", session.number, opened.name)
        try:
            send(session.requests, answer, *descriptors, wait=False)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _has_ended(session: _Session) -> bool:
    """Returns whether a session was killed, or its process has ended."""
    ends = select.poll()
    ends.register(session.requests, 0)
    return session.is_killed or bool(ends.poll(0))


def _client_at(peer: str) -> str:
    """Returns what distinguishes a client: its host, without the port."""
    host, separator, port = peer.rpartition(":")
    return host if separator and port.isdecimal() else peer


def _niceness_of(count: int) -> int:
    """Returns the niceness of the sessions of a client that has this many.

    Together they get half the CPU time of one session at niceness 0, because they can use more CPUs
    at a time. Each step divides the share of a process by 1.25 (sched(7) of Linux,
    ``sched_prio_to_weight``).
    """
    return min(19, round(math.log(2 * count, 1.25))) if count > 1 else 0


def offers(memory: int | None) -> Offers[tuple[dict[str, Any], int]]:
    """Returns the offers of sessions whose tensors are in files of memory."""

    def client(session: Hashable) -> Hashable:
        assert isinstance(session, _Session)
        return session.client

    return Offers(
        lambda item: os.close(item[1]), lambda item: os.fstat(item[1]).st_size, memory, client
    )


def broker_of(options: dict[str, Any]) -> tuple[Broker, str]:
    """Creates the broker of a server, and raises this process's limit of open files.

    Args:
        options: The options of ``tensorstream serve``. See crates/tensorstream/src/cli/
            serve_device.rs.

    Returns:
        The broker, and the address at which it listens.

    Raises:
        TensorStreamError: An option is invalid, or the address cannot be used.
        OSError: A file cannot be read, or the system cannot create a process.
        RuntimeError: This computer does not have the devices.
    """
    # Each session needs file descriptors, and so does each tensor that it offers.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    token = options["token"]
    tls = {"cert": options["cert"], "key": options["key"]}
    peers = Peers(tuple(options["peers"]), token, {"ca": options["peer_ca"], **tls})
    outgoing = Outgoing(tuple(options["send_to"]), options["peer_ca"])
    weights = Weights(tuple(options["weights"]))
    settings = _settings(token, 30.0, 300.0, True, None, LIMIT_BYTES)
    dispatcher = _native.Dispatcher(
        options["listen"], settings, options["insecure"], ca=options["ca"], **tls
    )
    sessions = {name: options[name] for name in ("device", "devices", "threads", "sandbox")}
    sessions |= {"memory": options["session_memory"], "budget": options["budget"]}
    sessions |= {name: options[name] for name in ("idle_timeout", "functions")}
    limits = {name: options[name] for name in ("max_sessions", "client_sessions", "drain", "once")}
    return Broker(dispatcher, peers, outgoing, weights, sessions, **limits), dispatcher.address


def _mapped(metadata: dict[str, Any], descriptor: int | None, limit: int | None) -> _native.Tensor:
    """Returns a tensor that a session has passed, without a copy.

    Args:
        metadata: The dtype and the sizes of the tensor.
        descriptor: Its memory.
        limit: The most bytes of its memory.

    Raises:
        ConfigurationError: The memory is not sealed, or is not that of such a tensor.
    """
    if descriptor is None or not is_sealed(descriptor):
        raise ConfigurationError("invalid tensor: expected sealed memory")
    status = os.fstat(descriptor)
    if limit is not None and status.st_size > limit:
        raise ConfigurationError(
            f"the tensor has {status.st_size} bytes, and the limit of --session-memory is {limit}"
        )
    # Otherwise reading would allocate memory of this process.
    if 512 * status.st_blocks < status.st_size:
        raise ConfigurationError("invalid tensor: expected memory without holes")
    size = status.st_size
    memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else b""
    try:
        dtype, sizes, _ = layout(metadata)
        return _native.Tensor._sharing(memory, dtype, sizes)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ConfigurationError(str(error)) from error


def _refusal(session: _Session, source: str, error: Exception) -> dict[str, Any]:
    """Returns the answer to a request for a source that cannot be read. Logs it."""
    _log.info("session %d: cannot read %.200r: %.200s", session.number, source, error)
    return _failure(error)


def _failure(error: Exception) -> dict[str, Any]:
    """Returns the answer to a request that has failed."""
    kind = type(error) if isinstance(error, TensorStreamError) else StorageError
    return {"refused": str(error)[:1500], "error": kind.__name__}
