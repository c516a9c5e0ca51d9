# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains over links that are cut, and over a link with a long round trip.

`cargo xtask bench links`, with 1,000 cuts. `cut_links.py CUTS` makes another number.

- A relay in front of `tensorstream serve` cuts each connection after a random number of bytes, in
  the handshake, in a batch of operators, in an upload or in a download: with a reset, with a clean
  end of both directions, or of one. The weights that were trained this way are compared, bit for
  bit, with those of the same training on this CPU.
- Between two network namespaces, each packet is delayed by 50 ms. 200 steps of training, each of
  which reads its loss, are compared with the same steps without the delay plus one round trip.
  Needs root.
"""

from __future__ import annotations

import collections
import copy
import os
import random
import select
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "crates/ts-py/tests"))
from links import bad_link, skip_reason
from serving import Serving

CUTS = 1000
STEPS = 200
ROUND_TRIP = 0.1
#: The ways in which the relay ends a connection.
WAYS = ("reset", "end", "end of requests", "end of replies")


class Relay:
    """Forwards connections to a server, and cuts each of them."""

    def __init__(self, to: str) -> None:
        host, port = to.rsplit(":", 1)
        self._to = host, int(port)
        self._random = random.Random(1)
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
        # From the first bytes of the handshake to many batches or a large part of an upload.
        left = int(10 ** self._random.uniform(0, 6.3))
        way = self._random.choice(WAYS)
        with client, socket.create_connection(self._to) as server:
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

    def _cut(self, client: socket.socket, server: socket.socket, way: str) -> None:
        self.cuts[way] += 1
        if way == "reset":
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


def through_cuts(count: int) -> None:
    from tensorstream.remote import RemoteMachine

    draw = torch.Generator().manual_seed(2)
    here, there = network()
    steps = 0
    with Serving() as served:
        relay = Relay(served.address)
        begin = time.monotonic()
        relay.cutting = True
        with RemoteMachine("tcp", relay.address, retry=60.0) as machine:
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
        f"{relay.cuts.total()} cuts ({dict(relay.cuts)}) in {time.monotonic() - begin:.0f} s: "
        f"{steps} steps, {stats['reconnects']} reconnections, 0 sessions lost, "
        f"{stats['uploaded_bytes'] / 1e6:.0f} MB uploaded; weights bit-identical: {equal}"
    )
    assert equal


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
    through_cuts(int(arguments[0]) if arguments else CUTS)
    over_a_long_link()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
