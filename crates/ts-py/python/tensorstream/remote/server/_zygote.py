# SPDX-License-Identifier: MIT OR Apache-2.0
"""The zygote of ``tensorstream serve``, from which the processes of sessions are forked.

The zygote has imported PyTorch, so a fork takes milliseconds. It has one thread and never runs an
operator, because an OpenMP thread pool does not survive a fork. The broker starts it as a new
program with a reduced environment. So its memory contains no token, no keys, and no secrets from
environment variables.

The zygote also forks its successor, which does nothing until the broker sends it requests, because
the zygote has ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from ... import _native
from ...errors import ConfigurationError
from ...serve._messages import MAX_MESSAGE, send
from ._exchange import BrokerExchange
from ._functions import Functions
from ._server import devices_of, session_server

#: The interval between checks for ended sessions, in milliseconds.
_INTERVAL = 100
#: The most open descriptors of a session.
_MAX_DESCRIPTORS = 4096
#: The private memory that a session has in addition to tensors, in bytes: for its own threads, and
#: for each further PyTorch thread. These are measured sizes, rounded up.
_OWN, _PER_THREAD = 24 << 20, 112 << 20
#: The time limit for sessions to end after the server has ended, in seconds.
_GRACE = 4.0


def _serve(
    handoffs: socket.socket,
    requests: socket.socket,
    options: dict[str, Any],
    restrictions: list[str],
) -> None:
    """Serves a session until it ends. Blocks."""
    # Output and core dumps may contain the client's data.
    with open(os.devnull, "r+b", buffering=0) as null:
        for stream in range(3):
            os.dup2(null.fileno(), stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Only a privileged process may raise the hard limit.
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = allowed == resource.RLIM_INFINITY
    descriptors = _MAX_DESCRIPTORS if is_unlimited else min(_MAX_DESCRIPTORS, allowed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    if options["memory"]:
        # PyTorch itself has private memory, most of which is never used.
        threads = (options["threads"] or os.cpu_count() or 1) - 1
        limit = options["memory"] + _private_bytes() + _OWN + threads * _PER_THREAD
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        # Limits each file in memory, because RLIMIT_DATA does not include such files.
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["memory"],) * 2)
    # If the system runs out of memory, it should kill a session and not the broker.
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="ascii") as score,
    ):
        score.write("500")
    exchange = BrokerExchange(requests)
    # This precedes the start of a GPU driver, because Landlock does not restrict running threads.
    blocked = _native.sandbox(options["device"] != "cpu") if options["sandbox"] else restrictions
    if blocked != restrictions:
        raise RuntimeError(
            f"cannot set up the sandbox: expected it to block access to {restrictions}, got "
            f"{blocked}"
        )
    devices = devices_of(options["device"], options["devices"])
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    served = session_server(
        handoffs,
        exchange,
        devices,
        budget=options["budget"],
        functions=Functions(tuple(options["functions"])),
        idle=options["idle_timeout"],
    )
    served.run(
        lambda peer, reason: exchange.tell({"disconnected": [peer, reason[:1000]]}), once=True
    )


def _session(descriptors: list[int], options: dict[str, Any], restrictions: list[str]) -> None:
    """Runs the process of a session, and exits."""
    status = 1
    handoffs, requests = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    try:
        _serve(handoffs, requests, options, restrictions)
        status = 0
    except BaseException:
        send(requests, {"failed": traceback.format_exc(limit=-5)[-4000:]})
    finally:
        # Skips the exit handlers, which belong to the zygote.
        os._exit(status)


def _private_bytes() -> int:
    """Returns what counts of this process for ``RLIMIT_DATA``, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))


def _restrictions(options: dict[str, Any]) -> list[str]:
    """Tries the sandbox in a child process. Returns what it blocks, one text per mechanism."""
    if not options["sandbox"]:
        return []
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, json.dumps(_native.sandbox(options["device"] != "cpu")).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return list(json.loads(text or "[]"))


