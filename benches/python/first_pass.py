# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares the first pass of a streamed model with later passes.

`cargo xtask bench first-pass [LAYERS|DIRECTORY [BUDGET ...]]`. Without arguments, the model is a
Llama of 22 layers (1.1B parameters, 2.2 GB), under 1500 MB. LAYERS is another number of layers of
the same size; 56 of them take 5.2 GB, and are created in memory. DIRECTORY is any language model.
For each budget, three processes decode a token per pass. The page cache is emptied before each.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from typing import Any

from models import child, drop_caches, llama, llama_1b, spread

ROUNDS = 3
PASSES = 8


def contender(path: str, budget: str) -> None:
    """Runs the model in this process. Prints the seconds of each pass as JSON."""
    import tensorstream as ts
    import torch

    model: Any = ts.from_pretrained(path, budget=budget)
    ids = torch.ones(1, 1, dtype=torch.long)
    seconds, read = [], []
    with torch.inference_mode():
        for _ in range(PASSES):
            before, began = ts.stats(model)["read_bytes"], time.perf_counter()
            model(ids, use_cache=False)
            seconds.append(time.perf_counter() - began)
            read.append(ts.stats(model)["read_bytes"] - before)
    stats = ts.stats(model)
    figures = {
        "seconds": seconds,
        "read": read,
        "system_s": resource.getrusage(resource.RUSAGE_SELF).ru_stime,
        "watches": stats["watches_writes"],
        "high_water": stats["in_use_high_water_bytes"] / stats["budget_bytes"],
    }
    print(json.dumps(figures))


def main(arguments: list[str]) -> None:
    model, *budgets = arguments or [""]
    path = llama(int(model)) if model.isdecimal() else model or llama_1b()
    print(
        "| budget | first pass (s) | later passes (s) | first / later | bytes, first / later | "
        "system (s) | watched |\n|---|---|---|---|---|---|---|"
    )
    for budget in budgets or ["1500MB"]:
        runs = []
        for _ in range(ROUNDS):
            drop_caches()
            run = child([], "--run", str(path), budget)
            if "error" in run:
                sys.exit(f"{budget}: {run['error']}")
            assert run["high_water"] <= 1
            runs.append(run)
            print(f"{budget}: {' '.join(f'{s:.2f}' for s in run['seconds'])}", file=sys.stderr)
        later = [statistics.median(run["seconds"][PASSES // 2 :]) for run in runs]
        first = [run["seconds"][0] for run in runs]
        ratios = [a / b for a, b in zip(first, later, strict=True)]
        read = [run["read"][0] / max(1, run["read"][-1]) for run in runs]
        system = [run["system_s"] for run in runs]
        watched = all(run["watches"] for run in runs)
        row = [spread(each) for each in (first, later, ratios, read, system)]
        print(f"| {budget} | {' | '.join(row)} | {watched} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        contender(*sys.argv[2:])
    else:
        main(sys.argv[1:])
