# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs random programs under memory limits, and compares their results with those in memory.

usage: programs.py [COUNT] [SEED]

`cargo xtask programs` runs 200 of them. Requires root and a memory cgroup.

A program is a process. Its seed determines the model, the dtype, the memory limit, the budget, the
configuration, the number of threads, and the calls and their order. Each program must do one of
these within two minutes:

- give exactly the results of the same calls with the model in memory, including errors
- be rejected with a `tensorstream.BudgetError` before the first call

A process that exceeds its limit is killed by the kernel. This counts as a failure.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import MIB, SCRATCH, memory_cap, peak_rss

KINDS = ("llama", "gpt2", "bert", "t5", "mixtral", "vit")
DTYPES = ("float32", "bfloat16", "float16")
#: Seconds after which a program counts as stuck.
TIMEOUT_S = 120


@dataclass
class Program:
    """What the process with a seed does."""

    kind: str
    dtype: str
    threads: int
    mode: str
    calls: list[tuple[str, int, int]]
    concurrent: bool
    cap: float
    options: dict[str, Any]

    @classmethod
    def of(cls, seed: int) -> Program:
        """Returns the program with this seed."""
        r = random.Random(seed)
        kind, dtype = r.choice(KINDS), r.choice(DTYPES)
        names = ["forward", "forward", "layers", "reversed", "state"]
        if kind in ("llama", "gpt2", "t5", "mixtral"):
            names += ["generate"] * 3
        if kind == "t5":
            names += ["encoder"] * 2
        calls = [(r.choice(names), r.randint(1, 4), r.randint(1, 24)) for _ in range(6)]
        options: dict[str, Any] = {
            "budget": r.choice(["chosen", "chosen", "share", "share", "small", "any", "any"]),
            "share": r.randint(5, 100),
            "any": r.uniform(0, 1.3),
            "memory_pressure_mode": r.choice(["strict", "strict", "adaptive", "lenient"]),
            "prefetch_strategy": r.choice(["adaptive", "none", "next_layer", "aggressive"]),
            "compression": r.choice(["auto", "off"]),
            "verify_checksums": r.choice([True, "once", False]),
        }
        return cls(
            kind=kind,
            dtype=dtype,
            threads=r.choice([1, 2]),
            mode=r.choice(["inference", "no_grad", "autocast"]),
            calls=calls,
            concurrent=r.random() < 0.3,
            cap=r.random(),
            options=options,
        )

    @property
    def path(self) -> Path:
        """The directory of the model."""
        return SCRATCH / "programs" / f"{self.kind}-{self.dtype}"


def model_class(kind: str) -> tuple[Any, Any]:
    """Returns the class and the configuration of a kind of model."""
    import transformers as tf

    small = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    if kind == "llama":
        return tf.LlamaForCausalLM, tf.LlamaConfig(
            **small, intermediate_size=2816, num_key_value_heads=4, vocab_size=8000
        )
    if kind == "gpt2":
        return tf.GPT2LMHeadModel, tf.GPT2Config(n_embd=1024, n_layer=6, n_head=8, vocab_size=8000)
    if kind == "bert":
        return tf.BertModel, tf.BertConfig(**small, intermediate_size=4096, vocab_size=30000)
    if kind == "t5":
        return tf.T5ForConditionalGeneration, tf.T5Config(
            d_model=768, d_ff=3072, num_layers=6, num_heads=12, d_kv=64, vocab_size=8000
        )
    if kind == "mixtral":
        return tf.MixtralForCausalLM, tf.MixtralConfig(
            **{**small, "num_hidden_layers": 4},
            intermediate_size=1024,
            num_key_value_heads=4,
            num_local_experts=8,
            vocab_size=8000,
        )
    return tf.ViTModel, tf.ViTConfig(**small, intermediate_size=4096)


def make(program: Program) -> None:
    """Creates the model of a program if it does not exist."""
    import torch

    if (program.path / "config.json").exists():
        return
    torch.manual_seed(KINDS.index(program.kind))
    cls, config = model_class(program.kind)
    model = cls(config).to(getattr(torch, program.dtype))
    model.save_pretrained(program.path, max_shard_size="100MB")


def layers_of(model: Any) -> Any:
    """Returns the longest list of modules in a model."""
    import torch

    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    return max(lists, key=len)


