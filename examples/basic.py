# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams your own PyTorch module with less memory than its weights need.

The weights are written to disk once and streamed from there. The results are bit-identical to those
of the module in memory.

Run: `python examples/basic.py`. Needs tensorstream.
"""

import tempfile

import tensorstream as ts
import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.GELU()))
    )
    weights = sum(parameter.nbytes for parameter in model.parameters())
    x = torch.randn(4, 1024)
    with torch.inference_mode():
        expected = model(x)

    with tempfile.TemporaryDirectory() as directory:
        # Writes the weights to a file in the directory and frees their memory.
        ts.offload(model, ts.Config(storage_path=directory, budget="16MiB"))
        with torch.inference_mode():
            for _ in range(3):
                assert torch.equal(model(x), expected)

        stats = ts.stats(model)
        print(f"weights {weights / 2**20:.1f} MiB, budget {stats['budget_bytes'] / 2**20:.1f} MiB")
        print(
            f"read {stats['read_bytes'] / 2**20:.1f} MiB in {stats['passes']} passes, results "
            "bit-identical: True"
        )

        # Restores ordinary parameters, so the model can be trained, saved or moved.
        ts.restore(model)
        model(x).sum().backward()
        print(
            f"restored: gradients for {sum(p.grad is not None for p in model.parameters())} "
            "parameters"
        )


if __name__ == "__main__":
    main()
