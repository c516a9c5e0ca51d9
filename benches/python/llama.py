# SPDX-License-Identifier: MIT OR Apache-2.0
"""Seconds per token of a 1.1B Llama in bf16 under a 1500 MB cap: TensorStream, accelerate, plain mmap.

`cargo xtask bench llama`. Every contender is a process of its own with cold caches; accelerate at each of four
`max_memory` settings; rounds are interleaved and medians taken.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from models import MIB, SCRATCH, child, decode, drop_caches, fio, huge_pages, llama_1b, memory_cap, spread

CAP = 1500 * MIB
BUDGET = "800MiB"
ACCELERATE_MB = (300, 450, 600, 750)
TOKENS = 5
ROUNDS = 3


def contender(name: str, setting: str, path: Path) -> None:
    import torch

    if name == "tensorstream":
        import tensorstream as ts

        model = ts.from_pretrained(path, budget=setting)
    elif name == "accelerate":
        from transformers import AutoModelForCausalLM

        folder = SCRATCH / f"accelerate-{setting}"
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, device_map="auto", max_memory={"cpu": setting}, offload_folder=folder
        )
    elif name == "mmap":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    else:
        raise ValueError(name)
    tokens, seconds = decode(model, TOKENS)
    result = {"tokens": tokens, "seconds": statistics.median(seconds[1:]), "first": seconds[0]}
    if name == "tensorstream":
        stats = ts.stats(model)
        result["streamed"] = stats["plan"]["streamed_bytes_per_pass"]
        result["reserved"] = stats["reserved_high_water_bytes"]
    print(json.dumps(result))


def main() -> int:
    path = llama_1b()
    shard = path / "model-00001-of-00003.safetensors"
    entries = [("tensorstream", BUDGET), *[("accelerate", f"{mb}MB") for mb in ACCELERATE_MB], ("mmap", "")]
    seconds: dict[tuple[str, str], list[float]] = {entry: [] for entry in entries}
    tokens = set()
    disk = []
    with memory_cap(CAP) as prefix, huge_pages() as huge:
        for round_ in range(ROUNDS):
            disk.append(fio(shard, 3, huge=huge))
            for entry in entries:
                drop_caches()
                result = child(prefix, *entry, str(path))
                print(round_, *entry, result, flush=True)
                if "error" not in result:
                    seconds[entry].append(result["seconds"])
                    tokens.add(tuple(result["tokens"]))
                if entry[0] == "tensorstream" and "error" not in result:
                    streamed = result["streamed"]
    medians = {entry: statistics.median(values) for entry, values in seconds.items() if values}
    print(f"\n| {'contender':14} | setting | s/token, median of {ROUNDS} runs (range) |\n|---|---|---|")
    for (name, setting), values in seconds.items():
        print(f"| {name:14} | {setting:7} | {spread(values) if values else 'failed'} |")
    ours = medians["tensorstream", BUDGET]
    best = min(value for (name, _), value in medians.items() if name == "accelerate")
    bandwidth = statistics.median(disk)
    print(f"\nagainst accelerate at its best: {best / ours:.2f}x; against mmap: {medians['mmap', ''] / ours:.2f}x")
    print(
        f"fio {spread([d / 1e9 for d in disk])} GB/s; streamed {streamed / 1e9:.2f} GB a token: "
        f"roofline {streamed / bandwidth:.2f} s/token"
    )
    print(f"all contenders gave the same tokens: {len(tokens) == 1}")
    return 0 if len(tokens) == 1 else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        contender(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