def run(orders: socket.socket, options: dict[str, Any], once: bool) -> None:
    """Forks a process for each session that the broker requests. Reports how each one ends.

    Blocks until the broker closes ``orders``.

    Args:
        orders: The socket of the broker's requests.
        options: The options of the sessions. See ``Broker``.
        once: Whether to serve the first session in this process instead of forking.
    """
    try:
        devices_of(options["device"], options["devices"])
        Functions(tuple(options["functions"])).preload()
    except ConfigurationError as error:
        return send(orders, {"refused": str(error)})
    # Detects the CPU's instruction sets. A sandboxed process cannot read /proc/cpuinfo, and PyTorch
    # would fall back to kernels without vector instructions, which round differently.
    torch.backends.cpu.get_cpu_capability()
    restrictions = _restrictions(options)
    send(orders, {"restrictions": restrictions})
    # Keeps the garbage collector from writing to pages that sessions share with the zygote.
    gc.collect()
    gc.freeze()
    _fork_sessions(orders, options, restrictions, once)


def _fork_sessions(
    orders: socket.socket, options: dict[str, Any], restrictions: list[str], once: bool
) -> None:
    """Forks sessions, and successors, until the broker closes ``orders``."""
    sessions: dict[int, int] = {}
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    while True:
        if poll.poll(_INTERVAL):
            text, descriptors, _, _ = socket.recv_fds(orders, MAX_MESSAGE, 2)
            if not text:
                return _end(sessions)
            order = json.loads(text)
            if "succeed" in order:
                successor = _fork_successor(descriptors[0])
                if successor is None:
                    continue
                orders.close()
                with successor:
                    return _fork_sessions(successor, options, restrictions, once)
            number = order["begin"]
            if once:
                with _pidfd(os.getpid()) as pidfd:
                    send(orders, {"began": number, "process": os.getpid()}, pidfd)
                _session(descriptors, options, restrictions)
            try:
                child = os.fork()
            except OSError:
                # The system has too many processes or too little memory. The client's connection
                # closes, and the client reconnects.
                child = None
            if child == 0:
                orders.close()
                _session(descriptors, options, restrictions)
            for descriptor in descriptors:
                os.close(descriptor)
            if child is not None:
                sessions[child] = number
                with _pidfd(child) as pidfd:
                    send(orders, {"began": number, "process": child}, pidfd)
        while sessions:
            child, status, used = os.wait4(-1, os.WNOHANG)
            if not child:
                break
            report = {
                "over": sessions.pop(child),
                "status": os.waitstatus_to_exitcode(status),
                "cpu": used.ru_utime + used.ru_stime,
                "peak": used.ru_maxrss << 10,
            }
            send(orders, report)


def _fork_successor(descriptor: int) -> socket.socket | None:
    """Forks a process that can replace this one.

    The successor is not a child of this process, and reports to the broker that it is ready.

    Args:
        descriptor: The socket of the broker's requests to the successor. Owned by this function.

    Returns:
        The socket in the successor. None in this process, also if it cannot be forked.
    """
    try:
        child = os.fork()
    except OSError:
        os.close(descriptor)
        return None
    if child:
        os.waitpid(child, 0)
        os.close(descriptor)
        return None
    try:
        # The parent of the successor ends at once, so that init waits for the successor.
        if os.fork():
            os._exit(0)
        successor = socket.socket(fileno=descriptor)
        with _pidfd(os.getpid()) as pidfd:
            send(successor, {"successor": os.getpid()}, pidfd)
        return successor
    except BaseException:
        os._exit(1)


@contextlib.contextmanager
def _pidfd(process: int) -> Iterator[int]:
    """Opens a descriptor of a process, with which another process can kill it without a race."""
    pidfd = os.pidfd_open(process)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _end(sessions: dict[int, int]) -> None:
    """Gives sessions 4 seconds to notify their clients and end, then kills those that remain."""
    end = time.monotonic() + _GRACE
    while sessions and time.monotonic() < end:
        child, _ = os.waitpid(-1, os.WNOHANG)
        sessions.pop(child, None)
        if not child:
            time.sleep(0.02)
    for child in sessions:
        os.kill(child, signal.SIGKILL)


def main() -> None:
    """Runs the zygote with the descriptor and the options from the command line."""
    # The broker handles Ctrl-C, and ends the zygote and the sessions.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as orders, contextlib.suppress(OSError):
        run(orders, json.loads(sys.argv[2]), sys.argv[3:] == ["once"])


if __name__ == "__main__":
    main()
