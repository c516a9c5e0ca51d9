# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures tokens per second of a 1.1B Llama in bf16 under 1500 MB, for several batch sizes.

`cargo xtask bench throughput` runs it. Each run is a process with a memory limit. It generates
greedily from prompts of 16 tokens with `generate` of transformers. Prompt lookup generates from a
prompt of 16 tokens that repeats. The prefill and the first token do not count.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any

from models import child, drop_caches, llama_1b, memory_cap

LIMIT_MB = 1500
BATCHES = (1, 4, 16, 64)
NEW_TOKENS = 6
ROUNDS = 3


def contender(name: str, path: str, batch: str, scratch: str) -> None:
    """Generates in this process. Prints the rate and the tokens as JSON."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    if name == "TensorStream":
        import tensorstream as ts

        model: Any = ts.from_pretrained(path)
    else:
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(
            path, device_map="auto", max_memory={"cpu": "500MB"}, offload_folder=scratch
        )
    times: list[float] = []

    class Steps(LogitsProcessor):
        """Notes when each pass has ended. A batch has no streamer."""

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            times.append(time.perf_counter())
            return scores

    options: dict[str, Any] = {
        "do_sample": False,
        "logits_processor": LogitsProcessorList([Steps()]),
    }
    if batch == "lookup":
        ids = (torch.arange(16) % 4 + 1).unsqueeze(0)
        options |= {"prompt_lookup_num_tokens": 8}
        count = 4 * NEW_TOKENS
    else:
        rows = torch.arange(int(batch)).unsqueeze(1)
        ids = (torch.arange(16).unsqueeze(0) * 7 + rows * 31) % 30000 + 1
        count = NEW_TOKENS
    options |= {"min_new_tokens": count, "max_new_tokens": count}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    end = time.perf_counter()
    made = (output.shape[1] - ids.shape[1] - 1) * output.shape[0]
    print(json.dumps({"rate": made / (end - times[0]), "tokens": output[:, 16:].tolist()}))


def main(rounds: int) -> None:
    path = llama_1b()
    for batch in (*map(str, BATCHES), "lookup"):
        rates: dict[str, list[float]] = {"TensorStream": [], "accelerate": []}
        tokens, failed = {}, {}
        for _ in range(rounds):
            for name, own in rates.items():
                drop_caches()
                with (
                    tempfile.TemporaryDirectory() as scratch,
                    memory_cap(LIMIT_MB * 1_000_000) as prefix,
                ):
                    result = child(prefix, name, str(path), batch, scratch)
                if "error" in result:
                    failed[name] = result["error"]
                else:
                    own.append(result["rate"])
                    tokens[name] = result["tokens"]
        said = []
        for name, own in rates.items():
            if own:
                median = statistics.median(own)
                said.append(f"{name} {median:.2f} tokens/s ({min(own):.2f}-{max(own):.2f})")
            if name in failed:
                said.append(f"{name}: {failed[name]}")
        same = tokens.get("TensorStream") == tokens.get("accelerate")
        print(f"batch {batch}: {'; '.join(said)}; same tokens: {same}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        contender(*sys.argv[1:])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else ROUNDS)
