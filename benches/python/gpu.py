# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures streaming to a GPU beside the bus, the disk, accelerate and diffusers, in one run.

`run.sh` of `cargo xtask gpu-bundle` calls it. It generates a random Llama in bf16, and writes
`gpu.json` and the table `gpu.md`. With `--small` it is a test of itself, also on a stand-in.

Each contender is a process. Rounds are interleaved, and figures are medians of their ratios.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

GIB = 1 << 30
#: The Llama: hidden size, size of the MLP, layers, heads, heads of keys, vocabulary.
LLAMA_8B = (4096, 14336, 32, 32, 8, 128256)
SMALL = (64, 128, 4, 4, 4, 256)
#: The memory for weights on the device, in bytes.
BUDGET = 4 * GIB
ROUNDS = 3
TOKENS = 5


class Setup:
    """What all contenders share: the arguments of the script."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        if arguments.stand_in:
            sys.path[:0] = [arguments.stand_in, os.path.dirname(arguments.programs)]
            import on_stand_in  # type: ignore[import-not-found]  # its directory is an argument

            on_stand_in.register()
        self.device = torch.device(arguments.device)
        self.is_small = arguments.small
        self.folder = Path(arguments.folder)
        self.model = self.folder / "model"
        self.budget = 200 << 10 if self.is_small else BUDGET

    def shape(self) -> tuple[int, ...]:
        return SMALL if self.is_small else LLAMA_8B

    def create(self) -> None:
        """Writes the model, unless it exists."""
        import torch
        from safetensors.torch import save_file
        from transformers import LlamaConfig, LlamaForCausalLM

        if (self.model / "done").exists():
            return
        hidden, mlp, layers, heads, keys, vocabulary = self.shape()
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=keys,
            vocab_size=vocabulary,
            tie_word_embeddings=False,
            dtype="bfloat16",
        )
        config.architectures = ["LlamaForCausalLM"]
        with torch.device("meta"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        self.model.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(1 << 24, generator=generator).mul_(0.02).to(torch.bfloat16)
        shards: list[dict[str, Any]] = [{}]
        size = 0
        for name, parameter in model.named_parameters():
            count = parameter.numel()
            start = hash_of(name) % (1 << 20)
            values = noise[start:].repeat(count // (noise.numel() - start) + 1)[:count]
            if name.endswith("norm.weight"):
                values = torch.ones(count, dtype=torch.bfloat16)
            if size + values.nbytes > 4 * GIB:
                shards.append({})
                size = 0
            size += values.nbytes
            shards[-1][name] = values.view(parameter.shape)
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        index = {}
        for file, tensors in zip(names, shards, strict=True):
            save_file(tensors, self.model / file, {"format": "pt"})
            index |= dict.fromkeys(tensors, file)
        total = sum(each.numel() * 2 for each in model.parameters())
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (self.model / "model.safetensors.index.json").write_text(json.dumps(content))
        config.save_pretrained(self.model)
        (self.model / "done").touch()

    def files(self) -> list[Path]:
        return sorted(self.model.glob("*.safetensors"))

    def weight_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files())

    def synchronize(self) -> None:
        import torch

        torch.accelerator.synchronize(self.device)


def hash_of(name: str) -> int:
    """Returns a number that depends on a name, and is the same in every process."""
    return sum((i + 1) * 7919 * byte for i, byte in enumerate(name.encode()))


def timed(setup: Setup, work: Callable[[], Any], times: int) -> list[float]:
    """Returns the seconds of each call, until the device has done its work."""
    seconds = []
    for _ in range(times):
        setup.synchronize()
        began = time.perf_counter()
        work()
        setup.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def decode(setup: Setup, model: Any, count: int = TOKENS) -> dict[str, Any]:
    """Generates tokens greedily. Returns them, and the median seconds of all but the first."""
    import torch

    tokens = torch.arange(1, 9, device=setup.device).view(1, 8)
    past, produced, seconds = None, [], []
    inputs = tokens
    with torch.no_grad():
        for _ in range(count):

            def step(ids: Any = inputs, cache: Any = past) -> Any:
                nonlocal output
                output = model(input_ids=ids, past_key_values=cache, use_cache=True)

            output: Any = None
            seconds += timed(setup, step, 1)
            past, inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
            produced.append(int(inputs))
    return {"tokens": produced, "seconds": statistics.median(seconds[1:])}


def prefill(setup: Setup, model: Any, length: int) -> float:
    """Returns the median seconds of a forward over a long input."""
    import torch

    ids = torch.arange(length, device=setup.device).view(1, -1) % setup.shape()[-1]
    with torch.no_grad():
        return statistics.median(
            timed(setup, lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1), 4)[1:]
        )


def bus(setup: Setup) -> dict[str, Any]:
    """Copies pinned memory to the device. Returns bytes per second."""
    import torch

    size = (1 << 20) if setup.is_small else GIB
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=setup.device)
    seconds = timed(setup, lambda: target.copy_(source, non_blocking=True), 6)[1:]
    return {"bytes_per_s": size / statistics.median(seconds)}


def disk(setup: Setup) -> dict[str, Any]:
    """Reads the files past the page cache, with eight threads. Returns bytes per second."""
    piece = 4096 if setup.is_small else 4 << 20
    most = setup.weight_bytes() if setup.is_small else 8 * GIB
    reads = [
        (file, offset)
        for file in setup.files()
        for offset in range(0, file.stat().st_size - piece, piece)
    ][: max(1, most // piece)]
    if not reads:
        return {"bytes_per_s": None}

    def read(own: list[tuple[Path, int]]) -> int:
        buffer, done = mmap.mmap(-1, piece), 0
        for file, offset in own:
            opened = os.open(file, os.O_RDONLY | os.O_DIRECT)
            done += os.preadv(opened, [buffer], offset)
            os.close(opened)
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(read, [reads[i::8] for i in range(8)]))
    return {"bytes_per_s": total / (time.perf_counter() - began)}


def ours(setup: Setup, host: bool) -> dict[str, Any]:
    """Streams the model from the host's memory, or from the disk."""
    import tensorstream as ts

    host_budget = setup.weight_bytes() + (1 << 20) if host else None
    for file in [] if host else setup.files():
        with file.open("rb") as opened:  # the disk is to be read, not the page cache
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    model = ts.from_pretrained(
        setup.model, device=setup.device, budget=setup.budget, host_budget=host_budget
    )
    found = decode(setup, model, TOKENS if host else 3)
    stats = ts.stats(model)
    resident = stats["plan"]["resident_bytes"]
    found["moved"] = sum(unit["slot_bytes"] for unit in stats["units"]) - resident
    found["read"] = stats["plan"]["streamed_bytes_per_pass"]
    found["backend"] = stats["backend"]
    if host:
        found["prefill"] = {str(n): prefill(setup, model, n) for n in lengths(setup)}
    return found


