# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the device ``ts`` costs, beside others, in one run of interleaved rounds; medians.

usage: remote.py [--rounds 9] [--ops 2048] [--mib 256]

The bare server is a Python process that runs operators by name on tensors it holds, in marshalled batches of 64: no
shapes are known at its client, nothing is acknowledged and nothing is freed.
"""

from __future__ import annotations

import argparse
import io
import marshal
import multiprocessing as mp
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tensorstream.remote import RemoteMachine, _infer, _kernels

BATCH = 64


def _exact(sock: socket.socket, size: int, into: bytearray | None = None) -> bytearray:
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
    return marshal.loads(bytes(_exact(sock, struct.unpack("I", _exact(sock, 4))[0])))


def _bare_server(path: str, ready: Any) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    operators = {"add": torch.add, "ones": lambda size: torch.ones(int(size), int(size))}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    ready.set()
    sock, held = listener.accept()[0], {}
    while True:
        batch, wanted = _get(sock)
        for name, out, inputs, constants in batch:
            held[out] = operators[name](*(held[i] for i in inputs), *constants)
        if wanted is not None:
            _put(sock, held[wanted].flatten()[:1].tolist())


class Bare:
    """A client of the bare server."""

    def __init__(self, directory: str) -> None:
        ready = mp.Event()
        self._process = mp.Process(target=_bare_server, args=(f"{directory}/bare", ready), daemon=True)
        self._process.start()
        ready.wait()
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(f"{directory}/bare")
        _put(self._sock, ([("ones", 0, (), (1.0,))], None))

    def chain(self, count: int) -> int:
        for start in range(0, count, BATCH):
            batch = [("add", i + 1, (i,), (1.0,)) for i in range(start, min(start + BATCH, count))]
            _put(self._sock, (batch, None))
        return count

    def value(self, number: int) -> float:
        _put(self._sock, ([], number))
        return _get(self._sock)[0]

    def one(self) -> float:
        _put(self._sock, ([("add", 1, (0,), (1.0,))], 1))
        return _get(self._sock)[0]


class Ours:
    """The device."""

    def __init__(self, machine: RemoteMachine) -> None:
        self._one = torch.ones(1, 1, device=machine.device())

    def chain(self, count: int) -> torch.Tensor:
        value = self._one
        for _ in range(count):
            value = value + 1.0
        return value

    def value(self, tensor: torch.Tensor) -> float:
        return tensor.item()

    def one(self) -> float:
        return (self._one + 1.0).item()


def _seconds(run: Callable[[], object]) -> float:
    since = time.perf_counter()
    run()
    return time.perf_counter() - since


def _median_us(run: Callable[[], object], count: int = 300) -> float:
    return 1e6 * statistics.median(_seconds(run) for _ in range(count))


def _rates(peers: dict[str, Any], rounds: int, count: int) -> None:
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in peers}
    for turn in range(-1, rounds):
        for name, peer in peers.items():
            since = time.perf_counter()
            last = peer.chain(count)
            issued = time.perf_counter() - since
            assert peer.value(last) == count + 1.0
            total = time.perf_counter() - since
            if turn >= 0:
                seen[name].append((_median_us(peer.one, 100), 1e6 * issued / count, count / total))
    print("| | operator and wait, us | issued, us | operators/s | of the bare server |\n|---|---|---|---|---|")
    bare = seen["bare server"]
    for name, rows in seen.items():
        sync, issued, rate = (statistics.median(column) for column in zip(*rows, strict=True))
        shares = [one[2] / other[2] for one, other in zip(rows, bare, strict=True)]
        waits = [one[0] / other[0] for one, other in zip(rows, bare, strict=True)]
        share = f"{statistics.median(shares):.2f} of its rate, {statistics.median(waits):.2f} of its wait"
        print(f"| {name} | {sync:.1f} | {issued:.2f} | {rate:,.0f} | {share} |")


def _overhead(machine: RemoteMachine) -> None:
    x, y = torch.ones(8, 8, device=machine.device()), torch.ones(8, 8, device=machine.device())
    cached = _median_us(lambda: x + y, 20_000)
    machine.synchronize()
    op, sizes = torch.ops.aten.add.Tensor, iter(range(1, 10**9))
    kernel = _kernels.kernel_of(op)

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        size = next(sizes)
        return torch.empty(size, device=machine.device()), torch.empty(size, device=machine.device())

    uncached, inferred = [], []
    for _ in range(2000):
        args = pair()
        uncached.append(_seconds(lambda args=args: kernel(*args)))
        inferred.append(_seconds(lambda args=args: _infer.infer(op, args, None)))
    uncached_us, inferred_us = 1e6 * statistics.median(uncached), 1e6 * statistics.median(inferred)
    print(f"\nadd of two tensors, one thread, median: {cached:.2f} us cached, {uncached_us:.1f} us not:")
    print(f"{uncached_us / inferred_us:.2f} of meta inference alone ({inferred_us:.1f} us)")


def _raw_server(path: str, ready: Any, size: int) -> None:
    torch.set_num_threads(1)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    ready.set()
    sock, buffer = listener.accept()[0], bytearray(size)
    while True:
        kind = bytes(_exact(sock, 1))
        if kind == b"u":
            _exact(sock, size, buffer)
            sock.sendall(b"k")
        elif kind == b"d":
            sock.sendall(buffer)
        elif kind == b"U":
            body = _exact(sock, struct.unpack("Q", _exact(sock, 8))[0])
            held = torch.load(io.BytesIO(body))
            sock.sendall(b"k")
        else:
            out = io.BytesIO()
            torch.save(held, out)
            sock.sendall(struct.pack("Q", out.tell()) + out.getbuffer())


def _copies(machine: RemoteMachine, directory: str, rounds: int, mib: int) -> None:
    size, ready = mib << 20, mp.Event()
    process = mp.Process(target=_raw_server, args=(f"{directory}/raw", ready, size), daemon=True)
    process.start()
    ready.wait()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"{directory}/raw")
    host, back = torch.randn(size // 4), bytearray(size)
    there = torch.empty(size // 4, device=machine.device())
    here = torch.empty(size // 4)

    def raw_up() -> None:
        sock.sendall(b"u")
        sock.sendall(memoryview(host.numpy()).cast("B"))
        _exact(sock, 1)

    def raw_down() -> None:
        sock.sendall(b"d")
        _exact(sock, size, back)

    def saved_up() -> None:
        out = io.BytesIO()
        torch.save(host, out)
        sock.sendall(b"U" + struct.pack("Q", out.tell()) + out.getbuffer())
        _exact(sock, 1)

    def saved_down() -> None:
        sock.sendall(b"D")
        torch.load(io.BytesIO(_exact(sock, struct.unpack("Q", _exact(sock, 8))[0])))

    def ours_up() -> None:
        there.copy_(host)
        machine.synchronize()

    runs = {
        "up": {"ours": ours_up, "raw socket": raw_up, "torch.save, load": saved_up},
        "down": {"ours": lambda: here.copy_(there), "raw socket": raw_down, "torch.save, load": saved_down},
    }
    print(f"\n{mib} MiB by a Unix socket, GB/s\n\n| | ours | raw socket | torch.save, load | of raw | of saved |")
    print("|---|---|---|---|---|---|")
    for way, peers in runs.items():
        seen: dict[str, list[float]] = {name: [] for name in peers}
        for turn in range(-1, rounds):
            for name, run in peers.items():
                seconds = _seconds(run)
                if turn >= 0:
                    seen[name].append(size / seconds / 1e9)
        assert torch.equal(here, host) or way == "up"
        shares = [
            statistics.median(one / other for one, other in zip(seen["ours"], seen[peer], strict=True))
            for peer in ("raw socket", "torch.save, load")
        ]
        rates = " | ".join(f"{statistics.median(rows):.2f}" for rows in seen.values())
        print(f"| {way} | {rates} | {shares[0]:.2f} | {shares[1]:.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ops", type=int, default=2048)
    parser.add_argument("--mib", type=int, default=256)
    options = parser.parse_args()
    mp.set_start_method("spawn")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as directory, RemoteMachine("local", threads=1) as machine:
        _rates({"bare server": Bare(directory), "ts, local": Ours(machine)}, options.rounds, options.ops)
        _overhead(machine)
        _copies(machine, directory, options.rounds, options.mib)
    return 0


if __name__ == "__main__":
    sys.exit(main())
