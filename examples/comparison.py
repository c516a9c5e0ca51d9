# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares three copies of a model: in memory, offloaded by accelerate, streamed by TensorStream.

All three copies decode the same tokens.

Run: `python examples/comparison.py`. Needs tensorstream, transformers and accelerate. The model is
a small Llama with random weights, which is created in a temporary directory.

The files stay in the page cache, so methods that read through it look faster than they are.
`cargo xtask demo --large` measures under a memory limit.
"""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import tensorstream as ts
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

TOKENS = 8


def decode(model: LlamaForCausalLM) -> tuple[list[int], float]:
    """Decodes greedily. Returns the tokens, and the seconds per token after the first token."""
    ids, past, tokens, began = torch.arange(1, 17).unsqueeze(0), None, [], 0.0
    with torch.inference_mode():
        for step in range(TOKENS):
            result = model(input_ids=ids, past_key_values=past, use_cache=True)
            past, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
            if step == 0:
                began = time.perf_counter()
    return tokens, (time.perf_counter() - began) / (TOKENS - 1)


def main() -> None:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        vocab_size=8000,
        dtype="bfloat16",
    )
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as offloaded:
        LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
        weights = ts.plan(directory, budget="4GiB").resident_bytes
        print(f"weights {weights / 2**20:.0f} MiB, budget 64 MiB")
        accelerate = {
            "device_map": "auto",
            "max_memory": {"cpu": "64MB"},
            "offload_folder": offloaded,
        }
        ways: dict[str, Callable[[], Any]] = {
            "in memory": lambda: LlamaForCausalLM.from_pretrained(directory),
            "accelerate": lambda: LlamaForCausalLM.from_pretrained(directory, **accelerate),
            "TensorStream": lambda: ts.from_pretrained(directory, budget="64MiB"),
        }
        results = set()
        for name, load in ways.items():
            tokens, seconds = decode(load())
            results.add(tuple(tokens))
            print(f"{name:13} {seconds:.3f} s/token")
    print(f"same tokens: {len(results) == 1}")


if __name__ == "__main__":
    main()
