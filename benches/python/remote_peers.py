# SPDX-License-Identifier: MIT OR Apache-2.0
"""Other ways to run operators in another process, for remote.py.

All peers start with 1.0 and add 1.0. A peer has a method ``measure``, or these three methods:

- ``one()`` runs one addition, and waits for its result.
- ``chain(count)`` issues additions without waiting. Each adds to the result of the previous one.
  Returns a reference to the last result.
- ``value(reference)`` waits for a result, and returns it.
"""

from __future__ import annotations

import importlib.util
import marshal
import multiprocessing as mp
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

BATCH = 64


def exact(sock: socket.socket, size: int, into: bytearray | None = None) -> bytearray:
    """Reads exactly ``size`` bytes from a socket to the start of ``into``, by default a new buffer.

    Returns the buffer. Exits the process if the socket is closed.
    """
    into = bytearray(size) if into is None else into
    view, at = memoryview(into)[:size], 0
    while at < size:
        got = sock.recv_into(view[at:], min(size - at, 1 << 20))
        if not got:
            sys.exit()
        at += got
    return into


def _send(sock: socket.socket, what: Any) -> None:
    body = marshal.dumps(what)
    sock.sendall(struct.pack("I", len(body)) + body)


def _receive(sock: socket.socket) -> Any:
    return marshal.loads(bytes(exact(sock, struct.unpack("I", exact(sock, 4))[0])))


def _operator(name: str) -> Callable[..., torch.Tensor]:
    return {"add": torch.add, "ones": lambda size: torch.ones(int(size), int(size))}[name]


def _batches(count: int) -> list[list[tuple[Any, ...]]]:
    return [
        [("add", i + 1, (i,), (1.0,)) for i in range(start, min(start + BATCH, count))]
        for start in range(0, count, BATCH)
    ]


def _bare_server(family: socket.AddressFamily, address: Any, bound: Any) -> None:
    """Runs the server process of `Bare`. First sends the address of its socket to ``bound``."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen(1)
    bound.send(listener.getsockname())
    sock, tensors = _without_delay(listener.accept()[0]), {}
    while True:
        batch, wanted = _receive(sock)
        for name, out, inputs, constants in batch:
            tensors[out] = _operator(name)(*(tensors[i] for i in inputs), *constants)
        if wanted is not None:
            _send(sock, tensors[wanted].flatten()[:1].tolist())


def _without_delay(sock: socket.socket) -> socket.socket:
    """Turns off Nagle's algorithm if this is a TCP socket. Returns the socket."""
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def seconds(run: Callable[[], object]) -> float:
    """Returns the duration of a call in seconds."""
    since = time.perf_counter()
    run()
    return time.perf_counter() - since


def median_us(run: Callable[[], object], count: int = 300) -> float:
    """Returns the median duration of ``count`` calls, in microseconds."""
    return 1e6 * statistics.median(seconds(run) for _ in range(count))


def measure(peer: Any, count: int) -> tuple[float, float, float]:
    """Measures a peer with a chain of ``count`` additions, and with single additions.

    Returns:
        The microseconds of one addition with its wait, the microseconds to issue one addition
        without waiting, and the additions per second.
    """
    if hasattr(peer, "measure"):
        return peer.measure(count)
    since = time.perf_counter()
    last = peer.chain(count)
    issued = time.perf_counter() - since
    assert peer.value(last) == count + 1.0
    rate = count / (time.perf_counter() - since)
    return median_us(peer.one, 100), 1e6 * issued / count, rate


class Bare:
    """A Python process that runs operators by name on its tensors, in marshalled batches of 64.

    The client does not compute shapes and frees no tensors. The server sends no acknowledgements.
    """

    def __init__(self, address: Any) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        ours, theirs = mp.Pipe()
        mp.Process(target=_bare_server, args=(family, address, theirs), daemon=True).start()
        self._sock = socket.socket(family)
        self._sock.connect(ours.recv())
        _without_delay(self._sock)
        _send(self._sock, ([("ones", 0, (), (1.0,))], None))

    def chain(self, count: int) -> int:
        for batch in _batches(count):
            _send(self._sock, (batch, None))
        return count

    def value(self, number: int) -> float:
        _send(self._sock, ([], number))
        return _receive(self._sock)[0]

    def one(self) -> float:
        _send(self._sock, ([("add", 1, (0,), (1.0,))], 1))
        return _receive(self._sock)[0]


