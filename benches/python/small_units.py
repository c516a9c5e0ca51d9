# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures models of many small layers: rates, visits, and the time to offload them.

The last part of `cargo xtask bench overhead`. The modules do nothing with their weights, so a visit
is all that a forward costs. Each round reads the file with direct I/O, and then runs a pass of the
streamed model. accelerate's hooks are measured on the same modules.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tensorstream as ts
import torch
from models import MIB, SCRATCH
from torch import nn

ROUNDS = 7
#: The number of modules for each size of a unit in KiB.
SIZES = {256: 1000, 64: 4000, 16: 8000}
#: The number of modules whose offloading is timed.
OFFLOADED = 8000


class Weight(nn.Module):
    """A module with a weight that it does not use."""

    def __init__(self, kib: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(256 * kib), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def layers(kib: int, count: int, device: str = "meta") -> nn.Sequential:
    """Returns modules with weights of this size."""
    with torch.device(device):
        return nn.Sequential(*(Weight(kib) for _ in range(count)))


def disk_rate(file: Path, request_bytes: int = 4 * MIB, threads: int = 8) -> float:
    """Reads a file sequentially with direct I/O. Returns the rate in bytes per second."""
    size = file.stat().st_size
    handle = os.open(file, os.O_RDONLY | os.O_DIRECT)

    def read(number: int) -> int:
        with mmap.mmap(-1, request_bytes) as memory:
            begins = range(number * request_bytes, size, threads * request_bytes)
            return sum(os.preadv(handle, [memory], begin) for begin in begins)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(read, range(threads)))
    os.close(handle)
    return done / (time.perf_counter() - began)


def seconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Returns the median duration of a call, after two calls that are not timed."""
    taken = []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


def show_rates(kib: int, count: int, file: Path) -> None:
    """Prints how fast units of this size are streamed, and what visits cost."""
    from safetensors.torch import save_file

    memory = layers(kib, count, "cpu")
    for number, parameter in enumerate(memory.parameters()):
        parameter.fill_(number)
    save_file(dict(memory.state_dict()), file)
    weights = count * kib * 1024
    x = torch.zeros(1)
    base = seconds(lambda: memory(x))
    began = time.perf_counter()
    # Other backends can read from the page cache.
    config = ts.Config(budget=weights // 4, backend="uring")
    streamed: Any = ts.offload(layers(kib, count), config, checkpoint=file)
    offload_s = time.perf_counter() - began
    for _ in range(3):
        streamed(x)
    ratios, beyond, disks, rates = [], [], [], []
    for _ in range(ROUNDS):
        disk = disk_rate(file)
        streamed(x)  # Restores the steady state: the ring was filled during the other read.
        before, began = ts.stats(streamed), time.perf_counter()
        streamed(x)
        taken = time.perf_counter() - began
        after = ts.stats(streamed)
        read = after["read_bytes"] - before["read_bytes"]
        loads = [sum(unit["loads"] for unit in stats["units"]) for stats in (before, after)]
        disks.append(disk)
        rates.append(read / taken)
        ratios.append(rates[-1] / disk)
        beyond.append((taken - base - read / disk) / max(1, loads[1] - loads[0]))
    del streamed
    resident: Any = ts.offload(layers(kib, count), checkpoint=file, budget=3 * weights + 8 * MIB)
    for _ in range(8):
        resident(x)
    visit = (seconds(lambda: resident(x)) - base) / count
    print(
        f"{count} units of {kib} KiB: {statistics.median(rates) / 1e6:.0f} MB/s where the disk "
        f"gives {statistics.median(disks) / 1e6:.0f}, ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}); a streamed visit takes "
        f"{statistics.median(beyond) * 1e6:.1f} µs beyond its read, a resident one "
        f"{visit * 1e6:.2f} µs; offloaded in {offload_s:.2f} s",
        flush=True,
    )


def show_accelerate(kib: int, count: int) -> None:
    """Prints what visits cost with the hooks of accelerate, from files and from memory."""
    from accelerate import cpu_offload, disk_offload

    x = torch.zeros(1)
    plain = layers(kib, count, "cpu")
    base = seconds(lambda: plain(x))
    for name, offload in (("disk_offload", disk_offload), ("cpu_offload", cpu_offload)):
        model: Any = layers(kib, count, "cpu")
        for parameter in model.parameters():
            parameter.fill_(1)
        with tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
            arguments = {"offload_dir": directory} if offload is disk_offload else {}
            began = time.perf_counter()
            offload(model, execution_device=torch.device("cpu"), **arguments)
            offload_s = time.perf_counter() - began
            each = (seconds(lambda model=model: model(x), 3) - base) / count
        print(
            f"{count} modules of {kib} KiB, accelerate's {name}: {each * 1e6:.1f} µs a visit, "
            f"offloaded in {offload_s:.2f} s",
            flush=True,
        )


def show_offloading(count: int, file: Path) -> None:
    """Prints how long it takes to offload modules whose weights are in a checkpoint."""
    from safetensors.torch import save_file

    save_file(dict(layers(1, count, "cpu").state_dict()), file)
    taken = []
    for _ in range(5):
        model = layers(1, count)
        began = time.perf_counter()
        ts.offload(model, checkpoint=file, budget=4 * MIB)
        taken.append(time.perf_counter() - began)
        ts.restore(model)
    print(
        f"offloading {count} modules takes {statistics.median(taken):.2f} s "
        f"({min(taken):.2f}-{max(taken):.2f})",
        flush=True,
    )


def main() -> None:
    """Prints all figures."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        file = Path(directory) / "layers.safetensors"
        for kib, count in SIZES.items():
            show_rates(kib, count, file)
        show_offloading(OFFLOADED, file)
        for kib in SIZES:
            show_accelerate(kib, 500)


if __name__ == "__main__":
    main()
