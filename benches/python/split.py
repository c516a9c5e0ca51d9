# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares a model that is split over two machines with what users would do instead.

`cargo xtask bench split`. Needs Ray, and a memory cgroup for the cap.

The model has 5.2 GB of weights. Each contender runs in processes with one thread each. Those marked
with a star are capped at 60% of the weights, page cache included:

- "split" *: `ts.remote.dispatch` over two machines, which two Ray actors host.
- "ray": two Ray actors, each with half of the layers, that pass activations as Ray's objects. They
  need more than the cap.
- "accelerate" *: one process, `device_map="auto"`, with what does not fit on disk.
- "streamed" *: one process, `ts.from_pretrained` with a budget.
- "direct": one process which has all weights in memory.

All load once. Then they decode the same tokens, in interleaved rounds: "split" and "ray" next to
"direct", and then the others next to it, because the memory is not enough for all. Ray's nodes are
on this computer, so a hop costs what a message through the loopback device does.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from models import SCRATCH, llama_3b, memory_group

sys.path.append(str(Path(__file__).parents[2] / "crates/ts-py/tests"))

ROUNDS = 7
TOKENS = 9
#: The file of a cgroup (version 1) with the most memory that its processes have used.
PEAK = "memory.max_usage_in_bytes"
#: The part of the cap that weights may use in one process.
SHARE = 0.55
#: The parts of the caps that weights may use in each of two. PyTorch's copy of the head's weights,
#: and the interpreter, need the rest.
PARTS = 0.865, 0.825


def decode(step: Any) -> dict[str, Any]:
    """Decodes greedily after a prompt. Returns the tokens, and the seconds of each but the first.

    Args:
        step: Returns the next token for the latest tokens and their position.
    """
    ids, position, tokens, seconds = list(range(1, 17)), 0, [], []
    for _ in range(TOKENS):
        begin = time.perf_counter()
        token = step(ids, position)
        seconds.append(time.perf_counter() - begin)
        position += len(ids)
        ids = [token]
        tokens.append(token)
    return {"tokens": tokens, "seconds": seconds[1:]}


class Whole:
    """A model that one call runs."""

    def __init__(self, model: Any) -> None:
        self.model, self.past = model, None
        self.device = next(iter(model.parameters())).device

    def __call__(self, ids: list[int], position: int) -> int:
        with torch.no_grad():
            result = self.model(
                input_ids=torch.tensor([ids]).to(self.device),
                past_key_values=self.past if position else None,
                use_cache=True,
            )
        self.past = result.past_key_values
        return int(result.logits[0, -1].argmax())


class Part:
    """A Ray actor with some of a Llama's layers. The first one embeds, and the last one decides."""

    def __init__(self, path: str, first: int, last: int) -> None:
        from safetensors import safe_open
        from transformers import AutoConfig, DynamicCache, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        torch.set_num_threads(1)
        config = AutoConfig.from_pretrained(path)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        self.layers = model.model.layers[first:last]
        self.embed = model.model.embed_tokens if first == 0 else None
        is_last = last == config.num_hidden_layers
        self.norm, self.head = (model.model.norm, model.lm_head) if is_last else (None, None)
        self.rotary, self.new_cache = LlamaRotaryEmbedding(config), DynamicCache
        wanted = {f"model.layers.{index}." for index in range(first, last)}
        wanted |= {"model.embed_tokens."} if self.embed is not None else set()
        wanted |= {"model.norm.", "lm_head."} if is_last else set()
        state = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                held = opened.keys()
                names = [name for name in held if name.startswith(tuple(wanted))]
                state |= {name: opened.get_tensor(name).clone() for name in names}
        model.load_state_dict(state, strict=False, assign=True)

    def step(self, value: Any, position: int) -> Any:
        with torch.no_grad():
            if position == 0:
                self.cache = self.new_cache()
            hidden = torch.tensor([value]) if self.embed is not None else value
            hidden = self.embed(hidden) if self.embed is not None else hidden
            positions = torch.arange(position, position + hidden.shape[1])[None]
            rotary = self.rotary(hidden, positions)
            for layer in self.layers:
                hidden = layer(
                    hidden, position_ids=positions, past_key_values=self.cache,
                    position_embeddings=rotary, use_cache=True,
                )  # fmt: skip
            if self.head is None:
                return hidden
            return int(self.head(self.norm(hidden)[:, -1:])[0, -1].argmax())


