# SPDX-License-Identifier: MIT OR Apache-2.0
"""Splits a model over several machines, generates with it, and trains it in a pipeline.

Run: `python examples/pipeline.py [ray [ADDRESS] | ssh HOST...]`. Needs tensorstream[remote],
transformers, and Ray for `ray`.

`dispatch` gives each machine consecutive layers. Operators run asynchronously, so while one machine
works on a part of a batch, the machine before it works on the next part.
"""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack
from typing import Any

import torch
from machines import start
from tensorstream.remote import dispatch, placement
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 3
PARTS = 4


def model() -> Any:
    """Returns a small model with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            vocab_size=512,
        )
    )


def train(net: Any) -> list[float]:
    """Trains with batches that are divided into parts. Returns the losses."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        batch = torch.randint(512, (8, 32))
        optimizer.zero_grad()
        parts = []
        for part in batch.chunk(PARTS):
            ids = part.to(net.device)
            loss = net(input_ids=ids, labels=ids).loss / PARTS
            loss.backward()
            parts.append(loss.detach())
        optimizer.step()
        losses.append(torch.stack(parts).sum().item())  # the only wait of a step
    return losses


def main() -> None:
    here = model()
    ids = torch.arange(8)[None]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with ExitStack() as stack:
        there = dispatch(copy.deepcopy(here), start(stack))
        for name, device in placement(there).items():
            print(f"{device}: {name}")
        tokens = there.generate(ids.to(there.device), **options).cpu()
        print(
            f"same tokens as on this computer: {torch.equal(tokens, here.generate(ids, **options))}"
        )
        begin = time.perf_counter()
        losses = train(there)
        print(f"{STEPS} steps of {PARTS} parts in {time.perf_counter() - begin:.2f} s")
    close = torch.allclose(torch.tensor(losses), torch.tensor(train(here)), rtol=1e-4)
    print(f"losses as on this computer, up to rounding: {close}")


if __name__ == "__main__":
    main()
