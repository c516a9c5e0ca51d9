# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures seconds per token of a mixture of experts under a memory limit of 1500 MB.

`cargo xtask bench moe` first finds the best `max_memory` of accelerate, and then runs three
interleaved rounds. Each round also measures the disk with fio, and the model in memory without a
limit. The model has the shape of Qwen3-MoE, with 16
layers of 64 experts, of which each token uses 4: 4.9 GB of bf16.

A random model repeats one token, and so needs the same experts again and again. Therefore the
routing is forced: a seed chooses the experts, either uniformly or with Zipf's law. The logits of
all contenders are compared.

Each run is a process that starts with an empty page cache. Figures are medians. For all
contenders, idle OpenMP threads sleep after about 40 µs.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from models import MIB, SCRATCH, child, drop_caches, fio, huge_pages, memory_cap, spread

#: The cache directory of TensorStream.
CACHE = SCRATCH / "cache"
os.environ["XDG_CACHE_HOME"] = str(CACHE)
os.environ["GOMP_SPINCOUNT"] = "4000"
#: The memory limit in bytes, which includes the page cache.
CAP = 1500 * 1000 * 1000
BUDGET = "900MiB"
ACCELERATE_MB = (300, 450, 600, 750)
#: The number of tokens after the prompt. The first ones are not counted, because caches are cold.
TOKENS, WARM = 40, 8
#: The same for accelerate, which takes seconds for each token.
PEER_TOKENS, PEER_WARM = 14, 4
ROUNDS = 3
LAYERS, EXPERTS, CHOSEN, HIDDEN, INTERMEDIATE = 16, 64, 4, 1024, 768
#: The size of one expert in bytes.
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 2


def checkpoint() -> Path:
    """Returns the directory of the model. Creates the model if it does not exist."""
    path = SCRATCH / "qwen3-moe-4.9gb"
    if not (path / "model.safetensors.index.json").exists():
        import torch
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        print(f"creating {path} (4.9 GB)", flush=True)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        config = Qwen3MoeConfig(
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            vocab_size=32000,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            dtype="bfloat16",
        )
        Qwen3MoeForCausalLM(config).save_pretrained(path, max_shard_size="1GB")
        torch.set_default_dtype(torch.float32)
    return path


def force_routing(model: Any, routing: str) -> list[list[tuple[int, int]]]:
    """Replaces the choices of all routers.

    Returns:
        A list that gets one entry for each forward: the pairs (layer, expert) that it uses.
    """
    import torch

    generator = torch.Generator().manual_seed(5)
    trace: list[list[tuple[int, int]]] = []

    def choose(layer: int) -> Any:
        shares = torch.ones(EXPERTS)
        if routing == "zipf":
            order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(layer))
            shares = 1.0 / (1 + order).float()

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            hidden, index, weights = args
            index = torch.multinomial(
                shares.expand(index.shape[0], -1), index.shape[1], generator=generator
            )
            if layer == 0:
                trace.append([])
            trace[-1] += [(layer, expert) for expert in torch.unique(index).tolist()]
            return (hidden, index, weights), kwargs

        return before

    experts = [each for each in model.modules() if type(each).__name__.endswith("Experts")]
    for layer, module in enumerate(experts):
        module.register_forward_pre_hook(choose(layer), with_kwargs=True)
    return trace


def time_experts(model: Any) -> list[float]:
    """Returns a list that gets the seconds that each layer spends in its experts."""
    seconds: list[float] = []

    def begin(*_: Any) -> None:
        seconds.append(-time.perf_counter())

    def end(*_: Any) -> None:
        seconds[-1] += time.perf_counter()

    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(begin)
            module.register_forward_hook(end)
    return seconds