class Child:
    """A contender in a separate process, which decodes once for each line of its input."""

    def __init__(self, kind: str, group: Path | None) -> None:
        environment = {**os.environ, **({} if group is None else {"BENCH_GROUP": str(group)})}
        self.process = subprocess.Popen(
            [sys.executable, sys.argv[0], kind], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"the process ended with status {self.process.wait()}")

    def __call__(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run_child(kind: str) -> None:
    """Runs as a ``Child``."""
    import tensorstream as ts
    from models import join_group
    from transformers import AutoModelForCausalLM

    path, limit = llama_3b(), cap()
    if "BENCH_GROUP" in os.environ:
        join_group()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        if kind == "streamed":
            model = ts.from_pretrained(path, budget=int(limit * SHARE))
        elif kind == "accelerate":
            model = AutoModelForCausalLM.from_pretrained(
                path, device_map="auto", max_memory={"cpu": int(limit * SHARE)},
                offload_folder=directory,
            )  # fmt: skip
        else:
            model = AutoModelForCausalLM.from_pretrained(path)
        step = Whole(model)
        print("{}", flush=True)
        for _ in sys.stdin:
            print(json.dumps(decode(step)), flush=True)


def cap() -> int:
    """Returns the most memory of each process: 60% of the weights."""
    return int(0.6 * sum(file.stat().st_size for file in llama_3b().glob("*.safetensors")))


def main() -> int:
    if len(sys.argv) > 1:
        run_child(sys.argv[1])
        return 0
    import ray
    import transformers
    from raycluster import RayCluster
    from tensorstream.remote import RemoteMachine, dispatch

    path, limit = llama_3b(), cap()
    print(f"scratch directory: {SCRATCH}; torch {torch.__version__}, ray {ray.__version__}")
    print(f"the cap is {limit >> 20} MiB")
    with ExitStack() as stack:
        direct = Child("direct", None)
        stack.callback(direct.close)
        with ExitStack() as inner:
            cluster = inner.enter_context(RayCluster())
            # Ray runs hooks only for whole jobs. Python imports this module when it starts.
            scripts = Path(inner.enter_context(tempfile.TemporaryDirectory()))
            (scripts / "sitecustomize.py").write_text("import models\nmodels.join_group()\n")
            groups = [
                inner.enter_context(memory_group(limit, f"-{name}")) for name in ("one", "other")
            ]

            def joining(group: Path) -> dict[str, Any]:
                """Returns the environment of an actor that joins a cgroup."""
                paths = [str(scripts), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
                variables = {"BENCH_GROUP": str(group), "PYTHONPATH": os.pathsep.join(paths)}
                return {"env_vars": variables}

            machines = [
                inner.enter_context(
                    RemoteMachine("ray", address=cluster.address, runtime_env=joining(group))
                )
                for group in groups
            ]
            begin = time.perf_counter()
            budgets = [int(limit * share) for share in PARTS]
            split = Whole(dispatch(path, machines, budgets))
            print(f"split loaded in {time.perf_counter() - begin:.2f} s")
            last = transformers.AutoConfig.from_pretrained(path).num_hidden_layers
            actor: Any = ray.remote(Part)
            middle = round(last * PARTS[0] / sum(PARTS))
            shares = ((0, middle), (middle, last))
            parts = [actor.remote(str(path), *share) for share in shares]

            def through_ray(ids: list[int], position: int) -> int:
                hidden = parts[0].step.remote(ids, position)
                token: int = ray.get(parts[1].step.remote(hidden, position))
                return token

            contenders: dict[str, Any] = {
                "split": lambda: decode(split),
                "ray": lambda: decode(through_ray),
                "direct": direct,
            }
            report(contenders)
            begin = time.perf_counter()
            for _ in range(200):
                machines[1].synchronize()
            print(f"  a round trip takes {1e3 * (time.perf_counter() - begin) / 200:.2f} ms")
            for machine in machines:
                sent = machine.stats()["uploaded_bytes"]
                print(f"  {machine.device()}: {sent} bytes uploaded by the client")
            for group in groups:
                if (group / PEAK).exists():
                    peak = int((group / PEAK).read_text()) >> 20
                    print(f"  {group.name}: peak {peak} MiB, page cache included")
            for part in parts:
                ray.kill(part)
        contenders = {"direct": direct}
        for kind in ("accelerate", "streamed"):
            child = Child(kind, stack.enter_context(memory_group(limit, f"-{kind}")))
            contenders[kind] = child
            stack.callback(child.close)
        report(contenders)
    return 0


def report(contenders: dict[str, Any]) -> None:
    """Decodes in interleaved rounds, and prints the times."""
    seen: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, list[int]] = {}
    for turn in range(ROUNDS + 1):
        for name in random.sample(list(contenders), len(contenders)):
            result = contenders[name]()
            assert tokens.setdefault(name, result["tokens"]) == result["tokens"], name
            if turn:
                seen[name].append(statistics.median(result["seconds"]))
    print(f"{ROUNDS} rounds: milliseconds a token, median (least to most), and ratio to direct")
    for name, times in sorted(seen.items()):
        ratios = [one / other for one, other in zip(times, seen["direct"], strict=True)]
        spread = f"{1e3 * min(times):.0f} to {1e3 * max(times):.0f}"
        print(
            f"  {name:<11} {1e3 * statistics.median(times):7.1f} ({spread})"
            f"   {statistics.median(ratios):.3f}   tokens equal: {tokens[name] == tokens['direct']}"
        )


if __name__ == "__main__":
    sys.exit(main())
