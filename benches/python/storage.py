# SPDX-License-Identifier: MIT OR Apache-2.0
"""Bytes per second that a decoding model streams, against fio on the same shard, nine interleaved pairs.

`cargo xtask bench storage`. Both read directly, cold or not; the model computes meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import time

from models import drop_caches, fio, llama_1b, spread

PAIRS = 9
BUDGET = "800MiB"


def main() -> int:
    import tensorstream as ts
    import torch

    path = llama_1b()
    shard = path / "model-00001-of-00003.safetensors"
    model = ts.from_pretrained(path, budget=BUDGET)
    ids = torch.ones(1, 1, dtype=torch.long)
    drop_caches()
    with torch.inference_mode():
        for _ in range(2):
            model(ids)
        ratios, disk, streamed = [], [], []
        for _ in range(PAIRS):
            disk.append(fio(shard, 2))
            model(ids)  # the ring was full while fio ran: bring it to the steady state
            before, began = ts.stats(model)["read_bytes"], time.perf_counter()
            for _ in range(2):
                model(ids)
            streamed.append((ts.stats(model)["read_bytes"] - before) / (time.perf_counter() - began))
            ratios.append(streamed[-1] / disk[-1])
            print(
                f"fio {disk[-1] / 1e9:.2f} GB/s, streamed {streamed[-1] / 1e9:.2f}, ratio {ratios[-1]:.2f}",
                flush=True,
            )
    print(f"\nby path: {ts.stats(model)['read_bytes_by_path']}")
    print(f"fio GB/s {spread([d / 1e9 for d in disk])}, streamed GB/s {spread([s / 1e9 for s in streamed])}")
    fluctuation = statistics.stdev(disk) / statistics.mean(disk)
    print(f"fio against itself: standard deviation {fluctuation:.0%} of its mean")
    print(f"ratio, median of {PAIRS} pairs (range): {spread(ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
