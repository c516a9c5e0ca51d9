# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures seconds per token of a 1.1B Llama in candle and in PyTorch, under a budget of 600 MiB.

`cargo xtask bench candle`. The example `llama` of crates/ts-candle and a Python process run in
turn, so that other load affects both. The figure of each is the median over all tokens but the
first of each run. The tokens must be those of candle's own loader, which has all weights in memory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from models import ROOT, child, llama_1b

BUDGET_MIB = 600
TOKENS = 8
ROUNDS = 4
PROMPT = [1, 450, 7483, 310, 3444, 338]


def rss_mb() -> int:
    """Returns the resident memory of this process, in MB."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 // 1_000_000


def contender(path: str) -> None:
    """Decodes in this process with PyTorch. Prints the figures as JSON."""
    import tensorstream as ts
    import torch

    model = ts.from_pretrained(path, budget=f"{BUDGET_MIB}MiB")
    ids, past = torch.tensor([PROMPT]), None
    tokens, seconds = [], []
    with torch.inference_mode():
        for _ in range(TOKENS):
            began = time.perf_counter()
            result = model(input_ids=ids, past_key_values=past, use_cache=True)
            past, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
            seconds.append(time.perf_counter() - began)
    print(json.dumps({"tokens": tokens, "seconds": seconds[1:], "rss_mb": rss_mb()}))


def candle(path: Path, budget_mib: int) -> dict[str, Any]:
    """Decodes with the example of ts-candle. A budget of 0 is candle's own loader."""
    program = ROOT / "target/candle/release/examples/llama"
    command = [program, path, budget_mib, TOKENS, *PROMPT]
    lines = subprocess.run(
        [str(each) for each in command], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    words = [line.replace(":", "").split() for line in lines]
    return {
        "tokens": [int(line[1]) for line in words],
        "seconds": [float(line[2]) for line in words[1:]],
        "rss_mb": max(int(line[4]) for line in words),
    }


def main() -> None:
    """Runs all contenders in turn, and prints their figures."""
    path = llama_1b()
    own = candle(path, 0)
    runs: dict[str, list[dict[str, Any]]] = {"candle": [], "python": []}
    for _ in range(ROUNDS):
        runs["candle"].append(candle(path, BUDGET_MIB))
        runs["python"].append(child([], "contender", str(path)))
    medians = {}
    for name, each in {"candle in memory": [own], **runs}.items():
        errors = [run["error"] for run in each if "error" in run]
        if errors:
            sys.exit(f"{name}: {errors[0]}")
        medians[name] = statistics.median(s for run in each for s in run["seconds"])
        print(f"{name}: {medians[name]:.3f} s/token, {max(run['rss_mb'] for run in each)} MB")
    print(f"candle / python: {medians['candle'] / medians['python']:.2f}")
    if any(run["tokens"] != own["tokens"] for run in runs["candle"]):
        sys.exit("the tokens differ from those of candle's own loader")


if __name__ == "__main__":
    if sys.argv[1:2] == ["contender"]:
        contender(sys.argv[2])
    else:
        main()