class Tensors:
    """Tensors of a PyTorch device, used with ordinary PyTorch calls."""

    def __init__(self, one: torch.Tensor) -> None:
        self._one = one

    def chain(self, count: int) -> torch.Tensor:
        value = self._one
        for _ in range(count):
            value = value + 1.0
        return value

    def value(self, tensor: torch.Tensor) -> float:
        return tensor.item()

    def one(self) -> float:
        return (self._one + 1.0).item()


class Mycelya:
    """A child process with the mock machine of mycelya-torch and its client.

    The mock machine has no transport: it runs in the process of its client. PyTorch supports only
    one additional device in a process, so the process of the benchmark cannot be the client.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("mycelya_torch") is None:
            raise ImportError("mycelya_torch is not installed")
        command = [sys.executable, "-c", "import remote_peers; remote_peers._mycelya()"]
        self._process = subprocess.Popen(
            command,
            cwd=os.path.dirname(__file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def measure(self, count: int) -> tuple[float, float, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(count, file=self._process.stdin, flush=True)
        one, issued, rate = self._process.stdout.readline().split()
        return float(one), float(issued), float(rate)


def _mycelya() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    import mycelya_torch

    peer = Tensors(torch.ones(1, 1).to(mycelya_torch.RemoteMachine("mock").device("cpu")))
    for line in sys.stdin:
        print(*measure(peer, int(line)), flush=True)


def _rpc(name: str, rank: int, port: int) -> Any:
    """Joins a group of two processes on the loopback interface. Returns the module ``rpc``."""
    from torch.distributed import rpc

    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def _rpc_server(port: int) -> None:
    torch.set_num_threads(1)
    _rpc("server", 1, port).shutdown()


def _add_one(reference: Any) -> torch.Tensor:
    return reference.local_value() + 1.0


class Rpc:
    """torch.distributed.rpc, with tensors that stay on the server as RRefs."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        mp.Process(target=_rpc_server, args=(port,), daemon=True).start()
        self._rpc = _rpc("client", 0, port)
        self._one = self._rpc.remote("server", torch.ones, ((1, 1),))

    def chain(self, count: int) -> Any:
        value = self._one
        for _ in range(count):
            value = self._rpc.remote("server", _add_one, (value,))
        return value

    def value(self, reference: Any) -> float:
        return reference.to_here().item()

    def one(self) -> float:
        return self.value(self.chain(1))

    def end(self) -> None:
        self._rpc.shutdown()


class Ray:
    """A Ray actor that stores tensors by number. A call runs ``batch`` operators, at most 64."""

    def __init__(self, batch: int) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(
                num_cpus=1, object_store_memory=128 << 20, _node_ip_address="127.0.0.1",
                include_dashboard=False,
                log_to_driver=False, logging_level="error",
            )  # fmt: skip

        @ray.remote
        class Actor:
            def __init__(self) -> None:
                torch.set_num_threads(1)
                self.tensors = {0: torch.ones(1, 1)}

            def run(self, batch: list[Any]) -> None:
                for name, out, inputs, constants in batch:
                    operator = {"add": torch.add}[name]
                    self.tensors[out] = operator(*(self.tensors[i] for i in inputs), *constants)

            def value(self, number: int) -> float:
                return self.tensors[number].item()

        self._batch, self._ray, self._actor = batch, ray, Actor.options(num_cpus=0).remote()

    def chain(self, count: int) -> int:
        for batch in _batches(count):
            for start in range(0, len(batch), self._batch):
                self._actor.run.remote(batch[start : start + self._batch])
        return count

    def value(self, number: int) -> float:
        return self._ray.get(self._actor.value.remote(number))

    def one(self) -> float:
        return self.value(self.chain(1))

    def end(self) -> None:
        self._ray.shutdown()