def inputs_of(model: Any, kind: str, batch: int, length: int) -> dict[str, Any]:
    """Returns inputs of a model, the same for the same arguments."""
    import torch

    generator = torch.Generator().manual_seed(batch * 100 + length)
    if kind == "vit":
        pixels = torch.randn(batch, 3, 224, 224, generator=generator)
        return {"pixel_values": pixels.to(model.dtype)}
    ids = torch.randint(0, 8000, (batch, length), generator=generator)
    if kind == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    return {"input_ids": ids}


def call(model: Any, kind: str, name: str, batch: int, length: int) -> Any:
    """Makes one call of a program. Returns its result."""
    import torch

    inputs = inputs_of(model, kind, batch, length)
    if name == "generate":
        ids = inputs["input_ids"]
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    if name == "encoder":
        return model.encoder(input_ids=inputs["input_ids"]).last_hidden_state
    if name == "state":
        return [p.detach().float().sum() for p in list(layers_of(model)[0].parameters())[:2]]
    if name in ("layers", "reversed"):
        # The order of the layers changes, or only some of them run.
        layers = layers_of(model)
        kept = list(layers._modules.items())
        taken = kept[::-1] if name == "reversed" else kept[: 1 + batch % len(kept)]
        if name == "reversed":
            for (key, _), (_, layer) in zip(kept, taken, strict=True):
                layers._modules[key] = layer
        else:
            for key, _ in kept[len(taken) :]:
                del layers._modules[key]
        try:
            return model(**inputs, use_cache=False) if kind != "vit" else model(**inputs)
        finally:
            layers._modules.clear()
            layers._modules.update(kept)
    return model(**inputs)


def digest(value: Any, into: Any) -> None:
    """Adds the tensors in a value to a hash."""
    import torch

    if isinstance(value, torch.Tensor):
        into.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for each in value.values():
            digest(each, into)
    elif isinstance(value, list | tuple):
        for each in value:
            digest(each, into)


def run(program: Program, model: Any) -> str:
    """Makes the calls of a program. Returns the hash of all results."""
    import torch

    torch.set_num_threads(program.threads)
    model.eval()
    digests = [hashlib.sha256() for _ in program.calls]

    def calls(indices: range) -> None:
        autocast = torch.autocast("cpu", torch.bfloat16)
        context = autocast if program.mode == "autocast" else nullcontext()
        no_grad = torch.inference_mode() if program.mode == "inference" else torch.no_grad()
        with no_grad, context:
            for i in indices:
                try:
                    digest(call(model, program.kind, *program.calls[i]), digests[i])
                except (RuntimeError, ValueError) as error:
                    # Some operators reject some dtypes, and must do so in both cases.
                    digests[i].update(str(error).encode())

    # Calls that change the list of layers would affect the other thread.
    changes = any(name in ("layers", "reversed") for name, _, _ in program.calls)
    if program.concurrent and not changes:
        failures: list[BaseException] = []

        def guarded(indices: range) -> None:
            try:
                torch.set_num_threads(program.threads)
                calls(indices)
            except BaseException as error:  # raised again in the main thread
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(range(i, 6, 2),)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
    else:
        calls(range(len(program.calls)))
    return "".join(each.hexdigest()[:8] for each in digests)


def reference(seeds: list[int]) -> None:
    """Runs programs with their models in memory. Prints the hash of each as JSON."""
    results = {}
    programs = {seed: Program.of(seed) for seed in seeds}
    for seed, program in sorted(programs.items(), key=lambda each: each[1].path):
        make(program)
        cls, _ = model_class(program.kind)
        model = cls.from_pretrained(program.path, dtype="auto")
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        results[seed] = {"digest": run(program, model), "weights": weights}
    print(json.dumps(results))


