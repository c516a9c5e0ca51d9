# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains and sends state dicts over links that are cut, and over a link with a long round trip.

`cargo xtask bench links`, with 2,000 cuts. `cut_links.py CUTS` makes another number. They are
divided evenly among TCP, TLS and Unix sockets. A relay makes them after a random number of bytes:
with a reset, with a clean end of both directions, or of one.

- Half of them are in front of `tensorstream serve`, in the handshake, in a batch of operators, in
  an upload or in a download. The weights that were trained this way are compared, bit for bit, with
  those of the same training on this CPU.
- Half of them are in state dicts that a program sends. The receiver gets all of a set, or an error.
- Between two network namespaces, each packet is delayed by 50 ms. 200 steps of training, each of
  which reads its loss, are compared with the same steps without the delay plus one round trip.
  Needs root.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import os
import random
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "crates/ts-py/tests"))
from certificates import certificates
from links import bad_link, skip_reason
from serving import Serving

CUTS = 2000
STEPS = 200
ROUND_TRIP = 0.1
#: The ways in which the relay ends a connection.
WAYS = ("reset", "end", "end of requests", "end of replies")


#: The kinds of links.
LINKS = ("tcp", "tls", "unix")


class Relay:
    """Forwards connections to a server, and cuts each of them.

    Args:
        to: The address of the server, "HOST:PORT" or "unix:PATH". The relay listens at the same
            kind of address.
        draw: Returns after how many bytes a connection is cut.
    """

    def __init__(self, to: str, draw: Callable[[random.Random], int]) -> None:
        self._to, self._draw = to, draw
        self._random = random.Random(1)
        if to.startswith("unix:"):
            self.address = f"{to}-relay"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self.address.removeprefix("unix:"))
            self._listener.listen(100)
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = "{}:{}".format(*self._listener.getsockname())
        self.cuts: collections.Counter[str] = collections.Counter()
        self.cutting = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        left, way = self._draw(self._random), self._random.choice(WAYS)
        with client, self._connect() as server:
            ends = {client: server, server: client}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    try:
                        data = end.recv(min(1 << 16, left) if self.cutting else 1 << 16)
                        if data:
                            ends[end].sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    left -= len(data) if self.cutting else 0
                if left <= 0 and self.cutting:
                    return self._cut(client, server, way)

    def _connect(self) -> socket.socket:
        if not self._to.startswith("unix:"):
            host, port = self._to.rsplit(":", 1)
            return socket.create_connection((host, int(port)))
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._to.removeprefix("unix:"))
        return server

    def _cut(self, client: socket.socket, server: socket.socket, way: str) -> None:
        self.cuts[way] += 1
        if way == "reset" and client.family != socket.AF_UNIX:
            for end in (client, server):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif way != "end":
            end, other = (server, client) if way == "end of requests" else (client, server)
            end.shutdown(socket.SHUT_WR)
            # The other direction goes on for a moment.
            if select.select([end], [], [], 0.05)[0]:
                try:
                    other.sendall(end.recv(1 << 16))
                except OSError:
                    return


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def network() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))
    return model, copy.deepcopy(model)


def train_through_cuts(count: int, link: str, directory: Path) -> None:
    from tensorstream.remote import RemoteMachine

    draw = torch.Generator().manual_seed(2)
    here, there = network()
    steps = 0
    options: dict[str, Any] = {}
    trust: dict[str, Any] = {}
    if link == "tls":
        known = certificates(directory)
        options = {"--tls-cert": known["cert"], "--tls-key": known["key"]}
        trust = {"ca": known["ca"]}
    elif link == "unix":
        options = {"--listen": f"unix:{directory}/socket"}
    with Serving(options, log=directory / "log") as served:
        # From the first bytes of the handshake to many batches or a large part of an upload.
        relay = Relay(served.address, lambda draw: int(10 ** draw.uniform(0, 6.3)))
        begin = time.monotonic()
        relay.cutting = True
        with RemoteMachine("tcp", relay.address, retry=60.0, **trust) as machine:
            there.to(machine.device())
            optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (here, there)]
            while relay.cuts.total() < count:
                # Some are sent within a batch of requests, others as separate uploads.
                rows = (1, 16, 512)[steps % 3]
                batch = torch.randn(rows, 256, generator=draw)
                expected = step(here, optimizers[0], batch)
                got = step(there, optimizers[1], batch.to(machine.device()))
                if steps % 3 == 0:
                    assert got.item() == expected.item(), f"the loss of step {steps} differs"
                steps += 1
                if sys.stderr.isatty():
                    print(f"\r{relay.cuts.total()} cuts", end="", file=sys.stderr, flush=True)
            state = there.state_dict()
            equal = all(torch.equal(state[name].cpu(), t) for name, t in here.state_dict().items())
            relay.cutting = False
            stats = machine.stats()
    print(
        f"{link}: {relay.cuts.total()} cuts ({dict(relay.cuts)}) in "
        f"{time.monotonic() - begin:.0f} s: {steps} steps, {stats['reconnects']} reconnections, "
        f"0 sessions lost, {stats['uploaded_bytes'] / 1e6:.0f} MB uploaded; "
        f"weights bit-identical: {equal}"
    )
    assert equal


