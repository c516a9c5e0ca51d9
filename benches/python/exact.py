# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares the logits of a 1.1B Llama, streamed and in memory, bit by bit.

`cargo xtask bench exact`. Covers prefill and decode, two batch sizes and two threads. The script
needs 3 GB of memory, so `cargo xtask ci` runs the small models of the test suite instead.
"""

from __future__ import annotations

import sys
import threading

from models import llama_1b

BUDGET = "800MiB"
#: The number of forward passes in a run: one prefill, and decode steps after it.
STEPS = 4


def main() -> int:
    import tensorstream as ts
    import torch
    from transformers import LlamaForCausalLM

    def logits(model: torch.nn.Module, batch: int) -> list[torch.Tensor]:
        ids, past, out = (torch.arange(batch * 16).reshape(batch, 16) * 31 + 1) % 32000, None, []
        with torch.inference_mode():
            for _ in range(STEPS):
                result = model(input_ids=ids, past_key_values=past, use_cache=True)
                past, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)
                out.append(result.logits)
        return out

    path = llama_1b()
    reference = LlamaForCausalLM.from_pretrained(path)
    expected = {batch: logits(reference, batch) for batch in (1, 2)}
    del reference
    model = ts.from_pretrained(path, config=ts.Config(budget=BUDGET, max_passes=2))
    equal = []

    def compare(batch: int) -> None:
        equal.append(all(map(torch.equal, logits(model, batch), expected[batch])))
        print(
            f"batch {batch}, prefill and {STEPS - 1} decode steps: bit-identical {equal[-1]}",
            flush=True,
        )

    for batch in expected:
        compare(batch)
    print("both batches at once, on two threads:")
    threads = [threading.Thread(target=compare, args=(batch,)) for batch in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = ts.stats(model)
    print(
        f"peak memory of the engine: {stats['reserved_high_water_bytes']} of "
        f"{stats['budget_bytes']} bytes"
    )
    return 0 if len(equal) == 4 and all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
