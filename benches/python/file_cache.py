# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures a decoding step over keys and values of 1 GiB, in memory and in files.

`cargo xtask bench file-cache` runs it. A step adds one token to 16 layers and computes attention
over 16,384 others (8 heads, 128 wide, bf16). Each run is a process. With a memory limit, which
includes the page cache, most of the keys and values have to come from the disk.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from models import child, drop_caches, memory_cap, peak_rss

LAYERS, TOKENS = 16, 16384
SHAPE = (1, 8, TOKENS, 128)
STEPS = 8
ROUNDS = 2
LIMIT = 900_000_000


def contender(budget: str) -> None:
    """Runs steps in this process. Prints their median and the peak memory as JSON."""
    import tensorstream as ts
    import torch
    from transformers import DynamicCache

    cache: Any = DynamicCache() if budget == "memory" else ts.FileCache(budget)
    new = torch.ones(*SHAPE[:2], 1, SHAPE[3], dtype=torch.bfloat16)
    seconds = []
    with torch.inference_mode():
        for number in range(LAYERS):
            states = torch.randn(SHAPE, dtype=torch.bfloat16)
            cache.update(states, states, number)
        for _ in range(STEPS):
            began = time.perf_counter()
            for number in range(LAYERS):
                keys, values = cache.update(new, new, number)
                torch.nn.functional.scaled_dot_product_attention(new, keys, values)
                del keys, values
            seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": statistics.median(seconds[1:]), "peak": peak_rss()}))


def main() -> None:
    """Runs each contender in turn, and prints a table."""
    if len(sys.argv) > 1:
        contender(sys.argv[1])
        return
    rows: dict[str, list[dict[str, Any]]] = {}
    with memory_cap(LIMIT) as limited:
        contenders = {
            "in memory": ([], "memory"),
            "512 MiB": ([], "512MiB"),
            "256 MiB": ([], "256MiB"),
            f"256 MiB, limit {LIMIT // 10**6} MB": (limited, "256MiB"),
        }
        for _ in range(ROUNDS):
            for name, (prefix, budget) in contenders.items():
                drop_caches()
                rows.setdefault(name, []).append(child(prefix, budget))
    print("| keys and values | s per step | peak memory |\n| :-- | --: | --: |")
    for name, results in rows.items():
        errors = [result["error"] for result in results if "error" in result]
        if errors:
            print(f"| {name} | {errors[0]} | |")
            continue
        seconds = statistics.median(result["seconds"] for result in results)
        peak = max(result["peak"] for result in results)
        print(f"| {name} | {seconds:.3f} | {peak / 1e6:.0f} MB |")


if __name__ == "__main__":
    main()
