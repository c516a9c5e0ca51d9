# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares the read bandwidth of a streaming model with that of fio, in nine rounds.

`cargo xtask bench storage`. Both use direct I/O. fio reads the first shard of the model. The model
also decodes tokens while it streams its weights. fio reads into ordinary pages. If huge pages can
be reserved, fio also reads into huge pages, as the engine does.
"""

from __future__ import annotations

import statistics
import sys
import time

from models import drop_caches, fio, huge_pages, llama_1b, spread

ROUNDS = 9
BUDGET = "800MiB"


def main() -> int:
    import tensorstream as ts
    import torch

    path = llama_1b()
    shard = path / "model-00001-of-00003.safetensors"
    model = ts.from_pretrained(path, budget=BUDGET)
    ids = torch.ones(1, 1, dtype=torch.long)
    disks: dict[str, list[float]] = {"ordinary pages": [], "huge pages": []}
    streamed = []
    drop_caches()
    with torch.inference_mode(), huge_pages() as huge:
        for _ in range(2):
            model(ids)
        for _ in range(ROUNDS):
            disks["ordinary pages"].append(fio(shard, 2))
            if huge:
                disks["huge pages"].append(fio(shard, 2, huge=True))
            model(ids)  # Restores the steady state: the engine filled its buffers during fio.
            before, began = ts.stats(model)["read_bytes"], time.perf_counter()
            for _ in range(2):
                model(ids)
            streamed.append(
                (ts.stats(model)["read_bytes"] - before) / (time.perf_counter() - began)
            )
            rates = [disk[-1] / 1e9 for disk in disks.values() if disk]
            print(
                "fio " + ", ".join(f"{rate:.2f}" for rate in rates),
                f"streamed {streamed[-1] / 1e9:.2f} GB/s",
                flush=True,
            )
    print(f"\nbytes read, by path: {ts.stats(model)['read_bytes_by_path']}")
    print(
        "| | GB/s, median (range) | fluctuation | streamed / fio, median of pairs (range) "
        "|\n|---|---|---|---|"
    )
    for name, disk in disks.items():
        if disk:
            ratios = [s / d for s, d in zip(streamed, disk, strict=True)]
            print(
                f"| fio, {name} | {spread([d / 1e9 for d in disk])} | {fluctuation(disk)} | "
                f"{spread(ratios)} |"
            )
    print(f"| streamed | {spread([s / 1e9 for s in streamed])} | {fluctuation(streamed)} | |")
    return 0


def fluctuation(rates: list[float]) -> str:
    """Returns the standard deviation divided by the mean, in percent."""
    return f"{statistics.stdev(rates) / statistics.mean(rates):.0%}"


if __name__ == "__main__":
    sys.exit(main())
