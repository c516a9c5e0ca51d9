# SPDX-License-Identifier: MIT OR Apache-2.0
"""Others that run operators elsewhere, for remote.py.

Each has the same three methods: ``one()``, an addition that is waited for; ``chain(count)``, so
many that are not, each on what the one before gave, and what stands for the last; ``value(last)``,
which waits for it. Everyone begins with a single 1.0 and adds 1.0.
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
    """So many bytes of a socket."""
    into = bytearray(size) if into is None else into
    view, at = memoryview(into)[:size], 0
    while at < size:
        got = sock.recv_into(view[at:], min(size - at, 1 << 20))
        if not got:
            sys.exit()
        at += got
    return into


def _put(sock: socket.socket, what: Any) -> None:
    body = marshal.dumps(what)
    sock.sendall(struct.pack("I", len(body)) + body)


def _get(sock: socket.socket) -> Any:
    return marshal.loads(bytes(exact(sock, struct.unpack("I", exact(sock, 4))[0])))


def _operator(name: str) -> Callable[..., torch.Tensor]:
    return {"add": torch.add, "ones": lambda size: torch.ones(int(size), int(size))}[name]


def _batches(count: int) -> list[list[tuple[Any, ...]]]:
    return [
        [("add", i + 1, (i,), (1.0,)) for i in range(start, min(start + BATCH, count))]
        for start in range(0, count, BATCH)
    ]


def _bare_server(family: socket.AddressFamily, address: Any, bound: Any) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen(1)
    bound.send(listener.getsockname())
    sock, held = _quick(listener.accept()[0]), {}
    while True:
        batch, wanted = _get(sock)
        for name, out, inputs, constants in batch:
            held[out] = _operator(name)(*(held[i] for i in inputs), *constants)
        if wanted is not None:
            _put(sock, held[wanted].flatten()[:1].tolist())


def _quick(sock: socket.socket) -> socket.socket:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def seconds(run: Callable[[], object]) -> float:
    """How long it takes."""
    since = time.perf_counter()
    run()
    return time.perf_counter() - since


def median_us(run: Callable[[], object], count: int = 300) -> float:
    """The same, of many."""
    return 1e6 * statistics.median(seconds(run) for _ in range(count))


def measure(peer: Any, count: int) -> tuple[float, float, float]:
    """Microseconds of an addition that is waited for, and of one that is issued; additions a
    second.
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
    """A Python process that runs operators by name on tensors it holds, in marshalled batches of
    64: no shapes are known at its client, nothing is acknowledged and nothing is freed."""

    def __init__(self, address: Any) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        ours, theirs = mp.Pipe()
        mp.Process(target=_bare_server, args=(family, address, theirs), daemon=True).start()
        self._sock = socket.socket(family)
        self._sock.connect(ours.recv())
        _quick(self._sock)
        _put(self._sock, ([("ones", 0, (), (1.0,))], None))

    def chain(self, count: int) -> int:
        for batch in _batches(count):
            _put(self._sock, (batch, None))
        return count

    def value(self, number: int) -> float:
        _put(self._sock, ([], number))
        return _get(self._sock)[0]

    def one(self) -> float:
        _put(self._sock, ([("add", 1, (0,), (1.0,))], 1))
        return _get(self._sock)[0]


class Tensors:
    """A tensor of a device: what a program of PyTorch's does."""

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
    """mycelya-torch, whose mock is in the process and has no transport: in one of its own, for
    PyTorch has room for one device that it does not know."""

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
    from torch.distributed import rpc

    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def _rpc_server(port: int) -> None:
    torch.set_num_threads(1)
    _rpc("server", 1, port).shutdown()


def _added(reference: Any) -> torch.Tensor:
    return reference.local_value() + 1.0


class Rpc:
    """torch.distributed.rpc, tensors by reference."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        mp.Process(target=_rpc_server, args=(port,), daemon=True).start()
        self._rpc = _rpc("client", 0, port)
        self._one = self._rpc.remote("server", torch.ones, ((1, 1),))

    def chain(self, count: int) -> Any:
        value = self._one
        for _ in range(count):
            value = self._rpc.remote("server", _added, (value,))
        return value

    def value(self, reference: Any) -> float:
        return reference.to_here().item()

    def one(self) -> float:
        return self.value(self.chain(1))

    def end(self) -> None:
        self._rpc.shutdown()


class Ray:
    """An actor of Ray's that holds tensors by number: an operator a call, or 64."""

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
                self.held = {0: torch.ones(1, 1)}

            def run(self, batch: list[Any]) -> None:
                for name, out, inputs, constants in batch:
                    operator = {"add": torch.add}[name]
                    self.held[out] = operator(*(self.held[i] for i in inputs), *constants)

            def value(self, number: int) -> float:
                return self.held[number].item()

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
