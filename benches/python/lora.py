# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains LoRA adapters over a 1.1B Llama in f32 under 1500 MB.

`cargo xtask bench lora` runs it. Each contender is a process. TensorStream and accelerate have a
memory limit, and the model in memory has none. All train with gradient checkpointing on 16 tokens,
and print the seconds of each step and a fingerprint of losses and adapters. The model is not in
bf16, because PyTorch multiplies that slowly in a backward pass on these processors.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from typing import Any

from models import SCRATCH, child, drop_caches, llama_1b, memory_cap, peak_rss

LIMIT_MB = 1500
STEPS = 3
TOKENS = 16


def load(name: str, path: str, scratch: str) -> Any:
    """Returns the model, as the contender of this name loads it."""
    if name == "TensorStream":
        import tensorstream as ts

        return ts.from_pretrained(path, dtype="float32")
    from transformers import LlamaForCausalLM

    if name == "in memory":
        return LlamaForCausalLM.from_pretrained(path, dtype="float32")
    return LlamaForCausalLM.from_pretrained(
        path,
        dtype="float32",
        device_map="auto",
        max_memory={"cpu": "500MB"},
        offload_folder=scratch,
    )


def contender(name: str, path: str, scratch: str) -> None:
    """Trains in this process. Prints figures as JSON."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = load(name, path, scratch)
    torch.manual_seed(0)
    model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-4)
    ids = torch.arange(1, TOKENS + 1).unsqueeze(0)
    seconds, digest = [], hashlib.sha256()
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        digest.update(str(loss.item()).encode())
    for parameter in own:
        digest.update(parameter.detach().float().numpy().tobytes())
    figures: dict[str, Any] = {"seconds": seconds, "digest": digest.hexdigest()[:16]}
    if name == "TensorStream":
        import tensorstream as ts

        stats = ts.stats(model)
        figures |= {"budget": stats["budget_bytes"], "read": stats["read_bytes"]}
    print(json.dumps({**figures, "peak": peak_rss()}))


def main() -> None:
    path = llama_1b()
    os.environ["XDG_CACHE_HOME"] = str(SCRATCH / "cache")
    expected = ""
    for name in ("in memory", "TensorStream", "accelerate"):
        drop_caches()
        with tempfile.TemporaryDirectory() as scratch:
            arguments = (name, str(path), scratch)
            if name == "in memory":
                result = child([], *arguments)
                expected = result.get("digest", "")
            else:
                with memory_cap(LIMIT_MB * 1_000_000) as prefix:
                    result = child(prefix, *arguments)
        if "error" in result:
            print(f"{name}: {result['error']}")
            continue
        seconds = ", ".join(f"{each:.1f}" for each in result["seconds"])
        print(f"{name}: {seconds} s; peak {result['peak'] / 1e6:.0f} MB")
        print(f"    same adapters and losses as in memory: {result['digest'] == expected}")
        if "budget" in result:
            print(f"    budget {result['budget'] / 1e6:.0f} MB, read {result['read'] / 1e9:.1f} GB")


if __name__ == "__main__":
    if sys.argv[1:]:
        contender(*sys.argv[1:])
    else:
        main()
