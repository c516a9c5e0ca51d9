# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures the cost of streaming when all weights are resident, of small units, and of tracing.

`cargo xtask bench overhead`. Compares forward passes of small models, offloaded and in memory, in
interleaved rounds. Then decodes tokens with a 1.1B Llama, every second one with `ts.trace`. Prints
medians and minima. small_units.py measures many small layers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import small_units
import tensorstream as ts
import torch
from models import MIB, llama_1b
from torch import nn

ROUNDS = 40


def interleaved(calls: list[Callable[[], Any]], rounds: int = ROUNDS) -> list[list[float]]:
    """Runs the calls in interleaved rounds. Returns the milliseconds of all rounds, by call."""
    for _ in range(5):
        for call in calls:
            call()
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for times, call in zip(taken, calls, strict=True):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
    return taken


def show(name: str, uses: int, memory: list[float], offloaded: list[float]) -> None:
    """Prints the times of both models and their ratio, and the difference per use of a unit.

    Args:
        name: A description of the model.
        uses: The number of units that a forward pass uses.
        memory: The milliseconds of each round in memory.
        offloaded: The milliseconds of each round with the offloaded model.
    """
    a, b = statistics.median(memory), statistics.median(offloaded)
    least = min(offloaded) / min(memory)
    each = (min(offloaded) - min(memory)) / uses * 1e3
    print(
        f"{name:38} {a:8.3f} ms, offloaded {b:8.3f} ms, ratio {b / a:.2f} (of minima {least:.2f}), "
        f"{each:5.1f} µs more per use"
    )


class MatrixAndLinear(nn.Module):
    """A module with a parameter and a child module."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.linear = nn.Parameter(torch.randn(64, 64)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x @ self.matrix)
        return result


class Nothing(nn.Module):
    """A module with a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def offloaded(model: nn.Module) -> nn.Module:
    """Returns a copy of the model, offloaded with a budget that keeps everything resident."""
    size = 3 * sum(parameter.nbytes for parameter in model.parameters()) + 8 * MIB
    return ts.offload(copy.deepcopy(model), ts.Config(storage_path=tempfile.mkdtemp(), budget=size))


def show_tracing(budget: str, rounds: int) -> None:
    """Prints what a trace costs in a forward pass. Beginning and writing the trace do not count."""
    model: Any = ts.from_pretrained(llama_1b(), budget=budget)
    ids = torch.arange(1, 17)[None]
    past = model(ids, use_cache=True).past_key_values
    taken: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as scratch:
        for step in range(2 * rounds + 6):
            # Also swaps the order, because a pass can leave more or less for the next one to read.
            traced = (step + step // 2) % 2 == 1
            with ts.trace(model, f"{scratch}/run.json") if traced else contextlib.nullcontext():
                began = time.perf_counter()
                model(ids[:, -1:], past_key_values=past, use_cache=True)
                seconds = time.perf_counter() - began
            past.crop(-1)
            if step >= 6:
                taken[traced].append(seconds * 1e3)
    without, traced_ms = statistics.median(taken[False]), statistics.median(taken[True])
    print(
        f"1.1B Llama, budget {budget:8} {without:8.2f} ms, traced {traced_ms:8.2f} ms, "
        f"ratio {traced_ms / without:.4f} (of minima {min(taken[True]) / min(taken[False]):.4f})"
    )


def show_nothing(rounds: int = 10_000) -> None:
    """Prints what a module costs that does nothing, with one thread: the median of each mode."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layers = nn.Sequential(*(Nothing() for _ in range(10)))
    x = torch.randn(4, 64)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            calls = [functools.partial(each, x) for each in (layers, offloaded(layers))]
            medians = [statistics.median(times) for times in interleaved(calls, rounds)]
        each_us = (medians[1] - medians[0]) / len(layers) * 1e3
        print(f"10 modules that do nothing, {mode.__name__:14} {each_us:5.2f} µs more per module")
    torch.set_num_threads(threads)


def main() -> None:
    import transformers as hf

    show_nothing()
    with torch.inference_mode():
        for name, hidden, count in (("tiny", 64, 4), ("small", 256, 8), ("larger", 512, 12)):
            torch.manual_seed(0)
            shape = {
                "hidden_size": hidden,
                "intermediate_size": 3 * hidden,
                "num_hidden_layers": count,
            }
            config = hf.LlamaConfig(
                **shape, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024
            )
            model = hf.LlamaForCausalLM(config).eval()
            streamed: Any = offloaded(model)
            units = len(ts.stats(streamed)["units"])
            for tokens in (1, 128):
                ids = torch.arange(tokens)[None] % 1000
                assert torch.equal(streamed(ids).logits, model(ids).logits)
                calls: list[Any] = [functools.partial(each, ids) for each in (model, streamed)]
                show(f"{name} Llama, {tokens} tokens", units, *interleaved(calls))
        x = torch.randn(4, 64)
        for name, layers in (
            ("50 Linear(64, 64)", nn.Sequential(*(nn.Linear(64, 64) for _ in range(50)))),
            (
                "25 modules with a matrix and a Linear",
                nn.Sequential(*(MatrixAndLinear() for _ in range(25))),
            ),
        ):
            streamed = offloaded(layers)
            calls = [functools.partial(each, x) for each in (layers, streamed)]
            show(name, 50, *interleaved(calls, 10 * ROUNDS))
    with torch.no_grad():
        show_tracing("4GiB", 3 * ROUNDS)
        show_tracing("800MiB", ROUNDS)
    small_units.main()


if __name__ == "__main__":
    main()