def send_through_cuts(count: int, link: str, directory: Path) -> None:
    import tensorstream as ts

    at = f"unix:{directory}/sets" if link == "unix" else "127.0.0.1:0"
    near, far = {}, {}
    if link == "tls":
        known = certificates(directory)
        near, far = {"ca": known["ca"]}, {"cert": known["cert"], "key": known["key"]}
    sizes = random.Random(3)
    outcomes: collections.Counter[str] = collections.Counter()
    with ts.listen(at, **far) as listener:
        relay = Relay(listener.address, lambda draw: draw.randrange(1, 60_000))
        relay.cutting = True
        while relay.cuts.total() < count:
            sent = {
                f"layers.{index}": torch.full([sizes.randrange(1, 2000)], float(index))
                for index in range(sizes.randrange(1, 20))
            }

            def send(sent: dict[str, torch.Tensor] = sent) -> None:
                try:
                    with ts.connect(relay.address, **near) as connection:
                        connection.send_state_dict(sent)
                except (ts.ConnectionLost, ts.ConnectionTimeout, ts.ProtocolError):
                    outcomes["error of the sender"] += 1

            sender = threading.Thread(target=send)
            sender.start()
            while sender.is_alive():
                try:
                    connection = listener.accept(timeout=0.05)
                except ts.ConnectionTimeout:
                    continue  # it was cut in the handshake
                outcomes[receive_set(connection, sent)] += 1
                with contextlib.suppress(ts.ConnectionLost):
                    connection.close()
            sender.join()
    print(f"{link}: {relay.cuts.total()} cuts ({dict(relay.cuts)}): {dict(outcomes)}")


def receive_set(connection: Any, sent: dict[str, torch.Tensor]) -> str:
    """Receives a state dict. Returns how that ended, which must be all of it or an error."""
    import tensorstream as ts

    try:
        came = connection.recv_state_dict(timeout=30.0)
    except ts.ConnectionLost:
        return "lost, with an error"
    assert came is not None, "a link that was cut looks like one that has ended"
    assert came.keys() == sent.keys(), (came.keys(), sent.keys())
    assert all(torch.equal(came[name].to_torch(), tensor) for name, tensor in sent.items())
    return "whole"


def train_at(address: str) -> None:
    """Runs in a separate process: prints the times of steps for each line of its input."""
    from tensorstream.remote import RemoteMachine

    torch.set_num_threads(1)
    with RemoteMachine("tcp", address, idle_timeout=60.0) as machine:
        _, model = network()
        model.to(machine.device())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = torch.randn(64, 256).to(machine.device())
        print("ready", flush=True)
        for _ in sys.stdin:
            times = []
            for _ in range(STEPS):
                begin = time.perf_counter()
                step(model, optimizer, batch).item()
                times.append(time.perf_counter() - begin)
            print(statistics.median(times), sum(times), flush=True)


def over_a_long_link() -> None:
    reason = skip_reason()
    if reason is not None:
        return print(f"the long link was not measured: {reason}")
    with bad_link() as (one, other, link):
        serve = [
            sys.executable, "-m", "tensorstream.serve", "--listen", "10.77.0.1:7470", "--insecure",
            "--threads", "1",
        ]  # fmt: skip
        server = one.start(serve, stderr=subprocess.DEVNULL)
        assert server.stdout is not None
        server.stdout.readline()
        client = other.start(
            [sys.executable, sys.argv[0], "train", "10.77.0.1:7470"], stdin=subprocess.PIPE
        )
        assert client.stdin is not None and client.stdout is not None
        client.stdout.readline()

        def measured(delay: float) -> tuple[float, float]:
            link.delay_s = delay
            print(file=client.stdin, flush=True)
            median, total = map(float, client.stdout.readline().split())
            return median, total

        measured(0.0)
        near = measured(0.0)
        far = measured(ROUND_TRIP / 2)
        link.delay_s = 0.0
        client.stdin.close()
        client.wait()
    bound = near[0] + ROUND_TRIP
    print(
        f"{STEPS} steps: {1e3 * near[0]:.1f} ms a step without delay, {1e3 * far[0]:.1f} ms with a "
        f"round trip of {1e3 * ROUND_TRIP:.0f} ms: {far[0] / bound:.3f} of their sum; in all "
        f"{far[1]:.1f} s, {far[1] / (STEPS * bound):.3f} of the sum"
    )


def main(arguments: list[str]) -> Any:
    if arguments[:1] == ["train"]:
        return train_at(arguments[1])
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    share = (int(arguments[0]) if arguments else CUTS) // (2 * len(LINKS))
    for link in LINKS:
        with tempfile.TemporaryDirectory() as directory:
            train_through_cuts(share, link, Path(directory))
            send_through_cuts(share, link, Path(directory))
    over_a_long_link()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
