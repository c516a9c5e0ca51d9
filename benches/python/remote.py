# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares the device ``ts`` with other ways to run operators remotely.

usage: remote.py [--rounds 31] [--ops 2048] [--mib 256] [--steps 50] [--peers]

Rates and durations are medians. The rounds of operators and of copies are interleaved.

--rounds: the number of rounds of operators. Copies run in a third as many rounds.
--ops: the number of operators in a round.
--mib: the size of a copy in MiB.
--steps: the number of training steps of each model.
--peers: also measure torch.distributed.rpc, Ray and mycelya-torch, if they can be imported.
"""

from __future__ import annotations

import argparse
import copy
import io
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
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from remote_peers import Bare, Mycelya, Ray, Rpc, Tensors, exact, measure, median_us, seconds
from servers import served
from tensorstream.remote import RemoteMachine
from tensorstream.remote.client import _infer, _kernels
from torch import nn


def _rates(peers: dict[str, Any], rounds: int, count: int) -> None:
    """Prints each peer's cost of an operator, and its ratio to the cost of the bare server."""
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in peers}
    for turn in range(-1, rounds):
        for name, peer in peers.items():
            measured = measure(peer, count)
            if turn >= 0:
                seen[name].append(measured)
    print(
        "| | operator and wait, µs | of the bare server | issued, µs | operators/s | of the bare "
        "server |"
    )
    print("|---|---|---|---|---|---|")
    bare = seen["bare server, Unix"]
    for name, rows in seen.items():
        wait, issued, rate = (statistics.median(column) for column in zip(*rows, strict=True))
        waits = statistics.median(one[0] / other[0] for one, other in zip(rows, bare, strict=True))
        share = statistics.median(one[2] / other[2] for one, other in zip(rows, bare, strict=True))
        print(f"| {name} | {wait:.1f} | {waits:.2f} | {issued:.2f} | {rate:,.0f} | {share:.3f} |")


def _others(ours: Tensors, rounds: int, count: int) -> None:
    """Compares the device ``ts`` with each installed library.

    Creates and ends one library after the other, because some keep a core busy while they are idle.
    """
    makes: dict[str, Callable[[], Any]] = {
        "mycelya-torch, mock": Mycelya,
        "Ray, one per call": lambda: Ray(1),
        "Ray, 64 per call": lambda: Ray(64),
        "torch rpc": Rpc,
    }
    print(
        "\n| | operator and wait, µs | ours in the same rounds | operators/s | ours in the same "
        "rounds | times |"
    )
    print("|---|---|---|---|---|---|")
    for name, make in makes.items():
        try:
            peer = make()
        except ImportError as error:
            print(f"| {name} | not measured: {error} |")
            continue
        pairs = [(measure(peer, count), measure(ours, count)) for _ in range(rounds + 1)][1:]
        peer.end()
        wait, ours_wait = (statistics.median(pair[at][0] for pair in pairs) for at in (0, 1))
        rate, ours_rate = (statistics.median(pair[at][2] for pair in pairs) for at in (0, 1))
        times = statistics.median(other[2] / one[2] for one, other in pairs)
        print(
            f"| {name} | {wait:.0f} | {ours_wait:.0f} | {rate:,.0f} | {ours_rate:,.0f} | "
            f"{times:.1f} |"
        )


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def _models() -> dict[str, tuple[nn.Module, torch.Tensor, torch.Tensor]]:
    """Returns small models by name, each with inputs and labels."""
    perceptron = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 3))
    convolutional = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(392, 3),
    )
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    transformer = nn.Sequential(nn.Embedding(50, 32), layer, nn.Linear(32, 50))
    return {
        "perceptron": (perceptron, torch.randn(16, 20), torch.randint(0, 3, (16,))),
        "CNN": (convolutional, torch.randn(8, 3, 16, 16), torch.randint(0, 3, (8,))),
        "LSTM": (_Recurrent(), torch.randn(8, 5, 8), torch.randint(0, 3, (8,))),
        "transformer": (transformer, torch.randint(0, 50, (4, 7)), torch.randint(0, 50, (4, 7))),
    }


def _train(
    model: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    device: Any,
    steps: int,
    waits: Callable[[], int],
) -> tuple[list[float], list[int], list[float]]:
    """Trains a model for ``steps`` steps.

    Returns the loss, the number of waits, and the milliseconds of each step. ``waits`` returns the
    number of waits so far.
    """
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(3)
    losses, waited, times = [], [], []
    for _ in range(steps):
        before, since = waits(), time.perf_counter()
        optimizer.zero_grad()
        outputs = model(inputs.to(device))
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), labels.to(device).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        waited.append(waits() - before)
        times.append(1e3 * (time.perf_counter() - since))
    return losses, waited, times