def reclaims() -> int:
    """Returns how often the memory cgroup of this process has reached its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            count = Path(f"/sys/fs/cgroup/memory{group}/memory.failcnt")
            return int(count.read_text()) if count.exists() else 0
        events = Path(f"/sys/fs/cgroup{group}/memory.events")
        if not controllers and events.exists():
            return int(dict(map(str.split, events.read_text().splitlines()))["max"])
    return 0


def contender(name: str, setting: str, routing: str, path: Path) -> None:
    """Runs a contender in this process. Prints its figures as JSON.

    Args:
        name: The contender.
        setting: Its budget or `max_memory`.
        routing: "uniform" or "zipf".
        path: The directory of the model.
    """
    import torch

    tokens, warm = TOKENS, WARM
    if name == "tensorstream":
        import tensorstream as ts

        model = ts.from_pretrained(path, budget=setting)
    elif name == "memory":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    else:
        tokens, warm = PEER_TOKENS, PEER_WARM
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.bfloat16,
            device_map="auto",
            max_memory={"cpu": setting},
            offload_folder=SCRATCH / f"accelerate-moe-{setting}",
        )
    trace = force_routing(model, routing)
    in_experts = time_experts(model)
    outside: list[float] = []
    reclaims_before = 0
    ids, past, seconds, sums = torch.arange(1, 17).unsqueeze(0), None, [], []
    marks = []
    with torch.inference_mode():
        for token in range(tokens + 1):
            if name == "tensorstream":
                stats = ts.stats(model)
                marks.append((stats["read_bytes"], dict(stats["routed"])))
            if token == 1 + warm:
                reclaims_before = reclaims()
            in_experts.clear()
            began = time.perf_counter()
            result = model(input_ids=ids, past_key_values=past, use_cache=True)
            seconds.append(time.perf_counter() - began)
            outside.append(seconds[-1] - sum(in_experts))
            past, ids = result.past_key_values, torch.tensor([[17 + token]])
            sums.append(float(result.logits.float().sum()))
    figures = {
        "sums": sums,
        "seconds": statistics.median(seconds[1 + warm :]),
        "outside experts": statistics.median(outside[1 + warm :]),
        "prompt": seconds[0],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "major faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        "reclaims": reclaims() - reclaims_before,
    }
    if name == "tensorstream":
        stats = ts.stats(model)
        (bytes_before, before), after = marks[1 + WARM], stats["routed"]
        counted = TOKENS - WARM
        touched = after["touched"] - before["touched"]
        hits = after["hits"] - before["hits"]

        def guessed(key: str) -> int:
            return int(after[key] - before[key])

        figures |= {
            "read": (stats["read_bytes"] - bytes_before) / counted,
            "absent": (touched - hits + guessed("right_guesses")) / 2 * EXPERT_BYTES / counted,
            "guessed": guessed("guessed_bytes") / counted,
            "hit rate": hits / touched,
            "best static": best_static(trace[1 + WARM :], _cache_bytes(stats)),
            "budget": stats["budget_bytes"],
        }
    print(json.dumps(figures))


def _cache_bytes(stats: Any) -> int:
    """Returns the memory that the plan leaves for experts, in bytes."""
    dense = sum(unit["slot_bytes"] for unit in stats["units"] if unit["resident"])
    return int(stats["reserved_high_water_bytes"]) - dense


def best_static(trace: list[list[tuple[int, int]]], room: int) -> float:
    """Returns the hit rate of the best fixed choice of experts for this memory and this trace."""
    counts = Counter(expert for token in trace for expert in token)
    kept = counts.most_common(room // EXPERT_BYTES)
    return sum(count for _, count in kept) / sum(counts.values())


def main(rounds: int) -> int:
    if not shutil.which("fio"):
        print("cannot measure the roofline without fio: apt-get install fio", file=sys.stderr)
    path = checkpoint()
    shard = path / "model-00001-of-00006.safetensors"
    kinds = ("uniform", "zipf")
    results: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    disk = []
    with memory_cap(CAP) as prefix, huge_pages() as huge:

        def run(kind: str, name: str, setting: str) -> None:
            drop_caches()
            # The experts that an earlier run used most would be known from the start.
            shutil.rmtree(CACHE / "tensorstream" / "routing", ignore_errors=True)
            limit = [] if name == "memory" else prefix
            result = child(limit, name, setting, kind, str(path))
            shown = {key: value for key, value in result.items() if key != "sums"}
            print(kind, name, setting, shown, flush=True)
            if "error" not in result:
                results.setdefault((kind, name, setting), []).append(result)

        best: dict[str, str] = {}
        for kind in kinds:
            for mb in ACCELERATE_MB:
                run(kind, "accelerate", f"{mb}MB")
            runs = [key for key in results if key[:2] == (kind, "accelerate")]
            best[kind] = min(runs, key=lambda key: results[key][0]["seconds"])[2]
        for _ in range(rounds):
            if shutil.which("fio"):
                disk.append(fio(shard, 3, huge=huge))
            for kind in kinds:
                run(kind, "tensorstream", BUDGET)
                run(kind, "accelerate", best[kind])
                run(kind, "memory", "no limit")
    print("\n| routing | contender | setting | ms/token, median (range) |\n|---|---|---|---|")
    for (kind, name, setting), runs in results.items():
        seconds = [1000 * run["seconds"] for run in runs]
        print(f"| {kind} | {name} | {setting} | {spread(seconds)} |")
    equal = True
    for kind in kinds:
        ours, peers = results[kind, "tensorstream", BUDGET], results[kind, "accelerate", best[kind]]
        memory = results[kind, "memory", "no limit"]
        equal &= _report(kind, ours, peers, memory, disk)
    return 0 if equal else 1


def _report(
    kind: str,
    ours: list[dict[str, Any]],
    peers: list[dict[str, Any]],
    memory: list[dict[str, Any]],
    disk: list[float],
) -> bool:
    """Prints the figures of a routing. Returns whether all logits were equal."""

    def median(key: str, runs: list[dict[str, Any]] = ours) -> float:
        return float(statistics.median(run[key] for run in runs))

    sums = {tuple(run["sums"][:PEER_TOKENS]) for run in [*ours, *peers, *memory]}
    own = median("seconds")
    print(
        f"\n{kind}: TensorStream is {median('seconds', peers) / own:.1f} times as fast as "
        f"accelerate at its best; the same logits: {len(sums) == 1}"
    )
    print(
        f"hit rate {median('hit rate'):.3f}, {median('hit rate') / median('best static'):.3f} "
        f"of the best fixed choice; read {median('read') / 1e6:.0f} MB per token, "
        f"{median('read') / median('absent'):.3f} of what was needed and absent, of which "
        f"{median('guessed') / 1e6:.1f} MB guesses"
    )
    if disk:
        reading = median("absent") / statistics.median(disk)
        computing, outside = median("seconds", memory), median("outside experts", memory)
        print(
            f"fio {spread([each / 1e9 for each in disk])} GB/s: reading takes {reading:.3f} s per "
            f"token, computing in memory {computing:.3f} s; of the longer one, "
            f"{max(reading, computing) / own:.2f} is reached"
        )
        # The forced choice of a layer is unknown until its router has run, so nothing can be read
        # while the parts outside the experts compute.
        print(
            f"of reading and then computing all but the experts ({outside:.3f} s), "
            f"{(reading + outside) / own:.2f} is reached"
        )
    print(
        f"peak {median('peak') / CAP:.3f} of the limit, which the counted tokens reached "
        f"{median('reclaims'):.0f} times; {median('major faults'):.0f} major faults; "
        f"a budget of {median('budget') / MIB:.0f} MiB was in force"
    )
    return len(sums) == 1


if __name__ == "__main__":
    if len(sys.argv) == 5:
        contender(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS))