def contender(program: Program, cap: int, weights: int) -> None:
    """Runs a program in this process with a streamed model. Prints the outcome as JSON."""
    import tensorstream as ts

    options = dict(program.options)
    kind, share, part = options.pop("budget"), options.pop("share"), options.pop("any")
    budget = {
        "chosen": None,
        "share": f"{share}%",
        "small": 24 * MIB,
        "any": int(part * min(cap, weights)) + MIB,
    }[kind]
    config = ts.Config(budget=budget, **options)
    outcome: dict[str, Any] = {"budget": str(budget)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = ts.from_pretrained(program.path, config=config)
        except ts.BudgetError as error:
            print(json.dumps({**outcome, "rejected": str(error)}))
            return
    warned = [str(each.message) for each in caught if each.category is ts.BudgetWarning]
    outcome["digest"] = run(program, model)
    stats = ts.stats(model)
    within = stats["reserved_high_water_bytes"] <= stats["budget_bytes"]
    streamed = stats["plan"]["streamed_bytes_per_pass"] > 0
    outcome |= {"warned": warned, "within": within, "streamed": streamed, "peak": peak_rss()}
    print(json.dumps(outcome))


def outcome(seed: int, allocated: int, expected: dict[str, Any]) -> dict[str, Any]:
    """Runs a program in a new process under its limit."""
    program = Program.of(seed)
    cap = int(allocated + program.cap * (expected["weights"] + 64 * MIB))
    with memory_cap(cap) as prefix:
        command = [*prefix, sys.executable, sys.argv[0], "run", str(seed), str(cap)]
        began = time.perf_counter()
        try:
            done = subprocess.run(
                [*command, str(expected["weights"])],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"still running after {TIMEOUT_S} s", "cap": cap}
    result: dict[str, Any] = {"cap": cap, "seconds": time.perf_counter() - began}
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [""])[-1]
        return {**result, "failed": f"status {done.returncode}: {said[:300]}"}
    result |= json.loads(done.stdout.strip().splitlines()[-1])
    if "rejected" not in result and result["digest"] != expected["digest"]:
        result["failed"] = "the results differ from those in memory"
    elif "rejected" not in result and not result["within"]:
        result["failed"] = "the engine exceeded its budget"
    return result


def base() -> None:
    """Prints the memory that PyTorch and transformers allocate in a process, in bytes.

    The memory of their files is not included, because the kernel can reclaim it.
    """
    import tensorstream as ts
    import torch
    from transformers import LlamaForCausalLM

    torch.nn.Linear(8, 8)(torch.ones(1, 8))
    assert ts.__version__ and LlamaForCausalLM
    status = Path("/proc/self/status").read_text()
    print(int(status.split("RssAnon:")[1].split()[0]) * 1024)


def main(count: int, first: int) -> int:
    if os.geteuid() != 0:
        print("cannot run programs: memory limits require root")
        return 1
    seeds = list(range(first, first + count))
    command = [sys.executable, sys.argv[0], "reference", *map(str, seeds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    expected = {int(seed): each for seed, each in json.loads(done.stdout.splitlines()[-1]).items()}
    allocated = int(subprocess.check_output([sys.executable, sys.argv[0], "base"], text=True))
    print(
        f"{count} programs; PyTorch and transformers allocate {allocated / MIB:.0f} MiB", flush=True
    )
    counts: Counter[str] = Counter()
    for seed in seeds:
        result = outcome(seed, allocated, expected[seed])
        what = next((key for key in ("failed", "rejected") if key in result), "equal")
        counts[what] += 1
        counts["streamed"] += bool(result.get("streamed"))
        counts["warned"] += bool(result.get("warned"))
        program = Program.of(seed)
        print(
            f"{seed}: {what}, {program.kind} {program.dtype} of "
            f"{expected[seed]['weights'] / MIB:.0f} MiB under {result['cap'] / MIB:.0f} MiB, "
            f"budget {result.get('budget')}: {result.get(what) or result.get('warned') or ''}",
            flush=True,
        )
        if what == "failed":
            print(f"    {program}", flush=True)
    print(
        f"{counts['equal']} gave the results of the model in memory ({counts['streamed']} of them "
        f"streamed, {counts['warned']} with a warning), {counts['rejected']} were rejected, "
        f"{counts['failed']} failed"
    )
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["reference", *seeds]:
            reference([int(seed) for seed in seeds])
        case ["run", seed, cap, weights]:
            contender(Program.of(int(seed)), int(cap), int(weights))
        case ["base"]:
            base()
        case [count, seed]:
            sys.exit(main(int(count), int(seed)))
        case [count]:
            sys.exit(main(int(count), 1))
        case _:
            sys.exit(main(200, 1))