def _steps(machine: RemoteMachine, steps: int) -> None:
    """Trains models on the machine and on the CPU, and compares losses and times."""

    def waits() -> int:
        return machine.stats()["waits"]

    print(f"\n{steps} steps of training with AdamW\n")
    print(
        "| | losses bit-identical to the CPU | waits per step (first) | operators per batch | "
        "ms per step | on the CPU |"
    )
    print("|---|---|---|---|---|---|")
    torch.manual_seed(0)
    with torch.enable_grad():
        for name, (model, inputs, labels) in _models().items():
            there = copy.deepcopy(model).to(machine.device())
            losses, _, here_ms = _train(model, inputs, labels, "cpu", steps, lambda: 0)
            before = machine.stats()
            actual, waited, there_ms = _train(there, inputs, labels, machine.device(), steps, waits)
            operators, batches = (
                machine.stats()[name] - before[name] for name in ("operators", "batches")
            )
            equal = sum(one == other for one, other in zip(losses, actual, strict=True))
            numbers = f"{max(waited[2:])} ({waited[0]}) | {operators / batches:.1f}"
            medians = f"{statistics.median(there_ms):.1f} | {statistics.median(here_ms):.1f}"
            print(f"| {name} | {equal} of {steps} | {numbers} | {medians} |")
    _decode(machine, waits)


def _decode(machine: RemoteMachine, waits: Callable[[], int]) -> None:
    """Decodes with tiny models on the machine and on the CPU, and counts waits."""
    import transformers

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    ends = {"bos_token_id": 0, "eos_token_id": 99}
    llama = transformers.LlamaConfig(**shape, intermediate_size=128, num_key_value_heads=2, **ends)
    gpt2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, **ends)
    models = {
        "GPT-2": transformers.GPT2LMHeadModel(gpt2),
        "Llama": transformers.LlamaForCausalLM(llama),
    }
    tokens = torch.randint(2, 99, (2, 7))
    mask = torch.ones_like(tokens)
    print("\ngreedy decoding, tiny models\n")
    print("| | same tokens as on the CPU | waits per token | before the first |\n|---|---|---|---|")
    for name, model in models.items():
        there = copy.deepcopy(model).eval().to(machine.device())

        def generate(count: int, there: Any = there) -> tuple[torch.Tensor, int]:
            inputs, before = tokens.to(machine.device()), waits()
            settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
            result = there.generate(inputs, attention_mask=mask.to(machine.device()), **settings)
            return result.cpu(), waits() - before

        settings = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
        expected = model.eval().generate(tokens, attention_mask=mask, **settings)
        generate(3)
        (_, few), (actual, many) = generate(20), generate(40)
        each = (many - few) / 20
        print(f"| {name} | {torch.equal(expected, actual)} | {each:.2f} | {many - 40 * each:.0f} |")


def _overhead(machine: RemoteMachine) -> None:
    """Measures the client's time for an addition, with and without a cached signature."""
    x, y = torch.ones(8, 8, device=machine.device()), torch.ones(8, 8, device=machine.device())
    here = torch.ones(8, 8)
    both: list[tuple[float, float]] = []
    for _ in range(40):
        both.append((median_us(lambda: x + y, 500), median_us(lambda: here + here, 500)))
        machine.synchronize()
    cached, on_cpu = map(statistics.median, zip(*both, strict=True))
    least = min(cached for cached, _ in both)
    op, sizes = torch.ops.aten.add.Tensor, iter(range(1, 10**9))
    kernel = _kernels.kernel_of(op)

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        size = next(sizes)
        return torch.empty(size, device=machine.device()), torch.empty(
            size, device=machine.device()
        )

    uncached, inferred = [], []
    for _ in range(2000):
        args = pair()
        uncached.append(seconds(lambda args=args: kernel(*args)))
        inferred.append(seconds(lambda args=args: _infer.infer(op, args, None)))
    uncached_us, inferred_us = 1e6 * statistics.median(uncached), 1e6 * statistics.median(inferred)
    print(
        f"\nmedian time to add two tensors on one thread, cached: {cached:.2f} µs "
        f"({least:.2f} in the best of 40 blocks)"
    )
    print(f"relative to an addition on the CPU ({on_cpu:.2f} µs): {cached / on_cpu:.1f}")
    print(f"not cached: {uncached_us:.1f} µs")
    print(f"relative to meta inference ({inferred_us:.1f} µs): {uncached_us / inferred_us:.2f}")