def lengths(setup: Setup) -> tuple[int, ...]:
    """Returns lengths of inputs, some of which compute about as long as a pass copies."""
    return (16, 64) if setup.is_small else (2048, 8192, 16384)


def resident(setup: Setup) -> dict[str, Any]:
    """Keeps the model on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.bfloat16)
    model = model.to(setup.device)
    found = decode(setup, model)
    found["prefill"] = {str(n): prefill(setup, model, n) for n in lengths(setup)}
    return found


def with_accelerate(setup: Setup) -> dict[str, Any]:
    """Streams the model with `cpu_offload` of accelerate."""
    import torch
    from accelerate import cpu_offload
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.bfloat16)
    cpu_offload(model, execution_device=setup.device)
    return decode(setup, model, 3)


def with_diffusers(setup: Setup) -> dict[str, Any]:
    """Streams the model with diffusers' group offloading, which copies on a second stream."""
    import torch
    from diffusers.hooks import apply_group_offloading
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.bfloat16)
    apply_group_offloading(
        model,
        onload_device=setup.device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
    )
    return decode(setup, model, 3)


CONTENDERS: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "bus": bus,
    "ours": lambda setup: ours(setup, True),
    "accelerate": with_accelerate,
    "diffusers": with_diffusers,
    "disk": disk,
    "ours, disk": lambda setup: ours(setup, False),
    "resident": resident,
}
#: Contenders that run in one round only: their figures are not ratios to others of the round.
ONCE = ("resident",)


