# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures seconds per token of a 1.1B Llama in bf16 under a memory limit of 1500 MiB.

`cargo xtask bench llama` runs three interleaved rounds, and `cargo xtask demo --large` one.

The contenders are TensorStream, accelerate with four `max_memory` settings, diffusers, and
transformers with mapped files. Each run is a process that starts with an empty page cache. Figures
are medians.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from models import (
    MIB,
    SCRATCH,
    child,
    decode,
    drop_caches,
    fio,
    huge_pages,
    llama_1b,
    memory_cap,
    spread,
)

#: The memory limit in bytes, which includes the page cache.
CAP = 1500 * MIB
BUDGET = "800MiB"
ACCELERATE_MB = (300, 450, 600, 750)
TOKENS = 5
ROUNDS = 3


def contender(name: str, setting: str, path: Path) -> None:
    """Runs a contender in this process. Prints its figures as JSON.

    Args:
        name: The contender.
        setting: Its budget or `max_memory`; empty for contenders without one.
        path: The directory of the model.
    """
    import torch

    if name == "tensorstream":
        import tensorstream as ts

        model = ts.from_pretrained(path, budget=setting)
    elif name == "accelerate":
        from transformers import AutoModelForCausalLM

        folder = SCRATCH / f"accelerate-{setting}"
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.bfloat16,
            device_map="auto",
            max_memory={"cpu": setting},
            offload_folder=folder,
        )
    elif name == "diffusers":
        model = grouped(path, SCRATCH / "diffusers")
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


def grouped(path: Path, folder: Path) -> Any:
    """Loads a model and offloads it to disk with diffusers. Each layer is one group."""
    import torch
    from accelerate import init_empty_weights
    from diffusers.hooks import apply_group_offloading
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=torch.bfloat16
        )
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            # `opened` is not a dictionary, so it cannot be iterated without `keys()`.
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    model.load_state_dict(tensors, assign=True, strict=False)
    del tensors
    cpu = torch.device("cpu")
    options = {
        "offload_type": "block_level",
        "num_blocks_per_group": 1,
        "offload_to_disk_path": str(folder),
    }
    apply_group_offloading(model.eval(), onload_device=cpu, **options)
    return model


def main(rounds: int) -> int:
    if not shutil.which("fio"):
        print("cannot measure the roofline without fio: apt-get install fio", file=sys.stderr)
    path = llama_1b()
    shard = path / "model-00001-of-00003.safetensors"
    entries = [("tensorstream", BUDGET), *[("accelerate", f"{mb}MB") for mb in ACCELERATE_MB]]
    entries += [("diffusers", ""), ("mmap", "")]
    seconds: dict[tuple[str, str], list[float]] = {entry: [] for entry in entries}
    tokens = set()
    disk = []
    with memory_cap(CAP) as prefix, huge_pages() as huge:
        for round_ in range(rounds):
            if shutil.which("fio"):
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
    print(f"\n| {'contender':14} | setting | s/token, median of {rounds} (range) |\n|---|---|---|")
    for (name, setting), values in seconds.items():
        print(f"| {name:14} | {setting:7} | {spread(values) if values else 'failed'} |")
    ours = medians["tensorstream", BUDGET]
    best = min(value for (name, _), value in medians.items() if name == "accelerate")
    others = {
        "accelerate at its best": best,
        **{n: medians.get((n, ""), 0) for n in ("diffusers", "mmap")},
    }
    print(
        "\n"
        + "; ".join(
            f"TensorStream is {value / ours:.2f} times as fast as {name}"
            for name, value in others.items()
            if value
        )
    )
    print(f"streamed {streamed / 1e9:.2f} GB per token", end="")
    if disk:
        roofline = streamed / statistics.median(disk)
        print(
            f"; fio {spread([d / 1e9 for d in disk])} GB/s: roofline {roofline:.2f} s/token", end=""
        )
    print()
    print(f"all contenders produced the same tokens: {len(tokens) == 1}")
    return 0 if len(tokens) == 1 else 1


if __name__ == "__main__":
    if len(sys.argv) == 4:
        contender(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS))