def _raw_server(address: Any, bound: Any, size: int) -> None:
    """Serves copies over a socket: raw bytes (u, d), or torch.save and torch.load (U, D).

    The requests u and U are copies to the server, and d and D are copies from the server. First
    sends the address of the socket to ``bound``.
    """
    torch.set_num_threads(1)
    listener = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    listener.bind(address)
    listener.listen(1)
    bound.send(listener.getsockname())
    sock, buffer = listener.accept()[0], bytearray(size)
    while True:
        kind = bytes(exact(sock, 1))
        if kind == b"u":
            exact(sock, size, buffer)
            sock.sendall(b"k")
        elif kind == b"d":
            sock.sendall(buffer)
        elif kind == b"U":
            body = exact(sock, struct.unpack("Q", exact(sock, 8))[0])
            saved = torch.load(io.BytesIO(body))
            sock.sendall(b"k")
        else:
            out = io.BytesIO()
            torch.save(saved, out)
            sock.sendall(struct.pack("Q", out.tell()) + out.getbuffer())


def _copies(machine: RemoteMachine, address: Any, rounds: int, mib: int) -> None:
    """Compares copies to and from the machine with copies over a raw socket.

    Args:
        machine: The machine to measure.
        address: The address for the raw socket, of the same kind as that of the machine.
        rounds: The number of interleaved rounds.
        mib: The size of a copy in MiB.
    """
    size, (ours, theirs) = mib << 20, mp.Pipe()
    mp.Process(target=_raw_server, args=(address, theirs, size), daemon=True).start()
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    sock.connect(ours.recv())
    host, back = torch.randn(size // 4), bytearray(size)
    there = torch.empty(size // 4, device=machine.device())
    here = torch.empty(size // 4)

    def raw_up() -> None:
        sock.sendall(b"u")
        sock.sendall(memoryview(host.numpy()).cast("B"))
        exact(sock, 1)

    def raw_down() -> None:
        sock.sendall(b"d")
        exact(sock, size, back)

    def saved_up() -> None:
        out = io.BytesIO()
        torch.save(host, out)
        sock.sendall(b"U" + struct.pack("Q", out.tell()) + out.getbuffer())
        exact(sock, 1)

    def saved_down() -> None:
        sock.sendall(b"D")
        torch.load(io.BytesIO(exact(sock, struct.unpack("Q", exact(sock, 8))[0])))

    def ours_up() -> None:
        there.copy_(host)
        machine.synchronize()

    runs = {
        "up": {"ours": ours_up, "raw socket": raw_up, "torch.save, load": saved_up},
        "down": {
            "ours": lambda: here.copy_(there),
            "raw socket": raw_down,
            "torch.save, load": saved_down,
        },
    }
    transport = "a Unix socket" if isinstance(address, str) else "TCP"
    print(
        f"\n{mib} MiB over {transport}, GB/s\n\n"
        "| | ours | raw socket | torch.save, load | of raw | of saved |"
    )
    print("|---|---|---|---|---|---|")
    for direction, peers in runs.items():
        seen: dict[str, list[float]] = {name: [] for name in peers}
        for turn in range(-1, rounds):
            for name, run in peers.items():
                time_of = seconds(run)
                if turn >= 0:
                    seen[name].append(size / time_of / 1e9)
        assert torch.equal(here, host) or direction == "up"
        shares = [
            statistics.median(
                one / other for one, other in zip(seen["ours"], seen[peer], strict=True)
            )
            for peer in ("raw socket", "torch.save, load")
        ]
        rates = " | ".join(f"{statistics.median(rows):.2f}" for rows in seen.values())
        print(f"| {direction} | {rates} | {shares[0]:.2f} | {shares[1]:.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--ops", type=int, default=2048)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    mp.set_start_method("spawn")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    with (
        tempfile.TemporaryDirectory() as directory,
        RemoteMachine("local", threads=1) as machine,
        RemoteMachine("mock") as mock,
    ):
        ours = {"ts, local": machine, "ts, mock": mock}
        peers: dict[str, Any] = {
            "bare server, Unix": Bare(f"{directory}/bare"),
            "bare server, TCP": Bare(("127.0.0.1", 0)),
            **{name: Tensors(torch.ones(1, 1, device=one.device())) for name, one in ours.items()},
        }
        _rates(peers, options.rounds, options.ops)
        _overhead(machine)
        rounds = max(options.rounds // 3, 1)
        _copies(machine, f"{directory}/raw", rounds, options.mib)
        with served() as address, RemoteMachine("tcp", address) as over_tcp:
            _copies(over_tcp, ("127.0.0.1", 0), rounds, options.mib)
        _steps(machine, options.steps)
        if options.peers:
            _others(peers["ts, local"], options.rounds, options.ops)
    return 0


if __name__ == "__main__":
    sys.exit(main())