def run(arguments: argparse.Namespace, name: str, seconds: float) -> dict[str, Any]:
    """Runs a contender in a process. Returns its figures, or why there are none."""
    command = [sys.executable, __file__, *arguments.own, "--only", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {seconds:.0f} s"}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"failed": lines[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(results: list[dict[str, dict[str, Any]]]) -> list[tuple[str, str, str]]:
    """Returns the rows of the table: what, the figure, and the goal."""

    def ratio(of: Callable[[dict[str, dict[str, Any]]], float]) -> str:
        values = []
        for own in results:
            try:
                values.append(of(own))
            except (KeyError, TypeError, ZeroDivisionError):
                continue
        if not values:
            return "not measured"
        every = ", ".join(f"{value:.3f}" for value in values)
        return f"{statistics.median(values):.3f} ({every})"

    def hidden(own: dict[str, dict[str, Any]]) -> float:
        """Returns the least share of a pass in which the longer of copies and kernels runs."""
        whole = results[0]["resident"]["prefill"]
        copies = own["ours"]["moved"] / own["bus"]["bytes_per_s"]
        return min(
            max(whole[length], copies) / seconds
            for length, seconds in own["ours"]["prefill"].items()
        )

    def equal(own: dict[str, dict[str, Any]]) -> float:
        wanted, got = results[0]["resident"]["tokens"], own["ours"]["tokens"]
        from_disk = own["ours, disk"]["tokens"]
        return float(wanted == got and wanted[: len(from_disk)] == from_disk)

    def against(peer: str) -> Callable[[dict[str, dict[str, Any]]], float]:
        return lambda own: own[peer]["seconds"] / own["ours"]["seconds"]

    return [
        (
            "host tier to device, of a pinned copy",
            ratio(
                lambda own: (
                    own["ours"]["moved"] / own["ours"]["seconds"] / own["bus"]["bytes_per_s"]
                )
            ),
            ">= 0.95",
        ),
        ("the longer of copies and kernels, of a pass", ratio(hidden), ">= 0.95"),
        ("times as fast as accelerate's cpu_offload", ratio(against("accelerate")), ">= 2"),
        ("times as fast as diffusers' group offload", ratio(against("diffusers")), ">= 1.2"),
        (
            "from disk, of the disk",
            ratio(
                lambda own: (
                    own["ours, disk"]["read"]
                    / own["ours, disk"]["seconds"]
                    / own["disk"]["bytes_per_s"]
                )
            ),
            ">= 0.9",
        ),
        ("tokens equal to the resident model's (1 is yes)", ratio(equal), "1"),
    ]


def table(results: list[dict[str, dict[str, Any]]], conditions: str) -> str:
    """Returns the table in Markdown."""
    lines = [conditions, "", "| What | Median (rounds) | Goal |", "|---|---|---|"]
    lines += [f"| {what} | {figure} | {goal} |" for what, figure, goal in rows(results)]
    lines += ["", "| Contender | Seconds a token, by round |", "|---|---|"]
    for name in ("ours", "ours, disk", "accelerate", "diffusers", "resident"):
        seconds = [
            own[name].get("seconds", own[name].get("failed")) for own in results if name in own
        ]
        shown = ", ".join(
            f"{each:.4f}" if isinstance(each, float) else str(each) for each in seconds
        )
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures streaming to a GPU.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", default="/tmp/tensorstream-gpu", help="for the model")
    parser.add_argument("--out", default=".", help="for gpu.json and gpu.md")
    parser.add_argument("--seconds", type=float, default=420, help="the most time that it takes")
    parser.add_argument("--small", action="store_true", help="use a tiny model")
    parser.add_argument("--stand-in", help="the directory of the stand-in accelerator")
    parser.add_argument("--programs", default="on_stand_in.py", help="the file that registers it")
    parser.add_argument("--only", choices=[*CONTENDERS, "create"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.own = sys.argv[1:]
    setup = Setup(arguments)
    if arguments.only == "create":
        setup.create()
        print("{}")
        return 0
    if arguments.only:
        print(json.dumps(CONTENDERS[arguments.only](setup)))
        return 0
    import torch

    end = time.monotonic() + arguments.seconds
    created = run(arguments, "create", arguments.seconds)
    if "failed" in created:
        print(f"cannot create the model: {created['failed']}", file=sys.stderr)
        return 1
    results: list[dict[str, dict[str, Any]]] = []
    for turn in range(1 if arguments.small else ROUNDS):
        results.append({})
        for name in CONTENDERS:
            left = end - time.monotonic()
            if left < 20 or (turn > 0 and name in ONCE):
                continue
            results[-1][name] = run(arguments, name, left)
            print(f"round {turn + 1}, {name}: {results[-1][name]}", flush=True)
    gpu = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "stand-in"
    conditions = (
        f"{gpu}, PyTorch {torch.__version__}, "
        f"Llama of {setup.weight_bytes() / 1e9:.1f} GB in bf16, "
        f"{setup.budget / 1e9:.2f} GB of weights on the device, {os.cpu_count()} processors, "
        f"{time.strftime('%Y-%m-%d')}"
    )
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    text = table(results, conditions)
    (out / "gpu.json").write_text(json.dumps({"conditions": conditions, "rounds": results}))
    (out / "gpu.md").write_text(text)
    print(text)
    failed = [name for own in results for name, each in own.items() if "failed" in each]
    return 1 if any(name.startswith("ours") for name in failed) else 0


if __name__ == "__main__":
    sys.exit(main())
