# SPDX-License-Identifier: MIT OR Apache-2.0
"""Shows the effects of budgets, prefetch strategies and checksums.

Prints the plan for several budgets, compares the prefetch strategies, and flips a bit of a file,
which the checksums detect.

Run: `python examples/advanced_configuration.py`. Needs tensorstream and transformers. The model is
a small Llama with random weights, which is created in a temporary directory.
"""

import os
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import tensorstream as ts
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

MIB = 2**20


def save_model(directory: Path) -> torch.Tensor:
    """Saves a checkpoint of 155 MiB, and returns the logits of the model in memory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=12,
        vocab_size=8000,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return logits_of(LlamaForCausalLM.from_pretrained(directory))


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(1, 17).unsqueeze(0)).logits
    return logits


def main() -> None:
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        expected = save_model(directory)

        print("budget     kept       ring       streamed per pass")
        for budget in ("40MiB", "80MiB", "160MiB"):
            plan = ts.plan(directory, budget=budget)
            sizes = (plan.resident_bytes, plan.ring_bytes, plan.streamed_bytes_per_pass)
            print(f"{budget:10}", *(f"{size / MIB:6.1f} MiB" for size in sizes))

        print("\nprefetch    s/pass  stalls")
        for strategy in ts.PrefetchStrategy:
            config = ts.Config(budget="40MiB", prefetch_strategy=strategy, io_depth=4)
            model = ts.from_pretrained(directory, config=config)
            logits_of(model)
            before, began = ts.stats(model)["stalls"], time.perf_counter()
            assert torch.equal(logits_of(model), expected)
            seconds = time.perf_counter() - began
            print(f"{strategy.value:11} {seconds:.3f}   {ts.stats(model)['stalls'] - before}")

        # A .ts file has checksums, and each unit is verified when it is read.
        container = directory / "model.ts"
        ts.convert(directory / "model.safetensors", container)
        (directory / "model.safetensors").unlink()
        config = ts.Config(
            vram_budget_gb=0.04, verify_checksums=True, memory_mode=ts.MemoryMode.CONSERVATIVE
        )
        logits_of(ts.from_pretrained(directory, config=config))
        with container.open("r+b") as file:
            file.seek(50_000_000)
            byte = file.read(1)[0]
            file.seek(50_000_000)
            file.write(bytes([byte ^ 1]))
        try:
            logits_of(ts.from_pretrained(directory, config=config))
        except ts.ChecksumError as error:
            print(f"\nafter flipping a bit: {str(error).replace(name, '...')}")


if __name__ == "__main__":
    main()
